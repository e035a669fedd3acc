"""Scenes: two to eight overlapping shapes in front of a sky and a ground, with every segment known exactly.

    scenes = SceneDataset(1000, size=128)
    pixels, segments = scenes.read(0), scenes.segments(0)

The shapes of builtin_sets.py are things, later ones in front of earlier ones; sky and ground are stuff. Colours, sizes
and places are drawn independently of the class. As there, an image is a pure function of (seed, index), at any size,
and nothing is stored. A shape that would leave too little of another one visible is not placed. Simple scenes have
fewer and larger shapes, of the three kinds that a small network learns to distinguish first.
"""

import re
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError
from vitrail.data.annotations.rle import encode
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.dataset import ImageDataset, Labels, hash_content
from vitrail.data.datasets.builtin_sets import (
    COLOURS,
    GRAIN,
    OUTLINES,
    TURNS,
    Outline,
    Plane,
    paint_outline,
    pixel_grid,
    spread_grain,
    to_image,
    trace_outline,
)
from vitrail.data.randomness import CounterRng

SCENES: Final = "scenes"
SIDE: Final = 128
TRAIN, TEST = 10_000, 1_000
SIDES: Final = (32, 4096)

THINGS: Final = tuple(OUTLINES)
SKY, GROUND = len(THINGS), len(THINGS) + 1  # class numbers
STUFF: Final = (SegmentClass("sky", False), SegmentClass("ground", False))
CLASSES: Final = (*(SegmentClass(name) for name in THINGS), *STUFF)

MOST: Final = 8  # shapes of a scene ...
FEWEST: Final = 2
TRIES: Final = 12  # ... out of so many
VISIBLE: Final = (0.15, 12)  # share and pixels of a shape that stay visible
RADII: Final = (0.075, 0.2)
NUMBERS: Final = 7  # drawn for each shape ...
BACKDROP: Final = 2 + GRAIN + 2 * GRAIN * GRAIN  # ... and for sky and ground

# How strongly clouds show, and how quickly the tones of sky and ground change downwards.
CLOUDS, SKY_FADE, GROUND_FROM, GROUND_FADE = (np.float32(value) for value in (0.55, 1.6, 0.4, 1.3))
SKIES: Final = (  # at the top, at the horizon
    *(((88, 146, 206), (212, 228, 238)), ((62, 78, 136), (240, 184, 154)), ((34, 40, 78), (104, 112, 156))),
    *(((146, 176, 190), (238, 232, 216)), ((112, 100, 164), (246, 204, 192)), ((164, 184, 202), (224, 228, 230))),
)
GROUNDS: Final = (  # at the horizon, at the bottom
    *(((156, 180, 124), (82, 124, 82)), ((224, 204, 164), (190, 156, 112)), ((226, 232, 238), (182, 196, 212))),
    *(((126, 110, 100), (76, 64, 62)), ((108, 162, 176), (46, 92, 122)), ((172, 140, 152), (108, 84, 106))),
)


Bytes: TypeAlias = tuple[int, int, int]


class SceneRules(NamedTuple):
    """Which shapes scenes have, how many at most, and their smallest and largest radius in sides of the image."""

    title: str
    shapes: tuple[str, ...]  # in the order of their class numbers; sky and ground follow
    most: int
    radii: tuple[float, float]


ALL: Final = SceneRules("scenes", THINGS, MOST, RADII)
SIMPLE: Final = SceneRules("scenes-simple", ("circle", "star", "ring"), 5, (0.13, 0.25))
SIMPLE_SIDE: Final = 64


class PlacedShape(NamedTuple):
    """A shape of a scene."""

    shape: int  # its class
    outline: Outline
    tint: Plane  # [3]


class SceneLayout(NamedTuple):
    """The layout of a scene: the shapes from back to front, and which of them each pixel shows (-1 for none)."""

    shapes: list[PlacedShape]
    owner: NDArray[np.int8]  # [H, W]
    below: Plane  # [H, W]: how far each pixel lies below the horizon, in pixels
    free: NDArray[np.float64]  # the numbers that the backdrop is drawn from


