"""Decodes the queries of a network into semantic logits, panoptic maps or instance masks.

    decode_semantic(output, (512, 512))  # [B, K, 512, 512]
    for found in decode_panoptic(output, (512, 512), things): ...  # one image at a time
    for found in decode_instances(output, (512, 512), things): ...

Every decoder resizes the mask logits first. Large images are decoded a few queries at a time, so that at most PIXELS
values of full-size masks are held at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.query_output import Output, QueryOutput

PIXELS: Final = 2**25  # most pixels of full-size masks that are held at once
THRESHOLD: Final = 0.8  # class probability above which a query takes part in a panoptic map
OVERLAP: Final = 0.8  # share of its mask that a segment of a panoptic map must keep
TOP: Final = 100  # most instances per image

Place: TypeAlias = Callable[[Tensor], Tensor]  # resizes mask logits into the image: [n, h, w] -> [n, H, W]


class PanopticMap(NamedTuple):
    """The n segments of an image, which do not overlap."""

    ids: Tensor  # int16 [H, W]: the index of the segment, or -1
    classes: Tensor  # int64 [n]
    scores: Tensor  # float [n]: class probabilities


class InstanceMasks(NamedTuple):
    """n instances of an image by descending score. A query appears once for each of its classes that made the cut."""

    masks: Tensor  # bool [n, H, W]
    classes: Tensor  # int64 [n]
    scores: Tensor  # float [n]: class probability times the mean mask probability inside the mask
    queries: Tensor  # int64 [n]


def resize_masks(masks: Tensor, size: Pair) -> Tensor:
    """Resizes mask logits bilinearly: [n, h, w] -> float32 [n, *size]."""
    if tuple(masks.shape[1:]) == size:
        return masks.float()
    return F.interpolate(masks.float()[None], size, mode="bilinear", align_corners=False)[0]


def sum_scores(classes: Tensor, masks: Tensor, place: Place) -> Tensor:
    """Class scores per pixel [K, H, W] from the queries of one image: the sum over queries of class probability times
    mask probability."""
    weights, total = classes.float().softmax(-1)[:, :-1], None
    for some in split_queries(masks, place):
        found = place(masks[some]).sigmoid()
        part = torch.einsum("qk,qhw->khw", weights[some], found)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def decode_semantic(output: QueryOutput, size: Pair) -> Tensor:
    """Decodes logits per pixel [B, K, *size]: the logarithm of the class scores, so that a softmax normalises them."""
    place = partial(resize_masks, size=size)
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack([sum_scores(*one, place).clamp_(min=tiny).log_() for one in zip(*output, strict=True)])


def to_dense(output: Output, size: Pair | None = None) -> Tensor:
    """Class logits [B, K, ...] from either kind of output. Queries are decoded at `size`, or at the masks' own size."""
    if isinstance(output, Tensor):
        return output
    height, width = output.masks.shape[-2:]
    return decode_semantic(output, (height, width) if size is None else size)


def decode_panoptic(
    output: QueryOutput, size: Pair, things: Sequence[bool], threshold: float = THRESHOLD, overlap: float = OVERLAP
) -> Iterator[PanopticMap]:
    """Yields the panoptic map of each image. `things` says which classes are things."""
    place = partial(resize_masks, size=size)
    for classes, masks in zip(*output, strict=True):
        yield map_segments(classes, masks, place, things, threshold, overlap)


