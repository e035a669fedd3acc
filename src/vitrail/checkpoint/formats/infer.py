"""What a state dict does not say and a config must: heads, the grid, and the numerics of whoever wrote it."""

import math

from vitrail.checkpoint.formats.table import Shapes
from vitrail.core.errors import MismatchedWeights
from vitrail.core.shapes import Pair, times
from vitrail.models.zoo import SHAPES, SMALL_SHAPES

HEADS = {(width, mlp): heads for width, _, mlp, heads in (SHAPES | SMALL_SHAPES).values()}


def heads_of(shapes: Shapes, width: int, mlp_width: int) -> int:
    """Heads as given, by the published shape, else 64 dimensions a head; a fused matrix does not tell."""
    if "heads" in shapes.facts:
        return int(shapes.facts["heads"])
    if (width, mlp_width) in HEADS:
        return HEADS[width, mlp_width]
    if width % 64:
        raise MismatchedWeights(
            f"{shapes.path}: width {width} is no published shape and the file does not say how many heads; pass heads="
        )
    return width // 64


def grid_of(shapes: Shapes, rows: int, patch: Pair, class_token: bool) -> tuple[Pair, int]:
    """The image that a position table is for, and how many of its rows belong to the class token."""
    path, image = shapes.path, shapes.image
    for prefix in (1, 0) if class_token else (0,):
        if image is not None:
            if (image[0] // patch[0]) * (image[1] // patch[1]) == rows - prefix:
                return image, prefix
            continue
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return (side * patch[0], side * patch[1]), prefix
    if image is None:
        raise MismatchedWeights(
            f"{path}: {rows} positions make no square grid; pass image=(height, width) of the training pictures"
        )
    raise MismatchedWeights(f"{path}: {rows} positions do not fit {times(image)} pixels at patch {times(patch)}")
