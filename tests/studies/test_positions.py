"""D.4, Table 8: the verdicts on positions follow from the numbers and their spread."""

from collections.abc import Mapping

from tests.studies.fake_outcomes import A, D, U, check_findings, check_grids, judge, noisy, outcomes
from vitrail.core.paper_tables import TABLE_8
from vitrail.models.vit_config import vit_config
from vitrail.studies import find_study
from vitrail.train.grid.plan import Coordinate

STUDY = find_study("positions")
SHIFT = {way: 0.0005 * (at % 3) for at, way in enumerate(TABLE_8)}  # less than the 0.2 points of the seeds


def values(at: Mapping[str, Coordinate], none: float = -0.03, odd: float = 0.0) -> dict[str, float]:
    """Positions are worth three points, and `odd` more or less if they are relative."""
    kind, place = str(at["positions"]), str(at["placed"])
    extra = none if kind == "none" else odd if kind == "relative" else 0.0
    turned = {**at, "seed": int(at["seed"]) + len(kind) + len(place)}  # another order of the same scatter
    return {"accuracy": noisy(0.8 + SHIFT[kind, place] + extra, turned), "fewshot-5": noisy(0.7 + extra, turned)}


def test_the_grid_is_table_8_and_differs_in_positions_alone() -> None:
    check_grids(STUDY)
    for scale in ("tiny", "small", "paper"):
        cells = STUDY.grid(scale)
        assert {(cell.at["positions"], cell.at["placed"]) for cell in cells} == set(TABLE_8)
        assert len({(cell.run.optim, cell.run.schedule, cell.run.steps, cell.run.data) for cell in cells}) == 1
        for cell in cells:
            assert cell.run.model is not None
            model = vit_config(cell.run.model)
            placed = "every" if cell.at["positions"] == "relative" else cell.at["placed"]
            assert (model.position, model.entry) == (cell.at["positions"], placed)
            assert cell.run.evaluation.fewshot


def test_verdicts() -> None:
    found = check_findings(STUDY, "small", values)
    assert found.verdict == A
    assert "costs 3." in found.summary
    assert judge(STUDY, "small", lambda at: values(at, none=0.02))[0] == D
    assert judge(STUDY, "small", lambda at: values(at, odd=0.02)) == [A, D]
    wide = {0: -0.05, 1: 0.0, 2: 0.05}
    assert judge(STUDY, "small", lambda at: {"accuracy": 0.8 + wide[int(at["seed"])]})[1] == U
    assert judge(STUDY, "small", values, seeds=1) == [U, U]
    assert judge(STUDY, "small", values, failed=["none"]) == []


def test_a_failed_kind_is_skipped() -> None:
    found = STUDY.findings(outcomes(STUDY, "small", values, failed=["relative"]))
    assert "the 6 kinds" in found.summary
    assert found.table.rows[-1][2:4] == ("–", "–")


def test_the_papers_values_are_in_the_table() -> None:
    rows = STUDY.findings(outcomes(STUDY, "small", values)).table.rows
    assert [row[-1] for row in rows] == [f"{100 * value:.2f}" for value in TABLE_8.values()]
    assert rows[0][2] == "77.0 ± 0.2"


def test_few_shot_accuracy_counts_without_a_test_split() -> None:
    few = outcomes(STUDY, "small", lambda at: {"fewshot-5": values(at)["fewshot-5"]})
    assert "of 5-shot accuracy" in STUDY.findings(few).summary
