"""Labels: one a sample, several, or none."""

import numpy as np
import pytest

from vitrail.core.errors import BadLabels
from vitrail.data.dataset import Labels


def test_one_several_none() -> None:
    one, several, none = Labels(np.array([2, 0, -1])), Labels.several([[2, 0], [], [1]]), Labels.none(3)
    assert [one[i] for i in range(3)] == [(2,), (0,), ()]
    assert [several[i] for i in range(3)] == [(2, 0), (), (1,)]
    assert [none[i] for i in range(3)] == [(), (), ()]
    assert (one.multiple, several.multiple, none.multiple) == (False, True, False)
    assert {len(one), len(several), len(none)} == {3}


def test_rows_of_a_batch() -> None:
    assert Labels(np.array([2, 0, -1], np.int32)).rows(np.array([2, 0])).tolist() == [-1, 2]
    several = Labels.several([[2, 0], [], [1]])
    assert several.rows(np.array([0, 1])).tolist() == [[2, 0], [-1, -1]]
    assert several.rows(np.array([1])).tolist() == [[-1]]


def test_take_and_count() -> None:
    several = Labels.several([[2, 0], [], [1]]).take(np.array([2, 0]))
    assert [several[i] for i in range(2)] == [(1,), (2, 0)]
    assert several.counts(4).tolist() == [1, 1, 1, 0]
    assert Labels(np.array([2, 0, -1])).counts(3).tolist() == [1, 0, 1]


def test_a_label_outside_the_range_is_named() -> None:
    Labels(np.array([0, 1, -1])).check(2, "here")
    with pytest.raises(BadLabels, match="here: sample 1 has label 7, but there are 3 classes, 0 to 2"):
        Labels(np.array([0, 7])).check(3, "here")
    with pytest.raises(BadLabels, match="sample 2 has label 3"):
        Labels.several([[0, 1], [], [1, 3]]).check(3, "here")
    with pytest.raises(BadLabels, match="label -2"):
        Labels(np.array([-2])).check(3, "here")
