"""Scoring along the way: the watched split, the one for the end, and closed-form few-shot of another source (4.1).

A run that learns from labels is scored by its answers, one without by its features (unlabelled.py).

The weights that a run stands for: the best ones where a held-out split chooses, else the last.

`RUN` means them everywhere, so the score of the end and everything that the report shows belong to them.

What came of a run.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.core.errors import DataError, VitrailError
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.meta_init import copy_rows, local_rows
from vitrail.distributed.parallel import Parallel
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.features import FrozenFeatures, extract_features
from vitrail.evaluation.frozen.fewshot import score_few_shot
from vitrail.evaluation.metrics import Criterion, is_better, score_batches
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import targets_of, task_of
from vitrail.tasks.task import Task, TaskScore
from vitrail.train.assemble import Parts
from vitrail.train.closed_form_baseline import Row
from vitrail.train.config import Evaluation, ResolvedRun
from vitrail.train.data import DataSplits, EvalBatches
from vitrail.train.observer import Advance, count_batches, ignore_advance
from vitrail.train.run_folder.files import BEST, LAST
from vitrail.train.run_folder.run import RunFolder
from vitrail.train.selfsup_scoring import FeatureScorer, ReportSamples

EXTREMES = 12  # best and worst images for the report
EVALUATION_BATCH = 256


@dataclass(slots=True)
class Best:
    """The numbers of the best score so far by which it is the best, and how many scores have come since. Of equal
    accuracies, which a small split gives often, the one with the lower loss is better."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    step: int = -1
    since: int = 0

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Best":
        """What a checkpoint tells; those of 0.1.0 name accuracy and loss themselves, -1 and none before any score."""
        if "values" in facts:
            return cls(**facts)
        known = {name: facts[name] for name in ("accuracy", "loss") if facts.get(name) is not None}
        return cls(known if facts["step"] >= 0 else {}, facts["step"], facts["since"])

    def take(self, row: Mapping[str, Any], criteria: Sequence[Criterion], step: int) -> bool:
        """Whether this score is better; one that lacks a number to choose by is not."""
        if any(criterion.name not in row for criterion in criteria):
            return False
        new = {criterion.name: float(row[criterion.name]) for criterion in criteria}
        first = not self.values and not math.isnan(new[criteria[0].name])
        if first or (self.values and is_better(new, {**dict.fromkeys(new), **self.values}, criteria)):
            self.values, self.step, self.since = new, step, 0
            return True
        self.since += 1
        return False

    def applied_to(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        """The row of a later score as it was for the best one."""
        return None if row is None else {**row, **self.values, "step": self.step}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitScore:
    """What the weights of a step did on a split, for the report."""

    split: str
    step: int
    found: TaskScore | ReportSamples


class ShardedNetwork(nn.Module):
    """A network whose weights lie in several processes: they answer together."""

    def __init__(self, network: nn.Module, parallel: Parallel) -> None:
        super().__init__()
        self.network, self.parallel = network, parallel

    def forward(self, images: Tensor) -> Tensor:
        return self.parallel.evaluate_with(answer, images)


def answer(network: nn.Module, images: Tensor) -> Tensor:
    return network(images)


@dataclass(kw_only=True, slots=True)
class Scorer:
    """Scores the network of a run, with averaged weights where there are some."""

    run: ResolvedRun
    parts: Parts
    splits: DataSplits
    world: World
    ledger: UnreadableLog
    advance: Advance = ignore_advance
    sweeps: dict[str, EvalBatches] = field(default_factory=dict[str, EvalBatches])
    latest: SplitScore | None = None
    looking: FeatureScorer = field(init=False)

    def __post_init__(self) -> None:
        self.looking = FeatureScorer(
            run=self.run,
            parts=self.parts,
            splits=self.splits,
            world=self.world,
            ledger=self.ledger,
            advance=self.advance,
        )

    @property
    def task(self) -> Task:
        """Of the run; one that learns from images alone is scored by labels, where there are some."""
        return task_of(self.run.objective) or CLASSIFICATION

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parts.average is None else self.parts.average.swapped()

    @property
    def network(self) -> Any:
        """What answers: the network, or under FSDP all processes together."""
        network = self.parts.objective.eval_network
        return ShardedNetwork(network, self.parts.parallel) if self.run.sharding in ("fsdp", "hsdp") else network

    def split(self, part: str) -> tuple[str, ImageDataset]:
        """Its name and its images, of "watch" or "test"."""
        watch, test = (self.splits.watch_name, self.splits.watch), (self.splits.test_name, self.splits.test)
        name, source = watch if part == "watch" else test
        assert source is not None
        return name, source

    def sweep(self, part: str) -> Iterator[Batch]:
        """The batches of a split, made once."""
        split, source = self.split(part)
        if part not in self.sweeps:
            batch = min(EVALUATION_BATCH, max(len(source) // self.world.size, 1))
            self.sweeps[part] = EvalBatches(
                source,
                self.run.preprocessing,
                self.run.data,
                batch=batch,
                world=self.world,
                ledger=self.ledger,
                targets=targets_of(self.run.objective),
            )
        return count_batches(
            self.sweeps[part], f"scoring {split}", len(source), self.advance, processes=self.world.size
        )

    def alone(self, source: ImageDataset) -> EvalBatches:
        """Batches that every process sees whole."""
        world = World(device=self.world.device)
        return EvalBatches(
            source, self.run.preprocessing, self.run.data, batch=EVALUATION_BATCH, world=world, ledger=self.ledger
        )

    def read(self, network: Any, images: Tensor) -> Tensor:
        """What the last layer reads."""
        return self.looking.read(images)

    def score(self, part: str, step: int, *, as_is: bool = False) -> dict[str, Any]:
        """One row of metrics for the split that is watched or the one for the end; `as_is` leaves averages aside."""
        split, source = self.split(part)
        with nullcontext() if as_is else self.averaged():
            if not self.parts.objective.config.labelled:
                row, seen = self.looking.score(split, source)
                self.latest = SplitScore(split=split, step=step, found=seen)
                return {"kind": part, "step": step, **row}
            found: TaskScore = score_batches(
                self.network,
                self.sweep(part),
                self.run.preprocessing,
                self.task.metric(len(self.splits.class_names), self.world.device, extremes=EXTREMES),
                device=self.world.device,
                world=self.world if self.world.size > 1 else None,
                precision="autocast" if self.world.device.type == "cuda" else "float32",
            )
        self.latest = SplitScore(split=split, step=step, found=found)
        return {"kind": part, "step": step, "split": split, **name_score(self.task), **found.row()}

    def summary_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What weights tell of how they did."""
        names = ("split", "measure", "score", *(criterion.name for criterion in self.task.criteria), "loss", "count")
        return {name: row[name] for name in names if name in row}

    def look(self, step: int) -> dict[str, Any]:
        """A row on the features of training images, for a run without labels that has no split to watch."""
        with self.averaged():
            row, seen = self.looking.train()
        self.latest = SplitScore(split=row["split"], step=step, found=seen)
        return {"kind": "look", "step": step, **row}

    def fewshot(self, step: int) -> list[dict[str, Any]]:
        """Rows of closed-form few-shot accuracy on `evaluation.fewshot`, a row a number of shots."""
        source, shots = self.run.evaluation.fewshot, self.run.evaluation.shots
        collection, test = fewshot_source(source)
        found: dict[str, FrozenFeatures] = {}
        for name in ("train", test):
            key = f"fewshot {name}"
            if key not in self.sweeps:
                self.sweeps[key] = self.alone(collection.split(name))
            batches = count_batches(self.sweeps[key], f"few-shot, {name}", len(collection.split(name)), self.advance)
            with self.averaged():
                found[name] = extract_features(
                    self.network, batches, self.run.preprocessing, self.world.device, read=self.read
                )
        train, scored = found["train"], found[test]
        rows: list[dict[str, Any]] = []
        for count in shots:
            accuracies = score_few_shot(
                train.features, train.labels, scored.features, scored.labels, len(collection.classes), count
            )
            mean = sum(accuracies) / len(accuracies)
            spread = (sum((value - mean) ** 2 for value in accuracies) / len(accuracies)) ** 0.5
            rows.append(
                {"kind": "fewshot", "step": step, "source": source, "shots": count, "accuracy": mean, "spread": spread}
            )
        return rows


def name_score(task: Task) -> dict[str, str]:
    """What a row says of the number that stands for it, where that is not the accuracy."""
    name = task.criteria[0].name
    return {} if name == "accuracy" else {"score": name}


@cache
def fewshot_source(text: str) -> tuple[Collection, str]:
    """A set for few-shot accuracy, and the split that it is scored on."""
    collection = open_collection(text)
    test = next((name for name in ("test", "val") if name in collection.splits), "")
    if "train" not in collection.splits or not test or not collection.classes:
        raise DataError(f"evaluation.fewshot={text}: few-shot accuracy needs labels and the splits train and test")
    return collection, test


def check_fewshot(evaluation: Evaluation) -> None:
    """Refuses a source that is not there, or that has fewer images of a class than are to be drawn."""
    collection, _ = fewshot_source(evaluation.fewshot)
    counts = collection.split("train").labels.counts(len(collection.classes))
    if counts.min() < max(evaluation.shots):
        raise DataError(
            f"evaluation.fewshot={evaluation.fewshot}: class {collection.classes[counts.argmin()]} has {counts.min()} "
            f"training images, {max(evaluation.shots)} shots were asked for; use fewer (evaluation.shots)"
        )


class FinalScore(NamedTuple):
    """The row of the split for the end, where there is one, and what the report shows."""

    row: dict[str, Any] | None
    shown: SplitScore | None


def score_final_weights(
    scorer: Scorer, folder: RunFolder, *, step: int, current: dict[str, Any] | None, shown: SplitScore | None
) -> FinalScore:
    """Scores the weights that the run stands for on the split for the end. `current` is the watched score of the last
    weights, those of `step`. Without such a split the report is completed, where it does not show them yet, as after a
    resume."""
    splits = scorer.splits
    best = read_best(folder.path / BEST, scorer.world, folder.note)
    chosen = step if best is None else int(best.card.provenance.get("step", step))
    if best is None and current is not None and splits.watch_name == splits.test_name:
        return FinalScore({**current, "kind": "test", "weights": "last"}, shown)
    with contextlib.nullcontext() if best is None else swap_weights(best.tensors, scorer.parts):
        if splits.test is None:
            if best is not None and splits.can_select_best and (shown is None or shown.step != chosen):
                scorer.score("watch", chosen, as_is=True)
                return FinalScore(None, scorer.latest)
            return FinalScore(None, shown)
        row = scorer.score("test", chosen, as_is=best is not None)
        return FinalScore({**row, "weights": "last" if best is None else "best"}, scorer.latest)


def read_best(path: Path, world: World, tell: Callable[[str], None]) -> Bundle | None:
    """The best weights of a run, in every process; none where there are none, or where one cannot read them."""
    found, refused = None, ""
    if world.broadcast(path.exists()):
        try:
            found = read_bundle(path)
        except (OSError, VitrailError) as error:
            refused = str(error)
    if refused := next(filter(None, world.gather(refused)), ""):
        tell(f"the best weights cannot be read, so the last ones are scored: {refused}")
        return None
    return found


@contextlib.contextmanager
def swap_weights(tensors: Mapping[str, Tensor], parts: Parts) -> Generator[None]:
    """The network with these weights while the context lasts."""
    live = parts.objective.eval_network.state_dict(keep_vars=True)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    try:
        with torch.no_grad():
            for name, tensor in live.items():
                part, shape, start = local_rows(tensor.detach())
                copy_rows(tensor.detach(), tensors[name][start : start + part.shape[0]] if shape else tensors[name])
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.detach().copy_(before[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """How a run ended: "done", or "interrupted" and can be resumed."""

    folder: Path
    state: str
    step: int
    best: Best
    test: dict[str, Any] | None  # of the weights that the run stands for
    watch: dict[str, Any] | None  # of the last weights
    baseline: dict[str, Row]  # closed form on the frozen features, by split

    @property
    def weights(self) -> Path:
        """What the run stands for: the best weights where it chose some, else the last."""
        best = self.folder / BEST
        return best if best.exists() else self.folder / LAST
