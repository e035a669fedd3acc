"""What is taken for what: classes by how often they are recognised, and the most frequent mistakes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ClassCount:
    """How many images of a class were recognised."""

    name: str
    right: int
    count: int

    @property
    def share(self) -> float:
        return self.right / self.count


@dataclass(frozen=True, slots=True)
class Confusion:
    """So many images of one class were taken for another."""

    truth: str
    said: str
    count: int
    share: float  # of the images of the true class


def rank_confusions(
    cells: NDArray[np.int64], totals: NDArray[np.int64], class_names: Sequence[str], most: int
) -> list[Confusion]:
    """The most frequent mistakes; of equal ones the larger share of its class first. `cells` [C, 3] are rows of true
    class, predicted class and count; `totals` [K] are the images of each class."""
    wrong = cells[cells[:, 0] != cells[:, 1]]
    truth, said, count = wrong.T
    share = count / totals[truth]
    order = np.lexsort((said, truth, -share, -count))[:most].tolist()
    return [
        Confusion(class_names[int(truth[at])], class_names[int(said[at])], int(count[at]), float(share[at]))
        for at in order
    ]
