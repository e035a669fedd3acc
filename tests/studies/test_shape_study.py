"""D.2: what each line gains for a doubling of compute."""

import math
from collections.abc import Mapping

import pytest

from tests.studies.made import check_findings, check_grids, noisy, outcomes
from vitrail.studies.framework.definition import grid
from vitrail.studies.framework.results import groups
from vitrail.studies.paper.depth_width_patch import BASE, LINES, STUDY, gains
from vitrail.train.grid.plan import Coordinate

GAIN = {"All": 0.03, "Depth": 0.04, "Patch size": 0.03, "Width MLP": 0.02, "Width": 0.01}  # for a doubling


def values(at: Mapping[str, Coordinate], gain: Mapping[str, float] = GAIN) -> dict[str, float]:
    line = str(at["line"])
    return {"accuracy": noisy(0.5 + gain.get(line, 0.0) * math.log2(float(at["compute"])), at)}


def test_the_grids_hold_together():
    check_grids(STUDY)


def test_the_paper_s_base_and_lines():
    cells = grid(STUDY, "paper")
    assert cells[0].at["shape"] == "8 x 1024, MLP 2048, patch 32"
    assert {str(cell.at["line"]) for cell in cells} == {BASE, *LINES}
    assert any(cell.at["shape"] == "64 x 1024, MLP 2048, patch 32" for cell in cells)


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_a_line_moves_its_own_dimension_alone(scale):
    base, *others = [cell.run.model for cell in grid(STUDY, scale) if cell.at["seed"] == 0]
    lines = [str(cell.at["line"]) for cell in grid(STUDY, scale) if cell.at["seed"] == 0][1:]
    field = {"Depth": "depth", "Patch size": "patch", "Width MLP": "mlp_width", "Width": "width"}
    for line, model in zip(lines, others, strict=True):
        moved = {name for name in field.values() if getattr(model, name) != getattr(base, name)}
        assert moved == {field[line]} if line in field else len(moved) > 1
        assert model.width // model.heads == base.width // base.heads


def test_compute_is_relative_to_the_base():
    cells = [cell for cell in grid(STUDY, "small") if cell.at["seed"] == 0]
    for cell in cells:
        assert cell.at["compute"] == pytest.approx(cell.run.model.macs / cells[0].run.model.macs, abs=1e-3)


def test_gains_are_for_a_doubling():
    found = gains(groups(outcomes(STUDY, "small", values)), "accuracy")
    assert {line: round(gain.each.difference, 6) for line, gain in found.items()} == GAIN


def test_the_paper_s_order_agrees():
    found = check_findings(STUDY, "small", values)
    assert "Depth +4.0" in found.sentence
    assert "most by Depth as there, least by Width as there" in found.beside
    assert found.beside.count("agrees") == 3
    assert "disagrees" not in found.beside


def test_another_order_does_not():
    found = STUDY.conclude(
        outcomes(STUDY, "small", lambda at: values(at, {**GAIN, "Width": 0.05, "Patch size": -0.01}))
    )
    assert "most by Width, not Depth, least by Patch size, not Width" in found.beside
    assert found.beside.count("disagrees") == 2


def test_a_gap_within_the_spread_is_open():
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, dict.fromkeys(LINES, 0.0))))
    assert found.beside.count("open within the spread over seeds") == 3


def test_a_line_without_outcomes_is_named():
    found = STUDY.conclude([one for one in outcomes(STUDY, "small", values) if one.at["line"] != "Depth"])
    assert "Not decided here: Depth not finished" in found.beside
    assert "Depth" not in found.sentence
