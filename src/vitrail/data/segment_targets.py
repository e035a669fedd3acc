"""Targets for instance and panoptic segmentation: the segments of an image, transformed with each view."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from vitrail.core.errors import DataError
from vitrail.core.text import Pair
from vitrail.data.annotations.rle import decode
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.dataset import ImageDataset
from vitrail.data.sized_annotations import read_sized_segments
from vitrail.data.targets import Geometry, Target, Targets, TargetSegments

BITS: Final = 8  # segments per plane


class ViewSegments(NamedTuple):
    """The n segments that are visible in a view, each with at least one pixel."""

    planes: NDArray[np.uint8]  # packed as in `TargetSegments`: [n / 8, rounded up, H, W]
    classes: Tensor  # int64 [n]
    crowd: Tensor  # bool [n]


class SegmentTargets(Targets):
    """The segments of every view, as `TargetSegments`. Segments outside the view are dropped. With `things_only` stuff
    is dropped as well, and class indices count things only."""

    moves, fill = True, 0

    def __init__(self, *, things_only: bool = False) -> None:
        self.things_only = things_only

    def check(self, source: ImageDataset) -> None:
        if not source.segment_classes:
            raise DataError("these data have no segments; provide annotations in COCO, YOLO or Pascal VOC format")
        if source.boxes_only:
            raise DataError("these data have boxes but no masks; segmentation needs polygons or masks")

    def read(self, source: ImageDataset, sample: int, size: Pair) -> Segments:
        found = read_sized_segments(source, sample, size)
        return keep_things(found, source.segment_classes) if self.things_only else found

    def view(self, target: Segments, geometry: Geometry) -> ViewSegments:
        planes = geometry.mask(torch.from_numpy(decode_planes(target)), 0).numpy()
        bits = np.bitwise_or.reduce(planes, axis=(1, 2))
        seen = np.unpackbits(bits, bitorder="little")[: len(target)].astype(np.bool_)
        if not seen.all():
            shown = np.flatnonzero(seen).tolist()
            planes = join_planes([planes[at // BITS] >> at % BITS & 1 for at in shown], geometry.size)
        return ViewSegments(planes, torch.from_numpy(target.classes[seen]), torch.from_numpy(target.crowd[seen]))

    def stack(self, views: Sequence[ViewSegments | None], size: Pair) -> Target:
        places = round_up_places(max((len(view.classes) for view in views if view is not None), default=0))
        planes = torch.zeros(len(views), places // BITS, *size, dtype=torch.uint8)
        classes = torch.full((len(views), places), -1)
        crowd = torch.zeros(len(views), places, dtype=torch.bool)
        for at, view in enumerate(views):
            if view is not None:
                count = len(view.classes)
                classes[at, :count], crowd[at, :count] = view.classes, view.crowd
                planes[at, : len(view.planes)] = torch.from_numpy(view.planes)
        return TargetSegments(planes, classes, crowd)


def decode_planes(segments: Segments) -> NDArray[np.uint8]:
    """Decodes the masks and packs them, eight per plane: [N / 8, rounded up, H, W]."""
    height, width = segments.size
    columns = join_planes([decode(mask).T for mask in segments.masks or ()], (width, height))
    return np.ascontiguousarray(columns.transpose(0, 2, 1))


def join_planes(masks: Sequence[NDArray[np.integer | np.bool_]], size: Pair) -> NDArray[np.uint8]:
    """Packs binary masks [H, W], eight per plane."""
    planes = np.zeros((-(-len(masks) // BITS), *size), np.uint8)
    for at, mask in enumerate(masks):
        planes[at // BITS] |= mask.view(np.uint8) << np.uint8(at % BITS)
    return planes


def keep_things(found: Segments, classes: Sequence[SegmentClass]) -> Segments:
    """Keeps the segments of things; their class indices then count only the things among `classes`."""
    things = np.array([one.thing for one in classes], np.bool_)
    if things.all():
        return found
    kept = things[found.classes]
    masks = None if found.masks is None else tuple(found.masks[at] for at in np.flatnonzero(kept).tolist())
    numbers = (np.cumsum(things) - 1)[found.classes[kept]].astype(np.int64)
    return Segments(size=found.size, classes=numbers, boxes=found.boxes[kept], crowd=found.crowd[kept], masks=masks)


def round_up_places(count: int) -> int:
    """Rounds up to 8, 16, 32, ..., so that a compiled training step sees few different shapes."""
    return BITS * 1 << max(-(-count // BITS) - 1, 0).bit_length()


def unpack_planes(planes: Tensor) -> Tensor:
    """Unpacks planes to binary masks: uint8 [..., N / 8, H, W] -> uint8 0 or 1 [..., N, H, W]."""
    shifts = torch.arange(BITS, dtype=torch.uint8, device=planes.device)[:, None, None]
    return ((planes[..., None, :, :] >> shifts) & 1).flatten(-4, -3)


def pack_masks(masks: Tensor) -> Tensor:
    """Packs masks into planes; N is a multiple of eight: [..., N, H, W] -> uint8 [..., N / 8, H, W]."""
    shifts = torch.arange(BITS, dtype=torch.uint8, device=masks.device)[:, None, None]
    return (masks.to(torch.uint8).unflatten(-3, (-1, BITS)) << shifts).sum(-3, dtype=torch.uint8)


def drop_unseen(target: TargetSegments) -> TargetSegments:
    """Clears the segments that have no pixels; the others keep their places."""
    seen = torch.stack([((target.planes >> bit) & 1).flatten(-2).amax(-1) for bit in range(BITS)], -1).flatten(-2) > 0
    return TargetSegments(target.planes, target.classes.masked_fill(~seen, -1), target.crowd & seen)


def add_places(target: TargetSegments, places: int) -> TargetSegments:
    """Pads a target to the given number of places, which is not below its own."""
    more = places - target.classes.shape[1]
    planes = pad(target.planes, (0, 0, 0, 0, 0, more // BITS))
    return TargetSegments(planes, pad(target.classes, (0, more), value=-1), pad(target.crowd, (0, more)))
