"""Print a script that completes commands, options, recipes, networks, data sets and files as you type.

The script is complete in itself: nothing of vitrail is run while you type. Print it again after an update. Open a new
shell afterwards; for zsh the folder has to be in fpath before compinit is called."""

import argparse
from dataclasses import dataclass

from vitrail.cli.completion_scripts import SCRIPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOptions:
    """The options of `vitrail completion`."""

    shell: str


OPTIONS = CompletionOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="whose script to print")
