"""The contact sheet of a split whose images are annotated: some of them, with their segments or masks drawn in."""

from typing import TYPE_CHECKING, Final

import numpy as np

from vitrail.core.errors import BadImage
from vitrail.core.text import pluralise
from vitrail.data.annotations.segments import IGNORED
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_mask

if TYPE_CHECKING:
    from PIL.Image import Image

PLAIN: Final = frozenset({"background", "other", "void", "unlabelled", "unlabeled"})  # classes that are not painted


def has_annotations(source: ImageDataset) -> bool:
    """Whether an image shows more with its segments, or with its mask, than with its class."""
    return bool(source.segment_classes or (source.pixel_classes and not source.classes))


def draw_annotations(source: ImageDataset, index: int, image: "Image") -> "Image":
    """A sample's image, or a copy of it at another size, with what is annotated: segments, or the classes of its mask.
    Raises BadImage or OSError."""
    from vitrail.report.segment_drawing import choose_segment_colours, draw_segments

    if not source.segment_classes:
        return draw_mask(source, index, image)
    found = source.segments(index)
    named = [source.segment_classes[at].name for at in found.classes]
    names = [f"{name} (crowd)" if crowd else name for name, crowd in zip(named, found.crowd, strict=True)]
    scale = np.array([image.width / found.size[1], image.height / found.size[0]] * 2)
    boxes = found.boxes * scale if found.masks is None or source.segments_overlap else None
    masks = None if found.masks is None else list(found.decode())
    return draw_segments(image, masks, choose_segment_colours(found.classes.tolist()), names, boxes=boxes)


def draw_mask(source: ImageDataset, index: int, image: "Image") -> "Image":
    """The classes of pixels of a sample, but for those that stand for nothing in particular."""
    from vitrail.report.segment_drawing import draw_segments, pick_class_colour

    mask = read_mask(source.mask(index))
    known = [int(at) for at in np.unique(mask) if at < len(source.pixel_classes) and at != IGNORED]
    shown = [at for at in known if source.pixel_classes[at].casefold() not in PLAIN]
    names = [source.pixel_classes[at] for at in shown]
    return draw_segments(image, [mask == at for at in shown], [pick_class_colour(at) for at in shown], names)


def load_annotated(source: ImageDataset, index: int, size: tuple[int, int]) -> "Image | None":
    """A sample with its annotations, at a size (width, height); None where it is unreadable."""
    from PIL import Image

    try:
        encoded = source.open_image(index)
        height, width = encoded.size
        scale = next((scale for scale in (8, 4, 2) if min(width / size[0], height / size[1]) >= 2 * scale), 1)
        return draw_annotations(source, index, encoded.rgb(scale).resize(size, Image.Resampling.LANCZOS))
    except (BadImage, OSError):
        return None


def make_annotated_sheet(source: ImageDataset, title: str, subtitle: str, chosen: list[int]) -> "Image":
    """The sheet of some samples, in rows of one height each."""
    from vitrail.report.contact_sheet import arrange_rows, draw_gallery

    aspects = [read_aspect(source, index) for index in chosen]
    sizes, rest = arrange_rows(aspects), iter(chosen)
    rows = [[load_annotated(source, next(rest), size) for size in row] for row in sizes]
    left = len(source) - len(chosen)
    return draw_gallery(title, subtitle, rows, sizes, footer=f"and {pluralise(left, 'more image')}" if left else "")


def read_aspect(source: ImageDataset, index: int) -> float:
    """Width over height; 1 where the image is unreadable."""
    try:
        height, width = source.open_image(index).size
        return width / height
    except BadImage:
        return 1.0
