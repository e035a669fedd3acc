"""Tell what became of a run: how far it came, what happened to it, and what to type next."""

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """The options of `vitrail report`."""

    run: Path


OPTIONS = ReportOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
