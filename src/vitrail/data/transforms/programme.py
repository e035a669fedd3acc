"""What a policy hands to those who run it: operations by number, and how strongly. Needs no torchvision."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

NAMES: Final = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "saturation", "contrast", "sharpness", "posterise", "solarise", "autocontrast", "equalise"),
    *("hue", "grey", "blur"),
)
NUMBER: Final = {name: number for number, name in enumerate(NAMES)}
GEOMETRIC: Final = frozenset({"shear_x", "shear_y", "translate_x", "translate_y", "rotate"})  # move pixels
IDENTITY: Final = NUMBER["identity"]


class Programme(NamedTuple):
    """S operations in a row for each of B samples: their numbers, and their levels."""

    which: NDArray[np.int64]  # [B, S]
    level: NDArray[np.float64]  # [B, S]
