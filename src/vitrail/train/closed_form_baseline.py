"""The number that a fine-tuning has to beat: the closed-form classifier (4.1) on the frozen features it starts from.

It is computed once, before the first step, by the first process: from the images that are trained on, or some of
them, with its penalty chosen on a tenth of those, and scored on the splits that the run is scored on. It draws nothing
from torch's generators, so a run with it and one without end with the same bits. `RUN/baseline.safetensors` keeps it; a
resume takes the scores from the metrics. With start=closed-form it is also the head that the run starts with.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import build_network, replace_head_and_resize
from vitrail.core.atomic_files import cache_folder
from vitrail.core.errors import ConfigError, DataError, TrainingError, VitrailError, WeightsError
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.closed_form_classifier import sample_stratified
from vitrail.evaluation.frozen.features import hash_network, load_or_extract
from vitrail.evaluation.frozen.ridge_head import RidgeHead, fit_head
from vitrail.evaluation.metrics import keep_single_labels, score_predictions
from vitrail.models.build import Model
from vitrail.tasks.registry import task_of
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.data import DataSplits, count_workers
from vitrail.train.observer import Advance, count_batches, get_advance, ignore_advance
from vitrail.train.report.page import read_metrics
from vitrail.train.run_folder.files import METRICS
from vitrail.train.run_folder.metric_rows import describe_score
from vitrail.train.run_folder.run import RunFolder

FILE: Final = "baseline.safetensors"
KIND: Final = "vitrail baseline 1"
LEARNT: Final = 10_000  # images that it is made from, at most
SCORED: Final = 5_000  # of a split, at most

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Baseline:
    """Rows of metrics, one a split that is scored, and the head to start with: weight [K, D] and bias [K]."""

    rows: tuple[Row, ...] = ()
    head: tuple[Tensor, Tensor] | None = None

    @property
    def by_split(self) -> dict[str, Row]:
        return {row["split"]: row for row in self.rows}


def scored_splits(splits: DataSplits) -> dict[str, ImageDataset]:
    found = {splits.watch_name: splits.watch, splits.test_name: splits.test}
    return {name: source for name, source in found.items() if source is not None}


def is_enabled(run: Run, splits: DataSplits) -> bool:
    """Whether a run has a baseline: every fine-tuning has, unless it was said otherwise or cannot be. What cannot be
    and was asked for is refused."""
    task = task_of(run.objective)
    if task is None or not task.has_closed_form:
        return False
    if not run.weights:
        if run.baseline == "on" or run.start == "closed-form":
            asked = "start=closed-form" if run.start == "closed-form" else "baseline=on"
            raise ConfigError(f"{asked} needs weights whose features it can take; it is for vitrail finetune")
        return False
    if run.baseline != "auto" or run.start == "closed-form":
        return run.baseline == "on" or run.start == "closed-form"
    return not find_obstacle(run, splits)


def find_obstacle(run: Run, splits: DataSplits) -> str:
    """Why a fine-tuning cannot be compared with the closed form, in words; nothing where it can."""
    task = task_of(run.objective)
    if task is None or not task.has_closed_form:
        return "the objective learns without labels" if task is None else f"{task.name} has no closed form"
    if not scored_splits(splits):
        return "no split is scored; --set data.dev=0.1 holds out a part"
    if splits.train.labels.multiple:
        return "images may have several labels"
    return "" if len(splits.class_names) > 1 else "there is only one class"


def compare_scores(closed: Mapping[str, Row], scores: Iterable[Row | None], run: ResolvedRun) -> str:
    """A sentence where the closed form beats the fine-tuning on the first split that both are scored on, or where the
    run started from it and nothing later was better; else nothing."""
    for row in scores:
        if row is not None and "accuracy" in row and (beaten := closed.get(row["split"])):
            if row["step"] == 0:
                return "no step was better than the closed form at the start, so the run stands for its start"
            if row["accuracy"] >= beaten["accuracy"]:
                return ""
            fit = f"vitrail fit {shlex.quote(run.weights)} {shlex.quote(run.data.source)} --out fitted.safetensors"
            return (
                f"a linear classifier on the frozen features beats this fine-tuning on {row['split']}: "
                f"{beaten['accuracy']:.2%} against {row['accuracy']:.2%}. To have it: {fit}"
            )
    return ""


def prepare_baseline(
    run: ResolvedRun, splits: DataSplits, world: World, folder: RunFolder, observer: Any, *, resumed: bool
) -> Baseline:
    """The baseline of a run that starts, computed or kept from an earlier start; that of one that goes on, as its
    metrics tell it. `observer` hears what is going on."""
    if resumed:
        known = [row for row in read_metrics(folder.path / METRICS)[0] if row.get("kind") == "baseline"]
        return Baseline(rows=tuple(world.broadcast(known)))
    if run.baseline != "on":
        return Baseline()
    found, refused = Baseline(), ""
    if world.is_main:
        try:
            found = compute_baseline(run, splits, world, folder.path, observer)
        except (VitrailError, torch.OutOfMemoryError) as error:
            refused = " ".join(str(error).split())
    found, refused = world.broadcast((found, refused))
    if refused and run.start == "closed-form":
        raise TrainingError(f"the head to start with could not be computed ({refused}); start=zero goes without")
    if refused:
        folder.note(f"no closed-form baseline: {refused}")
    known = {row["split"] for row in read_metrics(folder.path / METRICS)[0] if row.get("kind") == "baseline"}
    for row in found.rows:
        if row["split"] not in known:
            folder.record(row, describe_score(row))
        observer.progress(row)
    return found


def compute_baseline(run: ResolvedRun, splits: DataSplits, world: World, folder: Path, observer: Any) -> Baseline:
    model = load_frozen_network(run)
    facts = describe_inputs(run, splits, model)
    try:
        kept = read_weights(folder / FILE)
        if kept.description is not None and kept.description.get("facts") == facts:
            return baseline_from(run, kept.tensors, kept.description["rows"])
    except WeightsError:  # none yet, or a damaged one: made again
        pass
    learnt = sample_stratified(splits.train, LEARNT)
    scored = {name: sample_stratified(source, SCORED) for name, source in scored_splits(splits).items()}
    count, all_of_them = sum(map(len, scored.values())), sum(map(len, scored_splits(splits).values()))
    observer.log(
        "first a linear classifier on the frozen features, to compare with: "
        f"{counted(len(learnt), len(splits.train))} images to learn from, {counted(count, all_of_them)} to score; "
        "--set baseline=off skips it"
    )
    taking = FeatureExtractor(run=run, model=model.to(world.device), world=world, advance=get_advance(observer))
    features, labels = taking.features(learnt)
    labels = keep_single_labels(labels)
    usable = labels >= 0
    if not usable.any():
        raise DataError(f"none of {len(labels):,} training images has one label")
    head = fit_head(features[usable], labels[usable], len(splits.class_names))
    rows = [row_of(name, head, int(usable.sum()), *taking.features(source)) for name, source in scored.items()]
    tensors = {"weight": head.weight, "bias": head.bias}
    try:
        write_sealed(folder / FILE, tensors, {"kind": KIND, "facts": facts, "rows": rows})
    except WeightsError as error:  # a start after a kill computes it again
        observer.log(f"the closed form could not be kept: {error}")
    return baseline_from(run, tensors, rows)


def counted(some: int, whole: int) -> str:
    return f"{some:,}" if some == whole else f"{some:,} of {whole:,}"


def baseline_from(run: ResolvedRun, tensors: dict[str, Tensor], rows: list[Row]) -> Baseline:
    warm = run.start == "closed-form"
    return Baseline(rows=tuple(rows), head=(tensors["weight"], tensors["bias"]) if warm else None)


def row_of(split: str, head: RidgeHead, learnt: int, features: Tensor, labels: Tensor) -> Row:
    right, count = score_predictions(head.predict(features)[0], labels)
    return {
        "kind": "baseline",
        "step": 0,
        "split": split,
        "accuracy": right / count,
        "count": count,
        "penalty": head.penalty,
        "learnt_from": learnt,
    }


def load_frozen_network(run: ResolvedRun) -> Model:
    """The weights at the run's image size. A hidden layer of the head goes with the head (3.2); a linear one stays, so
    that features which other commands have kept are found."""
    bundle = replace_head_and_resize(find_weights(run.weights), None, run.model.image)
    if getattr(bundle.config, "head", "") == "tanh":
        bundle = replace_head_and_resize(bundle, 0)
    return build_network(bundle)


def describe_inputs(run: ResolvedRun, splits: DataSplits, model: Model) -> dict[str, Any]:
    """What it depends on, as plain data."""
    return {
        "network": hash_network(model),
        "preprocessing": [str(value) for value in run.preprocessing.to_dict().items()],
        "pictures": splits.fingerprint,
        "splits": list(scored_splits(splits)),
        "limits": [LEARNT, SCORED],
        "versions": [__version__, torch.__version__],
    }


@dataclass(kw_only=True, slots=True)
class FeatureExtractor:
    """Features of sources. A part of a small set is looked up in the features of the whole: train and dev, and every
    point of a search, share them."""

    run: ResolvedRun
    model: Model
    world: World
    advance: Advance = ignore_advance
    wholes: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor, Tensor]])

    def features(self, source: ImageDataset) -> tuple[Tensor, Tensor]:
        """Features [N, D] and labels [N] or [N, M]."""
        if not (isinstance(source, SubsetDataset) and len(source.source) <= LEARNT):
            return self.extracted(source)[:2]
        whole = source.source
        if id(whole) not in self.wholes:
            self.wholes[id(whole)] = self.extracted(whole)
        features, labels, samples = self.wholes[id(whole)]
        mine = torch.isin(samples, torch.from_numpy(source.indices))
        return features[mine], labels[mine]

    def extracted(self, source: ImageDataset) -> tuple[Tensor, Tensor, Tensor]:
        prepared, world = self.run.preprocessing, self.world
        found = load_or_extract(
            self.model, source, prepared, world.device, batches=self.batches, folder=cache_folder("features")
        )
        return found.features, found.labels, found.samples

    def batches(self, source: ImageDataset) -> Iterator[Batch]:
        cuda = self.world.device.type == "cuda"
        size = min(256 if cuda else 64, len(source))
        resident = self.run.data.resident == "on"  # a set so small that processes would take longer
        workers = 0 if resident else count_workers(self.run.data, self.world)
        found = eval_batches(source, self.run.preprocessing, batch=size, workers=workers, pin=cuda)
        return count_batches(found, "closed form", len(source), self.advance)


def read_head(folder: Path) -> tuple[Tensor, Tensor]:
    """The head that the run in a folder started with."""
    found = read_weights(folder / FILE)
    return found.tensors["weight"], found.tensors["bias"]


def put_head(model: nn.Module, head: tuple[Tensor, Tensor]) -> None:
    """Sets the last layer of a network that was built for as many classes."""
    last: Any = getattr(model.head, "classifier", model.head)
    with torch.no_grad():
        last.weight.copy_(head[0])
        last.bias.copy_(head[1])
