"""1,797 real handwritten digits of 8x8 pixels, inside the package: the smallest honest set of pictures.

They are scikit-learn's `load_digits`, the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0). docs/figures/digits.py took them out of there; a test
compares the two where scikit-learn is installed.
"""

from functools import lru_cache
from importlib import resources
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.data.labels import Labels
from vitrail.data.source import Arrays, Source

NAME: Final = "digits"
CLASSES: Final = tuple("0123456789")
EVERY: Final = 5  # every fifth of the digits, laid out by class, is kept for test
LEVELS: Final = 16  # ink is counted from 0 to 16


def read() -> dict[str, Source]:
    """The two splits: 1,437 to train and 360 to test, every class in the same proportion."""
    pictures, labels = scans()
    by_class = np.argsort(labels, kind="stable")
    test = np.sort(by_class[::EVERY])
    train = np.setdiff1d(by_class, test)
    return {
        split: Arrays(pictures[chosen], Labels(labels[chosen]), CLASSES, called=f"{NAME}/{split}")
        for split, chosen in (("train", train), ("test", test))
    }


@lru_cache(maxsize=1)
def scans() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All pictures [1797, 8, 8], white ink on black as 0 to 255, and what they show [1797], in the original order."""
    with resources.files("vitrail").joinpath("assets", "digits.npz").open("rb") as file, np.load(file) as stored:
        ink: NDArray[np.uint8] = stored["ink"]
        labels: NDArray[np.uint8] = stored["labels"]
    return np.rint(ink * (255 / LEVELS)).astype(np.uint8), labels.astype(np.int64)
