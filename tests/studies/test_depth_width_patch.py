"""D.2: what each line gains per doubling of compute."""

import math
from collections.abc import Mapping

import pytest

from tests.studies.fake_outcomes import A, D, U, check_findings, check_grids, judge, noisy, outcomes
from vitrail.models.vit_config import vit_config
from vitrail.studies import find_study
from vitrail.studies.definition import Scale
from vitrail.studies.paper.depth_width_patch import BASE, LINES, measure_gains
from vitrail.studies.statistics import group_by_seed
from vitrail.train.grid.plan import Coordinate

STUDY = find_study("shape")
GAIN = {"All": 0.03, "Depth": 0.04, "Patch size": 0.03, "Width MLP": 0.02, "Width": 0.01}  # per doubling


def values(at: Mapping[str, Coordinate], gain: Mapping[str, float] = GAIN) -> dict[str, float]:
    return {"accuracy": noisy(0.5 + gain.get(str(at["line"]), 0.0) * math.log2(float(at["compute"])), at)}


def test_the_papers_base_and_lines() -> None:
    check_grids(STUDY)
    cells = STUDY.grid("paper")
    assert cells[0].at["shape"] == "8 x 1024, MLP 2048, patch 32"
    assert {str(cell.at["line"]) for cell in cells} == {BASE, *LINES}
    assert any(cell.at["shape"] == "64 x 1024, MLP 2048, patch 32" for cell in cells)


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_a_line_moves_its_own_dimension_alone(scale: Scale) -> None:
    cells = [cell for cell in STUDY.grid(scale) if cell.at["seed"] == 0]
    base, *others = (vit_config(cell.run.model) for cell in cells if cell.run.model is not None)
    field = {"Depth": "depth", "Patch size": "patch", "Width MLP": "mlp_width", "Width": "width"}
    for cell, model in zip(cells[1:], others, strict=True):
        line = str(cell.at["line"])
        moved = {name for name in field.values() if getattr(model, name) != getattr(base, name)}
        assert moved == {field[line]} if line in field else len(moved) > 1
        assert model.width // model.heads == base.width // base.heads
        assert cell.at["compute"] == pytest.approx(model.macs / base.macs, abs=1e-3)


def test_gains_are_per_doubling() -> None:
    found = measure_gains(group_by_seed(outcomes(STUDY, "small", values)), "accuracy")
    assert {line: round(gain.per_doubling.difference, 6) for line, gain in found.items()} == GAIN


def test_verdicts() -> None:
    found = check_findings(STUDY, "small", values)
    assert "Depth +4.0" in found.summary
    assert found.verdict == A
    other = {**GAIN, "Width": 0.05, "Patch size": -0.01}
    assert judge(STUDY, "small", lambda at: values(at, other)) == [D, D, D, A]
    assert judge(STUDY, "small", lambda at: values(at, dict.fromkeys(LINES, 0.0)))[1:] == [U, U, U]
    assert judge(STUDY, "small", values, seeds=1) == [U] * 4


def test_without_a_line_nothing_is_judged() -> None:
    found = STUDY.findings([one for one in outcomes(STUDY, "small", values) if one.at["line"] != "Depth"])
    assert not found.claims
    assert "Depth" not in found.summary
