"""The prediction of a classifier: the likeliest classes of an image and their probabilities."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor

from vitrail.tasks.task import PredictionOptions

ANSWER: Final = {"label": {"type": "string"}, "index": {"type": "integer"}, "probability": {"type": "number"}}
ITEMS: Final = {"type": "object", "required": list(ANSWER), "properties": ANSWER}
ANSWERS: Final[dict[str, Any]] = {"type": "array", "items": ITEMS}
CHOSEN: Final = {**ANSWERS, "description": "of a multi-label network: at or above the threshold"}
PARTS: Final = {"top": ANSWERS, "chosen": CHOSEN}
SCHEMA: Final[dict[str, Any]] = {"type": "object", "required": ["top"], "properties": PARTS}  # of Prediction.to_dict


@dataclass(frozen=True, slots=True)
class ClassProbability:
    """One class and its probability."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The likeliest classes of one image in descending order. For a multi-label network `chosen` holds the classes at
    or above its threshold; it may be empty."""

    top: tuple[ClassProbability, ...]
    chosen: tuple[ClassProbability, ...] | None = None

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.top[0].label

    @property
    def index(self) -> int:
        return self.top[0].index

    @property
    def probability(self) -> float:
        return self.top[0].probability

    @property
    def labels(self) -> tuple[str, ...]:
        """The predicted classes: the likeliest one, or those that a multi-label network chose."""
        return (self.label,) if self.chosen is None else tuple(answer.label for answer in self.chosen)

    @property
    def display_classes(self) -> tuple[ClassProbability, ...]:
        """The classes in tables and bars: the likeliest, and all chosen ones."""
        return self.top if self.chosen is None or len(self.top) > len(self.chosen) else self.chosen

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain data: {"top": [{"label", "index", "probability"}, ...]}, and "chosen" if multi-label."""
        rows = {"top": [asdict(answer) for answer in self.top]}
        return rows if self.chosen is None else {**rows, "chosen": [asdict(answer) for answer in self.chosen]}

    def __str__(self) -> str:
        if self.chosen is None:
            return join_answers(self.top)
        return join_answers(self.chosen) or f"none; nearest: {join_answers(self.top[:1])}"


def rank_classes(probabilities: Tensor, options: PredictionOptions) -> list[Prediction]:
    """Turns probabilities [B, K] into predictions. Ties go to the class with the smaller number. A multi-label network
    chooses all classes at or above the threshold."""
    rows, names = probabilities.numpy(force=True), options.names
    found: list[Prediction] = []
    for row, order in zip(rows, np.argsort(-rows, axis=1, kind="stable"), strict=True):
        top = tuple(ClassProbability(names[at], int(at), float(row[at])) for at in order[: options.topk])
        reached = order[: int((row >= options.threshold).sum())] if options.multi_label else order[:0]
        chosen = tuple(ClassProbability(names[at], int(at), float(row[at])) for at in reached)
        found.append(Prediction(top, chosen if options.multi_label else None))
    return found


def join_answers(answers: tuple[ClassProbability, ...]) -> str:
    return ", ".join(f"{answer.label} {100 * answer.probability:.1f} %" for answer in answers)
