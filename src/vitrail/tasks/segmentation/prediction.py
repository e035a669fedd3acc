"""The prediction of a segmentation network: the class of every pixel."""

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.targets import IGNORED, Geometry
from vitrail.tasks.mask_queries.decode import resize_masks, sum_scores
from vitrail.tasks.mask_queries.view import crop_inner, find_seen
from vitrail.tasks.segmentation.mask_drawing import colour_mask

LEAST: Final = 0.0005  # share of the image below which a class is left out of the text; it would read 0.0 %
REGION: Final = {"label": {"type": "string"}, "index": {"type": "integer"}, "share": {"type": "number"}}
REGIONS: Final = {"type": "object", "required": list(REGION), "properties": REGION}
UNSEEN: Final = f"a PNG of class indices at that size; {IGNORED} where the network did not see the image"
SCHEMA: Final[dict[str, Any]] = {  # of PredictedMask.to_dict
    "type": "object",
    "required": ["size", "regions", "png"],
    "properties": {
        "size": {"type": "array", "items": {"type": "integer"}, "description": "height and width of the upright image"},
        "regions": {"type": "array", "description": "the classes that occur, the largest first", "items": REGIONS},
        "png": {"type": "string", "contentEncoding": "base64", "description": UNSEEN},
    },
}


@dataclass(frozen=True, slots=True)
class Region:
    """A class, and the share of the image's pixels that it covers."""

    label: str
    index: int
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class PredictedMask:
    """The class of each pixel of an image, at the size of the image; 255 where the network did not see it."""

    mask: NDArray[np.uint8]  # [H, W]
    names: Sequence[str]

    @property
    def regions(self) -> tuple[Region, ...]:
        """The classes that occur, largest first."""
        counts = np.bincount(self.mask.ravel(), minlength=256)[: len(self.names)]
        order: list[int] = np.argsort(-counts, kind="stable").tolist()
        return tuple(Region(self.names[at], at, float(counts[at] / self.mask.size)) for at in order if counts[at])

    def png(self) -> bytes:
        """The mask as a palette PNG of class indices, which viewers show in colour."""
        file = io.BytesIO()
        colour_mask(self.mask, self.names).save(file, "PNG")
        return file.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"size": [H, W], "regions": [{"label", "index", "share"}, ...], "png": base64}."""
        rows = [asdict(one) for one in self.regions]
        return {"size": list(self.mask.shape), "regions": rows, "png": base64.b64encode(self.png()).decode()}

    def __str__(self) -> str:
        return ", ".join(f"{one.label} {100 * one.share:.1f} %" for one in self.regions if one.share >= LEAST)


def segment(logits: Tensor, view: Geometry) -> NDArray[np.uint8]:
    """Predicts the mask [H, W] of the whole image from a view's logits [K, h, w]: resizes them to the visible part of
    the image, then takes the argmax."""
    mask, seen = np.full(view.whole, IGNORED, np.uint8), find_seen(view)
    mask[seen] = resize_argmax(crop_inner(logits, view), mask[seen].shape)
    return mask


def segment_queries(classes: Tensor, masks: Tensor, view: Geometry) -> NDArray[np.uint8]:
    """Like `segment`, from the queries of one image: resizes the class scores at the size of the view."""
    return segment(sum_scores(classes, masks, partial(resize_masks, size=view.size)), view)


def resize_argmax(logits: Tensor, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resizes logits [K, h, w] and takes the argmax [*size], class by class: all K classes at once would need K times
    the memory."""
    best = torch.full(size, -torch.inf)
    index = torch.zeros(size, dtype=torch.uint8)
    for at, one in enumerate(logits):
        value = F.interpolate(one[None, None], size, mode="bilinear", align_corners=False)[0, 0]
        index.masked_fill_(value > best, at)
        torch.maximum(best, value, out=best)
    return index.numpy()
