"""Statistics of the annotated segments of a split: number by class, sizes, and segments per image."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.annotations.segments import SegmentClass, Segments

SIZES: Final = (32**2, 96**2)  # pixels at which COCO's medium and large objects begin
SIZE_NAMES: Final = ("small", "medium", "large")


class ImageSegments(NamedTuple):
    """What the overview counts of the segments of one image, without their masks."""

    pixels: int  # of the image
    classes: NDArray[np.int64]  # [N]
    areas: NDArray[np.float64]  # [N], of masks, or of boxes if there are no masks
    crowd: NDArray[np.bool_]  # [N]


def measure_segments(found: Segments) -> ImageSegments:
    """Measures the segments of one image."""
    boxes = found.boxes
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    if found.masks is not None:
        areas = np.array([mask.area for mask in found.masks], np.float64)
    return ImageSegments(found.size[0] * found.size[1], found.classes, areas, found.crowd)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentSummary:
    """Counts of the segments of the inspected images. Crowd segments are counted separately."""

    classes: tuple[SegmentClass, ...]
    boxes_only: bool
    segments: NDArray[np.int64]  # [K]
    images: NDArray[np.int64]  # [K] with a segment of the class
    shares: NDArray[np.float64]  # [K] of the pixels of all images; boxes may overlap
    per_image: NDArray[np.int64]  # [images]
    sizes: tuple[int, int, int]  # small, medium and large things
    crowd: int

    @property
    def count(self) -> int:
        return int(self.segments.sum())

    @property
    def things(self) -> int:
        return sum(self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain values."""
        names, per_image = [one.name for one in self.classes], self.per_image
        spread = [int(per_image.min()), float(np.median(per_image)), int(per_image.max())] if len(per_image) else None
        rows = zip(self.classes, self.segments.tolist(), self.images.tolist(), self.shares.tolist(), strict=True)
        return {
            "looked_at": len(per_image), "segments": self.count, "boxes_only": self.boxes_only, "crowd": self.crowd,
            "per_image": spread, "without": int((per_image == 0).sum()),
            "sizes": dict(zip(SIZE_NAMES, self.sizes, strict=True)),
            "classes": {
                name: {"thing": one.thing, "segments": segments, "images": images, "share": share}
                for name, (one, segments, images, share) in zip(names, rows, strict=True)
            },
        }  # fmt: skip


def summarise_segments(
    classes: Sequence[SegmentClass], boxes_only: bool, images: Iterable[ImageSegments]
) -> SegmentSummary:
    """Counts the segments of images."""
    kinds, per_image = len(classes), list[int]()
    segments, present = np.zeros(kinds, np.int64), np.zeros(kinds, np.int64)
    areas, things, sizes = np.zeros(kinds), np.array([one.thing for one in classes], np.bool_), np.zeros(3, np.int64)
    pixels = crowd = 0
    for one in images:
        counted = ~one.crowd
        mine = one.classes[counted]
        segments += np.bincount(mine, minlength=kinds)
        present += np.bincount(np.unique(mine), minlength=kinds)
        areas += np.bincount(mine, one.areas[counted], minlength=kinds)
        sizes += np.bincount(np.searchsorted(SIZES, one.areas[counted][things[mine]], side="right"), minlength=3)
        per_image.append(int(counted.sum()))
        pixels, crowd = pixels + one.pixels, crowd + int(one.crowd.sum())
    small, medium, large = sizes.tolist()
    return SegmentSummary(
        classes=tuple(classes),
        boxes_only=boxes_only,
        segments=segments,
        images=present,
        shares=areas / max(pixels, 1),
        per_image=np.array(per_image, np.int64),
        sizes=(small, medium, large),
        crowd=crowd,
    )
