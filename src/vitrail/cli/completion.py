"""What `vitrail completion` does."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from vitrail.cli.app import COMMANDS, parser_of
from vitrail.cli.completion_scripts import SCRIPTS, Completed, Option, Value
from vitrail.cli.options.completion import CompletionOptions

# What is wanted where, by the name of a value in the help, or of the field it goes to. A command's own comes first.
WANTED: Final = {
    "recipes name": "recipe",
    "convert source": "weights",
    "convert target": "file",
    "convert FORMAT": "format",
    "cost NAME": "nothing",
    "data pack out": "file",
    "predict words": "weights",
    "study name": "study",
    "recipe": "recipe",
    "model": "model",
    "MODEL": "model",
    "pattern": "model",
    "WEIGHTS": "weights",
    "RUN": "file",
    "DATA": "set",
    "DATA|IMAGE": "set",
    "source": "set",
    "train": "set",
    "TEST": "set",
    "TASK": "task",
    "IMAGE": "file",
    "OUT": "file",
    "OUT.png": "file",
    "DIR": "file",
    "device": "device",
}
FILES: Final = ("weights", "set", "file")  # next to their names, a path will do


def run_completion(options: CompletionOptions) -> int:
    print(SCRIPTS[options.shell](completed()), end="")
    return 0


def completed() -> list[Completed]:
    """Every command with its options, from the parsers themselves."""
    words = known_names()
    found: list[Completed] = []
    for name, command in COMMANDS.items():
        actions: list[argparse.Action] = vars(parser_of(name))["_actions"]  # argparse has no other list of them
        values = tuple(value_of(name, action, words) for action in actions if not action.option_strings)
        options = tuple(
            option_of(name, action, words)
            for action in actions
            if action.option_strings and action.help != argparse.SUPPRESS
        )
        found.append(Completed(name=name, help=command.help, options=options, values=values))
    return found


def option_of(command: str, action: argparse.Action, words: dict[str, tuple[str, ...]]) -> Option:
    text = "show this help" if action.dest == "help" else plain(action.help or "")
    return Option(
        flags=tuple(action.option_strings),
        help=text,
        value=None if action.nargs == 0 else value_of(command, action, words),
        again=type(action).__name__ == "_AppendAction",
    )


def plain(text: str) -> str:
    """One line, short enough for a list next to the flags."""
    text = " ".join(text.replace("%%", "%").split())
    return text if len(text) <= 80 else text[:79].rstrip(" ,;:") + "…"


def value_of(command: str, action: argparse.Action, words: dict[str, tuple[str, ...]]) -> Value:
    many = action.nargs in ("+", "*")
    if action.choices is not None:
        return Value(words=tuple(str(choice) for choice in action.choices), many=many, name=action.dest)
    name = action.metavar if isinstance(action.metavar, str) else ""
    places = (f"{command} {action.dest}", f"{command} {name}", name, action.dest)
    kind = next((WANTED[place] for place in places if place in WANTED), "file" if action.type is Path else "nothing")
    return Value(words=words.get(kind, ()), files=kind in FILES, many=many, name=name or action.dest)


def known_names() -> dict[str, tuple[str, ...]]:
    """The names of things, by kind."""
    from vitrail.checkpoint.formats.registry import FORMATS
    from vitrail.checkpoint.known_weights import BUNDLED
    from vitrail.cli.data import known_sets
    from vitrail.data.datasets.catalogue import VTAB_TASKS
    from vitrail.models.zoo import SLUGS, ZOO
    from vitrail.recipes.registry import recipes
    from vitrail.studies.framework.registry import STUDIES

    return {
        "recipe": tuple(recipes()),
        "model": check_words([*ZOO, *SLUGS]),
        "weights": tuple(BUNDLED),
        "set": check_words(row[0] for row in known_sets()),
        "format": ("vitrail", "hf", *(name for name in FORMATS if name != "huggingface")),
        "task": check_words(VTAB_TASKS),
        "study": tuple(STUDIES),
        "device": ("auto", "cpu", "cuda", "mps"),
    }


def check_words(names: Iterable[str]) -> tuple[str, ...]:
    """Without doubles; names are words to every shell."""
    found: Sequence[str] = tuple(dict.fromkeys(names))
    assert not any(set(name) & set(" \t\n'\"\\$`;|&<>()*?[]{}~:") for name in found), found
    return tuple(found)
