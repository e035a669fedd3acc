"""Studies: grids of runs that repeat the paper's tables and figures, by name.

`vitrail study --list` needs only the table. A study itself is a module of `vitrail.studies.paper` with `cells` and
`analyse`; it needs torch and is imported on lookup.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from vitrail.core.errors import unknown_name

if TYPE_CHECKING:
    from vitrail.studies.definition import Study


@dataclass(frozen=True, slots=True)
class StudyEntry:
    """A study in the list: its module, its title, and the paper's sections, tables and figures."""

    module: str
    title: str
    anchor: str


STUDIES: Final = {
    "data-size": StudyEntry("data_size", "How much data a ViT needs", "4.3, Figures 3 and 4"),
    "scaling": StudyEntry("scaling", "Accuracy against compute", "4.4, Figure 5, Table 6"),
    "positions": StudyEntry("positions", "Position embeddings", "D.4, Table 8"),
    "head": StudyEntry("class_token_vs_pooling", "Class token and mean pooling, each at its own learning rate", "D.3"),
    "shape": StudyEntry("depth_width_patch", "Depth, width, MLP width and patch size from one base", "D.2, Figure 8"),
    "optimizer": StudyEntry("adam_vs_sgd", "ResNets trained with Adam and with SGD", "D.1, Table 7"),
    "axial": StudyEntry("axial", "Axial attention in ViTs and ResNets, against compute and speed", "D.6, Figure 13"),
    "resolution": StudyEntry(
        "resolution", "Fine-tuning at higher resolutions, with and without resized positions", "3.2"
    ),
    "selfsup": StudyEntry("selfsup", "Pre-training from images alone, by label budget", "4.6, B.1.2"),
}


def find_study(name: str) -> "Study":
    """The study with a name, written with hyphens or underscores."""
    key = name.strip().lower().replace("_", "-")
    if key not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    from vitrail.studies.definition import Study

    entry = STUDIES[key]
    module = import_module(f"vitrail.studies.paper.{entry.module}")
    return Study(name=key, title=entry.title, anchor=entry.anchor, cells=module.cells, analyse=module.analyse)
