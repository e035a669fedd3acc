"""The metric of instances against pycocotools; batches and processes change nothing, to the last bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.segments.test_mask_ap import judge
from tests.tasks.mask_queries.scenes import (
    CLASSES,
    COUNT,
    EMPTY,
    SIZE,
    SPLITS,
    TORN,
    draw_images,
    make_batch,
    score_in_two_processes,
    score_parts,
)
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.annotations.rle import decode
from vitrail.tasks.instances.metric import InstanceMetric, InstanceScore
from vitrail.tasks.mask_queries.decode import decode_instances

CPU = torch.device("cpu")
COUNTED = [place for place in range(COUNT) if place not in TORN]


class Scene:
    """The true and the predicted masks of an image, for the judge."""

    def __init__(self, place: int) -> None:
        masks, classes, crowd, _ = draw_images()
        there = classes[place] >= 0
        self.truth, self.truth_classes = masks[place, there].numpy(), classes[place, there].numpy()
        self.crowd = crowd[place, there].numpy()
        (found,) = decode_instances(make_batch([place])[0], SIZE)
        self.masks, self.classes = found.masks.numpy(), found.classes.numpy()
        self.scores = found.scores.double().numpy()


def scored(parts: Sequence[Sequence[int]], extremes: int = 4) -> InstanceScore:
    return score_parts(InstanceMetric(CLASSES, CPU, extremes), parts)


def test_the_numbers_are_those_of_pycocotools() -> None:
    scenes: list[Any] = [Scene(place) for place in COUNTED]
    verdict, score = judge(scenes), scored([range(COUNT)])
    row = score.row()
    assert row.pop("count") == score.count == len(COUNTED)
    assert 0.2 < score.ap < 0.9
    found = [-1.0 if value is None else value for value in row.values()]
    np.testing.assert_allclose(found, verdict.stats, rtol=0, atol=1e-9)
    assert score.unreadable == len(TORN)
    assert {one.name for one in (*score.criteria, *score.extras)} <= row.keys()


def test_the_worst_images_come_with_their_segments_the_earlier_of_two_equal_ones_first() -> None:
    score = scored([range(COUNT)], extremes=COUNT)
    keys = [(one.value, one.sample) for one in score.worst]
    assert keys == sorted(keys)
    assert sorted(one.sample for one in score.worst) == COUNTED
    values = {one.sample: one.value for one in score.worst}
    assert values[3] == values[11]
    assert len(set(values.values())) > 4
    for one in score.worst:
        scene = Scene(one.sample)
        sure = scene.scores >= 0.5
        assert [decode(mask).tolist() for mask in one.predicted.masks] == scene.masks[sure].tolist()
        assert one.predicted.scores is not None
        assert one.predicted.scores.tolist() == scene.scores[sure].tolist()
        assert [decode(mask).tolist() for mask in one.truth.masks] == scene.truth.tolist()
    assert [one.sample for one in scored([range(COUNT)], 3).worst] == [one.sample for one in score.worst[:3]]
    assert scored([range(COUNT)], extremes=0).worst == ()


def assert_same(one: InstanceScore, other: InstanceScore) -> None:
    assert one.row() == other.row()
    assert one.unreadable == other.unreadable
    assert np.array_equal(one.ranking.kinds, other.ranking.kinds)
    assert [(each.sample, each.value) for each in one.worst] == [(each.sample, each.value) for each in other.worst]


@pytest.mark.parametrize("parts", SPLITS)
def test_any_split_into_batches_gives_the_same(parts: list[list[int]]) -> None:
    assert_same(scored(parts), scored([range(COUNT)]))


@pytest.mark.parametrize("extremes", [0, 4, 50])
def test_processes_that_share_the_images_all_get_the_score_of_the_whole(extremes: int) -> None:
    for score in score_in_two_processes(lambda: InstanceMetric(CLASSES, CPU, extremes)):
        assert_same(score, scored([range(COUNT)], extremes))


def test_intervals_hold_the_numbers() -> None:
    score = scored([range(COUNT)])
    found, row = score.intervals(seed=0), score.row()
    assert list(found) == ["map", "map50", "map75"]
    for name, interval in found.items():
        value = row[name]
        assert interval is not None
        assert value is not None
        assert interval.low < value < interval.high


def test_where_nothing_counts_there_is_no_score() -> None:
    for places in ([*TORN, -1], [*EMPTY]):
        with pytest.raises(DataError):
            scored([places])


def test_outputs_of_another_kind_are_refused() -> None:
    outputs, batch = make_batch(range(3))
    with pytest.raises(ConfigError):
        InstanceMetric(3, CPU).update(outputs, batch)
