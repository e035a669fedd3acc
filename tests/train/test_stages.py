"""The three stages of a run: what a request may leave open, what a run has, and what is chosen once it is resolved."""

import json
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
import torch

from tests.train.selfsup import selfsup_run
from tests.train.tiny import tiny_run
from vitrail.core.config_overrides import diff_plain, field_types, from_plain, list_fields, to_plain, union_members
from vitrail.core.errors import ConfigError
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed.process_group import World
from vitrail.recipes.registry import list_recipes, load_recipe
from vitrail.recipes.run_overrides import start_from, with_changes
from vitrail.tasks.registry import task_of
from vitrail.train.config import Data, ResolvedRun, Run, RunRequest, Scoring, configure, to_stage
from vitrail.train.data import open_splits
from vitrail.train.loop import train
from vitrail.train.resolve import resolve
from vitrail.train.resume import check_same_run, read_run
from vitrail.train.run_folder.files import CONFIG

ALONE = World(device=torch.device("cpu"))
CHOSEN = {"precision": "float32", "compile": "off", "sharding": "none", "baseline": "off"}


def open_run(**changes: Any) -> Run:
    """A run that leaves open all that can be."""
    data = Data(source="digits", dev=0.02)
    return tiny_run(data=data, micro=0, steps=0, epochs=1.0, evaluation=Scoring(), **changes)


def resolved(run: Run) -> ResolvedRun:
    return resolve(run, open_splits(run.data, task_of(run.objective)), ALONE)


@pytest.mark.parametrize("make", [open_run, lambda: selfsup_run("mae", micro=0), lambda: selfsup_run("dino")])
def test_a_resolved_run_leaves_nothing_open(make: Callable[[], Run]) -> None:
    run = resolved(make())
    assert type(run) is ResolvedRun
    assert not [line.name for line in list_fields(run) if line.text in ("auto", "any")]
    assert not [field.name for field in fields(run) if getattr(run, field.name) is None]
    assert {name: getattr(run, name) for name in CHOSEN} == CHOSEN
    assert run.epochs == 0
    assert min(run.steps, run.micro, run.evaluation.every) >= 1
    assert run.preprocessing.image == run.model.image


def test_what_is_left_open_is_chosen_from_the_data() -> None:
    run = open_run()
    splits, chosen = open_splits(run.data), resolved(run)
    assert chosen.steps == round(len(splits.train) / run.batch)
    assert chosen.evaluation.every == chosen.steps // 20
    assert (chosen.data.watch, chosen.data.test) == ("dev", "test")
    assert (chosen.data.resident, chosen.micro) == ("on", 16)
    nothing = resolved(replace(run, data=replace(run.data, watch="none", test="none")))
    assert (nothing.data.watch, nothing.data.test) == ("none", "none")


def test_what_was_asked_for_stays() -> None:
    asked = tiny_run(precision="autocast", preprocessing=Preprocessing(image=(8, 8), resize=10))
    chosen = resolved(asked)
    same = {field.name for field in fields(asked)} - {"data", "baseline", "compile", "sharding"}
    assert {name: getattr(chosen, name) for name in same} == {name: getattr(asked, name) for name in same}
    assert resolved(chosen) == chosen  # once more changes nothing


@pytest.mark.parametrize("kind", [Run, ResolvedRun])
def test_the_types_of_a_later_stage_do_not_allow_what_is_open(kind: type[RunRequest]) -> None:
    assert NoneType in union_members(field_types(RunRequest)["model"])
    assert NoneType not in union_members(field_types(kind)["model"])
    if kind is ResolvedRun:
        assert not [
            name for name, hint in all_hints(kind) if NoneType in union_members(hint) or "auto" in get_args(hint)
        ]


def all_hints(kind: type) -> Iterator[tuple[str, Any]]:
    """The fields of a run and of its data."""
    yield from field_types(kind).items()
    yield from field_types(field_types(kind)["data"]).items()


@pytest.mark.parametrize(
    "open_again",
    [
        *({name: "auto"} for name in CHOSEN),
        *({name: None} for name in ("model", "preprocessing", "precision")),
        *({"micro": 0}, {"steps": 0}, {"steps": 0, "epochs": 1.0}, {"evaluation": Scoring()}),
    ],
)
def test_a_resolved_run_cannot_be_opened_again(open_again: dict[str, Any]) -> None:
    chosen = resolved(tiny_run())
    with pytest.raises(ConfigError, match=next(iter(open_again))):
        replace(chosen, **open_again)
    with pytest.raises(FrozenInstanceError):
        chosen.micro = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["watch", "test", "resident"])
def test_nor_can_its_data(name: str) -> None:
    with pytest.raises(ConfigError, match=f"data.{name}=auto"):
        replace(resolved(tiny_run()).data, **{name: "auto"})


def test_a_run_has_a_network_and_a_request_need_not() -> None:
    request = to_stage(RunRequest, tiny_run(), model=None)
    assert request.model is None
    for refused in (lambda: configure(request), lambda: replace(tiny_run(), model=None)):
        with pytest.raises(ConfigError, match="model is not set"):
            refused()
    with pytest.raises(ConfigError, match="model=none"):
        with_changes(tiny_run(), ["model=none"])
    run = tiny_run()
    started = start_from(request, "w.safetensors", run.model, Preprocessing(image=(8, 8)))
    assert type(started) is Run
    assert started.model == run.model
    assert configure(started) is started


@pytest.mark.parametrize("name", list(list_recipes()))
def test_a_recipe_is_a_run_where_it_has_a_network_and_a_request_where_it_has_none(name: str) -> None:
    found = load_recipe(name)
    assert type(found) is (RunRequest if found.model is None else Run)
    assert type(with_changes(found, ["seed=3"])) is type(found)


def test_all_stages_are_stored_alike() -> None:
    run = tiny_run()
    request, chosen = to_stage(RunRequest, run), resolved(run)
    assert to_plain(request) == to_plain(run)
    assert [list(to_plain(one)) for one in (request, run)] == [list(to_plain(chosen))] * 2
    assert list(to_plain(run)["data"]) == list(to_plain(chosen)["data"])
    assert diff_plain(to_plain(from_plain(Run, json.loads(json.dumps(to_plain(chosen))))), to_plain(chosen)) == []


@pytest.mark.slow
def test_a_folder_of_an_older_version_is_of_the_same_run(tmp_path: Path) -> None:
    """Which left the splits and the scoring open in what it wrote."""
    run = replace(open_run(), epochs=0.0, steps=8)
    train(run, out=tmp_path / "run", world=ALONE)
    path = tmp_path / "run" / CONFIG
    config = json.loads(path.read_text())
    assert (config["data"]["watch"], config["evaluation"]["every"]) == ("dev", 1)
    config["data"] |= {"watch": "auto", "test": "auto"}
    config["evaluation"]["every"] = 0
    path.write_text(json.dumps(config))
    check_same_run(tmp_path / "run", run, ALONE)
    check_same_run(tmp_path / "run", read_run(tmp_path / "run"), ALONE)
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        check_same_run(tmp_path / "run", with_changes(run, ["optim.lr=0.5"]), ALONE)
