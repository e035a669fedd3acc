"""Run one of the paper's studies: a grid of trainings to its end, a table, a figure and one sentence of result.

The same command again goes on where it stopped: finished cells stay, one that was interrupted resumes from its
checkpoint, one that failed is tried again. --list says what all of it costs before anything starts; without a name it
lists the studies.

Scales: tiny takes two cores a minute or two and shows that everything works; small is for one GPU and some minutes;
paper is the paper's own grid with its recipes, for those who have its images and the time.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from vitrail.cli.options.grammar import add_data_word
from vitrail.cli.options.groups import add_device

Scale: TypeAlias = Literal["tiny", "small", "paper"]
SCALES: Final = get_args(Scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """The options of `vitrail study`."""

    name: str = ""
    data: str | None = None
    scale: Scale = "tiny"
    out: Path | None = None
    list: bool = False
    jobs: int = 0
    seeds: int = 0
    force: bool = False
    device: str = "auto"


OPTIONS = StudyOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", default="", help="which study; `vitrail study --list` lists them")
    add_data_word(parser, "a folder, a list, shards, or a data set by name (default: the scale's own)", needed=False)
    add("--scale", choices=SCALES, default="tiny", help="how large a grid of how large networks (default: tiny)")
    add("--out", type=Path, metavar="DIR", help="a run folder a cell, and the results (default: runs/study-NAME-SCALE)")
    add("--list", action="store_true", help="say what every cell is and costs, and stop; without a name, list studies")
    add(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="processes at once (default: 4 a GPU; on a CPU, half its cores)",
    )
    add("--seeds", type=int, default=0, metavar="N", help="seeds of each point of the grid (default: the study's own)")
    add("--force", action="store_true", help="retrain cells whose run has changed")
    add_device(parser)
