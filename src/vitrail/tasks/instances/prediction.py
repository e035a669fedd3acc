"""The prediction of instance segmentation: a class, a score and a mask for each object."""

import numpy as np
from torch import Tensor

from vitrail.data.annotations.rle import encode
from vitrail.data.targets import Geometry
from vitrail.tasks.mask_queries.decode import TOP, InstanceMasks, rank_instances
from vitrail.tasks.mask_queries.prediction import PredictedSegment, PredictedSegments
from vitrail.tasks.mask_queries.view import find_seen, place_in_image
from vitrail.tasks.task import PredictionOptions


def find_instances(classes: Tensor, masks: Tensor, view: Geometry, options: PredictionOptions) -> PredictedSegments:
    """Decodes the objects of one image with a score of at least the threshold, best first. A query is one object, of
    its likeliest class; at a threshold of 0 every pair of a query and a class counts, as in evaluation."""
    found = rank_instances(classes, masks, place_in_image(view), options.things, TOP, options.threshold)
    rows, columns = find_seen(view)
    whole, segments = np.zeros(view.whole, np.bool_), list[PredictedSegment]()
    for at in pick_first(found) if options.threshold > 0 else range(len(found.scores)):
        whole[rows, columns] = found.masks[at].cpu().numpy()
        index, score = int(found.classes[at]), float(found.scores[at])
        segments.append(PredictedSegment(label=options.names[index], index=index, score=score, rle=encode(whole)))
    return PredictedSegments(view.whole, tuple(segments))


def pick_first(found: InstanceMasks) -> list[int]:
    """The best-scored instance of each query."""
    first: dict[int, int] = {}
    for at, query in enumerate(found.queries.tolist()):
        first.setdefault(query, at)
    return list(first.values())
