"""Every study by name. What they are called and are about is read from their sources: running one needs torch, which a
list should not.
"""

import ast
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from vitrail.core.errors import unknown_name

if TYPE_CHECKING:
    from vitrail.studies.framework.definition import Study


STUDIES: Final = {
    "data-size": "vitrail.studies.paper.data_size",
    "scaling": "vitrail.studies.paper.scaling",
    "positions": "vitrail.studies.paper.positions",
    "head": "vitrail.studies.paper.class_token_vs_pooling",
    "shape": "vitrail.studies.paper.depth_width_patch",
    "optimizer": "vitrail.studies.paper.adam_vs_sgd",
    "axial": "vitrail.studies.paper.axial",
    "resolution": "vitrail.studies.paper.resolution",
    "selfsup": "vitrail.studies.paper.selfsup",
}
VALUE: Final = "STUDY"  # of each module


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A study as the list knows it."""

    name: str
    title: str
    anchor: str


def entries() -> dict[str, Entry]:
    """The studies that are here, in the order of the paper's sections."""
    found: dict[str, Entry] = {}
    for name, module in STUDIES.items():
        told = literals(module)
        if told is not None:
            found[name] = Entry(name=name, title=told.get("title", ""), anchor=told.get("anchor", ""))
    return found


def study(name: str) -> "Study":
    """A study by its name, with hyphens or underscores."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    found: Study = getattr(import_module(STUDIES[wanted]), VALUE)
    return found


def literals(module: str) -> dict[str, str] | None:
    """The texts that `STUDY = Study(name="...", ...)` of a module is made with; none where there is no such module."""
    spec = find_spec(module)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return None
    text = spec.loader.get_source(module)
    assert text is not None, f"{module} is there without its source"
    for node in ast.parse(text).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else ()
        )
        named = any(isinstance(target, ast.Name) and target.id == VALUE for target in targets)
        if named and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            return {
                word.arg: word.value.value
                for word in node.value.keywords
                if word.arg and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
            }
    return {}
