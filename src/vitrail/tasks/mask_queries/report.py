"""Report sections for segments: a table of classes, and images next to their annotated and predicted segments."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import VitrailError
from vitrail.data.annotations.rle import decode
from vitrail.data.dataset import ImageDataset
from vitrail.report.axis import format_share
from vitrail.report.page import Table
from vitrail.report.sections import LARGE_SIDE, ImageRow, ImageRows, Shot, make_pane
from vitrail.report.segment_drawing import choose_segment_colours, draw_segments, pick_class_colour
from vitrail.tasks.mask_queries.scene import SceneSegments, SegmentedScene

ClassTable = Mapping[str, NDArray[np.float64]]  # name of a column -> its number for each class [K]


def build_class_table(numbers: ClassTable, names: Sequence[str], title: str) -> Table:
    """Builds the table of classes. Columns whose name starts with a capital letter are shares, the others counts."""
    cells = [[format_cell(name, value) for value in values.tolist()] for name, values in numbers.items()]
    rows = [list(row) for row in zip(names, *cells, strict=True)]
    colours = ["#{:02x}{:02x}{:02x}".format(*pick_class_colour(index)) for index in range(len(names))]
    return Table(title=f"Classes{on(title)}", columns=("class", *numbers), rows=rows, colours=colours)


def format_cell(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    return format_share(value) if name[:1].isupper() else f"{int(value):,}"


def list_class_numbers(numbers: ClassTable, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The numbers of each class, without NaN."""
    found: dict[str, dict[str, float]] = {}
    for at, name in enumerate(names):
        row = {kind: float(values[at]) for kind, values in numbers.items() if not math.isnan(values[at])}
        found[name] = row
    return found


def on(title: str) -> str:
    return f" on {title}" if title else ""


def build_scene_rows(
    scenes: Sequence[SegmentedScene], source: ImageDataset, measure: str, title: str, lead: str
) -> ImageRows:
    """Shows the worst images: each one plain, with its annotated segments and with the predicted ones."""
    sides, strips = ("image", "annotated", "predicted"), list[ImageRow]()
    for scene in scenes:
        panes, caption = build_panes(scene, source, sides), f"{measure} {format_share(scene.value)}"
        strips.append(ImageRow(panes=panes, caption=caption, note=source.name(scene.sample)))
    return ImageRows(title=f"Lowest {measure}{on(title)}", sides=sides, strips=strips, lead=lead, large=True)


def build_panes(scene: SegmentedScene, source: ImageDataset, sides: Sequence[str]) -> list[Shot]:
    """The image, then the annotated and the predicted segments drawn over the part that the network saw."""
    try:
        image = source.open_image(scene.sample).rgb()
    except (OSError, VitrailError):
        return [make_pane(None, side) for side in sides]
    seen = find_inner(scene.pixels, image.size)
    ground = Image.fromarray(scene.pixels[seen])
    scale = max(LARGE_SIDE / max(ground.size), 1)  # so that outlines are fine
    ground = ground.resize((round(scale * ground.width), round(scale * ground.height)), Image.Resampling.BICUBIC)
    drawn = [draw_scene(ground, part, seen) for part in (scene.truth, scene.predicted)]
    panes = zip((image, *drawn), sides, strict=True)
    return [make_pane(one, side, side=LARGE_SIDE) for one, side in panes]


def find_inner(pixels: NDArray[np.uint8], whole: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns of a view [H, W, 3] without its padding, if an image of size `whole` (width, height) was
    resized to fit inside it; all rows and columns of any other view."""
    height, width = pixels.shape[:2]
    scale = min(height / whole[1], width / whole[0])
    tall, wide = max(round(scale * whole[1]), 1), max(round(scale * whole[0]), 1)
    borders = pixels[tall:].reshape(-1, 3), pixels[:, wide:].reshape(-1, 3)
    if any((border != border[:1]).any() for border in borders):
        return slice(0, height), slice(0, width)
    return slice(0, tall), slice(0, wide)


def draw_scene(ground: Image.Image, found: SceneSegments, seen: tuple[slice, slice]) -> Image.Image:
    """Draws segments without names, which would be too small to read."""
    classes: list[int] = found.classes.tolist()
    masks = (decode(mask)[seen] for mask in found.masks)
    return draw_segments(ground, masks, choose_segment_colours(classes))
