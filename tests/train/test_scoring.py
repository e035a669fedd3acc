"""Which of several scores is the best."""

import math

from vitrail.train.scoring import Best


def test_better_is_more_right_and_then_less_loss() -> None:
    best = Best()
    assert best.take(0.5, 1.0, step=1)
    assert not best.take(0.5, 1.2, step=2)
    assert best.take(0.5, 0.9, step=3), "a small dev split gives the same accuracy again and again"
    assert not best.take(0.4, 0.1, step=4)
    assert (best.accuracy, best.loss, best.step, best.since) == (0.5, 0.9, 3, 1)
    assert best.take(0.6, 2.0, step=5)


def test_a_loss_that_is_none_decides_nothing() -> None:
    old = Best(accuracy=0.5, step=1, since=2)  # of a checkpoint from before losses were kept
    assert not old.take(0.5, 0.1, step=2)
    assert not Best(accuracy=0.5, loss=1.0, step=1).take(0.5, math.nan, step=2)
