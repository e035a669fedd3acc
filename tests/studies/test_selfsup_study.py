"""4.6: every method next to training from scratch, by the share of labels."""

from collections.abc import Mapping

import pytest

from tests.studies.made import check_findings, check_grids, noisy, outcomes
from vitrail.studies.framework.definition import grid
from vitrail.studies.paper.selfsup import (
    AFTER,
    BEFORE,
    LONGER,
    MASKED,
    NAMES,
    OURS,
    SCRATCH,
    STUDY,
    SUPERVISED,
    UNTAUGHT,
    plan,
)
from vitrail.train.grid.plan import Coordinate

OVER = {SCRATCH: 0.0, LONGER: 0.042, "masked-pixels": 0.04, SUPERVISED: 0.1}  # over scratch; 5 points for all others


def values(at: Mapping[str, Coordinate], over: Mapping[str, float] = OVER) -> dict[str, float]:
    if at["stage"] == BEFORE:
        return {"accuracy": noisy(0.4, at), "fewshot-5": noisy(0.3, at)}
    return {"accuracy": noisy(0.5 + 0.1 * float(at["budget"]) + over.get(str(at["method"]), 0.05), at)}


def test_the_grids_hold_together():
    check_grids(STUDY)


def test_all_methods_have_all_budgets_and_those_in_question_three_seeds():
    places = {
        (cell.at["method"], cell.at["budget"], cell.at["seed"])
        for cell in grid(STUDY, "small")
        if cell.at["stage"] == AFTER
    }
    seeds = {name: 3 if name in (SCRATCH, LONGER, "masked-colour", "mae") else 1 for name in NAMES}
    everything = {(name, budget, at) for name in NAMES for budget in (0.01, 0.1, 1.0) for at in range(seeds[name])}
    assert places == everything - {(LONGER, 1.0, seed) for seed in range(3)}


def test_scratch_has_a_second_chance_of_three_times_the_steps():
    cells = {cell.name: cell.run for cell in grid(STUDY, "small")}
    for budget in ("1pc", "10pc"):
        one, long = cells[f"scratch-{budget}-seed0"], cells[f"scratch-longer-{budget}-seed0"]
        assert long.steps == 3 * one.steps
        assert (long.model, long.data, long.optim) == (one.model, one.data, one.optim)


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_fine_tuning_differs_by_its_start_alone(scale):
    cells = {cell.name: cell for cell in grid(STUDY, scale)}
    scratch = {(cell.at["budget"], cell.at["seed"]): cell for cell in cells.values() if cell.at["method"] == SCRATCH}
    for cell in cells.values():
        if cell.at["stage"] == BEFORE:
            assert cell.run.data.part == 1.0
            continue
        like = scratch[cell.at["budget"], cell.at["seed"]].run
        assert (cell.run.data, cell.run.optim, cell.run.batch) == (like.data, like.optim, like.batch)
        assert (cell.run.steps == like.steps) == (cell.at["method"] != LONGER)
        assert cell.run.data.part == cell.at["budget"]
        assert cell.run.data.part_seed == cell.at["seed"]
        before = cells.get(cell.after)
        assert (before is None) == (cell.at["method"] in UNTAUGHT)
        if before is not None:
            assert (before.at["method"], before.at["seed"]) == (cell.at["method"], cell.at["seed"])
            assert (before.run.model.width, before.run.model.depth) == (like.model.width, like.model.depth)


def test_pretrainings_have_the_same_compute():
    work = {
        name: run.steps * run.batch * run.objective.macs_per_image(run.model)
        for name, run in plan("small", "").before.items()
    }
    assert set(work) == {*OURS, SUPERVISED}
    assert all(each == pytest.approx(work[SUPERVISED], rel=1e-3) for each in work.values())


def test_nothing_but_supervision_reads_labels():
    for scale in ("tiny", "small", "paper"):
        for cell in grid(STUDY, scale):
            if cell.at["stage"] == BEFORE:
                assert cell.run.objective.labelled == (cell.at["method"] in (SCRATCH, SUPERVISED))
                if target := MASKED.get(str(cell.at["method"])):
                    assert cell.run.objective.target == target


def test_the_paper_s_finding_agrees():
    found = check_findings(STUDY, "small", values)
    assert "is highest, +5." in found.sentence
    assert "beyond the spread over seeds are 6 of 6 with 1%, 6 of 6 with 10%, 6 of 6 with 100%" in found.sentence
    assert (
        "; 3 times the steps from scratch are +4.2 ± 0.3 points with 1%, +4.2 ± 0.3 points with 10%." in found.sentence
    )
    assert found.beside.count("+5.0 ± 0.3 points against scratch (agrees)") == 3
    assert found.beside.count("-4.8 ± 0.5 points against supervised (agrees)") == 3
    assert found.beside.count("+1.2 ± 0.5 points against pixels (agrees)") == 3


def test_another_finding_does_not():
    worse = {SCRATCH: 0.0, LONGER: 0.0, SUPERVISED: 0.0, **dict.fromkeys(OURS, -0.03)}
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, worse)))
    assert "beyond the spread over seeds are 0 of 6 with 1%, " in found.sentence
    assert found.beside.count("-3.0 ± 0.3 points against scratch (does not agree)") == 3
    assert found.beside.count("+0.2 ± 0.5 points against pixels (open)") == 3


def test_the_table_tells_neighbours_of_what_saw_no_labels():
    rows = {row[0]: row for row in STUDY.conclude(outcomes(STUDY, "small", values)).table.rows}
    assert rows["MAE"][1:3] == ("30.0 ± 0.2", "40.0 ± 0.2")
    assert rows["supervised, all labels"][1:3] == ("29.8", "–")
    assert rows["from scratch"][1:3] == ("–", "–")


def test_a_method_that_failed_is_left_aside():
    found = STUDY.conclude(outcomes(STUDY, "small", values, failed=["dino"]))
    assert "5 of 5 with 1%" in found.sentence
    assert "4 of 59 cells failed" in found.sentence


def test_without_scratch_nothing_is_compared_with_it():
    found = STUDY.conclude(outcomes(STUDY, "small", values, failed=["scratch"]))
    assert found.sentence.startswith("No method has finished next to training from scratch")
    assert "points against scratch (" not in found.beside
    assert "points against supervised (" in found.beside


def test_the_paper_s_values_stand_beside():
    found = STUDY.conclude(outcomes(STUDY, "paper", values))
    assert {row[0]: row[-1] for row in found.table.rows}["masked, mean colour"] == "79.9"
    assert "one seed decides nothing." in found.sentence
