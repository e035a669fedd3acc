"""D.6: axial networks next to their plain counterparts, in accuracy, compute and speed."""

from collections.abc import Mapping

import pytest

from tests.studies.fake_outcomes import A, D, U, check_findings, check_grids, judge, noisy, outcomes
from vitrail.studies import find_study
from vitrail.studies.definition import Scale
from vitrail.studies.paper.axial import READINGS
from vitrail.train.grid.plan import Coordinate

STUDY = find_study("axial")


def values(at: Mapping[str, Coordinate], gain: float = 0.02) -> dict[str, float]:
    """Twice the compute and half the speed for `gain`."""
    axial = at["attention"] == "axial"
    return {
        "accuracy": noisy(0.8 + gain * axial, at),
        "exaflops": 0.002 if axial else 0.001,
        "images": 7200.0,
        "device_hours": 2.0 if axial else 1.0,
    }


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_a_pair_differs_by_its_attention_and_an_axial_one_costs_more(scale: Scale) -> None:
    cells = [cell for cell in STUDY.grid(scale) if cell.at["seed"] == 0]
    seeds = len(STUDY.grid(scale)) // len(cells)
    assert [cell.at["attention"] for cell in STUDY.grid(scale)[::seeds]] == ["plain", "axial"] * (len(cells) // 2)
    for plain, axial in zip(cells[::2], cells[1::2], strict=True):
        assert plain.at["pair"] == axial.at["pair"] == plain.at["network"]
        assert plain.run.model is not None
        assert axial.run.model is not None
        assert axial.run.model.macs > plain.run.model.macs
        assert plain.run.optim == axial.run.optim


def test_grids() -> None:
    check_grids(STUDY)
    assert {str(cell.at["network"]) for cell in STUDY.grid("paper")} == set(READINGS)


def test_verdicts() -> None:
    found = check_findings(STUDY, "small", values)
    assert "ViT-Mini/4 +2.0" in found.summary
    assert "at 2 times the compute and 0.5 times the speed" in found.summary
    assert found.table.rows[0][1:4] == ("80.0 ± 0.2", "0.001", "2 ± 0")
    assert [claim.verdict for claim in found.claims] == [A] * 3
    assert judge(STUDY, "small", lambda at: values(at, gain=-0.02)) == [D] * 3
    assert judge(STUDY, "small", lambda at: values(at, gain=0.0)) == [U] * 3


def test_a_failed_network_leaves_the_other_pairs() -> None:
    found = STUDY.findings(outcomes(STUDY, "small", values, failed=["Axial-mini-R14"]))
    assert len(found.claims) == 2
    assert found.table.rows[-1][1:4] == ("–", "–", "–")


def test_readings_are_marked_as_such() -> None:
    found = STUDY.findings(outcomes(STUDY, "paper", lambda at: {**values(at), "fewshot-5": 0.6}))
    assert all(row[-1].startswith("about") for row in found.table.rows)
