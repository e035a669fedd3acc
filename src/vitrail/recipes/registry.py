"""Every recipe by name, without torch.

A recipe is a public function without arguments that returns a `Run`, or a `RunRequest` if the network comes from the
weights it starts from. Its name is the function's with hyphens; its help is the first line of the docstring, which is
read from the source because importing the module needs torch.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import TYPE_CHECKING, Final

from vitrail.core.errors import UnknownName, unknown_name

if TYPE_CHECKING:
    from vitrail.train.config import RunRequest

# Group -> its module and the prefix of its functions; "" takes those that no other group of the module takes.
GROUPS: Final = {
    "Small images, from scratch": ("small_images", ""),
    "The demo": ("digits", ""),
    "Segmentation": ("small_images", "segment_"),
    "Panoptic segmentation, from scratch": ("scenes", ""),
    "ImageNet-1k, as the authors did it later": ("table3", "plain_"),
    "Pre-training (Table 3)": ("table3", ""),
    "Pre-training without labels (4.6, B.1.2)": ("selfsup", ""),
    "Fine-tuning (Table 4)": ("table4", ""),
    "Fine-tuning of ResNets (BiT's HyperRule)": ("table4", "bit_"),
}
PREFIXES: Final = {"selfsup": "selfsup/"}  # of recipe names, by module


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeEntry:
    """A recipe in the list."""

    name: str
    group: str
    text: str  # the docstring
    module: str

    @property
    def help(self) -> str:
        return self.text.partition("\n")[0].rstrip(".")


@cache
def list_recipes() -> dict[str, RecipeEntry]:
    """All recipes, in the order of their groups."""
    found: dict[str, RecipeEntry] = {}
    for group, (module, start) in GROUPS.items():
        others = tuple(other for name, other in GROUPS.values() if name == module and other and not start)
        source = resources.files("vitrail.recipes").joinpath(f"{module}.py").read_text("utf-8")
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or not is_recipe(node):
                continue
            if node.name.startswith(start) and not node.name.startswith(others):
                name = PREFIXES.get(module, "") + node.name.replace("_", "-")
                assert name not in found, f"two recipes are called {name}"
                found[name] = RecipeEntry(name=name, group=group, text=ast.get_docstring(node) or "", module=module)
    return found


def is_recipe(node: ast.FunctionDef) -> bool:
    return (
        not node.name.startswith("_")
        and not node.args.args + node.args.kwonlyargs
        and isinstance(node.returns, ast.Name)
        and node.returns.id in ("Run", "RunRequest")
    )


def find_recipe(name: str) -> RecipeEntry:
    """The entry of a recipe by its name, written with hyphens or underscores."""
    entry = list_recipes().get(name.replace("_", "-").lower())
    if entry is None:
        raise UnknownName(f"{unknown_name('recipe', name, list_recipes())} `vitrail recipes` lists all")
    return entry


def load_recipe(name: str) -> "RunRequest":
    """The run of a recipe by its name."""
    entry = find_recipe(name)
    function = entry.name.rpartition("/")[2].replace("-", "_")
    make: Callable[[], RunRequest] = getattr(import_module(f"vitrail.recipes.{entry.module}"), function)
    return make()
