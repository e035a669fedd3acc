"""The interface of a task, and the table of registered tasks.

A task defines what a target is, which head a network needs, what is minimised, how outputs are scored, and what a
prediction is: how it is printed, drawn, served and shown in a report. The loader, the loop, the run folder, `evaluate`,
`predict`, `serve` and `export` use it, and know nothing else about targets. A new task is one file or folder, and one
call of `register_task`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle, Card, get_card
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.text import join_words, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.targets import Targets
from vitrail.evaluation.intervals import Interval
from vitrail.evaluation.metrics import REMEDY, Criterion, Metric
from vitrail.evaluation.result import Measure, make_measure
from vitrail.evaluation.scoring import EvaluationOutcome, EvaluationSetting, ScoringOptions, Subject
from vitrail.models.family import ModelConfig
from vitrail.models.query_output import Output
from vitrail.models.zoo import adapt_config
from vitrail.objectives.objective import ObjectiveConfig, register_objective
from vitrail.report.page import Section, Table
from vitrail.tasks.mask_queries.decode import to_dense

if TYPE_CHECKING:
    from PIL.Image import Image

    from vitrail.data.targets import Geometry


COUNT = "count"  # in the row of a score: the number of images


def check_outputs(card: Card, num_outputs: int, names: Sequence[str], outputs: str, where: str) -> None:
    """DataError if the outputs of a network are not the `names` of the data in `where`, which `outputs` describes."""
    if num_outputs != len(names):
        raise DataError(f"{where} has {outputs}, but the network has {num_outputs:,}; fine-tune it on these data")
    different = [at for at, name in enumerate(card.labels or names) if name != names[at]]
    if card.labels is not None and different:
        at, remedy = different[0], "give data with the same names in the same order, or fine-tune it on these"
        known = f"output {at} of the network is {card.labels[at]!r}, and in {where} it is {names[at]!r}"
        raise DataError(f"{known}; {remedy}")


def measure_row(
    row: Mapping[str, Any], criteria: Sequence[Criterion], intervals: Mapping[str, Interval | None], count: int
) -> tuple[Measure, ...]:
    """The finite numbers of a score's row as measures, those of the criteria first, under their titles."""
    known = {criterion.name: criterion for criterion in criteria}
    every = known | {name: Criterion(name=name) for name in row if name not in known and name != COUNT}
    found: list[Measure] = []
    for name, one in every.items():
        value, unit = row.get(name), "share" if one.share else "number"
        if isinstance(value, int | float) and math.isfinite(value):
            found.append(make_measure(one.title or name.replace("_", " "), value, intervals.get(name), count, unit))
    return tuple(found)


EXTREMES: Final = 12  # best and worst images on the page of an evaluation
PRINTED: Final = 25  # rows above which a table is on the page only


class TaskScore(Protocol):
    """The result of a task's metric on a split."""

    @property
    def count(self) -> int:
        """The number of images that counted."""
        ...

    def row(self) -> dict[str, Any]:
        """The row of a run's metrics: numbers by name, including those of the task's criteria."""
        ...


class TaskPrediction(Protocol):
    """A prediction for one image. As text it is one line."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        ...


class PredictionSet(Protocol):
    """Collects the predictions for many images in one file."""

    name: str

    def add(self, image: str, prediction: Any, files: Mapping[str, str]) -> None:
        """Adds the prediction for an image. `files` are the names of the files written for it, by kind."""
        ...

    def to_bytes(self) -> bytes:
        """The content of the file."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionOptions:
    """How outputs become predictions: their names, how many classes are listed, the threshold (the lowest probability
    of a class of a multi-label network, or the lowest score of a segment), and which classes are things. A task uses
    what it needs."""

    names: tuple[str, ...]
    topk: int = 5
    threshold: float = 0.5
    multi_label: bool = False
    things: tuple[bool, ...] | None = None  # None: all


class PredictionBar(NamedTuple):
    """A part of a prediction, shown as a bar."""

    label: str
    share: float  # length of the bar, up to 1
    chosen: bool = False  # whether it is the predicted one
    colour: str = ""  # its colour in a drawing, such as "#2c5aa0"


