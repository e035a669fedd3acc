"""Data sets inside the package: handwritten digits and rendered shapes.

digits: 1,797 real handwritten digits of 8x8 pixels, the smallest realistic image set. They are scikit-learn's
`load_digits`, the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, CC BY 4.0). docs/figures/digits.py extracted them; a test compares the two where scikit-learn
is installed.

shapes: one shape per image, with its class, colour, position and size known exactly, and its box and mask. An image is
a pure function of (seed, index): nothing is stored, any number of images at any resolution is available, and the four
labels are drawn independently of each other. Shapes are signed distances, so edges are smooth at every size. Only sums,
products, comparisons and roots are used: the pixels are the same everywhere.
"""

import math
from functools import cached_property, lru_cache
from importlib import resources
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.data.dataset import ArrayDataset, ImageDataset, Labels, hash_content, hash_names
from vitrail.data.randomness import CounterRng

Plane: TypeAlias = NDArray[np.floating[Any]]  # [H, W] or [3, H, W], float32
Label: TypeAlias = Literal["shape", "colour", "position", "size"]

DIGITS: Final = "digits"
SHAPES: Final = ("shapes", "shapes/colour", "shapes/position", "shapes/size")
TEST_EVERY: Final = 5  # of the digits in order of class, every fifth is for test
INK_LEVELS: Final = 16  # ink is counted from 0 to 16
TRAIN, TEST, SIDE = 10_000, 2_000, 64  # images and pixels of the shapes

COLOURS: Final = {
    "red": (206, 44, 60),
    "orange": (238, 132, 34),
    "yellow": (246, 208, 62),
    "green": (52, 152, 88),
    "cyan": (62, 188, 204),
    "blue": (44, 82, 186),
    "violet": (128, 70, 172),
    "pink": (240, 128, 170),
}
POSITIONS: Final = tuple(f"{y} {x}" for y in ("top", "middle", "bottom") for x in ("left", "centre", "right"))
SIZES: Final = {"tiny": (0.09, 0.11), "small": (0.13, 0.155), "medium": (0.18, 0.21), "large": (0.245, 0.28)}
GROUNDS: Final = (  # each blends into the one before it
    *((240, 235, 224), (220, 226, 230), (196, 206, 212), (222, 212, 198), (236, 224, 214), (206, 196, 196)),
    *((126, 132, 142), (84, 92, 110), (52, 58, 76), (40, 42, 54), (74, 74, 84), (128, 122, 118), (186, 178, 168)),
)
GRAIN: Final = 5  # points per side of the grid that the clouds are interpolated from
TURNS: Final = 120  # directions a shape may point in
ANGLES: Final = tuple(math.tau * i / TURNS for i in range(TURNS))
CIRCLE: Final = tuple((round(math.cos(angle), 6), round(math.sin(angle), 6)) for angle in ANGLES)


def distance_beyond(x: Plane, y: Plane, turn: int, radius: float) -> Plane:
    """How far each point lies beyond the line that is `radius` away from the centre, in the given direction."""
    across, along = CIRCLE[turn % TURNS]
    return across * x + along * y - np.float32(radius)


def circle(x: Plane, y: Plane) -> Plane:
    return np.sqrt(x * x + y * y) - np.float32(0.9)


def square(x: Plane, y: Plane) -> Plane:
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.7)


def triangle(x: Plane, y: Plane) -> Plane:
    return np.maximum.reduce([distance_beyond(x, y, turn, 0.5) for turn in (30, 70, 110)])


