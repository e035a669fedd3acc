"""The runs that the cells of small studies derive from: one recipe for two cores and one for a share of a GPU, counted
in steps so that a grid costs the same on any source; and the three network families of 4.3 and 4.4 for small images.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

from vitrail.data.transforms.augmentation import Mix, cifar
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import hybrid_backbone, mini_bit
from vitrail.optim.config import Schedule
from vitrail.recipes.digits import digits
from vitrail.recipes.registry import load_recipe
from vitrail.recipes.run_overrides import with_data, with_image_size
from vitrail.tasks.classification.objective import Classification
from vitrail.train.config import AnyRun, Run, RunRequest, Scoring, configure

Build: TypeAlias = Callable[..., ModelConfig]
SMALL_SOURCES: Final = ("cifar10", "cifar100", "svhn", "fashion-mnist", "mnist")  # with a recipe of the same name
SCORINGS: Final = 4  # during a run


def build_cpu_run(source: str = "", *, steps: int, width: int = 32, depth: int = 2) -> Run:
    """Digits at 16 px on two cores: a ViT with 16 patches, one or two seconds per hundred steps."""
    run = digits()
    model = replace(vit_config(run.model), width=width, depth=depth, mlp_width=2 * width, heads=2, head="linear")
    run = replace(run, model=model, batch=64, optim=replace(run.optim, lr=5e-3))
    return with_steps(with_source(run, source), steps, scorings=1)


def build_gpu_run(source: str = "", *, steps: int) -> Run:
    """CIFAR-10, or another source of small images, on a share of a GPU: the ViT-Mini/4 of its recipe, with learned
    positions as in the paper.

    A study trains for few epochs: crop and flip only, no stochastic depth, no averaged weights. A network then hardly
    sees any image often enough to overfit, and regularisation would cost more than it gains."""
    name = re.split("[:@]", source)[0] or "cifar10"  # without the folder or the split
    run = configure(load_recipe(name if name in SMALL_SOURCES else "cifar10"))
    model = vit_config(run.model)
    run = replace(
        run,
        model=replace(model, stochastic_depth=0.0, position="learned"),
        augmentation=replace(cifar(model.image, padding=min(model.image) // 8), flip=run.augmentation.flip),
        objective=Classification(smoothing=0.1),
        mix=Mix(),
        batch=256,
        average=0.0,
        log=50,
    )
    return with_steps(with_source(run, source), steps)


def build_paper_run(run: Run, source: str) -> Run:
    """A pre-training of Table 3, scored by its 5-shot accuracy on ImageNet."""
    return with_source(replace(run, evaluation=Scoring(fewshot="imagenet")), source)


def load_pretraining(network: str, upstream: str = "jft") -> Run:
    """The recipe of Table 3 for a network of the zoo."""
    return configure(load_recipe(f"{network.lower().replace('/', '').replace('+', '-')}-{upstream}"))


def load_finetuning(task: str) -> RunRequest:
    """The recipe of Table 4 for a data set."""
    return load_recipe(f"finetune-{task.removesuffix('102')}")


def with_source(run: AnyRun, source: str) -> AnyRun:
    """The run on a source; "" keeps its own."""
    return with_data(run, source) if source else run


def with_steps(run: AnyRun, steps: int, *, scorings: int = SCORINGS) -> AnyRun:
    """The run for this many steps, a tenth of them warm-up, without a closed-form baseline: it is compared with other
    cells."""
    return replace(
        run,
        steps=steps,
        epochs=0.0,
        schedule=Schedule(decay=run.schedule.decay, warmup=steps // 10),
        data=replace(run.data, watch="none"),
        evaluation=Scoring(every=-(-steps // scorings)),
        baseline="off",
    )


def with_dev(run: AnyRun, share: float) -> AnyRun:
    """With a part of the training split held out for selection, so that nothing is selected on the test split (4.1)."""
    return replace(run, data=replace(run.data, dev=share, watch="dev"))


def reshape_vit(model: ViTConfig, width: int, depth: int) -> ViTConfig:
    """The same ViT in another shape, with an MLP of twice its width as all small ones have."""
    heads = width // 64 if width % 64 == 0 else max(width // 32, 2)
    return replace(model, width=width, depth=depth, mlp_width=2 * width, heads=heads)


def build_resnet(model: ViTConfig, blocks: tuple[int, ...], factor: float) -> ResNetConfig:
    """A BiT ResNet with a 3x3 root, for a ViT's image and classes. Groups divide the narrowest layer, at most 8."""
    small = replace(mini_bit("mini-R14"), image=model.image, classes=model.classes)
    return replace(small, blocks=blocks, factor=factor, groups=min(8, round(64 * factor)))


def build_hybrid(model: ViTConfig, blocks: tuple[int, ...], factor: float, width: int, depth: int) -> ViTConfig:
    """A ViT on the feature map of a small ResNet, one patch per position."""
    root = replace(hybrid_backbone(blocks, model.image), root="3x3", factor=factor, groups=min(8, round(64 * factor)))
    return replace(reshape_vit(model, width, depth), patch=(1, 1), backbone=root)


# Family -> what builds one of its networks for a ViT's image and classes.
BUILDERS: dict[str, Build] = {"ViT": reshape_vit, "slim ViT": reshape_vit, "BiT": build_resnet, "hybrid": build_hybrid}


def shrink_to_8_px(run: Run) -> Run:
    """A run on 16 px at 8 px and patches of 2: as many tokens, and a quarter of the time for a ResNet."""
    return with_image_size(replace(run, model=replace(vit_config(run.model), patch=(2, 2))), 8)