class Task(ABC):
    """One kind of target, from the data to the report. A task has no state; one object is shared."""

    name: ClassVar[str]  # in weight files, on pages and in --task
    objective: ClassVar[type[ObjectiveConfig]]  # the default objective
    targets: ClassVar[Targets]
    criteria: ClassVar[tuple[Criterion, ...]]  # numbers that select weights; the first is the main one
    extras: ClassVar[tuple[Criterion, ...]] = ()  # further numbers of a score, and how they are shown
    mixes: ClassVar[bool] = False  # whether the targets of two images can be mixed (mixup, CutMix)
    has_classes: ClassVar[bool] = False  # whether outputs [B, K, ...] are logits of K exclusive classes
    threshold: ClassVar[float] = 0.5  # default of `PredictionOptions.threshold`
    slides: ClassVar[bool] = False  # whether networks can be scored by sliding windows
    has_closed_form: ClassVar[bool] = False  # whether least squares on frozen features also solves it

    # Data and network.

    def recognises(self, collection: Collection) -> bool:
        """Whether these data are annotated for this task, so that it need not be named."""
        return False

    @abstractmethod
    def output_names(self, collection: Collection) -> tuple[str, ...]:
        """The names of the network's outputs for these data; DataError if they lack the targets."""

    def describe_outputs(self, names: Sequence[str]) -> str:
        """A short description of the outputs: "37 classes"."""
        return f"{len(names):,} outputs" if len(names) != 1 else "one output"

    def fit_model(self, model: ModelConfig, outputs: int, *, new_head: bool) -> ModelConfig:
        """The network with a head for a number of outputs; `new_head` discards the whole old one (3.2)."""
        return adapt_config(model, **(model.linear_head(outputs) if new_head else {"classes": outputs}))

    def card_facts(self, objective: ObjectiveConfig, source: ImageDataset) -> Mapping[str, Any]:
        """Additional fields of the weights' card."""
        return {}

    def check_targets(self, objective: ObjectiveConfig, source: ImageDataset, names: Sequence[str]) -> list[str]:
        """Warnings about the targets of training images, before a run starts."""
        return []

    # Scores.

    @abstractmethod
    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> Metric[Any]:
        """A metric whose result is a `TaskScore`. It may keep some of the best and worst images for reports."""

    def metric_for(self, card: Card, outputs: int, device: torch.device, *, extremes: int = 0) -> Metric[Any]:
        """The metric for a network with this card, for a task whose metric depends on more than a number of outputs."""
        return self.metric(outputs, device, extremes=extremes)

    def report_sections(
        self, score: Any, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        """The sections of pages on a score, besides its numbers. `title` names the split and the weights."""
        return []

    def intervals(self, score: Any, *, seed: int) -> Mapping[str, Interval | None]:
        """95% intervals of numbers of a score's row, by name, as far as the task has them."""
        return {}

    def details(self, score: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Details of a score for the result file, as plain data."""
        return {"outputs": list(names)}

    # Evaluation.

    def check_scoring(self, how: ScoringOptions, about: Subject) -> None:
        """ConfigError for options of `vitrail evaluate` that do not apply to these weights."""
        if special := how.list_special():
            options, are = join_words(special), "is" if len(special) == 1 else "are"
            raise ConfigError(f"{options} {are} for classification; the task of {about.name} is {self.name}")
        self.check_windows(how, about)

    def check_windows(self, how: ScoringOptions, about: Subject) -> None:
        """ConfigError for sliding windows that do not apply to these weights."""
        if how.windows is not None and not self.slides:
            fact = f"--windows {how.windows} is for semantic segmentation (classes of pixels)"
            raise ConfigError(f"{fact}; the task of {about.name} is {self.name}")

    def score(self, setting: EvaluationSetting, outputs: int) -> Any:
        """The `TaskScore` of a network with this number of outputs."""
        card = get_card(setting.about.network)
        return setting.run(self.metric_for(card, outputs, setting.world.device, extremes=EXTREMES), self.targets)

    def assess(self, setting: EvaluationSetting) -> EvaluationOutcome:
        """Scores a network with the task's metric, for `vitrail evaluate`: every number of the score's row."""
        names, source = self.output_names(setting.collection), setting.source
        network, outputs = setting.about.network, self.describe_outputs(names)
        check_outputs(get_card(network), network.config.classes, names, outputs, setting.collection.name)
        self.targets.check(source)
        score: TaskScore = self.score(setting, len(names))
        left = len(source) - len(setting.unreadable) - score.count
        if not score.count:
            raise DataError(f"no image could be scored: all are unreadable or without a target; {REMEDY}")
        row, seed = score.row(), setting.how.seed
        if setting.world.is_main:
            setting.advance("computing intervals", 0, None)
        intervals = self.intervals(score, seed=seed)
        measures = measure_row(row, (*self.criteria, *self.extras), intervals, score.count)
        notes = [f"skipped {pluralise(left, 'image')} without a target"] if left else []
        unsound = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        notes += [f"skipped {name}, which is {row[name]}" for name in unsound]
        windows = {} if setting.how.windows is None else {"windows": setting.how.windows}
        tables = [each for each in self.report_sections(score, None, names, "") if isinstance(each, Table)]
        return EvaluationOutcome(
            outputs=outputs,
            lead=f"{score.count:,} images, {outputs}",
            measures=measures,
            brief=tuple(measure.name for measure in measures),
            settings={"task": self.name, **({"seed": seed} if intervals else {}), **windows},
            details=self.details(score, names),
            notes=tuple(notes),
            tables=tuple(table for table in tables if len(table.rows) <= PRINTED),
            sections=lambda: self.report_sections(score, source, names, ""),
        )

    # Exports.

    def match_targets(
        self, collection: Collection, split: str, bundle: Bundle, *, by_number: bool = False
    ) -> tuple[ImageDataset | None, tuple[str, ...]]:
        """The images of a split with targets numbered like the outputs of the network, and notes on the matching; None
        if the data have no targets for this task. With `by_number` the names may differ."""
        source = collection.splits[split]
        try:
            names = self.output_names(collection)
            self.targets.check(source)
        except DataError:
            return None, ()
        card = replace(bundle.card, labels=None) if by_number else bundle.card
        check_outputs(card, bundle.config.classes, names, self.describe_outputs(names), collection.name)
        return source, ()

    def agreement(self, outputs: Output, other: Output) -> Tensor | None:
        """The share of equal predictions of two outputs [B, K, ...] for each image [B]; None for a task without
        classes. Outputs of queries are compared by the semantic class of each pixel."""
        if not self.has_classes:
            return None
        outputs, other = (to_dense(one) for one in (outputs, other))
        return (outputs.argmax(1) == other.argmax(1)).float().reshape(len(outputs), -1).mean(1)

    # Predictions.

    @abstractmethod
    def predict(
        self, outputs: Any, views: Sequence["Geometry"], options: PredictionOptions
    ) -> Sequence[TaskPrediction]:
        """The predictions for B images from the network's `Output`, such as [B, K, ...], on these views of them."""

    def prediction_options(self, *, multi_label: bool) -> tuple[str, ...]:
        """The fields of `PredictionOptions` that a user may set: "topk", "threshold"."""
        return ()

    def describe_predictions(self, *, multi_label: bool) -> str:
        """A heading for predictions, as a server shows it."""
        return "What the network predicts for each image"

    def prediction_schema(self) -> dict[str, Any]:
        """The JSON Schema of a prediction's `to_dict`."""
        return {"type": "object"}

    def bars(self, prediction: Any) -> Sequence[PredictionBar]:
        """The parts of a prediction as bars, in order; empty if its text is enough."""
        return ()

    def columns(self, *, multi_label: bool) -> tuple[str, ...]:
        """The columns of a table of predictions, after the image's name."""
        return ("prediction",)

    def rows(self, prediction: Any) -> list[list[Any]]:
        """The rows of a prediction in that table, at least one."""
        return [[str(prediction)]]

    @property
    def has_files(self) -> bool:
        """Whether predictions can be written as files or drawn."""
        return type(self).file_of is not Task.file_of or type(self).draw is not Task.draw

    def draw(self, prediction: Any, image: "Image") -> "Image | None":
        """The prediction drawn over its image, which may be smaller than the original; None if there is nothing to
        draw."""
        return None

    def file_of(self, prediction: Any) -> tuple[str, bytes] | None:
        """The prediction as a file: suffix and bytes; None if text is enough."""
        return None

    def collect(self, options: PredictionOptions) -> "PredictionSet | None":
        """Collects the predictions for a folder of images in one file, besides those of each image; None if the task
        has no such file."""
        return None


TASKS: dict[str, Task] = {}


def register_task(task: Task) -> None:
    """Registers a task by its name, and its objective for --set."""
    TASKS[task.name] = task
    register_objective(task.objective)
