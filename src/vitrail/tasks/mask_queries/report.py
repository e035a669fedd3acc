"""Parts of a report on segments: numbers of each class, and images next to their annotated and predicted segments."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import VitrailError
from vitrail.data.annotations.rle import decode
from vitrail.data.dataset import ImageDataset
from vitrail.report.axis import format_share
from vitrail.report.page import Table
from vitrail.report.sections import ImageRow, ImageRows, Shot, make_pane
from vitrail.report.segment_drawing import choose_segment_colours, draw_segments, pick_class_colour
from vitrail.tasks.mask_queries.scene import SceneSegments, SegmentedScene

ClassTable = Mapping[str, NDArray[np.float64]]  # numbers of each class [K], by what they are
GREY: Final = (128, 128, 128)  # behind segments whose image does not fit them
SKEWED: Final = 0.02  # difference of aspects from which it does not


def build_class_table(numbers: ClassTable, names: Sequence[str], title: str) -> Table:
    """Columns that start with a capital letter are shares, the others counts."""
    cells = [[format_cell(name, value) for value in values.tolist()] for name, values in numbers.items()]
    rows = [list(row) for row in zip(names, *cells, strict=True)]
    colours = ["#{:02x}{:02x}{:02x}".format(*pick_class_colour(index)) for index in range(len(names))]
    return Table(title=f"Classes{on(title)}", columns=("class", *numbers), rows=rows, colours=colours)


def format_cell(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    return format_share(value) if name[:1].isupper() else f"{int(value):,}"


def list_class_numbers(numbers: ClassTable, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The numbers of each class that are numbers."""
    found: dict[str, dict[str, float]] = {}
    for at, name in enumerate(names):
        row = {kind: float(values[at]) for kind, values in numbers.items() if not math.isnan(values[at])}
        found[name] = row
    return found


def on(title: str) -> str:
    return f" on {title}" if title else ""


def build_scene_rows(scenes: Sequence[SegmentedScene], source: ImageDataset, measure: str, title: str) -> ImageRows:
    """The worst images: each by itself, and with its own and with the predicted segments."""
    sides, strips = ("image", "annotated", "predicted"), list[ImageRow]()
    for scene in scenes:
        panes, caption = build_panes(scene, source, sides), f"{measure} {format_share(scene.value)}"
        strips.append(ImageRow(panes=panes, caption=caption, note=source.name(scene.sample)))
    return ImageRows(title=f"Lowest {measure}{on(title)}", sides=sides, strips=strips)


def build_panes(scene: SegmentedScene, source: ImageDataset, sides: Sequence[str]) -> list[Shot]:
    """Segments lie over the image where the network saw all of it, else over grey: nothing says which part that was."""
    try:
        image: Image.Image | None = source.open_image(scene.sample).rgb()
    except (OSError, VitrailError):
        return [make_pane(None, side) for side in sides]
    sizes = [mask.size for part in (scene.truth, scene.predicted) for mask in part.masks]
    height, width = sizes[0] if sizes else (image.height, image.width)
    whole = abs(image.width * height - image.height * width) <= SKEWED * image.width * height
    ground = image.resize((width, height)) if whole else Image.new("RGB", (width, height), GREY)
    drawn = [draw_scene(ground, part) for part in (scene.truth, scene.predicted)]
    return [make_pane(one, side) for one, side in zip((image, *drawn), sides, strict=True)]


def draw_scene(ground: Image.Image, found: SceneSegments) -> Image.Image:
    """Without names: panes are too small to read them."""
    classes: list[int] = found.classes.tolist()
    return draw_segments(ground, (decode(mask) for mask in found.masks), choose_segment_colours(classes))
