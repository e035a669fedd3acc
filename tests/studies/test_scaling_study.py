"""4.4: what equal accuracy costs each family, by the numbers."""

from collections.abc import Mapping

import pytest

from tests.studies.made import check_findings, noisy, outcomes
from vitrail.core.paper_tables import AVERAGE_5, TABLE_6
from vitrail.models.zoo import model_config
from vitrail.studies.framework.definition import grid
from vitrail.studies.paper.scaling import SMALL, SMALL_LENGTHS, STUDY, TINY, TINY_LENGTHS
from vitrail.studies.paper.scaling_findings import lines_of, networks_of
from vitrail.train.grid.plan import CellOutcome, Coordinate

TRAININGS = len(SMALL["ViT"]) * len(SMALL_LENGTHS)


def place_of(at: Mapping[str, Coordinate]) -> int:
    """Of a training among those of its family, network by network, the short ones first."""
    lengths = [f"{steps:,} steps" for steps in SMALL_LENGTHS]
    return list(SMALL[str(at["family"])]).index(str(at["network"])) * len(lengths) + lengths.index(str(at["length"]))


def values(at: Mapping[str, Coordinate], needs: float = 3.0, lead: float = 0.02) -> dict[str, float]:
    """Error 0.5·C^-0.3 for ViTs; ResNets need some times as much, hybrids have a lead that is gone at the largest."""
    place = place_of(at)
    compute = 10.0**place
    error = 0.5 * (compute / (needs if at["family"] == "BiT" else 1.0)) ** -0.3
    ahead = lead * (1 - place / (TRAININGS - 1)) if at["family"] == "hybrid" else 0.0
    return {"exaflops": compute, "accuracy": noisy(1 - error + ahead, at)}


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_the_grid_has_three_families_of_growing_compute(scale: str) -> None:
    cells = grid(STUDY, scale)  # type: ignore[arg-type]
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
    for cell in grid(STUDY, "small"):
        assert cell.run.model is not None
        networks.setdefault(str(cell.at["family"]), []).append(cell.run.model.macs)
        costs.setdefault(str(cell.at["family"]), []).append(cell.run.model.macs * cell.run.steps)
    for some, factor in ((costs, 5), (networks, 1)):
        assert max(min(ones) for ones in some.values()) * factor < min(max(ones) for ones in some.values())


def test_other_pictures_make_other_networks() -> None:
    for cell in grid(STUDY, "small", "fashion-mnist"):
        assert cell.run.model is not None
        assert cell.run.model.image == (28, 28)
        assert cell.run.data.source == "fashion-mnist"


def test_the_papers_grid_is_table_6_with_five_fine_tunings_each() -> None:
    cells = {cell.name: cell for cell in grid(STUDY, "paper", "jft")}
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


def test_what_the_paper_found_agrees() -> None:
    found = check_findings(STUDY, "small", values)
    assert found.sentence.startswith("BiT ResNets need 3")
    assert "agrees, ResNets need 3" in found.beside
    assert "agrees, hybrids are ahead and their lead shrinks" in found.beside
    assert "disagrees" not in found.beside


def test_resnets_that_need_less_disagree() -> None:
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, needs=0.3)))
    assert "disagrees, ResNets need less compute than ViTs" in found.beside


def test_another_factor_is_told_as_such() -> None:
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, needs=8.0)))
    assert "agrees that ViTs need less, by another factor" in found.beside


def test_hybrids_without_a_lead() -> None:
    found = STUDY.conclude(outcomes(STUDY, "small", lambda at: values(at, lead=0.0)))
    assert "hybrids are not ahead at small budgets" in found.beside


