"""D.4, Table 8: what is said of positions follows from the numbers and their spread."""

from collections.abc import Mapping

from tests.studies.made import check_findings, check_grids, noisy, outcomes
from vitrail.core.paper_tables import TABLE_8
from vitrail.models.vit_config import ViTConfig
from vitrail.studies.framework.definition import grid
from vitrail.studies.paper.positions import STUDY
from vitrail.train.grid.plan import Coordinate

# Seeds scatter by 0.2 points; ways differ by less than that.
SHIFT = {way: 0.0005 * (at % 3) for at, way in enumerate(TABLE_8)}


def values(at: Mapping[str, Coordinate], none: float = -0.03, odd: float = 0.0) -> dict[str, float]:
    """Positions are worth three points, and `odd` more or less where they are relative."""
    way = (str(at["positions"]), str(at["placed"]))
    extra = none if way[0] == "none" else odd if way[0] == "relative" else 0.0
    # Another order of the same scatter for each way, as seeds have it.
    turned = {**at, "seed": int(at["seed"]) + len(way[0]) + len(way[1])}
    return {"accuracy": noisy(0.8 + SHIFT[way] + extra, turned), "fewshot-5": noisy(0.7 + extra, turned)}


def test_the_grids_hold_together() -> None:
    check_grids(STUDY)


def test_the_grid_is_table_8() -> None:
    for scale in ("tiny", "small", "paper"):
        cells = grid(STUDY, scale)
        assert {(cell.at["positions"], cell.at["placed"]) for cell in cells} == set(TABLE_8)
        for cell in cells:
            assert isinstance(cell.run.model, ViTConfig)
            assert cell.run.model.position == cell.at["positions"]
            placed = "every" if cell.at["positions"] == "relative" else cell.at["placed"]
            assert cell.run.model.placed == placed
            assert cell.run.evaluation.fewshot
    assert len(grid(STUDY, "small")) == 8 * 3


def test_cells_of_a_scale_differ_in_positions_and_seed_alone() -> None:
    runs = {(cell.run.optim, cell.run.schedule, cell.run.steps, cell.run.data) for cell in grid(STUDY, "small")}
    assert len(runs) == 1


def test_what_the_paper_found_agrees() -> None:
    found = check_findings(STUDY, "small", values)
    assert found.sentence.startswith("Leaving positions out costs 3.")
    assert "agrees, none is below every other way, beyond the spread over seeds" in found.beside
    assert "agrees, differences among the others are within the spread of seeds" in found.beside
    assert "disagrees" not in found.beside


def test_none_that_is_as_good_disagrees() -> None:
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, none=0.02)))
    assert found.sentence.startswith("Leaving positions out gains")
    assert "disagrees, none is not the worst" in found.beside


def test_a_way_that_stands_out_disagrees() -> None:
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, odd=0.02)))
    assert "agrees, none is below" in found.beside
    assert "disagrees, the others differ by more than the spread of seeds" in found.beside
    assert "relative" in found.beside


def test_a_wide_spread_is_no_agreement() -> None:
    wide = {0: -0.05, 1: 0.0, 2: 0.05}
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: {"accuracy": 0.8 + wide[int(at["seed"])]}))
    assert "too wide to tell" in found.beside
    assert "agrees, differences" not in found.beside


def test_one_seed_decides_nothing() -> None:
    one = [each for each in outcomes(STUDY, "small", values) if each.at["seed"] == 0]
    assert "nothing is decided" in STUDY.conclude(one).beside


def test_a_way_that_failed_is_left_out_and_told() -> None:
    found = STUDY.conclude(outcomes(STUDY, "small", values, failed=["relative"]))
    assert "the 6 ways of giving them" in found.sentence
    assert "3 of 24 cells failed" in found.sentence
    assert found.table.rows[-1][2:4] == ("–", "–")
    nothing = STUDY.conclude(outcomes(STUDY, "small", values, failed=["none"]))
    assert nothing.sentence.startswith("Too few cells")


def test_the_papers_values_stand_beside() -> None:
    rows = STUDY.conclude(outcomes(STUDY, "small", values)).table.rows
    assert [row[-1] for row in rows] == [f"{100 * value:.2f}" for value in TABLE_8.values()]
    assert rows[0][2] == "77.0 ± 0.2"


def test_without_a_test_split_few_shot_accuracy_is_read() -> None:
    few = [
        each
        if not each.values
        else type(each)(cell=each.cell, at=each.at, values={"fewshot-5": each.values["fewshot-5"]})
        for each in outcomes(STUDY, "small", values)
    ]
    assert "of 5-shot accuracy" in STUDY.conclude(few).sentence
