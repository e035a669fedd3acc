"""Images with true segments and outputs of queries for them, and processes that share them, played by threads."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.segment_targets import pack_masks
from vitrail.data.targets import TargetSegments
from vitrail.models.query_output import QueryOutput

CLASSES, QUERIES, COUNT, SIZE = 4, 7, 12, (16, 24)
EMPTY, TORN = (2, 9), (4,)  # images without a segment, and one that cannot be read
THINGS = (True, True, False, False)


@cache
def draw_images() -> tuple[Tensor, Tensor, Tensor, QueryOutput]:
    """True masks [N, 8, H, W] that do not overlap, classes and crowds [N, 8], and outputs."""
    draw = torch.Generator().manual_seed(3)
    rows, columns = torch.meshgrid(torch.arange(SIZE[0]), torch.arange(SIZE[1]), indexing="ij")
    low = torch.rand(COUNT, 8, 2, 1, 1, generator=draw) * torch.tensor([12.0, 18.0])[:, None, None]
    long = 3 + torch.rand(COUNT, 8, 2, 1, 1, generator=draw) * 8
    high = low + long
    masks = (rows >= low[:, :, 0]) & (rows < high[:, :, 0]) & (columns >= low[:, :, 1]) & (columns < high[:, :, 1])
    classes = torch.randint(0, CLASSES, (COUNT, 8), generator=draw)
    classes[:, 6:] = -1
    classes[list(EMPTY)] = -1
    masks &= (classes >= 0)[:, :, None, None]
    for at in range(8):
        masks[:, at] &= ~masks[:, at + 1 :].any(1)
    classes[~masks.flatten(2).any(2)] = -1
    crowd = (torch.rand(COUNT, 8, generator=draw) < 0.15) & (classes >= 0)
    logits = 8.0 * (masks[:, :QUERIES].roll(1, 3).float() - 0.5) + torch.randn(COUNT, QUERIES, *SIZE, generator=draw)
    said = torch.randn(COUNT, QUERIES, CLASSES + 1, generator=draw)
    likely = torch.where(torch.rand(COUNT, QUERIES, generator=draw) < 0.8, classes[:, :QUERIES], 1)
    said.scatter_(2, torch.where(likely < 0, CLASSES, likely)[..., None], 6.0)
    masks[11], classes[11], crowd[11], logits[11], said[11] = masks[3], classes[3], crowd[3], logits[3], said[3]
    return masks, classes, crowd, QueryOutput(said, logits)


def make_batch(places: Sequence[int]) -> tuple[QueryOutput, Batch]:
    """The images of these places; -1 is past the end."""
    masks, classes, crowd, outputs = draw_images()
    at = torch.tensor(places)
    valid = torch.tensor([place >= 0 and place not in TORN for place in places])
    there = valid[:, None] & (classes[at] >= 0)
    planes = pack_masks(masks[at] & there[:, :, None, None])
    segments = TargetSegments(planes, torch.where(there, classes[at], -1), crowd[at] & there)
    batch = Batch(
        step=0,
        views=(torch.zeros(len(at), 3, *SIZE, dtype=torch.uint8),),
        targets=(segments,),
        sample=at,
        epoch=torch.zeros_like(at),
        valid=valid,
    )
    return QueryOutput(outputs.classes[at], outputs.masks[at]), batch


def score_parts(metric: Any, parts: Sequence[Sequence[int]]) -> Any:
    for part in parts:
        metric.update(*make_batch(part))
    return metric.result()


SPLITS: list[list[list[int]]] = [
    [[place] for place in range(COUNT)],
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, -1, -1, -1]],
    [list(range(COUNT))[::-1]],
    [[11], [4, 3, 9], [0, 1, 2], [10, 8, 7, 6, 5]],
]
SHARES = [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11], [-1, -1, -1]]]


class Rank:
    """One of two processes."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.barrier, self.table = rank, barrier, table

    def gather(self, value: Any) -> list[Any]:
        self.table[self.rank] = value
        self.barrier.wait(30)
        return list(self.table)


def score_in_two_processes(build: Callable[[], Any]) -> list[Any]:
    """The score that each of two processes gets."""
    barrier, table, found = threading.Barrier(2), [None, None], [None, None]

    def count(rank: int) -> None:
        metric = build()
        for part in SHARES[rank]:
            metric.update(*make_batch(part))
        metric.merge(Rank(rank, barrier, table))
        found[rank] = metric.result()

    threads = [threading.Thread(target=count, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
