"""Scores during training: the watched split, the final test split, and closed-form few-shot of another dataset (4.1).

A run that learns from labels is scored by its predictions, a run without labels by its features (selfsup_scoring.py).
The weights that a run stands for are the best ones if a held-out split selects them, else the last: the final score and
the report belong to them.
"""

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.checkpoint.bundle import Bundle, get_card
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.core.errors import DataError, VitrailError
from vitrail.data.collection import Collection, open_collection
from vitrail.distributed.meta_init import local_rows
from vitrail.distributed.parallel import Parallel
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.features import FrozenFeatures, extract_features
from vitrail.evaluation.frozen.fewshot import score_few_shot
from vitrail.evaluation.metrics import Criterion, is_better, score_batches
from vitrail.models.backbone import unwrap_backbone
from vitrail.optim.optimiser import swap_tensors
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import task_of
from vitrail.tasks.task import Task, TaskScore
from vitrail.train.assemble import Parts
from vitrail.train.config import Scoring
from vitrail.train.run_folder.files import BEST, LAST
from vitrail.train.run_folder.metric_rows import Row
from vitrail.train.run_folder.run import RunFolder
from vitrail.train.selfsup_scoring import FeatureScorer, ReportSamples

EXTREMES = 12  # best and worst images for the report
EVALUATION_BATCH = 256


@dataclass(slots=True)
class Best:
    """The best score so far, by the numbers that decide, and how many scores have come since. Of equal accuracies,
    which are common on a small split, the one with the lower loss is better."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    step: int = -1
    since: int = 0

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Best":
        """From a checkpoint; those of 0.1.0 have accuracy and loss directly, -1 and none before any score."""
        if "values" in facts:
            return cls(**facts)
        known = {name: facts[name] for name in ("accuracy", "loss") if facts.get(name) is not None}
        return cls(known if facts["step"] >= 0 else {}, facts["step"], facts["since"])

    def update(self, row: Mapping[str, Any], criteria: Sequence[Criterion], step: int) -> bool:
        """Whether this score is better; one that lacks a number to decide by is not."""
        if any(criterion.name not in row for criterion in criteria):
            return False
        new = {criterion.name: float(row[criterion.name]) for criterion in criteria}
        is_first = not self.values and not math.isnan(new[criteria[0].name])
        if is_first or (self.values and is_better(new, {**dict.fromkeys(new), **self.values}, criteria)):
            self.values, self.step, self.since = new, step, 0
            return True
        self.since += 1
        return False

    def apply_to(self, row: Row | None) -> Row | None:
        """A later score's row with the best numbers."""
        return None if row is None else {**row, **self.values, "step": self.step}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitScore:
    """The score of a step's weights on a split, for the report."""

    split: str
    step: int
    found: TaskScore | ReportSamples


class ShardedNetwork(nn.Module):
    """A network whose weights lie in several processes, which predict together."""

    def __init__(self, network: nn.Module, parallel: Parallel) -> None:
        super().__init__()
        self.network, self.parallel = network, parallel

    def forward(self, images: Tensor) -> Tensor:
        return self.parallel.evaluate_with(lambda network, images: network(images), images)


