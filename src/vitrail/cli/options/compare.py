"""Lay results side by side: a row for weights, a column for a measure on some data, with 95% intervals.

Takes what `vitrail evaluate`, `fewshot`, `probe`, `knn`, `vtab` and `cost` write with --out: files, or folders with all
that is below them. Says where two numbers of a column may not be compared: other images, another image size or
setting, or copies that were left out of one training only."""

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """The options of `vitrail compare`."""

    results: tuple[Path, ...]
    measures: tuple[str, ...] = ()
    out: Path | None = None


OPTIONS = CompareOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="files, or folders to look through")
    parser.add_argument("--measures", nargs="+", default=[], metavar="NAME", help="only these (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table: .md, .csv or .html")
