"""4.6: every method next to training from scratch, by the share of labels."""

from collections.abc import Mapping

import pytest

from tests.studies.fake_outcomes import A, D, U, check_findings, check_grids, judge, noisy, outcomes
from vitrail.studies import find_study
from vitrail.studies.paper.selfsup import (
    FINETUNING,
    LONGER,
    MASKED,
    NAMES,
    PRETRAINING,
    SCRATCH,
    SUPERVISED,
    UNLABELLED,
    UNTRAINED,
    build_stages,
)
from vitrail.train.grid.plan import Coordinate

STUDY = find_study("selfsup")
OVER = {SCRATCH: 0.0, LONGER: 0.042, "masked-pixels": 0.04, SUPERVISED: 0.1}  # over scratch; 5 points for all others


def values(at: Mapping[str, Coordinate], over: Mapping[str, float] = OVER) -> dict[str, float]:
    if at["stage"] == PRETRAINING:
        return {"accuracy": noisy(0.4, at), "fewshot-5": noisy(0.3, at)}
    return {"accuracy": noisy(0.5 + 0.1 * float(at["budget"]) + over.get(str(at["method"]), 0.05), at)}


def test_the_grids_hold_together():
    check_grids(STUDY)


def test_all_methods_have_all_budgets_and_those_in_question_three_seeds():
    places = {
        (cell.at["method"], cell.at["budget"], cell.at["seed"])
        for cell in STUDY.grid("small")
        if cell.at["stage"] == FINETUNING
    }
    seeds = {name: 3 if name in (SCRATCH, LONGER, "masked-colour", "mae") else 1 for name in NAMES}
    everything = {(name, budget, at) for name in NAMES for budget in (0.01, 0.1, 1.0) for at in range(seeds[name])}
    assert places == everything - {(LONGER, 1.0, seed) for seed in range(3)}


def test_scratch_has_a_second_chance_of_three_times_the_steps():
    cells = {cell.name: cell.run for cell in STUDY.grid("small")}
    for budget in ("1pc", "10pc"):
        one, long = cells[f"scratch-{budget}-seed0"], cells[f"scratch-longer-{budget}-seed0"]
        assert long.steps == 3 * one.steps
        assert (long.model, long.data, long.optim) == (one.model, one.data, one.optim)


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_fine_tuning_differs_by_its_start_alone(scale):
    cells = {cell.name: cell for cell in STUDY.grid(scale)}
    scratch = {(cell.at["budget"], cell.at["seed"]): cell for cell in cells.values() if cell.at["method"] == SCRATCH}
    for cell in cells.values():
        if cell.at["stage"] == PRETRAINING:
            assert cell.run.data.part == 1.0
            continue
        like = scratch[cell.at["budget"], cell.at["seed"]].run
        assert (cell.run.data, cell.run.optim, cell.run.batch) == (like.data, like.optim, like.batch)
        assert (cell.run.steps == like.steps) == (cell.at["method"] != LONGER)
        assert cell.run.data.part == cell.at["budget"]
        assert cell.run.data.part_seed == cell.at["seed"]
        before = cells.get(cell.after)
        assert (before is None) == (cell.at["method"] in UNTRAINED)
        if before is not None:
            assert (before.at["method"], before.at["seed"]) == (cell.at["method"], cell.at["seed"])
            assert (before.run.model.width, before.run.model.depth) == (like.model.width, like.model.depth)


def test_pretrainings_have_the_same_compute():
    work = {
        name: run.steps * run.batch * run.objective.macs_per_image(run.model)
        for name, run in build_stages("small", "")[0].items()
    }
    assert set(work) == {*UNLABELLED, SUPERVISED}
    assert all(each == pytest.approx(work[SUPERVISED], rel=1e-3) for each in work.values())


def test_nothing_but_supervision_reads_labels():
    for scale in ("tiny", "small", "paper"):
        for cell in STUDY.grid(scale):
            if cell.at["stage"] == PRETRAINING:
                assert cell.run.objective.labelled == (cell.at["method"] in (SCRATCH, SUPERVISED))
                if target := MASKED.get(str(cell.at["method"])):
                    assert cell.run.objective.target == target


def test_verdicts() -> None:
    found = check_findings(STUDY, "small", values)
    assert "beyond the spread over seeds are 6 of 6 with 1%, 6 of 6 with 10%, 6 of 6 with 100%" in found.summary
    assert "3 times the steps from scratch bring +4.2 ± 0.3 points with 1%, +4.2 ± 0.3 points" in found.summary
    assert found.comparison.count("+5.0 ± 0.3 points") == found.comparison.count("-4.8 ± 0.5 points") == 3
    assert [claim.verdict for claim in found.claims] == [A] * 9
    worse = {SCRATCH: 0.0, LONGER: 0.0, SUPERVISED: 0.0, **dict.fromkeys(UNLABELLED, -0.03)}
    assert judge(STUDY, "small", lambda at: values(at, worse)) == [D, A, U] * 3
    assert len(judge(STUDY, "small", values, failed=["scratch"])) == 6


def test_only_methods_without_labels_have_neighbours() -> None:
    rows = {row[0]: row for row in STUDY.findings(outcomes(STUDY, "small", values)).table.rows}
    assert rows["MAE"][1:3] == ("30.0 ± 0.2", "40.0 ± 0.2")
    assert rows["supervised, all labels"][1:3] == ("29.8", "–")
    assert rows["from scratch"][1:3] == ("–", "–")


def test_a_failed_method_is_skipped() -> None:
    found = STUDY.findings(outcomes(STUDY, "small", values, failed=["dino"]))
    assert "5 of 5 with 1%" in found.summary
    assert "4 of 59 cells failed" in found.summary


def test_the_papers_values_are_in_the_table() -> None:
    found = STUDY.findings(outcomes(STUDY, "paper", values))
    assert {row[0]: row[-1] for row in found.table.rows}["masked, mean colour"] == "79.9"
    assert found.verdict == U  # one seed
