"""Contact sheets of annotated splits: some of the images, with their segments or masks drawn on them."""

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
    """Whether a sheet shows segments or masks instead of classes: there are segments, or masks and no classes."""
    return bool(source.segment_classes or (source.pixel_classes and not source.classes))


def draw_annotations(source: ImageDataset, index: int, image: "Image") -> "Image":
    """Draws a sample's segments, or the classes of its mask, on `image`, which may be the sample's image at another
    size. Raises BadImage or OSError."""
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
    """Draws the classes of a sample's mask, except for those such as background in PLAIN."""
    from vitrail.report.segment_drawing import draw_segments, pick_class_colour

    mask = read_mask(source.mask(index))
    known = [int(at) for at in np.unique(mask) if at < len(source.pixel_classes) and at != IGNORED]
    shown = [at for at in known if source.pixel_classes[at].casefold() not in PLAIN]
    names = [source.pixel_classes[at] for at in shown]
    return draw_segments(image, [mask == at for at in shown], [pick_class_colour(at) for at in shown], names)


def load_annotated(source: ImageDataset, index: int, size: tuple[int, int]) -> "Image | None":
    """Loads a sample at a size (width, height) and draws its annotations. None if it is unreadable."""
    from PIL import Image

    try:
        encoded = source.open_image(index)
        height, width = encoded.size
        scale = next((scale for scale in (8, 4, 2) if min(width / size[0], height / size[1]) >= 2 * scale), 1)
        return draw_annotations(source, index, encoded.rgb(scale).resize(size, Image.Resampling.LANCZOS))
    except (BadImage, OSError):
        return None


def make_annotated_sheet(source: ImageDataset, title: str, subtitle: str, chosen: list[int]) -> "Image":
    """Draws the sheet of the chosen samples, in rows of equal height."""
    from vitrail.report.contact_sheet import arrange_rows, draw_gallery

    aspects = [read_aspect(source, index) for index in chosen]
    sizes, rest = arrange_rows(aspects), iter(chosen)
    rows = [[load_annotated(source, next(rest), size) for size in row] for row in sizes]
    left = len(source) - len(chosen)
    return draw_gallery(title, subtitle, rows, sizes, footer=f"and {pluralise(left, 'more image')}" if left else "")


def read_aspect(source: ImageDataset, index: int) -> float:
    """Returns width over height, or 1 if the image is unreadable."""
    try:
        height, width = source.open_image(index).size
        return width / height
    except BadImage:
        return 1.0
