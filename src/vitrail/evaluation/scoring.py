"""What a task is given to score a network on a split, and what it gives back.

    outcome = setting.run(metric, targets)        # every image once
    Evaluated(outputs="21 classes of pixels", lead=..., measures=(...,))

Which images count, how they are read, the result file, the page and what is printed are the same for all tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.targets import Targets
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.evaluation.exposure import Advance
from vitrail.evaluation.frozen.features import Precision
from vitrail.evaluation.metrics.metric import Metric, score_batches
from vitrail.evaluation.result import Measure
from vitrail.evaluation.subject import Subject, iterate_batches
from vitrail.report.page import Section, Table

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOptions:
    """How a network is scored. `batch` and `workers` change nothing but the time it takes. The last five are for tasks
    whose targets are classes of images: `labels` name the outputs where the card does not, or otherwise; `by_number`
    takes class 7 for output 7 whatever they are called; `real` is the file of ReaL labels; `answers` says whether the
    answer to each image will be asked for."""

    precision: Precision = "float32"
    seed: int = 0  # of the bootstrap
    include_seen: bool = False
    without: Path | None = None
    deduplicated_by: Path | None = None
    batch: int = 0
    workers: int = 0
    labels: tuple[str, ...] | None = None
    by_number: bool = False
    real: Path | None = None
    threshold: float | None = None
    answers: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} must be at least 0")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold {self.threshold:g} must be between 0 and 1")

    def list_special(self) -> list[str]:
        """The options that were given and that not every task takes, as the command line calls them."""
        given = {
            "--labels": self.labels is not None,
            "--by-number": self.by_number,
            "--real": self.real is not None,
            "--threshold": self.threshold is not None,
            "--answers": self.answers,
        }
        return [option for option, there in given.items() if there]


@dataclass(frozen=True, kw_only=True)
class EvaluationSetting:
    """A network, and the images of a split that it is scored on. All processes have one."""

    about: Subject
    collection: Collection  # its split holds the images that count, and no others
    split: str
    how: ScoringOptions
    world: World
    advance: Advance
    ledger: UnreadableLog = field(default_factory=UnreadableLog)  # what could not be read here

    @property
    def source(self) -> ImageDataset:
        return self.collection.splits[self.split]

    def run(self, metric: Metric[ResultT], targets: Targets) -> ResultT:
        """The metric's result over every image once; the same in all processes."""
        world, source = self.world, self.source
        self.about.computing_in(self.how.precision)
        tell = lambda done: self.advance("pictures", min(done * world.size, len(source)), len(source))  # noqa: E731
        if world.is_main:
            tell(0)
        batches = iterate_batches(
            source,
            self.about.preprocessing,
            world.device,
            targets=targets,
            batch=self.how.batch,
            workers=self.how.workers,
            rank=world.rank,
            world=world.size,
            ledger=self.ledger,
        )
        try:
            return score_batches(
                self.about.network,
                batches,
                self.about.preprocessing,
                metric,
                device=world.device,
                world=world,
                precision=self.how.precision,
                progress=tell if world.is_main else None,
            )
        except DataError as error:  # nothing could be scored
            reasons = [f"; {entry}" for entry in self.ledger.known.values()]
            raise DataError(f"{error}{''.join(reasons[:1])}") from None

    @cached_property
    def unreadable(self) -> tuple[str, ...]:
        """The images and targets that could not be read, of all processes: each asks once the metric has run."""
        parts = self.world.gather(list(self.ledger.known.values()))
        return tuple(sorted(str(entry) for part in parts for entry in part))


def no_sections() -> Sequence[Section]:
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationOutcome:
    """What a task found: the measures, and what is printed, written and shown next to them."""

    outputs: str  # what the network answers, printed behind the number of images: "10 classes, matched by name"
    lead: str  # what was scored, above the page: "360 images, 10 classes"
    measures: tuple[Measure, ...]
    brief: tuple[str, ...] = ()  # the measures that stand in a row of several image sizes
    counting: tuple[str, ...] = ()  # the measures that are shares of images, printed as "58 of 64", too
    captions: Mapping[str, str] = field(default_factory=dict[str, str])  # what a measure is, in a few words
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the config of the result
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the result
    outputs_notes: tuple[str, ...] = ()  # on how the outputs are found in the data
    notes: tuple[str, ...] = ()  # on what counted
    tables: tuple[Table, ...] = ()  # printed below the measures
    sections: Callable[[], Sequence[Section]] = no_sections  # of the page
    answers: Callable[[], bytes] | None = None  # what was said to each image, as CSV
