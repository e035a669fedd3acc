"""The score that fine-tuning has to beat: a closed-form classifier (4.1) on the frozen features that it starts from,
or, for classes of pixels, a linear head on the frozen patch tokens.

It is computed once, before the first step, by the main process: from the training images, or a sample of them, with its
penalty chosen on a tenth of those, and scored on the run's own splits. It draws nothing from torch's generators, so a
run ends with the same bits with and without it. `RUN/baseline.safetensors` keeps it; a resumed run reads the scores
from the metrics. With start=closed-form it is also the head that the run starts with.
"""

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vitrail import __version__
from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import build_network, replace_head_and_resize, resize_like, to_bundle
from vitrail.core.atomic_files import cache_folder
from vitrail.core.errors import ConfigError, DataError, TrainingError, VitrailError, WeightsError
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.targets import MaskTargets
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.closed_form_classifier import sample_stratified
from vitrail.evaluation.frozen.features import FrozenFeatures, hash_network, load_or_extract
from vitrail.evaluation.frozen.ridge_head import RidgeHead, fit_head
from vitrail.evaluation.metrics import keep_single_labels, score_predictions
from vitrail.models.build import Model
from vitrail.tasks.registry import task_of
from vitrail.tasks.segmentation.closed_form import fit_patches, make_patch_network, score_patches, set_patch_head
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.data import DataSplits, count_workers
from vitrail.train.observer import Advance, count_batches, get_advance
from vitrail.train.run_folder.files import METRICS
from vitrail.train.run_folder.metric_rows import Row, describe_score, headline, read_metrics
from vitrail.train.run_folder.run import RunFolder

FILE: Final = "baseline.safetensors"
KIND: Final = "vitrail baseline 1"
LEARNT: Final = 10_000  # training images, at most
SCORED: Final = 5_000  # images of a split, at most

HeadWeights = tuple[Tensor, Tensor]  # weight [K, D] and bias [K] of the last layer


def is_enabled(run: Run, splits: DataSplits) -> bool:
    """Whether a run has a baseline: every fine-tuning has, unless it is turned off or impossible. ConfigError if it is
    requested and impossible."""
    task, is_requested = task_of(run.objective), run.baseline == "on" or run.start == "closed-form"
    if task is None or not task.has_closed_form:
        return False
    if is_requested and not run.weights:
        requested = "start=closed-form" if run.start == "closed-form" else "baseline=on"
        raise ConfigError(f"{requested} needs the features of existing weights; it is for vitrail finetune")
    return is_requested or (bool(run.weights) and run.baseline == "auto" and not find_obstacle(run, splits))


def find_obstacle(run: Run, splits: DataSplits) -> str:
    """Why fine-tuning cannot be compared with the closed form; "" if it can."""
    task = task_of(run.objective)
    if task is None or not task.has_closed_form:
        return "the objective learns without labels" if task is None else f"there is no closed form for {task.name}"
    if not splits.scored_splits:
        return "no split is scored; --set data.dev=0.1 holds out a part"
    if splits.train.labels.multiple:
        return "images may have several labels"
    return "" if len(splits.class_names) > 1 else "there is only one class"


def can_start(run: Run) -> bool:
    """Whether a run can start with the closed form as its head: a head of queries has no closed form."""
    return not run.model.has_queries


def compare_scores(closed: Mapping[str, Row], scores: Iterable[Row | None], run: ResolvedRun) -> str:
    """A sentence if the closed form beats the fine-tuning on the first split that both are scored on, or if the run
    started from it and nothing later was better; else ""."""
    for row in scores:
        ours = None if row is None else headline(row)
        if row is not None and ours is not None and (beaten := closed.get(row["split"])):
            if row["step"] == 0:
                return "no step was better than the closed form at the start, so the run keeps its initial weights"
            theirs = headline(beaten)
            if theirs is None or theirs.criterion != ours.criterion or ours.value >= theirs.value:
                return ""
            fit = f"vitrail fit {shlex.quote(run.weights)} {shlex.quote(run.data.source)} --out fitted.safetensors"
            both = f"{theirs.text} against {ours.text}"
            better = f"a linear classifier on the frozen features beats this fine-tuning on {row['split']}"
            return f"{better}: {both}. To get it: {fit}"
    return ""


