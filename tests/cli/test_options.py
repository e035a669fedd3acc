"""The options of a command are one dataclass that says what its parser can give, and nobody passes a Namespace on."""

import argparse
import inspect
import re
from dataclasses import MISSING, FrozenInstanceError, fields
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pytest

import vitrail
from vitrail.cli.app import COMMANDS, Command, command_parser, options_type, parse_options
from vitrail.cli.options.grammar import NeededWord

SOURCE = Path(vitrail.__file__).parent
PARSING = {SOURCE / "cli" / "app.py", SOURCE / "cli" / "options" / "grammar.py"}  # who may know of a Namespace


def actions_of(name: str) -> list[argparse.Action]:
    return [action for action in command_parser(name)._actions if action.dest != "help"]


def options_of(name: str) -> Any:
    return options_type(name)


def is_needed(action: argparse.Action) -> bool:
    return isinstance(action, NeededWord) or (action.required and action.nargs != "*")


def words_for(action: argparse.Action) -> list[str]:
    """A value that every kind of option takes: 2 is a number, a name, a path and a size."""
    value = [] if action.nargs == 0 else [str(next(iter(action.choices)))] if action.choices else ["2"]
    return [*action.option_strings[:1], *value]


def least_words(name: str, *, but: argparse.Action | None = None) -> list[str]:
    """The shortest command line that is accepted; `but` is given elsewhere."""
    needed = [action for action in actions_of(name) if is_needed(action) and action.dest != (but and but.dest)]
    return [word for action in needed for word in words_for(action)]


def conforms(value: object, hint: Any) -> bool:
    """Whether a value is of a declared type, to the letter: True is not an int, 2 is not a float."""
    if get_origin(hint) in (Union, UnionType):
        return any(conforms(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if kinds[-1] is Ellipsis:
            return all(conforms(one, kinds[0]) for one in value)
        return len(value) == len(kinds) and all(map(conforms, value, kinds))
    return isinstance(value, Path) if hint is Path else type(value) is hint


def wrong_fields(options: object) -> list[str]:
    hints = get_type_hints(type(options))
    names = [field.name for field in fields(cast(Any, options))]
    return [name for name in names if not conforms(getattr(options, name), hints[name])]


@pytest.mark.parametrize("name", COMMANDS)
def test_there_is_a_field_for_each_option_and_an_option_for_each_field(name: str) -> None:
    assert {field.name for field in fields(options_of(name))} == {action.dest for action in actions_of(name)}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_frozen_keyword_only_and_slotted(name: str) -> None:
    options = parse_options(name, least_words(name))
    assert type(options) is options_of(name)
    assert all(field.kw_only for field in fields(options))
    assert not hasattr(options, "__dict__")
    first = fields(options)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(options, first, getattr(options, first))


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_are_those_of_the_parser(name: str) -> None:
    """What is left out on the command line and what is left out in Python are the same."""
    options = parse_options(name, least_words(name))
    without = {field.name for field in fields(options) if field.default is MISSING}
    assert without == {action.dest for action in actions_of(name) if is_needed(action)}
    assert options_of(name)(**{field: getattr(options, field) for field in without}) == options
    assert not wrong_fields(options)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_gives_what_its_field_declares(name: str) -> None:
    for action in {action.dest: action for action in reversed(actions_of(name))}.values():  # no older forms
        options = parse_options(name, [*least_words(name, but=action), *words_for(action)])
        assert not wrong_fields(options)


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_a_command_runs_on_its_options(name: str, command: Command) -> None:
    run = getattr(import_module(f"vitrail.cli.{command.module}"), f"run_{name.rpartition(' ')[2]}")
    assert next(iter(inspect.signature(run).parameters.values())).annotation is options_of(name)


def test_only_the_parser_knows_of_a_namespace() -> None:
    known = {path for path in SOURCE.rglob("*.py") if re.search(r"\bNamespace\b", path.read_text("utf-8"))}
    assert known <= PARSING
