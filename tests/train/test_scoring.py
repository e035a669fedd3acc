"""Which of several scores is the best."""

import math
from dataclasses import asdict

from vitrail.evaluation.metrics import Criterion
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.train.scoring import Best


def row(accuracy: float, loss: float) -> dict[str, float]:
    return {"accuracy": accuracy, "loss": loss}


def test_better_is_more_right_and_then_less_loss() -> None:
    best, criteria = Best(), CLASSIFICATION.criteria
    assert best.update(row(0.5, 1.0), criteria, step=1)
    assert not best.update(row(0.5, 1.2), criteria, step=2)
    assert best.update(row(0.5, 0.9), criteria, step=3), "a small dev split gives the same accuracy again and again"
    assert not best.update(row(0.4, 0.1), criteria, step=4)
    assert (best.values, best.step, best.since) == (row(0.5, 0.9), 3, 1)
    assert best.update(row(0.6, 2.0), criteria, step=5)


def test_a_loss_that_is_none_decides_nothing() -> None:
    old = Best({"accuracy": 0.5}, step=1, since=2)  # of a checkpoint from before losses were kept
    assert not old.update(row(0.5, 0.1), CLASSIFICATION.criteria, step=2)
    assert not Best(row(0.5, 1.0), step=1).update(row(0.5, math.nan), CLASSIFICATION.criteria, step=2)


def test_a_row_without_the_number_to_choose_by_is_not_a_score() -> None:
    best = Best()
    assert not best.update({"loss": 1.0}, CLASSIFICATION.criteria, step=1)
    assert best == Best()


def test_smaller_may_be_better_and_a_number_comes_before_none() -> None:
    best, criteria = Best(), (Criterion(name="error", larger=False),)
    assert not best.update({"error": math.nan}, criteria, step=1)
    assert best.update({"error": 3.0}, criteria, step=2)
    assert best.update({"error": 2.0}, criteria, step=3)
    assert not best.update({"error": 2.5}, criteria, step=4)
    assert best.apply_to({"error": 2.5, "count": 9, "step": 4}) == {"error": 2.0, "count": 9, "step": 3}


def test_checkpoints_of_0_1_0_are_read() -> None:
    before = {"accuracy": -1.0, "step": -1, "since": 0, "loss": None}
    assert Best.from_facts(before) == Best()
    old = {"accuracy": 0.5, "step": 7, "since": 2, "loss": 1.5}
    assert Best.from_facts(old) == Best(row(0.5, 1.5), step=7, since=2)
    assert Best.from_facts(asdict(Best.from_facts(old))) == Best.from_facts(old)