class SceneDataset(ImageDataset):
    """`count` scenes of size x size pixels, with their segments. They have no labels as a whole."""

    def __init__(self, count: int, *, size: int = SIDE, seed: int = 0, rules: SceneRules = ALL) -> None:
        low, high = SIDES
        if count < 1 or not low <= size <= high:
            raise ConfigError(f"count={count}, size={size}: at least one scene, of {low} to {high} pixels per side")
        self.count, self.size, self.seed, self.rules = count, size, seed, rules
        self.generated_size = (size, size)
        self.segment_classes = (*(SegmentClass(name) for name in rules.shapes), *STUFF)
        self.pixel_classes = tuple(one.name for one in self.segment_classes)
        self.labels = Labels.none(count)
        self.latest: tuple[int, SceneLayout] | None = None  # pixels and segments are usually read in turn

    def read(self, index: int) -> NDArray[np.uint8]:
        """Pixels [size, size, 3]."""
        layout = self.layout(index)
        pixels = draw_landscape(layout, self.size)
        for one in layout.shapes:
            paint_outline(pixels, one.outline, one.tint)
        return to_image(pixels)

    def segments(self, index: int) -> Segments:
        """The visible parts of the shapes, from back to front, then of sky and ground."""
        layout = self.layout(index)
        masks = [layout.owner == at for at in range(len(layout.shapes))]
        masks += [(layout.owner < 0) & (layout.below < 0), (layout.owner < 0) & (layout.below >= 0)]
        sky = len(self.rules.shapes)
        classes = np.array([*(one.shape for one in layout.shapes), sky, sky + 1])
        there = np.array([mask.any() for mask in masks])
        masks = [mask for mask, some in zip(masks, there, strict=True) if some]
        return Segments(
            size=(self.size, self.size),
            classes=classes[there],
            boxes=np.array([find_box(mask) for mask in masks], np.float64).reshape(-1, 4),
            crowd=np.zeros(len(masks), np.bool_),
            masks=tuple(encode(mask) for mask in masks),
        )

    def mask(self, index: int) -> NDArray[np.uint8]:
        """Class indices [size, size]."""
        layout = self.layout(index)
        table = np.array([one.shape for one in layout.shapes], np.uint8)
        sky = len(self.rules.shapes)
        stuff = np.where(layout.below < 0, np.uint8(sky), np.uint8(sky + 1))
        return np.where(layout.owner < 0, stuff, table[layout.owner])

    def layout(self, index: int) -> SceneLayout:
        if not 0 <= index < self.count:
            raise IndexError(index)
        latest = self.latest
        if latest is None or latest[0] != index:
            self.latest = latest = (index, arrange_scene(self.seed, index, self.size, self.rules))
        return latest[1]

    def name(self, index: int) -> str:
        return f"{self.rules.title}-{self.size}px-seed{self.seed}[{index}]"

    def content_hash(self, index: int) -> int:
        """The name determines the pixels, so they need not be drawn for it."""
        return hash_content(self.name(index).encode()) | 1


def is_scene_set(name: str) -> bool:
    """Whether a name stands for scenes: "scenes", "scenes/SIZE" or "scenes/simple"."""
    return re.fullmatch(rf"{SCENES}(/([0-9]{{1,5}}|simple))?", name) is not None


def read_scenes(name: str = SCENES) -> dict[str, ImageDataset]:
    """The splits of "scenes", of "scenes/SIZE", or of "scenes/simple" at 64 px: 10,000 and 1,000 scenes."""
    variant = name.partition("/")[2]
    rules, size = (SIMPLE, SIMPLE_SIDE) if variant == "simple" else (ALL, int(variant or SIDE))
    counts = (("train", TRAIN, 0), ("test", TEST, 1))
    return {split: SceneDataset(count, size=size, seed=seed, rules=rules) for split, count, seed in counts}


