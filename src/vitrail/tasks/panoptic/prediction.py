"""The prediction of panoptic segmentation: segments that do not overlap."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.annotations.rle import encode_values
from vitrail.data.targets import Geometry
from vitrail.tasks.mask_queries.decode import OVERLAP, map_segments
from vitrail.tasks.mask_queries.prediction import PredictedSegment, PredictedSegments
from vitrail.tasks.mask_queries.view import find_seen, place_in_image
from vitrail.tasks.task import PredictionOptions


def find_segments(classes: Tensor, masks: Tensor, view: Geometry, options: PredictionOptions) -> PredictedSegments:
    """Decodes one image to panoptic segments, largest first. Pixels that the network did not see have no segment."""
    things = options.things or (True,) * len(options.names)
    found = map_segments(classes, masks, place_in_image(view), things, options.threshold, OVERLAP)
    ids = np.full(view.whole, -1, np.int16)
    ids[find_seen(view)] = found.ids.cpu().numpy()
    parts = zip(found.classes.tolist(), found.scores.tolist(), encode_values(ids, len(found.classes)), strict=True)
    segments = [
        PredictedSegment(label=options.names[index], index=index, score=score, rle=rle, thing=things[index])
        for index, score, rle in parts
    ]
    return PredictedSegments(view.whole, tuple(sorted(segments, key=lambda one: -one.area)))


def paint_ids(prediction: PredictedSegments) -> NDArray[np.int32]:
    """A map [H, W] of segment ids, from 1; 0 where there is no segment."""
    ids = np.zeros(prediction.size, np.int32)
    for number, one in enumerate(prediction.segments, start=1):
        ids[one.mask()] = number
    return ids


def write_ids(prediction: PredictedSegments) -> bytes:
    """Encodes the segment ids as a PNG in COCO's panoptic format: red + 256 green + 65,536 blue."""
    ids, file = paint_ids(prediction), io.BytesIO()
    pixels = np.stack([ids >> shift & 255 for shift in (0, 8, 16)], -1).astype(np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
