"""The metric of segmentation against a loop over pixels; how batches and processes split the images changes nothing."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.evaluation.segments.test_boundary_iou import slow_band
from tests.evaluation.test_accuracy import Rank
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.loader import Batch
from vitrail.evaluation.segments.boundary_iou import RATIO
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.decode import decode_semantic
from vitrail.tasks.segmentation.metric import SegmentationMetric, SegmentationScore

CLASSES, COUNT, SIZE = 6, 13, (5, 7)
VOID, TORN = (2, 9), (4,)  # images without a pixel that counts, and one that cannot be read
ABSENT, ONLY_PREDICTED = 5, 4  # classes: nowhere; in no mask
CPU = torch.device("cpu")


def images() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, K, H, W], masks [N, H, W] and which can be read [N]."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(COUNT, CLASSES, *SIZE, generator=draw)
    logits[:, ABSENT] = -50.0
    masks = torch.randint(0, ONLY_PREDICTED, (COUNT, *SIZE), generator=draw).byte()
    masks[torch.rand(masks.shape, generator=draw) < 0.3] = 255
    masks[list(VOID)] = 255
    valid = torch.ones(COUNT, dtype=torch.bool)
    valid[list(TORN)] = False  # its mask says classes, and they must not count
    logits[11], masks[11] = logits[3], masks[3]  # two equal IoUs
    return logits, masks, valid


def batch_of(places: Sequence[int]) -> tuple[Tensor, Batch]:
    """The images of these places; -1 is past the end."""
    logits, masks, valid = images()
    at = torch.tensor(places)
    there = at >= 0
    batch = Batch(
        step=0,
        views=(torch.zeros(len(at), 3, *SIZE, dtype=torch.uint8),),
        targets=(torch.where(there[:, None, None], masks[at], 255).byte(),),
        sample=at,
        epoch=torch.zeros_like(at),
        valid=there & valid[at],
    )
    return logits[at], batch


def scored(parts: Sequence[Sequence[int]], extremes: int = 4) -> SegmentationScore:
    metric = SegmentationMetric(CLASSES, CPU, extremes)
    for part in parts:
        metric.update(*batch_of(part))
    return metric.result()


def slow_confusion(places: Sequence[int]) -> NDArray[np.int64]:
    logits, masks, _ = images()
    cells = np.zeros((CLASSES, CLASSES), np.int64)
    for place in places:
        for row in range(SIZE[0]):
            for column in range(SIZE[1]):
                truth = int(masks[place, row, column])
                if truth != 255:
                    values = logits[place, :, row, column].tolist()
                    cells[truth, values.index(max(values))] += 1
    return cells


def slow_miou(cells: NDArray[np.int64]) -> float:
    ious: list[float] = []
    for kind in range(CLASSES):
        either = sum(int(cells[kind, other]) + int(cells[other, kind]) for other in range(CLASSES)) - cells[kind, kind]
        if either:
            ious.append(float(cells[kind, kind] / either))
    return sum(ious) / len(ious)


def slow_loss(place: int) -> float:
    logits, masks, _ = images()
    losses: list[float] = []
    for row in range(SIZE[0]):
        for column in range(SIZE[1]):
            truth = int(masks[place, row, column])
            if truth != 255:
                values = logits[place, :, row, column].double().tolist()
                losses.append(math.log(sum(math.exp(value) for value in values)) - values[truth])
    return sum(losses) / len(losses)


COUNTED = [place for place in range(COUNT) if place not in (*VOID, *TORN)]


def test_the_numbers_are_those_of_a_loop_over_pixels() -> None:
    score = scored([range(COUNT)])
    cells = slow_confusion(COUNTED)
    assert np.array_equal(score.confusion, cells)
    assert cells[ONLY_PREDICTED].sum() == 0 < cells[:, ONLY_PREDICTED].sum()
    assert np.isnan(score.ious[ABSENT])
    assert score.ious[ONLY_PREDICTED] == 0
    row = score.row()
    assert list(row) == ["miou", "pixel_accuracy", "loss", "boundary_iou", "count"]
    assert list(scored([range(COUNT)], extremes=0).row()) == ["miou", "pixel_accuracy", "loss", "count"]
    assert row["miou"] == pytest.approx(slow_miou(cells), rel=1e-12)
    assert row["pixel_accuracy"] == cells.trace() / cells.sum()
    assert row["loss"] == pytest.approx(sum(map(slow_loss, COUNTED)) / len(COUNTED), rel=1e-6)
    assert row["count"] == len(COUNTED)
    assert score.unreadable == len(TORN)
    assert {criterion.name for criterion in score.criteria} <= row.keys()


def test_the_worst_images_are_those_of_the_loop_the_earlier_of_two_equal_ones_first() -> None:
    each = {place: slow_miou(slow_confusion([place])) for place in COUNTED}
    assert each[3] == each[11]
    order = sorted(COUNTED, key=lambda place: (each[place], place))
    found = scored([range(COUNT)], extremes=COUNT).worst
    assert [one.sample for one in found] == order
    assert [one.iou for one in found] == pytest.approx([each[place] for place in order], rel=1e-6)
    logits, masks, _ = images()
    assert all(np.array_equal(one.mask, logits[one.sample].argmax(0).numpy()) for one in found)
    assert all(np.array_equal(one.truth, masks[one.sample].numpy()) for one in found)
    assert [one.sample for one in scored([range(COUNT)], extremes=3).worst] == order[:3]
    assert scored([range(COUNT)], extremes=0).worst == ()


def assert_same(one: SegmentationScore, other: SegmentationScore) -> None:
    assert np.array_equal(one.confusion, other.confusion)
    assert (one.count, one.unreadable) == (other.count, other.unreadable)
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    assert [(each.sample, each.iou) for each in one.worst] == [(each.sample, each.iou) for each in other.worst]
    assert all(np.array_equal(mine.mask, yours.mask) for mine, yours in zip(one.worst, other.worst, strict=True))
    assert one.images is not None
    assert other.images is not None
    for name in ("pixels", "both", "either", "loss", "bands"):
        assert np.array_equal(getattr(one.images, name), getattr(other.images, name))


@pytest.mark.parametrize(
    "parts",
    [
        [[place] for place in range(COUNT)],
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, -1, -1]],
        [list(range(COUNT))[::-1]],
        [[12, 11], [4, 3, 9], [0, 1, 2], [10, 8, 7, 6, 5]],
    ],
)
def test_any_split_into_batches_gives_the_same(parts: Sequence[Sequence[int]]) -> None:
    assert_same(scored(parts), scored([range(COUNT)]))


@pytest.mark.parametrize("extremes", [4, 50])  # also more than a process has
def test_processes_that_share_the_images_all_get_the_score_of_the_whole(extremes: int) -> None:
    shares = [[[0, 2, 4], [6, 8, 10], [12, -1, -1]], [[1, 3, 5], [7, 9, 11], [-1, -1, -1]]]
    barrier = threading.Barrier(2)
    table: list[Tensor | None] = [None, None]
    found: list[SegmentationScore | None] = [None, None]

    def count(rank: int) -> None:
        metric = SegmentationMetric(CLASSES, CPU, extremes)
        for part in shares[rank]:
            metric.update(*batch_of(part))
        metric.merge(Rank(rank, 2, barrier, table))
        found[rank] = metric.result()

    threads = [threading.Thread(target=count, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for score in found:
        assert score is not None
        assert_same(score, scored([range(COUNT)], extremes))


def slow_boundary_iou(places: Sequence[int]) -> float:
    logits, masks, _ = images()
    both, either = [0] * CLASSES, [0] * CLASSES
    for place in places:
        truth, predicted = masks[place].numpy(), logits[place].argmax(0).numpy()
        for kind in range(CLASSES):
            own = slow_band(truth == kind, RATIO)
            said = slow_band((predicted == kind) & (truth != 255), RATIO)
            both[kind] += int((own & said).sum())
            either[kind] += int((own | said).sum())
    ious = [one / other for one, other in zip(both, either, strict=True) if other]
    return sum(ious) / len(ious)


def test_the_boundary_iou_is_that_of_a_loop_over_classes_and_has_an_interval() -> None:
    score = scored([range(COUNT)])
    value = score.row()["boundary_iou"]
    assert value == pytest.approx(slow_boundary_iou(COUNTED), rel=1e-12)
    assert score.images is not None
    found = score.images.intervals(0)
    assert list(found) == ["miou", "pixel_accuracy", "loss", "boundary_iou"]
    interval = found["boundary_iou"]
    assert interval is not None
    assert interval.low < value < interval.high
    assert list(replace(score.images, bands=None).intervals(0)) == ["miou", "pixel_accuracy", "loss"]


def test_queries_are_scored_by_the_classes_that_they_decode_to() -> None:
    draw = torch.Generator().manual_seed(1)
    _, batch = batch_of(COUNTED)
    masks = torch.randn(len(COUNTED), 7, 3, 4, generator=draw)
    queries = QueryOutput(torch.randn(len(COUNTED), 7, CLASSES + 1, generator=draw), masks)
    metric, other = SegmentationMetric(CLASSES, CPU, 2), SegmentationMetric(CLASSES, CPU, 2)
    metric.update(queries, batch)
    other.update(decode_semantic(queries, SIZE), batch)
    assert_same(metric.result(), other.result())


def test_where_nothing_counts_there_is_no_score() -> None:
    with pytest.raises(DataError):
        scored([[*VOID, *TORN, -1]])


def test_outputs_of_another_kind_are_refused() -> None:
    metric = SegmentationMetric(CLASSES, CPU)
    logits, batch = batch_of(range(3))
    for outputs in (logits[:, :-1], logits[..., :-1], logits.mean((2, 3))):
        with pytest.raises(ConfigError):
            metric.update(outputs, batch)
    with pytest.raises(ConfigError, match="256"):
        SegmentationMetric(256, CPU)
