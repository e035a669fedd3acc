"""Look inside a network: where it attends on your images, and what it has learned.

Writes a page that needs nothing else (report.html, with an explorer to click through all layers and heads) and every
figure as PNG and SVG. A run's folder stands for its best weights so far, also while it trains."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.cli.options.groups import WeightsOptions, add_labels, add_loading, add_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions(WeightsOptions):
    """The options of `vitrail inspect`."""

    weights: str = DEFAULT_WEIGHTS
    image_size: int | None = None
    words: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    data: str | None = None
    count: int = 128
    out: Path = Path("inspection")
    only: str | None = None
    layers: tuple[int, ...] = ()
    asked: str | None = None
    patch: str | None = None
    labels: str | None = None


OPTIONS = InspectOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_weights(parser, optional=True)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="DATA|IMAGE",
        help="a folder or a data set by name, for what is measured over many images (distance, entropy, CKA), and "
        "image files to look at",
    )
    parser.add_argument("--images", nargs="+", default=[], metavar="IMAGE", help="image files to look at")
    parser.add_argument("--data", metavar="DATA", help=argparse.SUPPRESS)  # the older form
    parser.add_argument("--count", type=int, default=128, metavar="N", help="images of the data (default: 128)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("inspection"),
        metavar="DIR",
        help="the folder to write (default: inspection)",
    )
    parser.add_argument("--only", metavar="KINDS", help="some kinds, as in rollout,distance,explorer")
    parser.add_argument("--layers", type=int, nargs="+", default=[], metavar="N", help="layers to show, from 1")
    parser.add_argument("--class", dest="asked", metavar="CLASS", help="the class to explain: its name or number")
    parser.add_argument("--patch", metavar="ROW,COLUMN", help="the patch to compare with the others, from 1")
    add_labels(parser, rename=False)
    add_loading(parser)
