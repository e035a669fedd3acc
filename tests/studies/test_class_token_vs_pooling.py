"""D.3: each head is judged at the rate that is best on dev, never on test."""

from collections.abc import Mapping

from tests.studies.fake_outcomes import A, D, P, U, check_findings, check_grids, judge, noisy, outcomes
from vitrail.studies import find_study
from vitrail.train.grid.plan import Coordinate

STUDY = find_study("head")
BEST = {"token": 1e-3, "mean": 3e-4}


def values(at: Mapping[str, Coordinate], worse: float = 0.0) -> dict[str, float]:
    """Equal heads at different rates; off its rate a head loses ten points on dev, and nothing on test."""
    off = at["lr"] != BEST[str(at["head"])]
    test = 0.8 - (worse if at["head"] == "mean" else 0.0)
    return {"watch": noisy(0.8 - 0.1 * off, at), "accuracy": noisy(0.95 if off else test, at)}


def test_grids() -> None:
    check_grids(STUDY)


def test_nothing_is_selected_on_test() -> None:
    found = check_findings(STUDY, "small", values)
    selected = {row[0]: row[1:4] for row in found.table.rows if row[4] == "yes"}
    assert selected == {
        "class token": ("0.001", "80.0 ± 0.2", "80.0 ± 0.2"),
        "mean pooling": ("0.0003", "80.0 ± 0.2", "80.0 ± 0.2"),
    }
    assert "class token 80.0 ± 0.2 % at 0.001, mean pooling 80.0 ± 0.2 % at 0.0003" in found.summary


def test_verdicts() -> None:
    assert judge(STUDY, "small", values) == [A, A]
    assert judge(STUDY, "small", lambda at: values(at, worse=0.005)) == [P, A]
    assert judge(STUDY, "small", lambda at: values(at, worse=0.05)) == [D, A]
    assert judge(STUDY, "small", values, seeds=1) == [U, A]
    assert judge(STUDY, "small", lambda at: {**values(at), "watch": 1.0 - float(at["lr"])})[1] == D  # one rate for both
    assert judge(STUDY, "small", values, failed=["mean-"]) == []


def test_few_shot_accuracy_counts_on_jft() -> None:
    found = STUDY.findings(outcomes(STUDY, "paper", lambda at: {**values(at), "fewshot-5": 0.6}))
    assert "5-shot accuracy [%]" in found.table.columns
    assert {row[5] for row in found.table.rows} >= {"the reference", "far below the token", "as good as the token"}
