"""The paper's tables as data, as printed: what our own results stand next to. Shares are in per cent, but for Table 8.

Networks have the names of the zoo, tasks those of the data sets; "real" is ImageNet with the labels of ReaL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

JFT_IMAGES: Final = 303_000_000
JFT_CLASSES: Final = 18_291

TASKS: Final = ("imagenet", "real", "cifar10", "cifar100", "pets", "flowers102")
AVERAGE_5: Final = ("imagenet", "cifar10", "cifar100", "pets", "flowers102")  # of Table 7, taken to be Figure 5's too


def average_5(accuracies: Mapping[str, float]) -> float:
    """The mean over the five data sets."""
    return sum(accuracies[task] for task in AVERAGE_5) / len(AVERAGE_5)


@dataclass(frozen=True, slots=True)
class Printed:
    """A mean with the standard deviation over three fine-tunings, where one is printed. `other` is a second value in
    the same place: Noisy Student's 88.4 and 88.5."""

    mean: float
    deviation: float | None = None
    other: float | None = None


def _printed(*values: Printed | tuple[float, float] | float) -> dict[str, Printed]:
    names = (*TASKS, "vtab")
    found = [
        one if isinstance(one, Printed) else Printed(*one) if isinstance(one, tuple) else Printed(one) for one in values
    ]
    return dict(zip(names, found, strict=False))


# Table 2: L/16 at 512 px and H/14 at 518 px on ImageNet, with averaged weights; all else at 384 px.
TABLE_2: Final[Mapping[str, Mapping[str, Printed]]] = {
    "ViT-H/14, JFT": _printed(
        (88.55, 0.04), (90.72, 0.05), (99.50, 0.06), (94.55, 0.04), (97.56, 0.03), (99.68, 0.02), (77.63, 0.23)
    ),
    "ViT-L/16, JFT": _printed(
        (87.76, 0.03), (90.54, 0.03), (99.42, 0.03), (93.90, 0.05), (97.32, 0.11), (99.74, 0.00), (76.28, 0.46)
    ),
    "ViT-L/16, I21k": _printed(
        (85.30, 0.02), (88.62, 0.05), (99.15, 0.03), (93.25, 0.05), (94.67, 0.15), (99.61, 0.02), (72.72, 0.21)
    ),
    "BiT-L (R152x4)": _printed(
        (87.54, 0.02), 90.54, (99.37, 0.06), (93.51, 0.08), (96.62, 0.23), (99.63, 0.03), (76.29, 1.70)
    ),
    "Noisy Student (EfficientNet-L2)": _printed(Printed(88.4, None, 88.5), 90.55),
}
# Table 2: TPUv3-core-days of pre-training.
CORE_DAYS: Final[Mapping[str, float]] = {
    "ViT-H/14, JFT": 2500,
    "ViT-L/16, JFT": 680,
    "ViT-L/16, I21k": 230,
    "BiT-L (R152x4)": 9900,
    "Noisy Student (EfficientNet-L2)": 12300,
}


def _sizes(*values: float) -> dict[str, float]:
    return dict(zip(("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14"), values, strict=False))


# Table 5: by what was pre-trained on, then what was tuned on at 384 px. JFT's L/16 is the run of 14 epochs.
TABLE_5: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    "ImageNet": {
        "cifar10": _sizes(98.13, 97.77, 97.86, 97.94),
        "cifar100": _sizes(87.13, 86.31, 86.35, 87.07),
        "imagenet": _sizes(77.91, 73.38, 76.53, 71.16),
        "real": _sizes(83.57, 79.56, 82.19, 77.83),
        "flowers102": _sizes(89.49, 85.43, 89.66, 86.36),
        "pets": _sizes(93.81, 92.04, 93.64, 91.35),
    },
    "I21k": {
        "cifar10": _sizes(98.95, 98.79, 99.16, 99.13, 99.27),
        "cifar100": _sizes(91.67, 91.97, 93.44, 93.04, 93.82),
        "imagenet": _sizes(83.97, 81.28, 85.15, 80.99, 85.13),
        "real": _sizes(88.35, 86.63, 88.40, 85.65, 88.70),
        "flowers102": _sizes(99.38, 99.11, 99.61, 99.19, 99.51),
        "pets": _sizes(94.43, 93.02, 94.73, 93.09, 94.82),
    },
    "JFT": {
        "cifar10": _sizes(99.00, 98.61, 99.38, 99.19, 99.50),
        "cifar100": _sizes(91.87, 90.49, 94.04, 92.52, 94.55),
        "imagenet": _sizes(84.15, 80.73, 87.12, 84.37, 88.04),
        "real": _sizes(88.85, 86.27, 89.99, 88.28, 90.33),
        "flowers102": _sizes(99.56, 99.27, 99.56, 99.45, 99.68),
        "pets": _sizes(95.80, 93.40, 97.11, 95.83, 97.56),
    },
}


