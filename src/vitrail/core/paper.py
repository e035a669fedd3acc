"""The paper's tables as data, as printed: what our own results stand beside. Shares are in per cent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

JFT_IMAGES: Final = 303_000_000
JFT_CLASSES: Final = 18_291

# Table 2: TPUv3-core-days of pre-training.
CORE_DAYS: Final[Mapping[str, float]] = {"ViT-H/14, JFT": 2500, "ViT-L/16, JFT": 680, "ViT-L/16, I21k": 230}


@dataclass(frozen=True, slots=True)
class Compute:
    """A row of Table 6: a network by its name here, the epochs on JFT-300M, and exaFLOPs as printed."""

    network: str
    epochs: int
    exaflops: float
    misprint: bool = False


TABLE_6: Final = (
    Compute("ViT-B/32", 7, 55),
    Compute("ViT-B/16", 7, 224),
    Compute("ViT-L/32", 7, 196),
    Compute("ViT-L/16", 7, 783),
    Compute("ViT-L/16", 14, 1567),
    Compute("ViT-H/14", 14, 4262),
    Compute("BiT-R50x1", 7, 50),
    Compute("BiT-R50x2", 7, 199),
    Compute("BiT-R101x1", 7, 96),
    Compute("BiT-R152x1", 7, 141),
    Compute("BiT-R152x2", 7, 563),
    Compute("BiT-R152x2", 14, 1126),
    Compute("BiT-R200x3", 14, 3306),
    Compute("R50+ViT-B/32", 7, 106),
    Compute("R50+ViT-B/16", 7, 274),
    Compute("R50+ViT-L/32", 7, 246),
    Compute("R50+ViT-L/16", 7, 859, misprint=True),  # half of the next row is 834
    Compute("R50+ViT-L/16", 14, 1668),
)

VTAB_TASKS: Final = (
    *("caltech101", "cifar100", "dtd", "flowers102", "pets", "sun397", "svhn"),
    *("pcam", "eurosat", "resisc45", "retinopathy"),
    *("clevr-count", "clevr-distance", "dmlab", "dsprites-location", "dsprites-orientation"),
    *("kitti-distance", "smallnorb-azimuth", "smallnorb-elevation"),
)


def _row(*values: float) -> dict[str, float]:
    return dict(zip(VTAB_TASKS, values, strict=True))


# Table 9: VTAB-1k by task, for each network and what it was pre-trained on.
TABLE_9: Final[Mapping[str, Mapping[str, float]]] = {
    "ViT-H/14, JFT": _row(
        *(95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9),
        *(83.3, 96.7, 91.4, 76.6),
        *(91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
    ),
    "ViT-L/16, JFT": _row(
        *(95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4),
        *(83.6, 96.5, 89.7, 77.1),
        *(86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
    ),
    "ViT-L/16, I21k": _row(
        *(90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9),
        *(82.5, 95.6, 85.2, 75.3),
        *(70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
    ),
}


def printed_exaflops(network: str, epochs: float) -> float | None:
    """What Table 6 prints for a network after so many epochs on JFT-300M; none where it has no such row."""
    return next((row.exaflops for row in TABLE_6 if (row.network, row.epochs) == (network, epochs)), None)


def jft_epochs(network: str) -> tuple[int, ...]:
    """For how long the paper trains a network on JFT-300M: Table 6's epochs, and 7 for one that is not in it."""
    return tuple(row.epochs for row in TABLE_6 if row.network == network) or (7,)
