"""Run one step of a training again, with its newest weights: which images it had, and what each of them did.

A run that stopped because its loss was not finite names the step; this shows the batch.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vitrail.cli.options.groups import add_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """The options of `vitrail replay`."""

    run: Path
    step: int
    device: str = "auto"


OPTIONS = ReplayOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step, counted from 0")
    add_device(parser)
