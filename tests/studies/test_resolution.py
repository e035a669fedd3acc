"""3.2: higher resolutions, with positions resized or drawn again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.studies.fake_outcomes import A, D, U, check_findings, check_grids, judge, noisy, outcomes
from vitrail.checkpoint.weights import build_fresh, load, save
from vitrail.core.errors import UnknownName
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import adapt_config
from vitrail.recipes.digits import finetune_digits
from vitrail.studies import find_study
from vitrail.studies.paper.resolution import PRETRAINING
from vitrail.train.assemble import load_starting_network
from vitrail.train.grid.plan import Coordinate

STUDY = find_study("resolution")
WIDE = ViTConfig(width=16, depth=1, mlp_width=32, heads=2, patch=(4, 4), image=(16, 16), classes=10)


def values(at: Mapping[str, Coordinate], *, up: float = 0.02, lost: float = 0.03) -> dict[str, float]:
    """Each size above the lowest brings `up`; positions drawn again lose `lost`; each scatters by seed on its own."""
    higher, drawn = int(at["size"]) > int(at["from"]), at["positions"] == "drawn"
    value = 0.7 + up * higher - lost * drawn
    for _ in range(1 + higher + drawn):
        value = noisy(value, at)
    return {"accuracy": value}


def test_the_grids_hold_together():
    check_grids(STUDY)


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_every_fine_tuning_comes_after_a_pretraining_at_the_lowest_size(scale):
    cells = {cell.name: cell for cell in STUDY.grid(scale)}
    for cell in cells.values():
        if cell.at["stage"] == PRETRAINING:
            assert not cell.after
            continue
        before = cells[cell.after]
        assert before.at["stage"] == PRETRAINING
        assert before.run.augmentation.size[0] == cell.at["from"] <= cell.at["size"]
        assert cell.run.augmentation.size[0] == cell.at["size"]
        assert cell.run.model.patch == before.run.model.patch
        assert cell.run.positions == cell.at["positions"]


def test_verdicts() -> None:
    found = check_findings(STUDY, "small", values)
    assert "+2.0 ± 0.2 points at 24 px" in found.summary
    assert "resized positions over new ones: +3.0 ± 0.2 points at 24 px" in found.summary
    assert [claim.verdict for claim in found.claims] == [A] * 6
    assert judge(STUDY, "small", lambda at: values(at, up=-0.02, lost=0.0)) == [D, D, D, U, U, U]
    assert judge(STUDY, "small", values, seeds=1) == [U] * 6
    assert judge(STUDY, "small", values, failed=["tuned-16px"]) == [A] * 3  # no low resolution to compare with


def test_seeds_are_compared_with_themselves() -> None:
    """Fine-tunings start from the weights of their seed, so the spread of these weights does not count."""
    found = STUDY.findings(
        outcomes(STUDY, "small", lambda at: {"accuracy": values(at)["accuracy"] + 0.05 * int(at["seed"])})
    )
    assert "+3.0 ± 0.2 points at 24 px" in found.summary
    assert found.verdict == A


def test_the_papers_value_is_at_its_size() -> None:
    found = STUDY.findings(outcomes(STUDY, "paper", values))
    assert {row[0]: row[-1] for row in found.table.rows} == {"224 px": "–", "384 px": "83.97", "512 px": "–"}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "before.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_fresh(WIDE)
        model.position.tables[0].table.data.fill_(1.0)
        save(model, path)
    return str(path)


def started(weights: str, positions: str, size: int, seed: int = 0, config: ViTConfig = WIDE) -> torch.Tensor:
    labels = tuple("0123456789")
    run = replace(finetune_digits(), weights=weights, positions=positions, seed=seed)
    run = replace(run, augmentation=replace(run.augmentation, crop=replace(run.augmentation.crop, size=(size, size))))
    model = adapt_config(config, image_size=size)
    run = replace(run, model=model, preprocessing=load(weights, image_size=size).card.preprocessing)
    return load_starting_network(run, len(labels))[0].state_dict()["position.tables.0.table"][0]


def test_resized_positions_are_those_of_the_weights(weights):
    assert torch.equal(started(weights, "resized", 32), torch.ones(65, 16))


def test_drawn_positions_are_new_but_for_the_class_token(weights):
    table = started(weights, "drawn", 32)
    assert torch.equal(table[0], torch.ones(16))
    assert 0.015 < table[1:].std() < 0.025
    assert torch.equal(table, started(weights, "drawn", 32))
    assert not torch.equal(table, started(weights, "drawn", 32, seed=1))


def test_at_the_same_size_nothing_is_drawn(weights):
    assert torch.equal(started(weights, "drawn", 16), torch.ones(17, 16))


def test_positions_of_two_tables_are_drawn_too(tmp_path):
    config = replace(WIDE, position="learned2d")
    model = build_fresh(config)
    for table in model.position.parameters():
        table.data.fill_(1.0)
    save(model, tmp_path / "two.safetensors")
    run = replace(finetune_digits(), weights=str(tmp_path / "two.safetensors"), positions="drawn")
    run = replace(
        run,
        model=adapt_config(config, image_size=32),
        preprocessing=load(run.weights, image_size=32).card.preprocessing,
    )
    tables = load_starting_network(run, 10)[0].state_dict()
    assert torch.equal(tables["position.tables.0.prefix"], torch.ones(1, 1, 16))
    for name in ("rows", "columns"):
        assert tables[f"position.tables.0.{name}"].shape == (8, 8)
        assert tables[f"position.tables.0.{name}"].abs().max() < 0.2


def test_another_word_is_refused():
    with pytest.raises(UnknownName, match="positions"):
        replace(finetune_digits(), positions="stretched")
