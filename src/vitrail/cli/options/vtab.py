"""Fine-tune weights on the 19 tasks of VTAB-1k, a thousand images each, and set the results next to the paper's.

One recipe for all tasks, the paper's: 2,500 steps of 512 images at a rate of 0.01, 384 px (Table 4). The same command
again goes on where it stopped, task by task; data sets that are not there are passed over, and named.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vitrail.cli.options.groups import add_device, add_jobs, add_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabOptions:
    """The options of `vitrail vtab`."""

    weights: str
    tasks: tuple[str, ...] = ()
    root: Path | None = None
    out: Path | None = None
    image_size: int = 0
    settings: tuple[str, ...] = ()
    seed: int | None = None
    download: bool = False
    dry_run: bool = False
    jobs: int = 1
    device: str = "auto"


OPTIONS = VtabOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("weights", metavar="WEIGHTS", help="a file, a folder or NAME:TAG, in any format that vitrail reads")
    add(
        "--tasks", nargs="+", default=[], metavar="TASK", help="some of the 19, or a group: natural, ... (default: all)"
    )
    add("--root", type=Path, metavar="DIR", help="holds a folder for each data set (default: $VITRAIL_DATA)")
    add("--out", type=Path, metavar="DIR", help="a run folder a task, and the results (default: runs/vtab-WEIGHTS)")
    add("--image-size", type=int, default=0, metavar="N", help="pixels a side (default: 384, as the paper)")
    add_settings(parser)
    add("--seed", type=int, default=None, help="of everything that is random (default: 0)")
    add("--download", action="store_true", help="fetch the files of the sets that may be fetched")
    add("--dry-run", action="store_true", help="say which sets are there and what it will take, and stop")
    add_jobs(parser, "tasks")
    add_device(parser)