@dataclass
class Scorer(FeatureScorer):
    """Scores the network of a run, with averaged weights if there are any."""

    latest: SplitScore | None = None

    @property
    def task(self) -> Task:
        """The run's task; a run without one is scored as a classification, if there are labels."""
        return task_of(self.parts.run.objective) or CLASSIFICATION

    def use_average(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parts.average is None else self.parts.average.swap_in()

    @property
    def network(self) -> Any:
        """The network that predicts; under FSDP all processes together."""
        network = self.parts.objective.eval_network
        return ShardedNetwork(network, self.parts.parallel) if self.parts.is_sharded else network

    def score(self, part: str, step: int, *, as_is: bool = False) -> Row:
        """One row of metrics for the "watch" or "test" split; `as_is` ignores averages."""
        run, splits, world, task = self.parts.run, self.parts.splits, self.parts.world, self.task
        split = splits.watch_name if part == "watch" else splits.test_name
        source = splits.scored_splits[split]
        with nullcontext() if as_is else self.use_average():
            if not run.objective.labelled:
                row, samples = self.score_features(split, source)
                self.latest = SplitScore(split=split, step=step, found=samples)
                return {"kind": part, "step": step, **row}
            size = min(EVALUATION_BATCH, max(len(source) // world.size, 1))
            batches = self.iterate(f"scoring {split}", source, run.preprocessing, size)
            card = get_card(unwrap_backbone(self.parts.objective.eval_network))
            metric = task.metric_for(card, len(splits.class_names), world.device, extremes=EXTREMES)
            shared, precision = world if world.size > 1 else None, self.parts.evaluation_precision
            found: TaskScore = score_batches(
                self.network, batches, run.preprocessing, metric, device=world.device, world=shared, precision=precision
            )
        self.latest = SplitScore(split=split, step=step, found=found)
        name = task.criteria[0].name  # a row whose main number is not the accuracy names it
        score = {} if name == "accuracy" else {"score": name}
        return {"kind": part, "step": step, "split": split, **score, **found.row()}

    def summarise(self, row: Row) -> Row:
        """A score for the provenance of weights."""
        names = ("split", "measure", "score", *(criterion.name for criterion in self.task.criteria), "loss", "count")
        return {name: row[name] for name in names if name in row}

    def score_training_images(self, step: int) -> Row:
        """A row on the features of training images, for a run without labels and without a watched split."""
        with self.use_average():
            row, samples = self.score_training_features()
        self.latest = SplitScore(split=row["split"], step=step, found=samples)
        return {"kind": "look", "step": step, **row}

    def score_few_shot(self, step: int) -> list[Row]:
        """Closed-form few-shot accuracy on `evaluation.fewshot`, one row per number of shots."""
        run, device = self.parts.run, self.parts.world.device
        (collection, test), prepared = open_fewshot(run.evaluation.fewshot), run.preprocessing
        found: list[FrozenFeatures] = []
        for name in ("train", test):
            batches = self.iterate(f"few-shot, {name}", collection.split(name), prepared, EVALUATION_BATCH, alone=True)
            with self.use_average():
                read = lambda network, images: self.read(images)  # noqa: E731
                found.append(extract_features(self.network, batches, prepared, device, read=read))
        learnt, test_set = ((one.features, one.labels) for one in found)
        rows: list[Row] = []
        for shots in run.evaluation.shots:
            scores = score_few_shot(learnt, test_set, len(collection.classes), shots)
            numbers = {"accuracy": statistics.fmean(scores), "spread": statistics.pstdev(scores)}
            rows.append({"kind": "fewshot", "step": step, "source": run.evaluation.fewshot, "shots": shots, **numbers})
        return rows


@cache
def open_fewshot(text: str) -> tuple[Collection, str]:
    """A collection for few-shot accuracy, and the split that it is scored on."""
    collection = open_collection(text)
    test = next((name for name in ("test", "val") if name in collection.splits), "")
    if "train" not in collection.splits or not test or not collection.classes:
        raise DataError(f"evaluation.fewshot={text}: few-shot accuracy needs labels and the splits train and test")
    return collection, test


def check_fewshot(evaluation: Scoring) -> None:
    """DataError if the few-shot source is missing, or has fewer images of a class than shots."""
    collection, _ = open_fewshot(evaluation.fewshot)
    counts = collection.split("train").labels.counts(len(collection.classes))
    if counts.min() < max(evaluation.shots):
        rare = f"class {collection.classes[counts.argmin()]} has {counts.min()} training images"
        remedy = f"fewer than {max(evaluation.shots)} shots; use fewer (evaluation.shots)"
        raise DataError(f"evaluation.fewshot={evaluation.fewshot}: {rare}, {remedy}")


def score_final_weights(
    scorer: Scorer, folder: RunFolder, step: int, current: Row | None, shown: SplitScore | None
) -> tuple[Row | None, SplitScore | None]:
    """Scores the weights that the run stands for on the test split; returns the row of that split, if there is one, and
    what the report shows. `current` is the watched score of the last weights,
    those of `step`. Without a test split, completes the report if it does not show these weights yet, as after a
    resume."""
    splits = scorer.parts.splits
    best = read_best(folder.path / BEST, scorer.parts.world, folder.note)
    chosen = step if best is None else int(best.card.provenance.get("step", step))
    if best is None and current is not None and splits.watch_name == splits.test_name:
        return {**current, "kind": "test", "weights": "last"}, shown
    with nullcontext() if best is None else swap_weights(best.tensors, scorer.parts, (chosen, step)):
        if splits.test is not None:
            row = scorer.score("test", chosen, as_is=best is not None)
            return {**row, "weights": "last" if best is None else "best"}, scorer.latest
        if best is not None and splits.can_select_best and (shown is None or shown.step != chosen):
            scorer.score("watch", chosen, as_is=True)
            return None, scorer.latest
        return None, shown


def read_best(path: Path, world: World, log: Callable[[str], None]) -> Bundle | None:
    """The best weights of a run, in every process; None if there are none, or if a process cannot read them."""
    found, problem = None, ""
    if world.broadcast(path.exists()):
        try:
            found = read_bundle(path)
        except (OSError, VitrailError) as error:
            problem = str(error)
    if problem := next(filter(None, world.gather(problem)), ""):
        log(f"the best weights cannot be read, so the last ones are scored: {problem}")
        return None
    return found


@contextmanager
def swap_weights(tensors: Mapping[str, Tensor], parts: Parts, steps: tuple[int, int]) -> Generator[None]:
    """The network with these weights inside the block. `steps` are the step of these weights and that of its own."""
    live = parts.objective.eval_network.state_dict(keep_vars=True)
    held, values = list[Tensor](), list[Tensor]()
    for name, tensor in live.items():
        part, shape, start = local_rows(tensor.detach())
        held.append(part)
        values.append(tensors[name][start : start + len(part)] if shape else tensors[name])
    inside, outside = steps
    parts.objective.set_progress(inside)
    with swap_tensors(held, values):
        yield
    parts.objective.set_progress(outside)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended: "done", or "interrupted", in which case it can be resumed."""

    folder: Path
    state: str
    step: int
    best: Best
    test: Row | None  # of the weights that the run stands for
    watch: Row | None  # of the last weights
    baseline: dict[str, Row]  # closed form on the frozen features, by split

    @property
    def weights(self) -> Path:
        """The weights that the run stands for: the best ones if it selected some, else the last."""
        best = self.folder / BEST
        return best if best.exists() else self.folder / LAST
