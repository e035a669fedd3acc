"""What came of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.train.baseline import Row
from vitrail.train.folder.layout import BEST, LAST
from vitrail.train.scoring import Best


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
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
