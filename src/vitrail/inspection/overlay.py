"""A map over its image as in Figure 6: what the map does not mark goes dark."""

import math
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from vitrail.core.errors import ConfigError

DIM: Final = 0.3  # mean brightness below which an image is brightened before it is lit
BLACK: Final = 8 / 255  # below this there is nothing but noise to stretch
TOP: Final = 99.5  # per cent of the values that stay below white

Map: TypeAlias = Tensor | NDArray[np.floating[Any]]


def overlay(pixels: NDArray[np.uint8], map: Map) -> NDArray[np.uint8]:
    """Pixels [H, W, 3] lit by a map [rows, columns] -> [H, W, 3], after the author's recipe: the map over its largest
    value, in 8 bits, enlarged by Lanczos, blurred with the patch's side for radius, stretched to [0, 1], and multiplied
    with the image. A map that is the same everywhere leaves the image as it is. A dark image is brightened first:
    else nothing of it could be seen, lit or not."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ConfigError(f"pixels are {pixels.dtype} {list(pixels.shape)}; bytes of [H, W, 3] are wanted")
    light = light_from_map(map, (pixels.shape[0], pixels.shape[1]))
    return np.rint(brighten(pixels) * light[..., None]).astype(np.uint8)


def brighten(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels [H, W, 3] as floats. Those of a dark image are stretched to the whole range, and then bent until their
    mean is near `DIM`; others are left as they are."""
    values = pixels.astype(np.float32) / 255
    if values.mean() >= DIM:
        return pixels.astype(np.float32)
    stretched = np.minimum(values / max(float(np.percentile(values, TOP)), BLACK), 1.0)
    lifted = (stretched + BLACK) / (1 + BLACK)
    power = min(math.log(DIM) / math.log(float(lifted.mean())), 1.0)
    return (255 * lifted**power).astype(np.float32)


def light_from_map(map: Map, size: tuple[int, int]) -> NDArray[np.float32]:
    """The map as the light on each pixel: [rows, columns] -> [H, W] in [0, 1]."""
    values = np.asarray(map.detach().float().cpu() if isinstance(map, Tensor) else map, np.float32)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ConfigError(
            f"a map is finite numbers of [rows, columns], not {list(values.shape)} with something else in it"
        )
    height, width = size
    top = float(values.max())
    bits = np.rint(np.clip(values / top, 0, 1) * 255).astype(np.uint8) if top > 0 else np.zeros(values.shape, np.uint8)
    large = Image.fromarray(bits).resize((width, height), Image.Resampling.LANCZOS)
    radius = (width / values.shape[1], height / values.shape[0])
    blurred = np.asarray(large.filter(ImageFilter.GaussianBlur(radius)), np.float32)
    low, high = float(blurred.min()), float(blurred.max())
    return (blurred - low) / (high - low) if high > low else np.ones_like(blurred)
