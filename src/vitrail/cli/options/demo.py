"""Pre-train a small ViT on 8x8 digits at 16 px, fine-tune it at 32 px with resized positions, and show the report.

The paper's way from 224 to 384 px, on data that are in the package, in about a minute on two cores. Ends with what to
type next: to look at it, to serve it, to ask it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vitrail.cli.options.groups import add_device


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The options of `vitrail demo`."""

    out: Path = Path("runs/demo")
    seed: int = 0
    device: str = "auto"


OPTIONS = DemoOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help="(default: runs/demo)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default: 0)")
    add_device(parser)