def prepare_baseline(
    run: ResolvedRun, splits: DataSplits, world: World, folder: RunFolder, observer: Any, *, resumed: bool
) -> tuple[dict[str, Row], HeadWeights | None]:
    """The baseline of a run: a row by scored split, and the head that the run starts with, if it uses one. A new run
    computes it, or reuses that of an earlier start; a resumed run reads it from its metrics."""
    known = [row for row in read_metrics(folder.path / METRICS)[0] if row.get("kind") == "baseline"]
    if resumed:
        return {row["split"]: row for row in world.broadcast(known)}, None
    rows, tensors, problem = list[Row](), dict[str, Tensor](), ""
    if run.baseline == "on" and world.is_main:
        try:
            rows, tensors = compute_baseline(run, splits, world, folder.path, observer)
        except (VitrailError, torch.OutOfMemoryError) as error:
            problem = " ".join(str(error).split())
    rows, tensors, problem = world.broadcast((rows, tensors, problem))
    if problem and run.start == "closed-form":
        raise TrainingError(f"the head to start with could not be computed ({problem}); start=zero does without it")
    if problem:
        folder.note(f"no closed-form baseline: {problem}")
    for row in rows:
        if row["split"] not in {row["split"] for row in known}:
            folder.record(row, describe_score(row))
        observer.progress(row)
    head = (tensors["weight"], tensors["bias"]) if tensors and run.start == "closed-form" else None
    return {row["split"]: row for row in rows}, head


def compute_baseline(
    run: ResolvedRun, splits: DataSplits, world: World, folder: Path, observer: Any
) -> tuple[list[Row], dict[str, Tensor]]:
    """A row by scored split, and the weight and bias of the classifier: from the folder, or computed."""
    model = load_frozen_network(run)
    prepared = [str(value) for value in run.preprocessing.to_dict().items()]
    facts: Row = {"network": hash_network(model), "preprocessing": prepared, "pictures": splits.fingerprint}
    facts |= {
        "splits": list(splits.scored_splits),
        "limits": [LEARNT, SCORED],
        "versions": [__version__, torch.__version__],
    }
    with contextlib.suppress(WeightsError):  # missing or damaged: computed again
        kept = read_weights(folder / FILE)
        if kept.description is not None and kept.description.get("facts") == facts:
            return kept.description["rows"], kept.tensors
    task = task_of(run.objective)
    assert task is not None
    sample, solve = (sample_evenly, solve_masks) if task.targets.moves else (sample_stratified, solve_classes)
    learnt = sample(splits.train, LEARNT)
    scored = {name: sample(source, SCORED) for name, source in splits.scored_splits.items()}
    counts = (
        (len(learnt), len(splits.train)),
        (sum(map(len, scored.values())), sum(map(len, splits.scored_splits.values()))),
    )
    images, to_score = (f"{some:,}" if some == total else f"{some:,} of {total:,}" for some, total in counts)
    what = f"{images} images to learn from, {to_score} to score; --set baseline=off skips it"
    observer.log(f"first a linear classifier on the frozen features, for comparison: {what}")
    rows, tensors = solve(run, model.to(world.device), splits.class_names, learnt, scored, world, get_advance(observer))
    try:
        write_sealed(folder / FILE, tensors, {"kind": KIND, "facts": facts, "rows": rows})
    except WeightsError as error:  # a resumed run computes it again
        observer.log(f"the closed form could not be saved: {error}")
    return rows, tensors


def sample_evenly(source: ImageDataset, most: int) -> ImageDataset:
    """All of a source, or `most` samples evenly spaced."""
    if len(source) <= most:
        return source
    return SubsetDataset(source, np.linspace(0, len(source) - 1, most).round().astype(np.int64))


Solution: TypeAlias = tuple[list[Row], dict[str, Tensor]]  # a row by scored split, and the weight and bias


