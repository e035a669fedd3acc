"""Grids: what they must be, their seeds, and what they cost before anything is opened."""

from dataclasses import replace
from typing import Any

import pytest

from tests.studies.tiny_study import TINY, quick
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.core.paper_tables import printed_exaflops
from vitrail.models.zoo import model_config
from vitrail.recipes.registry import load_recipe
from vitrail.recipes.run_overrides import with_image_size
from vitrail.studies import STUDIES, find_study
from vitrail.studies import cost_estimate as costs
from vitrail.studies.definition import check_grid, repeat_seeds
from vitrail.train.config import Data, RunRequest, to_stage
from vitrail.train.grid.plan import Cell

SPEED = costs.DeviceSpeed(device="a card", peak=1e15, step_s=0.0, start_s=0.0)


def cell(name: str, seed: int | None = None, after: str = "", **at: Any) -> Cell:
    places = at if seed is None else {**at, "seed": seed}
    return Cell(name=name, at=places, run=quick(seed=seed or 0), after=after)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([cell("a/b")], "letters, digits"),
        ([cell("..")], "letters, digits"),
        ([cell("a"), cell("a")], "two cells are called a"),
        ([cell("a", after="b")], "after b, which is not a cell"),
        ([cell("a", after="b"), cell("b", after="a")], "in turn"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(cells: list[Cell], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_grid("grid", cells)


def test_seeds_are_left_out_or_made() -> None:
    cells = [cell(f"x-seed{seed}", seed, x=1) for seed in (0, 1)]
    assert repeat_seeds(cells, 1) == (cells[0],)
    more = repeat_seeds(cells, 11)
    assert [one.name for one in more] == [f"x-seed{seed}" for seed in range(11)]
    assert [one.run.seed for one in more] == [one.at["seed"] for one in more] == list(range(11))
    assert [one.name for one in TINY.grid("tiny", seeds=2)] == [
        *("first-0", "first-1", "second-0", "second-1", "third-0", "third-1")
    ]
    assert TINY.grid("tiny", seeds=2)[-1].after == "first-1"


def test_weights_that_all_seeds_start_from_are_not_trained_more_often() -> None:
    base = cell("base-0", 0, stage="base")
    tuned = [cell(f"tuned-{seed}", seed, after="base-0", stage="tuned") for seed in range(2)]
    found = repeat_seeds([base, *tuned], 3)
    assert [(one.name, one.after) for one in found] == [
        *(("base-0", ""), ("tuned-0", "base-0"), ("tuned-1", "base-0"), ("tuned-2", "base-0"))
    ]
    single = repeat_seeds([cell("base", stage="base"), cell("on-0", 0, after="base", stage="on")], 2)
    assert [(one.name, one.after) for one in single] == [("base", ""), ("on-0", "base"), ("on-1", "base")]


def test_two_cells_at_one_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="a and b are at the same place"):
        repeat_seeds([cell("a", 0), cell("b", 0)], 2)


@pytest.mark.parametrize("name", ["vit-b16-jft", "vit-l16-jft", "vit-l16-jft-14ep", "vit-h14-jft"])
def test_the_papers_exaflops_without_its_pictures(name: str) -> None:
    """Table 6, from the recipe alone: JFT-300M is nowhere."""
    run = load_recipe(name)
    network = costs.estimate_costs([Cell(name="a", at={}, run=run)], SPEED)["a"]
    printed = printed_exaflops(network.network, run.epochs)
    assert printed is not None
    assert network.exaflops == pytest.approx(printed, rel=0.03)
    assert network.images == 303_000_000
    assert network.hours == pytest.approx(network.exaflops * 1e18 / 0.4e15 / 3600)


def test_sizes_are_those_that_were_published_part_and_dev_taken_off() -> None:
    run = replace(
        load_recipe("cifar10"), data=Data(source="cifar10:/nowhere", part=0.1, dev=0.2), steps=0, epochs=2, batch=100
    )
    found = costs.estimate_costs([Cell(name="a", at={}, run=run)], SPEED)["a"]
    assert (found.images, found.steps) == (4000, 80)
    lost = replace(run, data=Data(source="/nowhere/at/all"))
    assert costs.estimate_costs([Cell(name="a", at={}, run=lost)], SPEED)["a"].hours is None
    counted = replace(lost, epochs=0.0, steps=7)  # steps need no images to be counted
    assert costs.estimate_costs([Cell(name="a", at={}, run=counted)], SPEED)["a"].steps == 7


def test_a_cell_without_a_network_has_that_of_the_cell_it_starts_from_at_its_own_size() -> None:
    first = Cell(name="first", at={}, run=with_image_size(quick(), 16))
    second = Cell(name="second", at={}, run=to_stage(RunRequest, quick(), model=None), after="first")
    assert costs.find_model(first, {}) == first.run.model
    found = costs.find_model(second, {"first": first})
    assert found is not None
    assert found.image == (8, 8)
    assert costs.find_model(replace(second, after=""), {}) is None


def test_hours_count_steps_and_starts() -> None:
    speed = costs.DeviceSpeed(device="x", peak=1e12, step_s=0.01, start_s=6.0)
    assert speed.hours(0.4e12 * 30, 100) * 3600 == pytest.approx(30 + 1 + 6)
    assert costs.estimate_speed("cpu", for_gpu=True).device == "one H200"
    assert "CPU" in costs.estimate_speed("cpu", for_gpu=False).device


def test_a_study_is_found_by_its_name() -> None:
    for name, entry in STUDIES.items():
        found = find_study(name.replace("-", "_"))
        assert (found.name, found.title, found.anchor) == (name, entry.title, entry.anchor)
    with pytest.raises(UnknownName, match="did you mean positions"):
        find_study("position")


def test_a_tiny_grid_takes_a_minute_of_training_on_a_slow_core() -> None:
    core = costs.DeviceSpeed(device="a slow core", peak=40e9, step_s=5e-3, start_s=0.5)
    for name in STUDIES:
        hours = [cost.hours for cost in costs.estimate_costs(find_study(name).grid("tiny"), core).values()]
        assert None not in hours
        assert 3600 * sum(each for each in hours if each is not None) < 60


def test_a_network_by_its_name() -> None:
    run = replace(load_recipe("vit-b16-imagenet21k"), model=model_config("ViT-B/32", classes=21_843))
    assert costs.estimate_costs([Cell(name="a", at={}, run=run)], SPEED)["a"].network == "ViT-B/32"


def test_more_seeds_draw_other_parts_of_the_data() -> None:
    found = find_study("data-size").grid("tiny", seeds=4)
    assert {cell.at["seed"] for cell in found} == {0, 1, 2, 3}
    assert all(cell.run.data.part_seed == cell.at["seed"] for cell in found if cell.run.data.part < 1)
