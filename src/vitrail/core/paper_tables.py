"""The paper's tables as data, as printed, for comparison with our own results. The values are in paper_tables.toml,
which says what each of them shows. Shares are in per cent, except in Table 8.

Networks have the names of the zoo, tasks those of the data sets; "real" is ImageNet with the labels of ReaL.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

JFT_IMAGES: Final = 303_000_000
JFT_CLASSES: Final = 18_291

TASKS: Final = ("imagenet", "real", "cifar10", "cifar100", "pets", "flowers102")
AVERAGE_5: Final = ("imagenet", "cifar10", "cifar100", "pets", "flowers102")  # of Table 7, taken to be Figure 5's too


def average_5(accuracies: Mapping[str, float]) -> float:
    """The mean over the five data sets."""
    return sum(accuracies[task] for task in AVERAGE_5) / len(AVERAGE_5)


@dataclass(frozen=True, slots=True)
class Compute:
    """A row of Table 6: a network by its name here, the epochs on JFT-300M, accuracies after tuning at 384 px in the
    order of TASKS, and exaFLOPs, all as printed."""

    network: str
    epochs: int
    accuracies: list[float]
    exaflops: float
    misprint: bool = False  # of the exaFLOPs

    @property
    def accuracy(self) -> dict[str, float]:
        return dict(zip(TASKS, self.accuracies, strict=True))

    @property
    def average_5(self) -> float:
        """The mean of five accuracies, without ReaL; not printed in the table."""
        return average_5(self.accuracy)


_FILE: Final = resources.files("vitrail.core").joinpath("paper_tables.toml").read_text("utf-8")
_TABLES: Final[dict[str, Any]] = tomllib.loads(_FILE)


def _by_name(names: tuple[str, ...], rows: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
    return {name: dict(zip(names, row, strict=False)) for name, row in rows.items()}


# By network and task: the mean, the deviation over three fine-tunings where it is printed, and a second value in the
# same place, Noisy Student's 88.4 and 88.5.
TABLE_2: Final[Mapping[str, Mapping[str, list[float]]]] = _by_name((*TASKS, "vtab"), _TABLES["table-2"])
CORE_DAYS: Final[Mapping[str, float]] = _TABLES["core-days"]  # of Table 2: TPUv3-core-days of pre-training
TABLE_5: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    upstream: _by_name(("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14"), tasks)
    for upstream, tasks in _TABLES["table-5"].items()
}
TABLE_6: Final = tuple(Compute(*row) for row in _TABLES["table-6"]["rows"])
TABLE_7: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = _TABLES["table-7"]
TABLE_8: Final[Mapping[tuple[str, str], float]] = {
    (kind, place): value for kind, places in _TABLES["table-8"].items() for place, value in places.items()
}
VTAB_TASKS: Final[tuple[str, ...]] = tuple(_TABLES["vtab-tasks"]["names"])
TABLE_9: Final[Mapping[str, Mapping[str, float]]] = _by_name(VTAB_TASKS, _TABLES["table-9"])
TABLE_9_MEANS: Final[Mapping[str, float]] = _TABLES["table-9-means"]  # its last column


def printed_exaflops(network: str, epochs: float) -> float | None:
    """The exaFLOPs that Table 6 prints for a network after so many epochs on JFT-300M; None if it has no such row."""
    return next((row.exaflops for row in TABLE_6 if (row.network, row.epochs) == (network, epochs)), None)


def jft_epochs(network: str) -> tuple[int, ...]:
    """The epochs for which the paper trains a network on JFT-300M: those of Table 6, or 7 if it is not in the table."""
    return tuple(row.epochs for row in TABLE_6 if row.network == network) or (7,)
