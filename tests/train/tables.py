"""The table of docs/training.md: every field of a run with its default, what it takes and what it means."""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from vitrail.core.config_overrides import (
    classes_of,
    default_of,
    describe_choices,
    field_types,
    format_value,
    is_choice,
)
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.train.config import Run
from vitrail.train.resume import FREE

MEANINGS = {
    "name": "name of the run, in `runs/NAME` and in its report",
    "augmentation.crop": "the training crop, which gives the image size: [transforms](data.md#transforms)",
    "augmentation.flip": "probability of a horizontal flip",
    "augmentation.policy": "further distortions",
    "augmentation.erase": "a rectangle of noise",
    "model": "the network, by name (`model=ViT-B/32`) or by any of [its fields](models.md#every-field)",
    "weights": "the pre-trained weights to start from; WEIGHTS sets it",
    "start": "the new head: at zero (3.2), or the [closed form](fit.md#in-every-fine-tuning)",
    "positions": "position embeddings at another image size: resized (3.2), or drawn again for comparison",
    "patches": "patch sizes to train at, one drawn for every step: [several](#several-patch-sizes)",
    "patch_order": "one of the `patches` for every step, or one after the other, [in stages](#fewer-tokens-first)",
    "sizes": "image sizes to train at, one after the other, [in stages](#fewer-tokens-first)",
    "objective": "what to learn from: labels, masks, segments or images alone (`selfsup/...`); each has its own fields",
    "objective.loss": "cross-entropy, summed over classes for sigmoid",
    "objective.smoothing": "label smoothing",
    "objective.head_bias": "initial value of the last bias (-10 on ImageNet-21k)",
    "data.source": "[the images](data.md#point-at-images); DATA sets it",
    "data.train": "the split to train on",
    "data.without": "the `drop.json` of `vitrail data dedup`: the images it names are excluded first",
    "data.part": "fraction of that split to train on, per class; a smaller fraction is part of every larger one",
    "data.part_seed": "seed of that draw",
    "data.dev": "fraction of these images held out, per class, for model selection",
    "data.watch": "the split scored during training; auto: dev, else val; any: else test",
    "data.test": "the split scored at the end; auto: test",
    "data.names": "names of the classes, in their order; `--labels` and `--rename` set them",
    "data.resident": "hold the whole set on the device and augment it there; auto: if it fits and is faster",
    "data.workers": "loader processes; -1: chosen by the number of cores",
    "data.repeats": "repeated augmentation: views of each sample in a batch",
    "data.strict": "an unreadable image ends the run",
    "mix.mixup": "alpha of MixUp, 0 for none",
    "mix.cutmix": "alpha of CutMix, 0 for none",
    "mix.probability": "fraction of the steps that are mixed",
    "mix.switch": "if both are on, fraction of the mixed steps that use CutMix",
    "mix.stride": "distance in the batch to the partner for mixing: the number of repeats",
    "preprocessing": "preprocessing for evaluation; none: that of the weights, or a plain resize",
    "optim.kind": "Adam with decoupled decay, or SGD with momentum",
    "optim.lr": "the peak learning rate",
    "optim.weight_decay": "λ in θ ← θ - lr·λ·θ, on kernels only",
    "optim.momentum": "SGD's, or Adam's first β",
    "optim.second": "Adam's second β",
    "optim.eps": "Adam's ε",
    "optim.momentum_type": "type of the first moment; bfloat16 saves two bytes per parameter",
    "optim.clip": "largest global norm of the gradient, 0 for no clipping",
    "optim.layer_decay": "d: layer l of L learns at lr·d^(L+1-l)",
    "optim.freeze": "`embedding`, `blocks:N` (embedding and the first N blocks) or `all` (but the head)",
    "schedule.decay": "shape of the decay from the end of the warm-up to the last step",
    "schedule.warmup": "steps of linear warm-up, the first at rate 0",
    "schedule.end": "the rate that linear and cosine decay reach",
    "schedule.encoder_warmup": "steps in which the encoder warms up, after the head has; 0: both together",
    "schedule.power": "exponent of polynomial decay",
    "schedule.milestones": "where the decay `steps` divides the rate by ten, as fractions of the run",
    "batch": "images per step, over all processes and micro-batches",
    "micro": "images per process and forward pass; 0: as many as fit, and after a resume as many as before",
    "steps": "length of the run; 0 if `epochs` is given",
    "epochs": "length of the run; 0 if `steps` is given",
    "average": "Polyak's factor, 0.9999 in the paper; 0 for none",
    "seed": "seed of everything random; `--seed` sets it",
    "precision": "auto: float32 on a CPU, bfloat16 on a GPU; [fp8](#accumulation-memory-and-precision)",
    "compile": "`torch.compile`; auto: on a GPU, with graphs for a small network; graphs: each step is also recorded "
    "as a CUDA graph; recorded: the same without compiling",
    "recompute": "recompute activations in the backward pass: less memory, about a third more work",
    "sharding": "auto: ddp if there are several [processes](scale.md)",
    "evaluation.every": "steps between two evaluations; 0: twenty per run",
    "evaluation.fewshot": "a second source, for closed-form few-shot accuracy",
    "evaluation.shots": "images per class for it",
    "evaluation.patience": "evaluations without improvement after which the run stops; 0: never",
    "keep.steps": "steps between two checkpoints; 0: by time",
    "keep.minutes": "minutes between two checkpoints",
    "keep.last": "number of checkpoints kept",
    "baseline": "the [closed form](fit.md#in-every-fine-tuning) next to the score; auto: in every fine-tuning where "
    "it can be computed",
    "log": "steps between two rows of metrics",
    "bad_steps": "updates skipped for a non-finite loss or gradient before the run stops",
}


def leaves(kind: type[Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and what it takes. Configs that are always there are entered; of a choice, its default."""
    for field in fields(kind):
        hint, name = field_types(kind)[field.name], f"{path}{field.name}"
        inner = Augmentation if hint is Augmentation else None if default_of(field) is MISSING else default_of(field)
        if is_choice(hint) and is_dataclass(inner):
            yield name, format_value(inner), takes(hint)
        if inner is Augmentation or is_dataclass(inner):
            yield from leaves(inner if isinstance(inner, type) else type(inner), f"{name}.")
        else:
            yield name, "" if default_of(field) is MISSING else format_value(inner), takes(hint)


def takes(hint: Any) -> str:
    if classes := classes_of(hint):
        own = (one for one in classes if one.__module__.startswith("vitrail."))  # tests register others
        return ", ".join(f"`{one.__name__}`" for one in own)
    return "text" if hint is str else ", ".join(describe_choices(hint))


def may_change(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def run_table() -> str:
    rows = [
        [f"`{name}`{'°' if may_change(name) else ''}", f"`{default}`" if default else "", kinds, MEANINGS[name]]
        for name, default, kinds in leaves(Run)
    ]
    assert {name for name, _, _ in leaves(Run)} == set(MEANINGS)
    lines = [["field", "default", "takes", "meaning"], ["---"] * 4, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
