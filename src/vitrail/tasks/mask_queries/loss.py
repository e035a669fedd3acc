"""The loss of Mask2Former (Cheng et al. 2022, 3.3), which EoMT (Kerssies et al. 2025) trains with: queries and segments
are matched one to one; then each query learns its segment's class, or that it has none, and its mask at some points.

Everything is computed in float32, with shapes that do not depend on how many segments there are.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.points import LossPoints, sample_maps, sample_planes


class LossWeights(NamedTuple):
    """What each part counts, in matching as in the loss; and a query without a segment in the loss of classes."""

    classes: float
    mask: float
    dice: float
    no_object: float


class LearntSegments(NamedTuple):
    """The segments of B images that a network learns."""

    planes: Tensor  # uint8 [B, N / 8, H, W]
    classes: Tensor  # int64 [B, N]; -1 where there is none
    valid: Tensor  # bool [B]; an image that is not counts for nothing


class LossSums(NamedTuple):
    """Of each image [B], not normalised: cross-entropies by weight over queries, means over points over segments."""

    classes: Tensor
    mask: Tensor
    dice: Tensor


@torch.no_grad()
def compute_costs(output: QueryOutput, segments: LearntSegments, points: Tensor, weights: LossWeights) -> Tensor:
    """The cost of every pair of a segment and a query, [B, N, Q], at points that an image's pairs share [B, P, 2]."""
    logits, truth = sample_maps(output.masks.float(), points), sample_planes(segments.planes, points)
    shares, areas = logits.sigmoid(), truth.sum(2)[:, :, None]
    entropy = (F.softplus(logits).sum(2)[:, None] - truth @ logits.mT) / points.shape[1]
    dice = compute_dice(truth @ shares.mT, areas + shares.sum(2)[:, None])
    names = segments.classes.clamp(min=0)[:, None].expand(-1, output.classes.shape[1], -1)
    likely = output.classes.float().softmax(2).gather(2, names).mT
    return weights.mask * entropy + weights.dice * dice - weights.classes * likely


def compute_dice(common: Tensor, areas: Tensor) -> Tensor:
    """1 - 2|A ∩ B| / (|A| + |B|), softened by one point in both."""
    return 1 - (2 * common + 1) / (areas + 1)


def sum_losses(
    output: QueryOutput, segments: LearntSegments, queries: Tensor, points: LossPoints, weights: LossWeights
) -> LossSums:
    """The losses of each image, given the query of each segment [B, N], -1 where it has none."""
    matched = queries >= 0
    mask, dice = compare_masks(pick_masks(output.masks, queries), segments.planes, points)
    return LossSums(
        sum_class_losses(output.classes.float(), segments, queries, weights.no_object),
        torch.where(matched, mask, 0.0).sum(1),
        torch.where(matched, dice, 0.0).sum(1),
    )


def sum_class_losses(logits: Tensor, segments: LearntSegments, queries: Tensor, no_object: float) -> Tensor:
    """Cross-entropies [B] of all queries' classes [B, Q, K + 1]; one without a segment counts `no_object`."""
    none, count = logits.shape[2] - 1, logits.shape[1]
    truth = torch.full_like(logits[:, :1, 0], none, dtype=torch.int64).repeat(1, count + 1)
    places = torch.where(queries >= 0, queries, count)  # a place more than there are queries takes what has none
    truth = truth.scatter(1, places, segments.classes)[:, :count]
    losses = F.cross_entropy(logits.mT, truth, reduction="none")
    return torch.where(segments.valid[:, None], losses * torch.where(truth == none, no_object, 1.0), 0.0).sum(1)


def pick_masks(masks: Tensor, queries: Tensor) -> Tensor:
    """The mask of each segment's query: [B, Q, h, w] at [B, N] -> float32 [B, N, h, w]."""
    places = queries.clamp(min=0)[:, :, None, None].expand(-1, -1, *masks.shape[2:])
    return masks.gather(1, places).float()


def compare_masks(masks: Tensor, planes: Tensor, points: LossPoints) -> tuple[Tensor, Tensor]:
    """Cross-entropy and dice [B, N] of masks [B, N, h, w] with the segments in their places: at those candidates where
    a mask's logit is nearest to 0, as many as make up the number with the other points."""
    with torch.no_grad():
        certainty = sample_maps(masks, points.candidates).abs()
        chosen = certainty.topk(points.uncertain, largest=False, sorted=False).indices
        chosen = points.candidates.gather(2, chosen[..., None].expand(-1, -1, -1, 2))
        places = torch.cat([chosen, points.others], 2)
        truth = sample_planes(planes, places)
    logits = sample_maps(masks, places)
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(2)
    shares = logits.sigmoid()
    return entropy, compute_dice((shares * truth).sum(2), shares.sum(2) + truth.sum(2))


class Normalisers(NamedTuple):
    """Sums over all images of a step that count [n]: images, segments, and the weights of their queries' classes."""

    images: Tensor
    segments: Tensor
    weights: Tensor


def count_normalisers(segments: LearntSegments, queries: int, no_object: float) -> Tensor:
    """The three numbers [3] of some images; those of several parts add up."""
    found = torch.where(segments.valid, (segments.classes >= 0).sum(1), 0)
    matched = found.clamp(max=queries)
    weights = torch.where(segments.valid, matched + no_object * (queries - matched), 0.0)
    return torch.stack([segments.valid.sum(), found.sum(), weights.sum()]).float()
