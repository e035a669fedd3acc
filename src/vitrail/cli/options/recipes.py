"""List the recipes, or show one: what it is for, what the paper reached with it, and every setting it resolves to."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipesOptions:
    """The options of `vitrail recipes`."""

    name: str | None = None
    set: tuple[str, ...] = ()
    json: bool = False


OPTIONS = RecipesOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a recipe to show; without one, all are listed")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="show it with this changed")
    parser.add_argument("--json", action="store_true", help="the resolved config as JSON")
