"""What `vitrail recipes` does."""

import json
from collections.abc import Sequence

from vitrail.cli.options.recipes import RecipesOptions
from vitrail.core.console import print_table
from vitrail.recipes.registry import Entry, find, recipes


def run_recipes(options: RecipesOptions) -> int:
    if options.name is None:
        list_recipes()
        return 0
    show_recipe(find(options.name), options.set, as_json=options.json)
    return 0


def list_recipes() -> None:
    for group in dict.fromkeys(entry.group for entry in recipes().values()):
        rows = [(name, entry.help) for name, entry in recipes().items() if entry.group == group]
        print_table(["recipe", "what it is"], rows, title=group, left=2)
    print("vitrail recipes NAME shows the settings of one; each can be changed with --set NAME=VALUE.")


def show_recipe(entry: Entry, settings: Sequence[str], *, as_json: bool) -> None:
    """The docstring and the flat config; what is not the default is marked."""
    from vitrail.core.config_overrides import flat, plain
    from vitrail.recipes.registry import recipe
    from vitrail.recipes.run_overrides import with_changes

    chosen = with_changes(recipe(entry.name), settings)
    if as_json:
        print(json.dumps(plain(chosen), indent=2))
        return
    print(f"{entry.name}: {entry.text}\n")
    rows = [(line.name, line.text, "" if line.default else "*") for line in flat(chosen)]
    print_table(["setting", "value", ""], rows, left=3)
    print("* not the default. Any of these can be changed with --set NAME=VALUE.")
