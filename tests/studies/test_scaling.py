"""4.4: what equal accuracy costs each family, by the numbers."""

from collections.abc import Mapping

import pytest

from tests.studies.fake_outcomes import A, D, P, U, check_findings, judge, noisy, outcomes
from vitrail.core.paper_tables import AVERAGE_5, TABLE_6
from vitrail.models.zoo import model_config
from vitrail.studies import find_study
from vitrail.studies.definition import Scale
from vitrail.studies.paper.scaling import SMALL, SMALL_STEPS, TINY, TINY_STEPS, build_lines, collect_networks
from vitrail.train.grid.plan import CellOutcome, Coordinate

STUDY = find_study("scaling")
TRAININGS = len(SMALL["ViT"]) * len(SMALL_STEPS)


def place_of(at: Mapping[str, Coordinate]) -> int:
    """Of a training among those of its family, network by network, the short ones first."""
    lengths = [f"{steps:,} steps" for steps in SMALL_STEPS]
    return list(SMALL[str(at["family"])]).index(str(at["network"])) * len(lengths) + lengths.index(str(at["length"]))


def values(at: Mapping[str, Coordinate], needs: float = 3.0, lead: float = 0.02) -> dict[str, float]:
    """Error 0.5·C^-0.3 for ViTs; ResNets need some times as much, hybrids have a lead that is gone at the largest."""
    place = place_of(at)
    compute = 10.0**place
    error = 0.5 * (compute / (needs if at["family"] == "BiT" else 1.0)) ** -0.3
    ahead = lead * (1 - place / (TRAININGS - 1)) if at["family"] == "hybrid" else 0.0
    return {"exaflops": compute, "accuracy": noisy(1 - error + ahead, at)}


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_the_grid_has_three_families_of_growing_compute(scale: Scale) -> None:
    cells = STUDY.grid(scale)
    assert {cell.at["family"] for cell in cells} == {"ViT", "BiT", "hybrid"}
    for family in ("ViT", "BiT", "hybrid"):
        ones = [cell for cell in cells if cell.at["family"] == family and cell.at["seed"] == 0]
        costs = {(cell.run.model.macs, cell.run.steps) for cell in ones if cell.run.model is not None}
        assert [cell.run.model.macs for cell in ones if cell.run.model is not None] == [
            cost for cost, _ in sorted(costs)
        ]
        assert len({cost * steps for cost, steps in costs}) >= 3
        assert {steps for _, steps in costs} == {cell.run.steps for cell in cells}


def test_families_share_a_range_of_compute() -> None:
    """By what the trainings cost, and by what an image does, for the same number of steps."""
    costs: dict[str, list[int]] = {}
    networks: dict[str, list[int]] = {}
    for cell in STUDY.grid("small"):
        assert cell.run.model is not None
        networks.setdefault(str(cell.at["family"]), []).append(cell.run.model.macs)
        costs.setdefault(str(cell.at["family"]), []).append(cell.run.model.macs * cell.run.steps)
    for some, factor in ((costs, 5), (networks, 1)):
        assert max(min(ones) for ones in some.values()) * factor < min(max(ones) for ones in some.values())


def test_other_pictures_make_other_networks() -> None:
    for cell in STUDY.grid("small", "fashion-mnist"):
        assert cell.run.model is not None
        assert cell.run.model.image == (28, 28)
        assert cell.run.data.source == "fashion-mnist"


def test_the_papers_grid_is_table_6_with_five_fine_tunings_each() -> None:
    cells = {cell.name: cell for cell in STUDY.grid("paper", "jft")}
    assert len(cells) == len(TABLE_6) * (1 + len(AVERAGE_5))
    firsts = [cell for cell in cells.values() if not cell.after]
    for cell, row in zip(firsts, TABLE_6, strict=True):
        assert (cell.run.epochs, cell.run.data.source) == (row.epochs, "jft")
        expected = model_config(row.network)
        assert cell.run.model is not None
        assert cell.run.model.macs == pytest.approx(expected.macs, rel=0.1)
    tuned = cells["vit_h_14-14ep-pets"]
    assert (tuned.after, tuned.run.augmentation.size, tuned.run.steps) == ("vit_h_14-14ep", (378, 378), 500)
    assert (tuned.run.data.source, tuned.run.data.dev, tuned.run.data.test) == ("pets", 0.0, "auto")
    assert cells["vit_l_16-7ep-imagenet"].run.augmentation.size == (384, 384)