def arrange_scene(seed: int, index: int, size: int, rules: SceneRules) -> SceneLayout:
    """Places the shapes of a scene one after the other."""
    parts = np.cumsum([1, TRIES * NUMBERS, len(COLOURS)])
    drawn = CounterRng.for_samples(seed=seed, epoch=0, sample=index).uniform("scenes", int(parts[-1]) + BACKDROP)[0]
    amount, numbers, ranks, backdrop = np.split(drawn, parts)
    wanted = FEWEST + int(amount[0] * (rules.most - FEWEST + 1))
    order = np.argsort(ranks).tolist()  # no colour comes twice
    colours, shapes, areas = list(COLOURS.values()), list[PlacedShape](), list[int]()
    owner = np.full((size, size), -1, np.int8)
    for some in numbers.reshape(TRIES, NUMBERS).tolist():
        if len(shapes) == wanted:
            break
        shape, outline = trace_shape(some, size, rules)
        inside, part = outline.distance <= 0, owner[outline.rows, outline.columns]
        hidden = np.bincount(part[inside] + 1, minlength=len(shapes) + 1)[1:]  # of each shape so far
        area = int(inside.sum())
        if area < VISIBLE[1] or not stays_visible(owner, areas, hidden):
            continue
        part[inside] = len(shapes)
        tint = np.array(colours[order[len(shapes)]], np.float32) * np.float32(0.88 + 0.2 * some[6])
        shapes.append(PlacedShape(shape, outline, tint))
        areas.append(area)
    return SceneLayout(shapes, owner, measure_horizon(backdrop[2 : 2 + GRAIN], size), backdrop)


def trace_shape(numbers: list[float], size: int, rules: SceneRules) -> tuple[int, Outline]:
    """A shape's class and outline from its numbers; its centre lies in the image."""
    low, high = rules.radii
    radius = low + (high - low) * numbers[1] * (0.4 + 0.6 * numbers[2])  # more small ones than large ones
    at = (0.06 + 0.88 * numbers[3], 0.06 + 0.88 * numbers[4])
    shape = int(numbers[0] * len(rules.shapes))
    return shape, trace_outline(THINGS.index(rules.shapes[shape]), at, radius, int(numbers[5] * TURNS), size)


def stays_visible(owner: NDArray[np.int8], areas: list[int], hidden: NDArray[np.int64]) -> bool:
    """Whether enough stays visible of every shape if so many more pixels of each are hidden."""
    touched = np.flatnonzero(hidden)
    if not touched.size:
        return True
    left = np.bincount(owner.ravel() + 1, minlength=len(areas) + 1)[1:] - hidden
    share, least = VISIBLE
    return all(left[at] >= max(least, share * areas[at]) for at in touched)


def measure_horizon(points: NDArray[np.float64], size: int) -> Plane:
    """How far each pixel lies below a wavy horizon, in pixels [H, W]."""
    place, cell, part = pixel_grid(size)
    heights = np.float32(0.34) + np.float32(0.34) * np.float32(points[0]) + points.astype(np.float32) * np.float32(0.16)
    line = heights[cell] + (heights[cell + 1] - heights[cell]) * part
    return (place[:, None] - line[None, :]) * np.float32(size)


def draw_landscape(layout: SceneLayout, size: int) -> Plane:
    """Sky and ground, each from one tone to another with soft clouds: [3, H, W]."""
    free, place = layout.free, pixel_grid(size)[0][:, None]
    grain = free[2 + GRAIN :].astype(np.float32).reshape(2, GRAIN, GRAIN) - np.float32(0.5)
    share = np.clip(layout.below + np.float32(0.5), 0, 1)  # of the ground
    seen, last = (share > 0).any(1), (share < 1).any(1)
    top, bottom = int(seen.argmax()), size - int(np.flip(last).argmax())  # ground from one on, sky up to the other
    sky = blend_tones(
        SKIES[int(free[0] * len(SKIES))], spread_grain(grain[0], size) * CLOUDS + place * SKY_FADE, bottom
    )
    haze = spread_grain(grain[1], size) * CLOUDS + (place - GROUND_FROM) * GROUND_FADE
    ground = blend_tones(GROUNDS[int(free[1] * len(GROUNDS))], haze[top:], size - top)
    both = sky[:, top:bottom]
    both += share[top:bottom] * (ground[:, : bottom - top] - both)
    return np.concatenate([sky, ground[:, bottom - top :]], 1)


def blend_tones(tones: tuple[Bytes, Bytes], amount: Plane, rows: int) -> Plane:
    """From one tone to the other [3, H, W], by amounts from 0 to 1, of the first rows."""
    start, end = (np.array(tone, np.float32)[:, None, None] for tone in tones)
    pixels = np.clip(amount[:rows], 0, 1) * (end - start)
    pixels += start
    return pixels


def find_box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """The smallest box around a mask: left, top, right, bottom in pixels, the last two exclusive."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
