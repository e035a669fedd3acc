"""One grammar for all commands: WEIGHTS and DATA are words, what is written is --out. Older forms are still taken.

A word and its older form store into one place; giving both is refused. What is misspelt gets a suggestion.
"""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

# What people type that is called otherwise here; the first that a command has is suggested.
SYNONYMS: Final = {
    "--learning-rate": ("--lr",),
    "--learning_rate": ("--lr",),
    "--rate": ("--lr",),
    "--batch-size": ("--batch",),
    "--batch_size": ("--batch",),
    "--bs": ("--batch",),
    "--num-epochs": ("--epochs",),
    "--max-steps": ("--steps",),
    "--iterations": ("--steps",),
    "--img-size": ("--image-size",),
    "--size": ("--image-size",),
    "--resolution": ("--image-size",),
    "--output": ("--out",),
    "--save": ("--out",),
    "-o": ("--out",),
    "--gpu": ("--device",),
    "--cuda": ("--device",),
    "--classes": ("--labels",),
    "--names": ("--labels",),
    "--top": ("--topk",),
    "--format": ("--to", "--json"),
    "--time": ("--minutes",),
}


class Word(argparse.Action):
    """A positional, or the older option that means the same."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del option_string
        if values is None or values == []:
            return
        before = getattr(namespace, self.dest, None)
        if isinstance(values, list):
            values = [*(before or []), *values]
        elif before is not None and before != self.default and before != values:
            parser.error(f"{named(self)} is given twice, as {before} and as {values}; leave one out")
        setattr(namespace, self.dest, values)


class NeededWord(Word):
    """A positional that has to be given, in one form or the other."""


def add_word(
    parser: argparse.ArgumentParser,
    dest: str,
    metavar: str,
    older: str,
    *,
    help: str,
    needed: bool = True,
    several: bool = False,
    type: Any = None,
) -> None:
    """A positional with an older form, which help does not show."""
    kind = NeededWord if needed else Word
    parser.add_argument(dest, action=kind, nargs="*" if several else "?", metavar=metavar, help=help, type=type)
    nargs = 1 if several else None
    parser.add_argument(older, action=Word, dest=dest, nargs=nargs, metavar=metavar, help=argparse.SUPPRESS, type=type)


def add_data_word(parser: argparse.ArgumentParser, text: str, *, needed: bool = True, several: bool = False) -> None:
    """DATA, or --data."""
    add_word(parser, "data", "DATA", "--data", help=text, needed=needed, several=several)


def add_out(parser: argparse.ArgumentParser, text: str, *, dest: str = "out", kind: Any = Path) -> None:
    """--out, or as the last word."""
    parser.add_argument(dest, action=NeededWord, nargs="?", metavar="OUT", help=argparse.SUPPRESS, type=kind)
    parser.add_argument("--out", action=Word, dest=dest, metavar="OUT", help=text, type=kind)


def named(action: argparse.Action) -> str:
    """What help calls an argument."""
    return action.metavar if isinstance(action.metavar, str) else action.dest


def missing_words(actions: Iterable[argparse.Action], found: argparse.Namespace) -> list[str]:
    """The positionals that have to be given and were not."""
    return [
        f"--out {named(action)}" if action.help == argparse.SUPPRESS else named(action)
        for action in actions
        if isinstance(action, NeededWord) and not action.option_strings and not getattr(found, action.dest, None)
    ]


def complain(extra: Sequence[str], actions: Iterable[argparse.Action]) -> str:
    """What to say of words that a command does not take."""
    options = [option for action in actions for option in action.option_strings]
    wrong = next((word for word in extra if word.startswith("-") and word != "-"), None)
    if wrong is None:
        return f"unexpected argument {' '.join(extra)}"
    typed = wrong.partition("=")[0]
    near = [option for option in SYNONYMS.get(typed.lower(), ()) if option in options][:1]
    near = near or difflib.get_close_matches(typed.lower(), options, n=2, cutoff=0.6)
    near = near or [option for option in options if len(typed) > 3 and option.startswith(typed)]
    return f"unknown option {typed}" + (f"; did you mean {' or '.join(near)}?" if near else "")
