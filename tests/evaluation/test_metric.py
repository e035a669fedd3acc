"""Any task can bring a metric: the loop feeds it, leaves nothing out, and adds up what processes counted."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.evaluation.test_accuracy import COUNT, PLAIN, Rank, Torn, pictures
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.distributed.process_group import World
from vitrail.evaluation.metrics import Criterion, is_better, score_batches

TARGETS = torch.linspace(-1.0, 1.0, COUNT, dtype=torch.float64)


class AbsoluteError:
    """The metric of a regression of one number: its sum of errors and how many there are."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, outputs: Tensor, batch: Batch) -> None:
        errors = (outputs.double() - TARGETS[batch.sample.clamp(min=0)]).abs()
        self.sums += torch.stack([torch.where(batch.valid, errors, 0.0).sum(), batch.valid.sum()])

    def merge(self, world: World) -> None:
        world.sum_(self.sums)

    def result(self) -> tuple[float, int]:
        return float(self.sums[0] / self.sums[1]), int(self.sums[1])


def brightness(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3))


def wanted(source: ImageDataset, places: list[int]) -> float:
    images = torch.stack([PLAIN(source.open_image(at).rgb()) for at in places])
    return float((brightness(images).double() - TARGETS[places]).abs().mean())


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_a_regression_counts_every_readable_image_once(batch: int) -> None:
    source, seen = pictures(), list[int]()
    torn = Torn(source.pictures, source.labels, source.classes)
    found = score_batches(
        brightness, eval_batches(torn, PLAIN, batch=batch), PLAIN, AbsoluteError(), device="cpu", progress=seen.append
    )
    there = [at for at in range(COUNT) if at not in (3, 22)]
    assert found == (pytest.approx(wanted(source, there)), COUNT - 2)
    assert seen == sorted(seen)
    assert seen[-1] >= COUNT


def test_processes_add_up_what_they_counted() -> None:
    source, size = pictures(), 2
    barrier = threading.Barrier(size)
    table: list[Tensor | None] = [None] * size
    found = [(np.nan, 0)] * size

    def part(rank: int) -> None:
        batches = eval_batches(source, PLAIN, batch=2 * size, rank=rank, world=size)
        world = Rank(rank, size, barrier, table)
        found[rank] = score_batches(brightness, batches, PLAIN, AbsoluteError(), device="cpu", world=world)

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(pytest.approx(wanted(source, list(range(COUNT)))), COUNT)] * size


def test_a_criterion_says_which_number_is_better() -> None:
    assert Criterion(name="mIoU").is_better(0.6, 0.5)
    assert not Criterion(name="mIoU").is_better(0.5, 0.5)
    error = Criterion(name="error", larger=False, rounding=0.1)
    assert error.is_better(0.8, 1.0)
    assert not error.is_better(0.95, 1.0)
    assert not error.is_better(-1.05, -1.0)
    assert error.is_better(-1.2, -1.0)
    assert not error.is_better(np.nan, 1.0)


def test_the_next_criterion_decides_between_equals_only() -> None:
    criteria = (Criterion(name="error", larger=False), Criterion(name="r2"))
    old = {"error": 1.0, "r2": 0.5}
    assert is_better({"error": 0.9, "r2": 0.1}, old, criteria)
    assert is_better({"error": 1.0, "r2": 0.6}, old, criteria)
    assert not is_better({"error": 1.1, "r2": 0.9}, old, criteria)
    assert not is_better(old, old, criteria)
    assert not is_better({"error": 1.0, "r2": 0.6}, {"error": 1.0, "r2": None}, criteria)