def test_resnets_that_are_all_above_every_vit() -> None:
    """Nothing costs both families something then, and still the study knows who needs less."""

    def lifted(at: Mapping[str, Coordinate]) -> dict[str, float]:
        place = place_of(at)
        accuracy = {"ViT": 0.5, "BiT": 0.8, "hybrid": 0.6}[str(at["family"])] + 0.01 * place
        return {"exaflops": 10.0 ** (place + (at["family"] != "BiT")), "accuracy": accuracy}

    found = STUDY.conclude(outcomes(STUDY, "small", lifted))
    best = f"{10.0**-TRAININGS:.2g}"
    told = (
        f"lready the cheapest of the BiT ResNets is above the best of the ViTs, with at most {best} times its compute"
    )
    assert found.sentence.startswith(f"A{told}; already the cheapest of the hybrids is above the best of the ViTs")
    assert f"disagrees, a{told}" in found.beside
    one = [each for each in outcomes(STUDY, "small", lifted) if each.at["seed"] == 0]
    assert f"Here: a{told}, of one seed, so that nothing is decided" in STUDY.conclude(one).beside


def test_a_family_whose_largest_network_is_not_its_best_is_compared_all_the_same() -> None:
    """Of hybrids that get worse with size the frontier is one point, and a larger budget still buys that."""

    def falling(at: Mapping[str, Coordinate]) -> dict[str, float]:
        place = place_of(at)
        accuracy = 0.8 - 0.02 * place if at["family"] == "hybrid" else 0.7 + 0.01 * place
        return {"exaflops": 10.0**place, "accuracy": noisy(accuracy, at)}

    beside = STUDY.conclude(outcomes(STUDY, "small", falling)).beside
    assert "agrees, hybrids are ahead and their lead shrinks (+10" in beside
    assert "one seed" not in beside.split(";")[-1]


def test_the_fitted_frontier_has_the_exponent_of_the_points() -> None:
    vits = [one for one in outcomes(STUDY, "small", values) if one.at["family"] == "ViT"]
    assert "the error falls as compute^-0.30" in STUDY.conclude(vits).sentence


def test_one_seed_decides_nothing() -> None:
    one = [each for each in outcomes(STUDY, "small", values) if each.at["seed"] == 0]
    assert STUDY.conclude(one).beside.count("nothing is decided") == 2


def papers(own: bool = True) -> list[CellOutcome]:
    """Outcomes of the paper's grid as Table 6 prints them."""
    rows = {(row.network, row.epochs): row for row in TABLE_6}
    out: list[CellOutcome] = []
    for cell in grid(STUDY, "paper"):
        row = rows[str(cell.at["network"]), int(str(cell.at["length"]).split()[0])]
        tuned = cell.at["task"] in AVERAGE_5
        values = {"accuracy": row.accuracy[str(cell.at["task"])] / 100} if tuned else {"exaflops": row.exaflops}
        if tuned or own:
            out.append(CellOutcome(cell=cell.name, at=cell.at, values=values))
    return out


def test_a_network_that_was_trained_for_several_lengths_has_a_line_of_its_own() -> None:
    networks = networks_of(outcomes(STUDY, "tiny", lambda at: {"exaflops": float(len(str(at))), "accuracy": 0.5}))
    lines = lines_of(networks)
    assert [line.name for line in lines] == [name for named in TINY.values() for name in named]
    assert {len(line.points) for line in lines} == {len(TINY_LENGTHS)}
    same = [one for one in networks if one.length == networks[0].length]
    assert [line.name for line in lines_of(same)] == ["ViTs", "BiT ResNets", "hybrids"]


def test_table_6_stands_beside_itself() -> None:
    rows = STUDY.conclude(papers()).table.rows
    assert len(rows) == len(TABLE_6)
    for row in rows:
        assert float(row[2].replace("e+03", "e3")) == pytest.approx(float(row[5]), rel=0.01)
        assert float(row[3]) == pytest.approx(float(row[6]), abs=0.051)


def test_a_row_counts_once_all_its_fine_tunings_are_there() -> None:
    some = [one for one in papers() if one.at["task"] != "pets" or one.at["network"] != "ViT-H/14"]
    assert len(STUDY.conclude(some).table.rows) == len(TABLE_6) - 1
    assert not STUDY.conclude(papers(own=False)).table.rows
