"""D.6: axial networks next to their plain kin, in accuracy, compute and speed."""

from collections.abc import Mapping

import pytest

from tests.studies.made import check_findings, check_grids, noisy, outcomes
from vitrail.studies.framework.definition import grid
from vitrail.studies.paper.axial import READINGS, STUDY
from vitrail.train.grid.plan import Coordinate


def values(at: Mapping[str, Coordinate], gain: float = 0.02) -> dict[str, float]:
    """Twice the compute and half the speed for `gain`."""
    axial = at["attention"] == "axial"
    return {
        "accuracy": noisy(0.8 + gain * axial, at),
        "exaflops": 0.002 if axial else 0.001,
        "images": 7200.0,
        "device_hours": 2.0 if axial else 1.0,
    }


def test_the_grids_hold_together():
    check_grids(STUDY)


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_a_pair_differs_by_its_attention_and_an_axial_one_costs_more(scale):
    cells = [cell for cell in grid(STUDY, scale) if cell.at["seed"] == 0]
    for plain, axial in zip(cells[::2], cells[1::2], strict=True):
        assert plain.at["pair"] == axial.at["pair"] == plain.at["network"]
        assert (plain.at["attention"], axial.at["attention"]) == ("plain", "axial")
        assert axial.run.model.macs > plain.run.model.macs
        assert plain.run.optim == axial.run.optim


def test_the_paper_s_networks():
    assert {str(cell.at["network"]) for cell in grid(STUDY, "paper")} == set(READINGS)


def test_a_gain_agrees():
    found = check_findings(STUDY, "small", values)
    assert "ViT-Mini/4 +2.0" in found.sentence
    assert "at 2 times the compute and 0.5 times the speed" in found.sentence
    assert found.beside.count("better, as there, at more compute, slower") == 3
    assert found.table.rows[0][1:4] == ("80.0 ± 0.2", "0.001", "2 ± 0")


def test_a_loss_does_not():
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, gain=-0.02)))
    assert found.beside.count("worse, unlike there") == 3


def test_equals_are_not_decided():
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, gain=0.0)))
    assert found.beside.count("undecided (no difference beyond the spread over seeds)") == 3


def test_a_failed_network_leaves_the_other_pairs():
    found = STUDY.conclude(outcomes(STUDY, "small", values, failed=["Axial-mini-R14"]))
    assert "mini-R14 " not in found.sentence.partition(" cells failed")[0]
    assert found.beside.count("better, as there") == 2
    assert found.table.rows[-1][1:4] == ("–", "–", "–")


def test_readings_stand_beside_as_readings():
    found = STUDY.conclude(outcomes(STUDY, "paper", lambda at: {**values(at), "fewshot-5": 0.6}))
    assert all(row[-1].startswith("about") for row in found.table.rows)
