"""The loss of Mask2Former (Cheng et al. 2022, 3.3), with which EoMT (Kerssies et al. 2025) is trained.

Queries and ground-truth segments are matched one to one. Each query then learns the class of its segment, or "no
object", and matched queries learn the segment's mask at sampled points. Everything is computed in float32, with shapes
that do not depend on the number of segments.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.points import LossPoints, sample_maps, sample_planes


class LossWeights(NamedTuple):
    """Weights of the class, mask and dice terms, in matching as well as in the loss; `no_object` is the weight of an
    unmatched query in the class loss."""

    classes: float
    mask: float
    dice: float
    no_object: float


class LearntSegments(NamedTuple):
    """The ground-truth segments of B images."""

    planes: Tensor  # uint8 [B, N / 8, H, W]
    classes: Tensor  # int64 [B, N]; -1 where there is none
    valid: Tensor  # bool [B]; an invalid image does not contribute to the loss


class LossSums(NamedTuple):
    """Unnormalised losses of each image [B]: weighted class cross-entropies, summed over queries; mask and dice losses,
    averaged over points and summed over segments."""

    classes: Tensor
    mask: Tensor
    dice: Tensor


@torch.no_grad()
def compute_costs(output: QueryOutput, segments: LearntSegments, points: Tensor, weights: LossWeights) -> Tensor:
    """Matching costs of every segment and query [B, N, Q], computed at the same points [B, P, 2] for all pairs."""
    logits, truth = sample_maps(output.masks.float(), points), sample_planes(segments.planes, points)
    shares, areas = logits.sigmoid(), truth.sum(2)[:, :, None]
    entropy = (F.softplus(logits).sum(2)[:, None] - truth @ logits.mT) / points.shape[1]
    dice = compute_dice(truth @ shares.mT, areas + shares.sum(2)[:, None])
    names = segments.classes.clamp(min=0)[:, None].expand(-1, output.classes.shape[1], -1)
    likely = output.classes.float().softmax(2).gather(2, names).mT
    return weights.mask * entropy + weights.dice * dice - weights.classes * likely


def compute_dice(common: Tensor, areas: Tensor) -> Tensor:
    """The dice loss 1 - 2|A ∩ B| / (|A| + |B|), with 1 added to numerator and denominator."""
    return 1 - (2 * common + 1) / (areas + 1)


def sum_losses(
    output: QueryOutput, segments: LearntSegments, queries: Tensor, points: LossPoints, weights: LossWeights
) -> LossSums:
    """The losses of each image, given the matched query of each segment [B, N]; -1 for none."""
    matched = queries >= 0
    mask, dice = compare_masks(pick_masks(output.masks, queries), segments.planes, points)
    return LossSums(
        sum_class_losses(output.classes.float(), segments, queries, weights.no_object),
        torch.where(matched, mask, 0.0).sum(1),
        torch.where(matched, dice, 0.0).sum(1),
    )


def sum_class_losses(logits: Tensor, segments: LearntSegments, queries: Tensor, no_object: float) -> Tensor:
    """Sums the class cross-entropies over queries: logits [B, Q, K + 1] -> [B]. Unmatched queries have the weight
    `no_object`."""
    none, count = logits.shape[2] - 1, logits.shape[1]
    truth = torch.full_like(logits[:, :1, 0], none, dtype=torch.int64).repeat(1, count + 1)
    places = torch.where(queries >= 0, queries, count)  # unmatched segments write to an extra place
    truth = truth.scatter(1, places, segments.classes)[:, :count]
    losses = F.cross_entropy(logits.mT, truth, reduction="none")
    return torch.where(segments.valid[:, None], losses * torch.where(truth == none, no_object, 1.0), 0.0).sum(1)


def pick_masks(masks: Tensor, queries: Tensor) -> Tensor:
    """Gathers the mask of each segment's query: [B, Q, h, w] and [B, N] -> float32 [B, N, h, w]."""
    places = queries.clamp(min=0)[:, :, None, None].expand(-1, -1, *masks.shape[2:])
    return masks.gather(1, places).float()


def compare_masks(masks: Tensor, planes: Tensor, points: LossPoints) -> tuple[Tensor, Tensor]:
    """Cross-entropy and dice loss [B, N] of masks [B, N, h, w] against the segments in the same places, at the
    `uncertain` candidates whose logits are closest to 0 and at the other points."""
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
    """Sums over all valid images of a step: images, segments, and the class weights of all queries."""

    images: Tensor
    segments: Tensor
    weights: Tensor


def count_normalisers(segments: LearntSegments, queries: int, no_object: float) -> Tensor:
    """The `Normalisers` of some images as one tensor [3]; parts of a step add up."""
    found = torch.where(segments.valid, (segments.classes >= 0).sum(1), 0)
    matched = found.clamp(max=queries)
    weights = torch.where(segments.valid, matched + no_object * (queries - matched), 0.0)
    return torch.stack([segments.valid.sum(), found.sum(), weights.sum()]).float()
