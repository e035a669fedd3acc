"""Every recipe by name. A list of them is read from the sources: running them needs torch, which a list should not.

A recipe is a public function of one of the modules below that needs no arguments and returns a `Run` or, where the
network is that of the weights it starts from, a `RunRequest`. Its name is the function's with hyphens, behind the
prefix of its module; its help is the first line of the docstring.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from vitrail.core.errors import UnknownName, unknown_name

if TYPE_CHECKING:
    from vitrail.train.config import RunRequest

MODULES: Final = {
    "vitrail.recipes.small_images": "Small images, from scratch",
    "vitrail.recipes.digits": "The demo",
    "vitrail.recipes.shapes": "Segmentation",
    "vitrail.recipes.imagenet": "ImageNet-1k, as the authors did it later",
    "vitrail.recipes.table3": "Pre-training (Table 3)",
    "vitrail.recipes.selfsup": "Pre-training without labels (4.6, B.1.2)",
    "vitrail.recipes.table4": "Fine-tuning (Table 4)",
    "vitrail.recipes.bit_hyperrule": "Fine-tuning of ResNets (BiT's HyperRule)",
}

RETURNED: Final = ("Run", "RunRequest")
PREFIXES: Final = {"vitrail.recipes.selfsup": "selfsup/"}  # of the names, for the modules that have one


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A recipe as the list knows it."""

    name: str
    group: str
    text: str  # the docstring
    module: str

    @property
    def help(self) -> str:
        return self.text.partition("\n")[0].rstrip(".")

    @property
    def function(self) -> str:
        return self.name.rpartition("/")[2].replace("-", "_")


@cache
def recipes() -> dict[str, Entry]:
    """All recipes, in the order of their modules."""
    found: dict[str, Entry] = {}
    for module, group in MODULES.items():
        for node in ast.parse(source(module)).body:
            if isinstance(node, ast.FunctionDef) and is_recipe(node):
                name = PREFIXES.get(module, "") + node.name.replace("_", "-")
                assert name not in found, f"two recipes are called {name}"
                found[name] = Entry(name=name, group=group, text=ast.get_docstring(node) or "", module=module)
    return found


def source(module: str) -> str:
    """The text of a module that is not imported."""
    spec = find_spec(module)
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    text = spec.loader.get_source(module)
    assert text is not None, f"{module} is there without its source"
    return text


def is_recipe(node: ast.FunctionDef) -> bool:
    bare = not node.name.startswith("_") and not node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return bare and isinstance(node.returns, ast.Name) and node.returns.id in RETURNED


def find(name: str) -> Entry:
    """A recipe by its name, with hyphens or underscores."""
    entry = recipes().get(name.replace("_", "-").lower())
    if entry is not None:
        return entry
    try:
        raise unknown_name("recipe", name, recipes())
    except UnknownName as error:
        raise UnknownName(f"{error} `vitrail recipes` lists all") from None


def recipe(name: str) -> "RunRequest":
    """The run of a name."""
    entry = find(name)
    make: Callable[[], RunRequest] = getattr(import_module(entry.module), entry.function)
    return make()