def test_verdicts() -> None:
    found = check_findings(STUDY, "small", values)
    assert found.summary.startswith("BiT ResNets need 3")
    assert found.verdict == A
    assert judge(STUDY, "small", lambda at: values(at, needs=0.3))[0] == D
    assert judge(STUDY, "small", lambda at: values(at, needs=8.0))[0] == P
    assert judge(STUDY, "small", lambda at: values(at, lead=-0.02)) == [A, D]
    assert judge(STUDY, "small", values, seeds=1) == [U, U]


@pytest.mark.parametrize("lead", [-0.003, 0.0, 0.003])
def test_a_lead_of_hybrids_within_the_spread_of_the_seeds_decides_nothing(lead: float) -> None:
    def scattered(at: Mapping[str, Coordinate]) -> dict[str, float]:
        found = values(at, lead=lead)
        swing = 0.004 * (int(str(at["seed"])) - 1) if at["family"] == "hybrid" else 0.0
        return {**found, "accuracy": found["accuracy"] + swing}

    assert judge(STUDY, "small", scattered)[1] == U


def test_resnets_that_are_all_above_every_vit() -> None:
    """The families then share no accuracy, and still it is clear which one needs less."""

    def lifted(at: Mapping[str, Coordinate]) -> dict[str, float]:
        place = place_of(at)
        accuracy = {"ViT": 0.5, "BiT": 0.8, "hybrid": 0.6}[str(at["family"])] + 0.01 * place
        return {"exaflops": 10.0 ** (place + (at["family"] != "BiT")), "accuracy": accuracy}

    found = STUDY.findings(outcomes(STUDY, "small", lifted))
    assert f"with at most {10.0**-TRAININGS:.2g} times its compute" in found.summary
    assert found.claims[0].verdict == D
    assert judge(STUDY, "small", lifted, seeds=1)[0] == U


def test_a_family_whose_largest_network_is_not_its_best_is_compared_all_the_same() -> None:
    """The frontier of hybrids that get worse with size is one point, and a larger budget still buys that."""

    def falling(at: Mapping[str, Coordinate]) -> dict[str, float]:
        place = place_of(at)
        accuracy = 0.8 - 0.02 * place if at["family"] == "hybrid" else 0.7 + 0.01 * place
        return {"exaflops": 10.0**place, "accuracy": noisy(accuracy, at)}

    assert judge(STUDY, "small", falling)[1] == A


def test_the_fitted_frontier_has_the_exponent_of_the_points() -> None:
    vits = [one for one in outcomes(STUDY, "small", values) if one.at["family"] == "ViT"]
    assert "the error falls as compute^-0.30" in STUDY.findings(vits).summary


def papers(own: bool = True) -> list[CellOutcome]:
    """Outcomes of the paper's grid as Table 6 prints them."""
    rows = {(row.network, row.epochs): row for row in TABLE_6}
    out: list[CellOutcome] = []
    for cell in STUDY.grid("paper"):
        row = rows[str(cell.at["network"]), int(str(cell.at["length"]).split()[0])]
        tuned = cell.at["task"] in AVERAGE_5
        values = {"accuracy": row.accuracy[str(cell.at["task"])] / 100} if tuned else {"exaflops": row.exaflops}
        if tuned or own:
            out.append(CellOutcome(cell=cell.name, at=cell.at, values=values))
    return out


def test_a_network_that_was_trained_for_several_lengths_has_a_line_of_its_own() -> None:
    networks = collect_networks(outcomes(STUDY, "tiny", lambda at: {"exaflops": float(len(str(at))), "accuracy": 0.5}))
    lines = build_lines(networks)
    assert [line.name for line in lines] == [name for named in TINY.values() for name in named]
    assert {len(line.points) for line in lines} == {len(TINY_STEPS)}
    same = [one for one in networks if one.length == networks[0].length]
    assert [line.name for line in build_lines(same)] == ["ViTs", "BiT ResNets", "hybrids"]


def test_table_6_is_next_to_itself() -> None:
    rows = STUDY.findings(papers()).table.rows
    assert len(rows) == len(TABLE_6)
    for row in rows:
        assert float(row[2].replace("e+03", "e3")) == pytest.approx(float(row[5]), rel=0.01)
        assert float(row[3]) == pytest.approx(float(row[6]), abs=0.051)


def test_a_row_counts_once_all_its_fine_tunings_are_there() -> None:
    some = [one for one in papers() if one.at["task"] != "pets" or one.at["network"] != "ViT-H/14"]
    assert len(STUDY.findings(some).table.rows) == len(TABLE_6) - 1
    assert not STUDY.findings(papers(own=False)).table.rows
