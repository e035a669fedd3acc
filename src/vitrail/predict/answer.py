"""What a network says of a picture: the likeliest classes and how sure it is."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One class and its probability."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The likeliest classes of one picture, the likeliest first."""

    top: tuple[Answer, ...]

    @property
    def label(self) -> str:
        """What the picture most likely shows."""
        return self.top[0].label

    @property
    def index(self) -> int:
        return self.top[0].index

    @property
    def probability(self) -> float:
        return self.top[0].probability

    def to_dict(self) -> dict[str, Any]:
        """As plain data: {"top": [{"label", "index", "probability"}, ...]}."""
        return {
            "top": [
                {"label": answer.label, "index": answer.index, "probability": answer.probability} for answer in self.top
            ]
        }

    def __str__(self) -> str:
        return ", ".join(f"{answer.label} {100 * answer.probability:.1f} %" for answer in self.top)
