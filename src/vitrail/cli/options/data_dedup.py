"""Find images of test sets in a training set: exact copies, near ones by perceptual hash, and with --embed those
that a network finds alike.

Prints a table and writes into the output folder: pairs.csv, a page that shows the pairs side by side (pairs.html), what
was compared and how (dedup.json), and a selection that leaves the copies out of training (drop.json). Under torchrun
the work is shared between the processes."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupOptions:
    """The options of `vitrail data dedup`."""

    train: str
    against: tuple[str, ...] = ()
    within: bool = False
    exact: bool = False
    embed: str | None = None
    cosine: float = 0.95
    out: str = "dedup"
    workers: int | None = None
    download: bool = False


OPTIONS = DedupOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("train", help="the training set, as for `vitrail data`; without @SPLIT its train")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="TEST", help="test sets; without @SPLIT their test, else val"
    )
    parser.add_argument("--within", action="store_true", help="compare the training set with itself, too")
    parser.add_argument("--exact", action="store_true", help="only the same pixels: for drawn sets that all look alike")
    parser.add_argument("--embed", metavar="WEIGHTS", help="also compare the representations of this network")
    parser.add_argument("--cosine", type=float, default=0.95, help="from which these are the same (default: 0.95)")
    parser.add_argument("--out", default="dedup", metavar="DIR", help="the folder to write (default: dedup)")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")