def star(x: Plane, y: Plane) -> Plane:
    """Inside a five-pointed star, at most one of its five lines is crossed: the second largest distance counts."""
    first, second = distance_beyond(x, y, 6, 0.31), np.full_like(x, -9)
    for arm in range(1, 5):
        beyond = distance_beyond(x, y, 6 + arm * TURNS // 5, 0.31)
        second = np.maximum(second, np.minimum(first, beyond))
        first = np.maximum(first, beyond)
    return second


def cross(x: Plane, y: Plane) -> Plane:
    a, b = np.abs(x), np.abs(y)
    wide, narrow = np.float32(0.92), np.float32(0.3)
    return np.minimum(np.maximum(a - wide, b - narrow), np.maximum(a - narrow, b - wide))


def ring(x: Plane, y: Plane) -> Plane:
    return np.abs(np.sqrt(x * x + y * y) - np.float32(0.7)) - np.float32(0.23)


def moon(x: Plane, y: Plane) -> Plane:
    bite = x - np.float32(0.5)
    return np.maximum(np.sqrt(x * x + y * y) - np.float32(0.95), np.float32(0.78) - np.sqrt(bite * bite + y * y))


def arrow(x: Plane, y: Plane) -> Plane:
    shaft = np.maximum(np.abs(y) - np.float32(0.22), np.abs(x + np.float32(0.4)) - np.float32(0.54))
    slope = (x + np.float32(1.1) * np.abs(y)) * np.float32(0.672673) - np.float32(0.64)
    return np.minimum(shaft, np.maximum(slope, np.float32(0.05) - x))


OUTLINES: Final = {shape.__name__: shape for shape in (circle, square, triangle, star, cross, ring, moon, arrow)}
ATTRIBUTES: Final = {"shape": OUTLINES, "colour": COLOURS, "position": POSITIONS, "size": SIZES}
CLASSES: Final = {label: tuple(names) for label, names in ATTRIBUTES.items()}


def read_builtin(name: str) -> dict[str, ImageDataset]:
    """The splits of "digits", or of "shapes", "shapes/colour" and the like: 10,000 and 2,000 images of 64x64."""
    if name == DIGITS:
        return read_digits()
    label = name.partition("/")[2] or "shape"
    return {"train": ShapesDataset(TRAIN, label=label), "test": ShapesDataset(TEST, label=label, seed=1)}


def read_digits() -> dict[str, ImageDataset]:
    """1,437 images for train and 360 for test, every class in the same proportion."""
    images, labels = load_digit_scans()
    by_class = np.argsort(labels, kind="stable")
    test = np.sort(by_class[::TEST_EVERY])
    splits = {"train": np.setdiff1d(by_class, test), "test": test}
    return {
        split: ArrayDataset(images[chosen], Labels(labels[chosen]), "0123456789", called=f"{DIGITS}/{split}")
        for split, chosen in splits.items()
    }


@lru_cache(maxsize=1)
def load_digit_scans() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All images [1797, 8, 8], white ink on black from 0 to 255, and their digits [1797], in the original order."""
    with resources.files("vitrail").joinpath("assets", "digits.npz").open("rb") as file, np.load(file) as stored:
        return np.rint(stored["ink"] * (255 / INK_LEVELS)).astype(np.uint8), stored["labels"].astype(np.int64)


class ShapesDataset(ImageDataset):
    """`count` images of size x size pixels, labelled by one of their four attributes."""

    def __init__(self, count: int, *, size: int = SIDE, label: str = "shape", seed: int = 0) -> None:
        if label not in get_args(Label):
            raise unknown_name("label", label, get_args(Label))
        if count < 1 or not 8 <= size <= 8192:
            raise ConfigError(f"count={count}, size={size}: at least one image, of 8 to 8192 pixels per side")
        self.count, self.size, self.label, self.seed = count, size, label, seed
        self.generated_size = (size, size)
        self.classes, self.pixel_classes = CLASSES[label], ("background", *OUTLINES)
        self.labels = Labels(draw_labels(label, seed, count))

    def read(self, index: int) -> NDArray[np.uint8]:
        """Pixels [size, size, 3]."""
        scene = self.scene(index)
        pixels = draw_backdrop(scene, self.size)
        paint_outline(pixels, self.outline(scene), scene.tint)
        return to_image(pixels)

    def mask(self, index: int) -> NDArray[np.uint8]:
        """Class indices [size, size]: the shape's where it covers at least half of a pixel, else 0."""
        scene = self.scene(index)
        rows, columns, distance, _ = self.outline(scene)
        out = np.zeros((self.size, self.size), np.uint8)
        out[rows, columns] = (distance <= 0) * np.uint8(scene.shape + 1)
        return out

    def box(self, index: int) -> tuple[int, int, int, int]:
        """The smallest box around the shape: left, top, right, bottom in pixels, the last two exclusive."""
        mask = self.mask(index)
        columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
        return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

    def name(self, index: int) -> str:
        return f"shapes-{self.size}px-seed{self.seed}[{index}]"

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint without the pixel classes, which follow from the names: runs from before masks can resume."""
        return hash_names(self, self.classes)

    def content_hash(self, index: int) -> int:
        """The name determines the pixels, so they need not be drawn for it."""
        return hash_content(self.name(index).encode()) | 1

    def scene(self, index: int) -> "Scene":
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Scene(self.seed, index)

    def outline(self, scene: "Scene") -> "Outline":
        return trace_outline(scene.shape, (scene.x, scene.y), scene.radius, scene.turn, self.size)


def draw_labels(label: str, seed: int, count: int, *, block: int = 1 << 20) -> NDArray[np.int8]:
    """One attribute of the first `count` images, computed in blocks, so that a long set needs one byte per image."""
    at, out = get_args(Label).index(label), np.empty(count, np.int8)
    for start in range(0, count, block):
        some = np.arange(start, min(start + block, count), dtype=np.int64)
        free = CounterRng.for_samples(seed=seed, epoch=0, sample=some).uniform("scene", at + 1)[:, at]
        out[start : start + block] = (free * len(CLASSES[label])).astype(np.int8)
    return out


class Scene:
    """All random choices of one image."""

    __slots__ = ("bend", "colour", "grain", "ground", "position", "radius", "shape", "size", "tint", "turn", "x", "y")

    def __init__(self, seed: int, index: int) -> None:
        drawn = CounterRng.for_samples(seed=seed, epoch=0, sample=index).uniform("scene", 12 + GRAIN * GRAIN)[0]
        free: list[float] = drawn.tolist()
        counts = [len(CLASSES[label]) for label in get_args(Label)]
        self.shape, self.colour, self.position, self.size = (int(v * n) for v, n in zip(free, counts, strict=False))
        low, high = tuple(SIZES.values())[self.size]
        self.radius = low + (high - low) * free[4]
        row, column = divmod(self.position, 3)
        self.x, self.y = place_inside(column, self.radius, free[5]), place_inside(row, self.radius, free[6])
        self.turn = int(free[7] * TURNS)
        self.tint = np.array(tuple(COLOURS.values())[self.colour], np.float32) * np.float32(0.92 + 0.16 * free[8])
        first = int(free[9] * len(GROUNDS))
        self.ground = (GROUNDS[first], GROUNDS[first - 1])
        self.bend = (free[10] * 2 - 1, free[11] * 2 - 1)
        self.grain = drawn[12:].astype(np.float32).reshape(GRAIN, GRAIN) * np.float32(0.5)


def place_inside(cell: int, radius: float, free: float) -> float:
    """A position in one third of the side where a shape does not touch the border."""
    margin = radius + 0.015
    low, high = max(margin, cell / 3), min(1 - margin, (cell + 1) / 3)
    return low + (high - low) * free


@lru_cache(maxsize=8)
def pixel_grid(size: int) -> tuple[Plane, NDArray[np.int64], Plane]:
    """The pixel centres along a side; the grain before each, and the eased fraction of the way to the next."""
    place = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    at = place * np.float32(GRAIN - 1)
    cell = np.minimum(at.astype(np.int64), GRAIN - 2)
    part = at - cell.astype(np.float32)
    return place, cell, part * part * (3 - 2 * part)


def spread_grain(grain: Plane, size: int) -> Plane:
    """Soft clouds [H, W] between the points of a grid [GRAIN, GRAIN]."""
    _, cell, part = pixel_grid(size)
    rows = grain[cell]
    rows += (grain[cell + 1] - rows) * part[:, None]
    amount = rows[:, cell]
    amount += (rows[:, cell + 1] - amount) * part
    return amount


class Outline(NamedTuple):
    """The rows and columns around a shape, and for each pixel there its distance to the outline in pixels, negative
    inside, and how brightly it is lit."""

    rows: slice
    columns: slice
    distance: Plane
    light: Plane


def trace_outline(shape: int, at: tuple[float, float], radius: float, turn: int, size: int) -> Outline:
    """A shape of some radius at x and y, both in sides of the image, turned, in an image of size x size pixels."""
    x, y = at
    reach = radius + 3 / size + 0.05
    low, high = ([int((middle + by) * size) for middle in (y, x)] for by in (-reach, reach))
    rows, columns = (slice(max(0, first), min(size, last + 1)) for first, last in zip(low, high, strict=True))
    place = pixel_grid(size)[0]
    dx = ((place[columns] - np.float32(x)) / np.float32(radius))[None, :]
    dy = ((place[rows] - np.float32(y)) / np.float32(radius))[:, None]
    cos, sin = (np.float32(part) for part in CIRCLE[turn])
    distance = OUTLINES[CLASSES["shape"][shape]](cos * dx + sin * dy, cos * dy - sin * dx)
    return Outline(rows, columns, distance * np.float32(radius * size), 1 - (dx + dy) * np.float32(0.08))


def paint_outline(pixels: Plane, outline: Outline, tint: Plane) -> None:
    """Paints a shape and its shadow over an image [3, H, W], in place."""
    rows, columns, distance, light = outline
    part, by = pixels[:, rows, columns], max(1, pixels.shape[-1] // 32)
    moved = np.full_like(distance, 9 * by)  # to the right and down; what enters at the border is far away
    moved[by:, by:] = distance[:-by, :-by]
    shadow = np.clip(0.5 - moved * np.float32(0.35), 0, 1)
    part *= 1 - shadow * np.float32(0.28)
    part += np.clip(0.5 - distance, 0, 1) * (tint[:, None, None] * light - part)
    np.minimum(part, np.float32(255), out=part)


def to_image(pixels: Plane) -> NDArray[np.uint8]:
    """[3, H, W] as bytes [H, W, 3]."""
    return np.ascontiguousarray(pixels.astype(np.uint8).transpose(1, 2, 0))


def draw_backdrop(scene: Scene, size: int) -> Plane:
    """A gradient between two quiet tones with soft clouds: [3, H, W]."""
    place = pixel_grid(size)[0]
    right, down = (np.float32(slope) for slope in scene.bend)
    amount = spread_grain(scene.grain, size)
    amount += place * right
    amount += place[:, None] * down + (np.float32(0.25) - (right + down) / 2)
    np.clip(amount, 0, 1, out=amount)
    start, end = (np.array(tone, np.float32)[:, None, None] for tone in scene.ground)
    pixels = amount * (end - start)
    pixels += start
    return pixels
