"""D.3: each head is judged at the rate that is best on dev, never on test."""

from collections.abc import Mapping

from tests.studies.made import check_findings, check_grids, noisy, outcomes
from vitrail.studies.paper.class_token_vs_pooling import STUDY
from vitrail.train.grid.plan import Coordinate

BEST = {"token": 1e-3, "mean": 3e-4}


def values(at: Mapping[str, Coordinate], worse: float = 0.0) -> dict[str, float]:
    """The heads alike at rates of their own; off its rate a head loses ten points on dev, and nothing on test."""
    off = at["lr"] != BEST[str(at["head"])]
    test = 0.8 - (worse if at["head"] == "mean" else 0.0)
    return {"watch": noisy(0.8 - 0.1 * off, at), "accuracy": noisy(0.95 if off else test, at)}


def test_the_grids_hold_together():
    check_grids(STUDY)


def test_nothing_is_chosen_on_test():
    found = check_findings(STUDY, "small", values)
    chosen = {row[0]: row for row in found.table.rows if row[4] == "yes"}
    assert {name: row[1] for name, row in chosen.items()} == {"class token": "0.001", "mean pooling": "0.0003"}
    assert all(row[3] == "80.0 ± 0.2" for row in chosen.values())
    assert "class token 80.0 ± 0.2 % at 0.001, mean pooling 80.0 ± 0.2 % at 0.0003" in found.sentence


def test_equal_heads_agree_with_the_paper():
    found = STUDY.conclude(outcomes(STUDY, "small", values))
    assert "Here too" in found.beside
    assert "The best rates differ, as in the paper (0.001 and 0.0003)" in found.beside


def test_a_worse_pooling_does_not():
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, worse=0.05)))
    assert "Not so here: pooling less the token is -5.0" in found.beside


def test_half_a_point_is_still_similar():
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, worse=0.005)))
    assert "Here nearly so" in found.beside


def test_one_seed_decides_nothing():
    one = [each for each in outcomes(STUDY, "small", values) if each.at["seed"] == 0]
    assert "nothing is decided" in STUDY.conclude(one).beside


def test_one_rate_for_both_is_told():
    same = STUDY.conclude(outcomes(STUDY, "small", lambda at: {**values(at), "watch": 1.0 - float(at["lr"])}))
    assert "Both have the same best rate here, 0.0001, unlike in the paper." in same.beside


def test_a_failed_head_is_told():
    found = STUDY.conclude(outcomes(STUDY, "small", values, failed=["mean-"]))
    assert found.sentence.startswith("No cell with mean pooling has finished")
    assert "12 of 24 cells failed" in found.sentence
    assert "Not decided" in found.beside


def test_few_shot_accuracy_counts_on_jft():
    found = STUDY.conclude(outcomes(STUDY, "paper", lambda at: {**values(at), "fewshot-5": 0.6}))
    assert "5-shot accuracy [%]" in found.table.columns
    assert {row[5] for row in found.table.rows} >= {"the reference", "far below the token", "as good as the token"}