def solve_classes(
    run: ResolvedRun,
    model: Model,
    names: Sequence[str],
    learnt: ImageDataset,
    scored: Mapping[str, ImageDataset],
    world: World,
    advance: Advance,
) -> Solution:
    """Solves for the classes of images."""
    extract = make_extractor(run, model, world, advance)
    features, labels = extract(learnt)
    labels = keep_single_labels(labels)
    usable = labels >= 0
    if not usable.any():
        raise DataError(f"none of {len(labels):,} training images has exactly one label")
    head = fit_head(features[usable], labels[usable], len(names))
    rows = [score_head(name, head, int(usable.sum()), *extract(source)) for name, source in scored.items()]
    return rows, {"weight": head.weight, "bias": head.bias}


def solve_masks(
    run: ResolvedRun,
    model: Model,
    names: Sequence[str],
    learnt: ImageDataset,
    scored: Mapping[str, ImageDataset],
    world: World,
    advance: Advance,
) -> Solution:
    """Solves for the classes of pixels."""
    network = make_patch_network(to_bundle(model), names).to(world.device)
    network.card = replace(get_card(network), preprocessing=run.preprocessing)
    cuda, targets = world.device.type == "cuda", MaskTargets()
    workers = 0 if run.data.resident == "on" else count_workers(run.data, world)

    def load(source: ImageDataset) -> Iterator[Batch]:
        size = min(256 if cuda else 32, len(source))
        found = eval_batches(source, run.preprocessing, batch=size, workers=workers, pin=cuda, targets=targets)
        return count_batches(found, "closed form", len(source), advance)

    made = fit_patches(network, learnt, load(learnt), world.device)
    set_patch_head(network, made.head)
    rows = list[Row]()
    for split, source in scored.items():
        row = score_patches(network, load(source), world.device).row()
        facts: Row = {"penalty": made.head.penalty, "learnt_from": len(made.samples)}
        rows.append({"kind": "baseline", "step": 0, "split": split, "score": "miou"} | row | facts)
    return rows, {"weight": made.head.weight, "bias": made.head.bias}


def score_head(split: str, head: RidgeHead, learnt: int, features: Tensor, labels: Tensor) -> Row:
    right, count = score_predictions(head.predict(features)[0], labels)
    row: Row = {"kind": "baseline", "step": 0, "split": split, "accuracy": right / count, "count": count}
    return row | {"penalty": head.penalty, "learnt_from": learnt}


def load_frozen_network(run: ResolvedRun) -> Model:
    """The weights at the run's image size. A hidden layer or projection is removed with the head (3.2); a linear head
    stays, so that features cached by other commands are found."""
    bundle = resize_like(find_weights(run.weights), run.model)
    if not bundle.config.has_plain_head:
        bundle = replace_head_and_resize(bundle, 0)
    return build_network(bundle)


def make_extractor(
    run: ResolvedRun, model: Model, world: World, advance: Advance
) -> Callable[[ImageDataset], tuple[Tensor, Tensor]]:
    """A function that returns the features [N, D] and labels [N] or [N, M] of a dataset. A part of a small dataset is
    looked up in the features of the whole, which train and dev and all points of a sweep share."""
    wholes: dict[int, FrozenFeatures] = {}
    cuda, cache = world.device.type == "cuda", cache_folder("features")
    workers = 0 if run.data.resident == "on" else count_workers(run.data, world)  # if so small, they would be slower

    def iterate(source: ImageDataset) -> Iterator[Batch]:
        size = min(256 if cuda else 64, len(source))
        found = eval_batches(source, run.preprocessing, batch=size, workers=workers, pin=cuda)
        return count_batches(found, "closed form", len(source), advance)

    load = partial(
        load_or_extract, model, preprocessing=run.preprocessing, device=world.device, batches=iterate, folder=cache
    )

    def extract(source: ImageDataset) -> tuple[Tensor, Tensor]:
        if not (isinstance(source, SubsetDataset) and len(source.source) <= LEARNT):
            found = load(source)
            return found.features, found.labels
        found = wholes.get(id(source.source)) or load(source.source)
        wholes[id(source.source)] = found
        mine = torch.isin(found.samples, torch.from_numpy(source.indices))
        return found.features[mine], found.labels[mine]

    return extract


def read_head(folder: Path) -> HeadWeights:
    """The head that the run in a folder started with."""
    found = read_weights(folder / FILE)
    return found.tensors["weight"], found.tensors["bias"]
