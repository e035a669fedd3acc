"""The panoptic metric against a loop over the decoded maps; batches and processes change nothing, to the last bit."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.evaluation.segments.test_panoptic_quality import Scene
from tests.evaluation.segments.test_panoptic_quality import slow_counts as count_slowly
from tests.tasks.mask_queries.scenes import (
    CLASSES,
    COUNT,
    EMPTY,
    SIZE,
    SPLITS,
    THINGS,
    TORN,
    draw_images,
    make_batch,
    score_in_two_processes,
    score_parts,
)
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.annotations.rle import decode
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.decode import decode_panoptic
from vitrail.tasks.panoptic.metric import PanopticMetric, PanopticScore

CPU = torch.device("cpu")
COUNTED = [place for place in range(COUNT) if place not in (*EMPTY, *TORN)]


def scored(parts: Sequence[Sequence[int]], extremes: int = 4) -> PanopticScore:
    return score_parts(PanopticMetric(THINGS, CPU, extremes), parts)


def slow_counts(place: int) -> NDArray[np.float64]:
    """[4, K] of one image."""
    masks, classes, crowd, outputs = draw_images()
    one = QueryOutput(outputs.classes[place][None], outputs.masks[place][None])
    (found,) = decode_panoptic(one, SIZE, THINGS)
    truth, number, labels, crowds = np.full(SIZE, -1), 0, list[int](), list[bool]()
    for mask, label, is_crowd in zip(masks[place], classes[place].tolist(), crowd[place].tolist(), strict=True):
        if label >= 0:
            truth[mask.numpy()] = number
            number += 1
            labels.append(label)
            crowds.append(is_crowd)
    scene = Scene(
        truth=truth,
        truth_classes=np.array(labels, np.int64),
        crowd=np.array(crowds, np.bool_),
        predicted=found.ids.numpy().astype(np.int64),
        classes=found.classes.numpy(),
    )
    rows = np.array(count_slowly(scene))
    return np.pad(rows, ((0, 0), (0, CLASSES)))[:, :CLASSES]


def test_the_numbers_are_those_of_a_loop_over_segments() -> None:
    score = scored([range(COUNT)])
    expected = np.stack([slow_counts(place) for place in COUNTED])
    np.testing.assert_allclose(score.counts.images, expected, rtol=1e-14)
    ious, right, wrong, missed = expected.sum(0)
    assert (expected.sum((0, 2))[1:] > 3).all()  # matches, wrong and missed segments
    row, per_class = score.row(), ious / (right + wrong / 2 + missed / 2)
    assert row["pq"] == pytest.approx(per_class.mean())
    assert row["pq_things"] == pytest.approx(per_class[:2].mean())
    assert row["pq_stuff"] == pytest.approx(per_class[2:].mean())
    assert row["count"] == score.count == len(COUNTED)
    assert score.unreadable == len(TORN)
    assert {one.name for one in (*score.criteria, *score.extras)} <= row.keys()


def test_the_worst_images_come_with_their_segments_the_earlier_of_two_equal_ones_first() -> None:
    score = scored([range(COUNT)], extremes=COUNT)
    values = dict(zip(COUNTED, score.counts.image_quality().tolist(), strict=True))
    assert values[3] == values[11]
    assert [one.sample for one in score.worst] == sorted(COUNTED, key=lambda place: (values[place], place))
    assert all(one.value == values[one.sample] for one in score.worst)
    masks, classes, crowd, _ = draw_images()
    for one in score.worst:
        there = classes[one.sample] >= 0
        assert np.array_equal(np.stack([decode(mask) for mask in one.truth.masks]), masks[one.sample, there].numpy())
        assert np.array_equal(one.truth.classes, classes[one.sample, there].numpy())
        assert np.array_equal(one.truth.crowd, crowd[one.sample, there].numpy())
        outputs, _ = make_batch([one.sample])
        (found,) = decode_panoptic(outputs, SIZE, THINGS)
        assert len(one.predicted) == len(found.classes)
        for number, mask in enumerate(one.predicted.masks):
            assert np.array_equal(decode(mask), found.ids.numpy() == number)
    assert [one.sample for one in scored([range(COUNT)], 3).worst] == [one.sample for one in score.worst[:3]]
    assert scored([range(COUNT)], extremes=0).worst == ()


def assert_same(one: PanopticScore, other: PanopticScore) -> None:
    assert np.array_equal(one.counts.images, other.counts.images)
    assert one.row() == other.row()
    assert one.unreadable == other.unreadable
    assert [(each.sample, each.value) for each in one.worst] == [(each.sample, each.value) for each in other.worst]


@pytest.mark.parametrize("parts", SPLITS)
def test_any_split_into_batches_gives_the_same(parts: list[list[int]]) -> None:
    assert_same(scored(parts), scored([range(COUNT)]))


@pytest.mark.parametrize("extremes", [0, 4, 50])
def test_processes_that_share_the_images_all_get_the_score_of_the_whole(extremes: int) -> None:
    for score in score_in_two_processes(lambda: PanopticMetric(THINGS, CPU, extremes)):
        assert_same(score, scored([range(COUNT)], extremes))


def test_intervals_hold_the_numbers() -> None:
    score = scored([range(COUNT)])
    found, row = score.intervals(seed=0), score.row()
    assert list(found) == ["pq", "sq", "rq", "pq_things", "pq_stuff"]
    for name in ("pq", "sq", "rq"):
        interval, value = found[name], row[name]
        assert interval is not None
        assert value is not None
        assert interval.low < value < interval.high


def test_where_nothing_counts_there_is_no_score() -> None:
    with pytest.raises(DataError):
        scored([[*EMPTY, *TORN, -1]])


def test_where_there_is_no_stuff_its_number_is_missing() -> None:
    score = score_parts(PanopticMetric((True,) * CLASSES, CPU), [range(COUNT)])
    assert score.row()["pq_stuff"] is None


def test_outputs_of_another_kind_are_refused() -> None:
    outputs, batch = make_batch(range(3))
    with pytest.raises(ConfigError):
        PanopticMetric((True,) * 3, CPU).update(outputs, batch)
