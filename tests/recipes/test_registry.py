"""Every recipe: found by name, told in a line, built, changed and stored."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import pytest

from vitrail.core.config_overrides import apply_settings, from_plain, list_fields, to_plain
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.data.transforms.batched import BatchedAugmentation
from vitrail.recipes.registry import GROUPS, PREFIXES, RecipeEntry, find_recipe, is_recipe, list_recipes, load_recipe
from vitrail.recipes.run_overrides import GRIDS, find_sweep_grid
from vitrail.train.config import Run, RunRequest, to_stage

EVERY = list(list_recipes())


def function_of(entry: RecipeEntry) -> Any:
    return getattr(import_module(f"vitrail.recipes.{entry.module}"), entry.name.rpartition("/")[2].replace("-", "_"))


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_builds_and_bears_its_name(name: str) -> None:
    run = load_recipe(name)
    assert isinstance(run, RunRequest)
    assert run.name == name
    assert load_recipe(name.replace("-", "_")) == run


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_is_told_in_a_line(name: str) -> None:
    entry = list_recipes()[name]
    assert 20 < len(entry.help) <= 115
    assert not entry.help.endswith(".")
    assert entry.text == (function_of(entry).__doc__ or "").replace("\n    ", "\n")


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_is_stored_and_printed_without_loss(name: str) -> None:
    run = load_recipe(name)
    assert from_plain(type(run), json.loads(json.dumps(to_plain(run)))) == run
    lines = list_fields(run)
    assert len({line.name for line in lines}) == len(lines)
    other = to_stage(RunRequest, load_recipe("cifar10"))
    assert apply_settings(other, [f"{line.name}={line.text}" for line in lines]) == to_stage(RunRequest, run)


def test_no_two_recipes_are_the_same_run() -> None:
    runs = [json.dumps({**to_plain(load_recipe(name)), "name": ""}) for name in EVERY]
    assert len(set(runs)) == len(runs)


def test_the_list_is_what_the_modules_offer() -> None:
    """Public functions that take nothing and return a run, by inspection of the imported modules."""
    offered = {
        PREFIXES.get(module, "") + name.replace("_", "-")
        for module in {module for module, _ in GROUPS.values()}
        for name, function in vars(import_module(f"vitrail.recipes.{module}")).items()
        if getattr(function, "__module__", "") == f"vitrail.recipes.{module}" and not name.startswith("_")
        if callable(function) and signature(function).return_annotation in (Run, RunRequest)
        if all(each.default is not Parameter.empty for each in signature(function).parameters.values())
    }
    assert offered == set(EVERY)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("def a() -> Run: ...", True),
        ("def a() -> RunRequest: ...", True),
        ("def _a() -> Run: ...", False),
        ("def a(x: int) -> Run: ...", False),
        ("def a(*, x: int) -> Run: ...", False),
        ("def a() -> int: ...", False),
        ("def a(): ...", False),
    ],
)
def test_what_counts_as_a_recipe(text: str, counts: bool) -> None:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert is_recipe(node) == counts


def test_a_misspelt_recipe_is_helped() -> None:
    with pytest.raises(UnknownName, match=r"unknown recipe 'cifar-10'; did you mean cifar10.* `vitrail recipes` lists"):
        find_recipe("cifar-10")


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from vitrail.recipes.registry import list_recipes; list_recipes(); "
        "sys.exit(' '.join({'torch', 'numpy', 'vitrail.train'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, entry in list_recipes().items()
        if (entry.module in ("small_images", "digits") and not name.startswith("segment"))
        or (name.startswith("selfsup/") and "16" not in name)
    ],
)
def test_small_recipes_can_live_on_the_device(name: str) -> None:
    """Their augmentation has a batched form, and images are mixed in whole pairs."""
    run = load_recipe(name)
    for view in run.objective.views(run.augmentation):
        assert BatchedAugmentation(view).size == view.size
    assert run.batch % 2 == 0
    assert run.data.watch in ("test", "any", "auto")  # watched, never chosen by


@pytest.mark.parametrize("name", GRIDS)
def test_every_point_of_a_grid_is_a_run(name: str) -> None:
    run = load_recipe(name)
    for setting, values in find_sweep_grid(name).items():
        current = {line.name: line.text for line in list_fields(run)}[setting]
        assert float(current) in values
        for value in values:
            found = apply_settings(run, [f"{setting}={value}"])
            assert (to_plain(found) == to_plain(run)) == (value == float(current))


def test_grids_for_what_has_none_of_its_own() -> None:
    assert find_sweep_grid("bit-finetune-pets") == {"optim.lr": (0.001, 0.003, 0.01, 0.03)}
    with pytest.raises(ConfigError, match="cifar10 has no grid; give one: --sweep"):
        find_sweep_grid("cifar10")
