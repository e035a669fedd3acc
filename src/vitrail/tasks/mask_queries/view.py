"""Maps the masks of a view back to its image."""

from functools import partial

from torch import Tensor

from vitrail.data.targets import Geometry
from vitrail.tasks.mask_queries.decode import Place, resize_masks


def find_seen(view: Geometry) -> tuple[slice, slice]:
    """The rows and columns of the image that are visible in a view, at least one of each."""
    top, left, height, width = view.box
    spans: list[slice] = []
    for start, length, whole in ((top, height, view.whole[0]), (left, width, view.whole[1])):
        first = min(max(round(start), 0), whole - 1)
        spans.append(slice(first, max(min(round(start + length), whole), first + 1)))  # at least a pixel
    return spans[0], spans[1]


def crop_inner(values: Tensor, view: Geometry) -> Tensor:
    """Crops the padding from a view's pixel values [n, h, w] and undoes its flip."""
    across, down, *_ = view.pad
    upright = values.flip(-1) if view.flip else values
    return upright[:, down : down + view.inner[0], across : across + view.inner[1]]


def place_in_image(view: Geometry) -> Place:
    """Resizes mask logits to the part of the image given by `find_seen`: first to the size of the view, at which the
    network was trained, then to that of the image."""
    return partial(move_masks, view=view)


def move_masks(masks: Tensor, view: Geometry) -> Tensor:
    rows, columns = find_seen(view)
    size = (rows.stop - rows.start, columns.stop - columns.start)
    return resize_masks(crop_inner(resize_masks(masks, view.size), view), size)