def map_segments(
    classes: Tensor, masks: Tensor, place: Place, things: Sequence[bool], threshold: float, overlap: float
) -> PanopticMap:
    """Decodes the panoptic map of one image. Of the queries whose class probability is above `threshold`, each pixel
    goes to the one with the highest product of class and mask probability, provided that it lies inside that query's
    mask. A query that wins too small a share of its mask (`overlap`) is dropped. Queries of the same stuff class are
    merged into one segment."""
    scores, labels = classes.float().softmax(-1).max(-1)
    kept = ((labels != classes.shape[-1] - 1) & (scores > threshold)).nonzero()[:, 0]
    if not len(kept):
        height, width = place(masks[:1]).shape[1:]
        none = torch.full((height, width), -1, dtype=torch.int16, device=masks.device)
        return PanopticMap(none, labels[kept], scores[kept])
    masks, scores, labels = masks[kept], scores[kept], labels[kept]
    owner, inside, whole = assign_pixels(scores, masks, place)
    own = torch.bincount(owner.flatten(), minlength=len(kept))  # pixels that a query wins
    final = torch.bincount(owner[inside], minlength=len(kept))  # of these, pixels inside its mask
    valid = (final > 0) & (own > overlap * whole)
    numbers, first, stuff = list[int](), list[int](), dict[int, int]()
    for at, (label, there) in enumerate(zip(labels.tolist(), valid.tolist(), strict=True)):
        number = stuff.get(label, len(first)) if there else -1
        numbers.append(number)
        if number == len(first):
            first.append(at)
            if not things[label]:
                stuff[label] = number
    table = torch.tensor(numbers, dtype=torch.int16, device=masks.device)
    chosen = torch.tensor(first, dtype=torch.int64, device=masks.device)
    return PanopticMap(table[owner].masked_fill_(~inside, -1), labels[chosen], scores[chosen])


def assign_pixels(scores: Tensor, masks: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """Assigns pixels to n queries: which query wins each pixel [H, W], whether the pixel is inside that query's mask
    [H, W], and the area of each full mask [n]."""
    best = owner = inside = None
    areas = list[Tensor]()
    for some in split_queries(masks, place):
        found = place(masks[some]).sigmoid_()
        areas.append((found >= 0.5).sum((1, 2)))
        value, at = (found * scores[some, None, None]).max(0)
        within = found.gather(0, at[None])[0] >= 0.5
        at = at + some.start
        if best is None or owner is None or inside is None:
            best, owner, inside = value, at, within
        else:
            better = value > best
            best = torch.where(better, value, best)
            owner, inside = torch.where(better, at, owner), torch.where(better, within, inside)
    assert owner is not None
    assert inside is not None
    return owner, inside, torch.cat(areas)


def decode_instances(
    output: QueryOutput, size: Pair, things: Sequence[bool] | None = None, top: int = TOP
) -> Iterator[InstanceMasks]:
    """Yields the instances of each image: its `top` pairs of query and class. With `things`, only classes that are
    things."""
    place = partial(resize_masks, size=size)
    for classes, masks in zip(*output, strict=True):
        yield rank_instances(classes, masks, place, things, top)


def rank_instances(
    classes: Tensor, masks: Tensor, place: Place, things: Sequence[bool] | None, top: int, threshold: float = 0.0
) -> InstanceMasks:
    """Ranks the instances of one image: at most `top`, with scores of at least `threshold`. Drops empty masks."""
    likely = classes.float().softmax(-1)[:, :-1]
    if things is not None:
        likely = likely.masked_fill(~torch.tensor(list(things), device=likely.device), -1.0)
    values, pairs = likely.flatten().topk(min(top, likely.numel()))
    pairs, values = pairs[values >= threshold], values[values >= threshold]
    queries, labels = pairs // likely.shape[1], pairs % likely.shape[1]
    needed, back = queries.unique(return_inverse=True)
    found, means = list[Tensor](), list[Tensor]()
    for some in split_queries(masks[needed], place):
        logits = place(masks[needed[some]])
        inside = logits > 0
        means.append((logits.sigmoid_() * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1))
        found.append(inside)
    height, width = found[0].shape[1:] if found else place(masks[:1]).shape[1:]
    every = torch.cat(found) if found else torch.zeros(0, height, width, dtype=torch.bool, device=masks.device)
    quality = torch.cat(means) if means else values.new_zeros(0)
    scores = values * quality[back]
    order = scores.argsort(descending=True, stable=True)
    order = order[(scores[order] >= threshold) & (scores[order] > 0)]
    return InstanceMasks(every[back[order]], labels[order], scores[order], queries[order])


def split_queries(masks: Tensor, place: Place) -> Iterator[slice]:
    """Splits n queries into slices whose full-size masks have at most PIXELS pixels together."""
    if not len(masks):
        return
    pixels = place(masks[:1]).shape[1:].numel()
    step = max(PIXELS // max(pixels, 1), 1)
    for start in range(0, len(masks), step):
        yield slice(start, min(start + step, len(masks)))