@dataclass(frozen=True, slots=True)
class Compute:
    """A row of Table 6: a network by its name here, the epochs on JFT-300M, accuracies after tuning at 384 px in the
    order of TASKS, and exaFLOPs, all as printed."""

    network: str
    epochs: int
    accuracies: tuple[float, ...]
    exaflops: float
    misprint: bool = False  # of the exaFLOPs

    @property
    def accuracy(self) -> dict[str, float]:
        return dict(zip(TASKS, self.accuracies, strict=True))

    @property
    def average_5(self) -> float:
        """Of five accuracies, without ReaL; not printed in the table."""
        return average_5(self.accuracy)


TABLE_6: Final = (
    Compute("ViT-B/32", 7, (80.73, 86.27, 98.61, 90.49, 93.40, 99.27), 55),
    Compute("ViT-B/16", 7, (84.15, 88.85, 99.00, 91.87, 95.80, 99.56), 224),
    Compute("ViT-L/32", 7, (84.37, 88.28, 99.19, 92.52, 95.83, 99.45), 196),
    Compute("ViT-L/16", 7, (86.30, 89.43, 99.38, 93.46, 96.81, 99.66), 783),
    Compute("ViT-L/16", 14, (87.12, 89.99, 99.38, 94.04, 97.11, 99.56), 1567),
    Compute("ViT-H/14", 14, (88.08, 90.36, 99.50, 94.71, 97.11, 99.71), 4262),
    Compute("BiT-R50x1", 7, (77.54, 84.56, 97.67, 86.07, 91.11, 94.26), 50),
    Compute("BiT-R50x2", 7, (82.12, 87.94, 98.29, 89.20, 93.43, 97.02), 199),
    Compute("BiT-R101x1", 7, (80.67, 87.07, 98.48, 89.17, 94.08, 95.95), 96),
    Compute("BiT-R152x1", 7, (81.88, 87.96, 98.82, 90.22, 94.17, 96.94), 141),
    Compute("BiT-R152x2", 7, (84.97, 89.69, 99.06, 92.05, 95.37, 98.62), 563),
    Compute("BiT-R152x2", 14, (85.56, 89.89, 99.24, 91.92, 95.75, 98.75), 1126),
    Compute("BiT-R200x3", 14, (87.22, 90.15, 99.34, 93.53, 96.32, 99.04), 3306),
    Compute("R50+ViT-B/32", 7, (84.90, 89.15, 99.01, 92.24, 95.75, 99.46), 106),
    Compute("R50+ViT-B/16", 7, (85.58, 89.65, 99.14, 92.63, 96.65, 99.40), 274),
    Compute("R50+ViT-L/32", 7, (85.68, 89.04, 99.24, 92.93, 96.97, 99.43), 246),
    # Half of the next row's exaFLOPs is 834.
    Compute("R50+ViT-L/16", 7, (86.60, 89.72, 99.18, 93.64, 97.03, 99.40), 859, misprint=True),
    Compute("R50+ViT-L/16", 14, (87.12, 89.76, 99.31, 93.89, 97.36, 99.11), 1668),
)

# Table 7: ResNets on JFT for 7 epochs, by network and optimiser of the pre-training; "average" is printed, too.
TABLE_7: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    "BiT-R50x1": {
        "adam": {
            "imagenet": 77.54, "cifar10": 97.67, "cifar100": 86.07, "pets": 91.11, "flowers102": 94.26, "average": 89.33
        },
        "sgd": {
            "imagenet": 78.24, "cifar10": 97.46, "cifar100": 85.17, "pets": 91.00, "flowers102": 92.06, "average": 88.79
        },
    },
    "BiT-R152x2": {
        "adam": {
            "imagenet": 84.97, "cifar10": 99.06, "cifar100": 92.05, "pets": 95.37, "flowers102": 98.62, "average": 94.01
        },
        "sgd": {
            "imagenet": 84.37, "cifar10": 99.07, "cifar100": 91.06, "pets": 94.79, "flowers102": 99.32, "average": 93.72
        },
    },
}  # fmt: skip

# Table 8: ViT-B/16, 5-shot linear accuracy on ImageNet as a share, by kind of positions and where they enter. Relative
# ones stand in the column of the stem, but are of every layer.
TABLE_8: Final[Mapping[tuple[str, str], float]] = {
    ("none", "stem"): 0.61382,
    ("learned", "stem"): 0.64206,
    ("learned", "every"): 0.63964,
    ("learned", "shared"): 0.64292,
    ("learned2d", "stem"): 0.64001,
    ("learned2d", "every"): 0.64046,
    ("learned2d", "shared"): 0.64022,
    ("relative", "stem"): 0.64032,
}

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
# Table 9's last column.
TABLE_9_MEANS: Final[Mapping[str, float]] = {"ViT-H/14, JFT": 77.6, "ViT-L/16, JFT": 76.3, "ViT-L/16, I21k": 72.7}


def printed_exaflops(network: str, epochs: float) -> float | None:
    """What Table 6 prints for a network after so many epochs on JFT-300M; none where it has no such row."""
    return next((row.exaflops for row in TABLE_6 if (row.network, row.epochs) == (network, epochs)), None)


def jft_epochs(network: str) -> tuple[int, ...]:
    """For how long the paper trains a network on JFT-300M: Table 6's epochs, and 7 for one that is not in it."""
    return tuple(row.epochs for row in TABLE_6 if row.network == network) or (7,)
