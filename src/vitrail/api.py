"""Public functions that do what the commands do, print nothing, and return their results.

    run = vitrail.train("digits", out="runs/first", steps=200, settings={"optim.lr": 1e-3})
    tuned = vitrail.finetune(run.folder, "photos/", out="runs/mine", epochs=3)
    score = vitrail.evaluate(tuned.folder, "photos/")
    fitted = vitrail.fit("vitrail-cifar10", "photos/")
    vitrail.save(fitted.model, "photos.safetensors")
    masks = vitrail.fit_segmenter("vitrail-cifar10", "annotated/")
    found = vitrail.extract_features("vitrail-cifar10", "photos@train")

Weights may be any name that `vitrail.load` accepts or, except for `finetune`, a network. Data may be any name that
`vitrail.open_collection` accepts; `evaluate`, `fit`, `fit_segmenter` and `extract_features` also accept a collection.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.onnx_network import is_onnx
from vitrail.checkpoint.weights import load, to_bundle
from vitrail.core.atomic_files import cache_folder
from vitrail.core.config_overrides import format_value
from vitrail.core.errors import ConfigError
from vitrail.core.precision import PrecisionChoice
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import MaskTargets
from vitrail.distributed.process_group import find_device, join_world
from vitrail.evaluation.frozen import closed_form_classifier as instant
from vitrail.evaluation.frozen.closed_form_classifier import FittedClassifier
from vitrail.evaluation.frozen.features import list_missing, load_or_extract
from vitrail.evaluation.frozen.ridge_head import SHARE
from vitrail.evaluation.result import Measure, Result
from vitrail.evaluation.scoring import (
    ScoringOptions,
    choose_split,
    iterate_batches,
    make_onnx_subject,
    make_subject,
)
from vitrail.models.build import Model
from vitrail.recipes.launch import free_folder, plan_run, record_command, short_settings
from vitrail.recipes.run_request import RunCommand
from vitrail.tasks.scoring import score_network
from vitrail.tasks.segmentation import closed_form as segmenters
from vitrail.tasks.segmentation.closed_form import FittedSegmenter
from vitrail.tasks.segmentation.windows import Scale
from vitrail.train import loop
from vitrail.train.observer import Observer
from vitrail.train.run_folder.files import BEST, METRICS
from vitrail.train.run_folder.metric_rows import headline, read_metrics
from vitrail.train.scoring import TrainingResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run that has ended: "done", or "interrupted", which the same call resumes."""

    folder: Path
    state: str
    step: int
    weights: Path  # the best ones if the run selects them, else the last
    scores: dict[str, dict[str, Any]]  # by split, of these weights: accuracy, loss, count and the like
    score: float | None  # the task's first metric on the test split, else on the watched one; None if not scored
    choices: tuple[str, ...] = ()  # settings that were chosen automatically, and why, one per line

    @property
    def accuracy(self) -> float | None:
        """The score, if it is an accuracy; None for other tasks, or if nothing was scored."""
        found = [row["accuracy"] for row in self.scores.values() if "accuracy" in row]
        return found[-1] if found else None

    @property
    def model(self) -> Model:
        """The network with the run's weights, in evaluation mode, on the CPU."""
        return load(self.weights)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: losses, learning rates and scores, step by step."""
        return [dict(row) for row in read_metrics(self.folder / METRICS)[0]]


def train(
    recipe: str,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    image_size: int | None = None,
    patch: int | None = None,
    task: str = "",
    decoder: str = "",
    seed: int | None = None,
    minutes: float | None = None,
    settings: Mapping[str, object] | None = None,
    force: bool = False,
    observer: Observer | None = None,
    device: str = "auto",
) -> Trained:
    """Trains a network following a recipe of `vitrail recipes`, on the recipe's data or on `data`, like `vitrail
    pretrain`.

    `settings` are those of --set, by name: {"optim.lr": 1e-3, "model": "ViT-S/16"}. Repeating the call resumes the run
    in `out`, or returns it if it is done; without `out` every call starts a new run in runs/NAME. `force` resumes a run
    even though its config has changed. `task` replaces the recipe's task: "segmentation" learns from masks. `decoder`
    selects how features become masks: "linear", "eomt" or "pmt". An `observer` follows the run by its methods log(text)
    and progress(row).
    """
    typed = write_settings(settings, epochs=epochs, steps=steps, batch=batch, lr=lr)
    asked = RunCommand(image_size=image_size or 0, patch=patch or 0, task=task, decoder=decoder, seed=seed)
    asked = replace(asked, verb="pretrain", minutes=minutes, settings=typed, recipe=recipe, data=str(data or ""))
    return launch(asked, out, force=force, observer=observer, device=device)


def finetune(
    weights: str | Path,
    data: str | Path | None = None,
    *,
    recipe: str = "",
    out: str | Path | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    image_size: int | None = None,
    patch: int | None = None,
    task: str = "",
    decoder: str = "",
    seed: int | None = None,
    minutes: float | None = None,
    settings: Mapping[str, object] | None = None,
    force: bool = False,
    observer: Observer | None = None,
    device: str = "auto",
) -> Trained:
    """Fine-tunes weights on images, like `vitrail finetune`. Settings that are not given are chosen from the weights
    and the data, or by a `recipe`. On a CPU, a run without a given length is limited to 5 minutes; `minutes` sets
    another budget, and 0 none. Other arguments are as in `train`."""
    if not isinstance(weights, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance] - not all callers check types
        raise ConfigError("a run records the file that it starts from; write one with vitrail.save, and give its path")
    if data is None and not recipe:
        raise ConfigError("which images? give data: a folder with one subfolder per class, or another source")
    typed = write_settings(settings, epochs=epochs, steps=steps, batch=batch, lr=lr)
    asked = RunCommand(image_size=image_size or 0, patch=patch or 0, task=task, decoder=decoder, seed=seed)
    asked = replace(asked, verb="finetune", minutes=minutes, settings=typed)
    asked = replace(asked, weights=str(weights), recipe=recipe, data=str(data or ""))
    return launch(asked, out, force=force, observer=observer, device=device)


def write_settings(settings: Mapping[str, object] | None, **short: Any) -> tuple[str, ...]:
    """Settings, and the arguments that are short for one, as they are typed after --set."""
    typed = [f"{name}={format_value(value)}" for name, value in (settings or {}).items()]
    return (*typed, *short_settings(typed, **short))


def launch(
    asked: RunCommand, out: str | Path | None, *, force: bool, observer: Observer | None, device: str
) -> Trained:
    """Runs a request, from its first step or from where it stopped."""
    folder = None if out is None else Path(out)
    with join_world(device) as world:
        plan, budget = plan_run(asked, folder, world)
        folder = folder or world.broadcast(free_folder(plan.run))
        command = record_command(asked, folder, budget)
        result = loop.train(
            plan.run, out=folder, world=world, command=command, force=force, observer=observer, why=plan.why
        )
    return summarise_training(result, plan.why)


def summarise_training(result: TrainingResult, choices: tuple[str, ...]) -> Trained:
    """Summarises a run, with the scores of its chosen weights."""
    watch: dict[str, Any] | None = result.watch
    if watch is not None and result.weights.name == BEST:
        watch = result.best.apply_to(watch)
    first = headline(result.test or watch or {})
    return Trained(
        folder=result.folder,
        state=result.state,
        step=result.step,
        weights=result.weights,
        scores={row["split"]: row for row in (watch, result.test) if row is not None},
        score=None if first is None else first.value,
        choices=choices,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The scores of a network on the images of a split. Shares are between 0 and 1. `measures` holds all metrics of the
    task, with 95% intervals if available. `result.write(path)` writes the file of `vitrail evaluate --out`."""

    split: str
    count: int  # selected images, including the `unreadable` ones, which do not count in the measures
    left_out: int  # images that were skipped because the weights were trained on them
    measures: dict[str, Measure]
    unreadable: tuple[str, ...]
    notes: tuple[str, ...]
    result: Result

    @property
    def top1(self) -> float | None:
        """The share of correct predictions; None for multi-label weights."""
        return self._value("top-1")

    @property
    def top5(self) -> float | None:
        """The share of images whose class is among the five likeliest; None for five classes or fewer."""
        return self._value("top-5")

    @property
    def loss(self) -> float | None:
        return self._value("loss")

    @property
    def mean_average_precision(self) -> float | None:
        """Mean average precision (mAP); None unless the weights are multi-label."""
        return self._value("mAP")

    def _value(self, name: str) -> float | None:
        return self.measures[name].value if name in self.measures else None


def evaluate(
    weights: str | Path | Model,
    data: str | Path | Collection,
    *,
    image_size: int | None = None,
    patch: int | None = None,
    labels: Sequence[str] | None = None,
    by_number: bool = False,
    real: str | Path | None = None,
    threshold: float | None = None,
    windows: Scale | None = None,
    precision: PrecisionChoice = "auto",
    include_seen: bool = False,
    batch: int = 0,
    workers: int = 0,
    seed: int = 0,
    device: str = "auto",
) -> Evaluation:
    """Scores weights, or a network, with the metrics of their task, like `vitrail evaluate`.

    Scores the split that `data` names ("photos@dev"), else test, else val. Images that the weights were trained on are
    excluded, as far as the weights record them, unless `include_seen` is set. For classification, `labels` name the
    outputs, instead of the weights; `by_number` matches class 7 with output 7; `real` is a file of ReaL labels;
    `threshold` is for multi-label weights. With `windows`, a segmentation network slides over each image, resized until
    its shorter side fits ("fit") or at full size ("full"), and is scored at the image's own size. A network that is
    passed is not changed. Under torchrun all processes call this and get the same numbers.
    """
    collection = as_collection(data)
    name, bundle = ("", None) if is_onnx(weights) else as_bundle(weights)
    split, _ = choose_split(collection, "test", "val")
    how = ScoringOptions(
        seed=seed,
        include_seen=include_seen,
        batch=batch,
        workers=workers,
        labels=None if labels is None else tuple(labels),
        by_number=by_number,
        real=None if real is None else Path(real),
        threshold=threshold,
        windows=windows,
    )
    sizes: dict[str, Any] = {"image_size": image_size, "patch": patch, "precision": precision}
    with join_world(device) as world:
        if bundle is None:
            about = make_onnx_subject(str(weights), world.device, **sizes)
        else:
            about = make_subject(name, bundle, world.device, **sizes)
        found = score_network(about, collection, split, how, world=world, called=f"{collection.name}@{split}")
    return Evaluation(
        split=split,
        count=len(found.source),
        left_out=found.scope.given - len(found.source),
        measures={measure.name: measure for measure in found.result.measures},
        unreadable=tuple(found.result.details["unreadable"]),
        notes=found.notes,
        result=found.result,
    )


def fit(
    weights: str | Path | Model,
    data: str | Path | Collection,
    *,
    test: str | Path | Collection | None = None,
    l2: float | None = None,
    dev: float = SHARE,
    shots: int | None = None,
    image_size: int | None = None,
    patch: int | None = None,
    channels: int | None = None,
    batch: int = 0,
    workers: int = 0,
    cache: bool = True,
    device: str = "auto",
) -> FittedClassifier:
    """Fits a classifier of new classes in seconds, like `vitrail fit`: closed-form least squares on frozen features
    (4.1). Its `model` is a network for `vitrail.save` and `vitrail.Predictor`.

    Fits on the train split of `data`, or its only split, and scores its test split, else val, or that of `test`. Unless
    `l2` is given, it is chosen on the share `dev` of every class. `shots` limits the images per class. Features are
    cached for the next call, unless `cache` is False. A network that is passed is not changed.
    """
    collection, place = as_collection(data), find_device(device)
    collection.need_labels()  # before the weights are read
    name, bundle = as_bundle(weights)
    subject = make_subject(name, bundle, place, image_size=image_size, patch=patch, channels=channels)
    return instant.fit(
        subject.network,
        collection,
        test=None if test is None else as_collection(test),
        penalty=l2,
        held_out=dev,
        shots=shots,
        name=name,
        device=place,
        batches=lambda source: iterate_batches(source, subject.preprocessing, place, batch=batch, workers=workers),
        folder=cache_folder("features") if cache else None,
    )


def fit_segmenter(
    weights: str | Path | Model,
    data: str | Path | Collection,
    *,
    test: str | Path | Collection | None = None,
    l2: float | None = None,
    dev: float = SHARE,
    image_size: int | None = None,
    patch: int | None = None,
    channels: int | None = None,
    batch: int = 0,
    workers: int = 0,
    device: str = "auto",
) -> FittedSegmenter:
    """Fits a segmentation network to data with masks in seconds, like `vitrail fit`: closed-form least squares on
    frozen patch tokens. Its `model` is for `vitrail.save` and `vitrail.Predictor`.

    Fits on the train split of `data`, or its only split, and scores its test split, else val, or that of `test`. The
    offsets of the classes, the scale of the logits and, unless given, `l2` are chosen on the share `dev` of images."""
    collection, place = as_collection(data), find_device(device)
    collection.need_masks()  # before the weights are read
    name, bundle = as_bundle(weights)
    subject = make_subject(name, bundle, place, image_size=image_size, patch=patch, channels=channels)

    def load(source: ImageDataset, prepared: Preprocessing) -> Iterator[Batch]:
        return iterate_batches(source, prepared, place, batch=batch, workers=workers, targets=MaskTargets())

    return segmenters.fit_segmenter(
        subject.network,
        collection,
        test=None if test is None else as_collection(test),
        penalty=l2,
        held_out=dev,
        name=name,
        device=place,
        batches=load,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """Features of the N readable images of a split, in its order, on the CPU: the input of the network's last layer
    (the paper's pre-logits)."""

    split: str
    features: Tensor  # float32 [N, D]
    labels: Tensor  # int64 [N], -1 for none; or [N, M] padded with -1 if images have several
    names: tuple[str, ...]  # of the N images: paths, or other names
    classes: tuple[str, ...]
    unreadable: tuple[str, ...]  # names of the images that were skipped


def extract_features(
    weights: str | Path | Model,
    data: str | Path | Collection,
    *,
    image_size: int | None = None,
    patch: int | None = None,
    precision: PrecisionChoice = "auto",
    batch: int = 0,
    workers: int = 0,
    cache: bool = True,
    device: str = "auto",
) -> Features:
    """Extracts the features of every image of a split, with its label, for your own classifier, search or plot.

    `data` has one split or names one ("photos@train"); labels are optional. Features are cached for the next call,
    unless `cache` is False; for a large set, `vitrail embed` writes them to a file. A network that is passed is not
    changed.
    """
    collection, place = as_collection(data), find_device(device)
    split, source = choose_split(collection)
    name, bundle = as_bundle(weights)
    subject = make_subject(name, bundle, place, image_size=image_size, patch=patch, precision=precision)
    kept = load_or_extract(
        subject.network,
        source,
        subject.preprocessing,
        place,
        batches=lambda bare: iterate_batches(bare, subject.preprocessing, place, batch=batch, workers=workers),
        folder=cache_folder("features") if cache else None,
        precision=subject.precision,
    )
    return Features(
        split=split,
        features=kept.features,
        labels=kept.labels,
        names=tuple(source.name(sample) for sample in kept.samples.tolist()),
        classes=source.classes,
        unreadable=tuple(source.name(sample) for sample in list_missing(source, kept.samples)),
    )


def as_collection(data: str | Path | Collection) -> Collection:
    return data if isinstance(data, Collection) else open_collection(data)


def as_bundle(weights: str | Path | Model) -> tuple[str, Bundle]:
    """The name of weights in results, and the weights as a bundle."""
    if isinstance(weights, str | Path):
        return str(weights), find_weights(weights)
    return type(weights).__name__, to_bundle(weights)
