"""Say what is on images: the likeliest classes of each, in the order they were given. Weights of
segmentation predict a mask of each, which --out writes as PNG.

WEIGHTS may be left out: the first word is taken for weights unless it is an image, a folder without weights in it, or
-, and then a small network that comes with vitrail answers (CIFAR-10's ten classes). Folders are walked through in the
order of names; - reads names from stdin, one a line. An image that cannot be read is named on stderr and passed over,
and the exit status is then 1."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.cli.options.groups import add_device, add_labels


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """The options of `vitrail predict`."""

    words: tuple[str, ...]
    weights: str | None = None
    topk: int | None = None
    threshold: float | None = None
    json: bool = False
    csv: bool = False
    out: Path | None = None
    attention: Path | None = None
    labels: str | None = None
    rename: tuple[str, ...] = ()
    image_size: int | None = None
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    batch: int | None = None
    workers: int = -1


OPTIONS = PredictOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [WEIGHTS] IMAGE|FOLDER|-... [options]"
    parser.add_argument("words", nargs="+", metavar="[WEIGHTS] IMAGE|FOLDER|-", help="weights, then images")
    parser.add_argument("--weights", metavar="WEIGHTS", help="the weights; then every word is an image or a folder")
    parser.add_argument("--topk", type=int, metavar="N", help="classes for each image (default: 5)")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="of a multi-label network: choose the classes of this probability or more (default: 0.5)",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="a JSON object a line, also for what could not be read")
    kind.add_argument("--csv", action="store_true", help="a row for each answer, under a header")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a folder for predictions that are files, as masks are, and a drawing of each (NAME.overlay.png)",
    )
    parser.add_argument(
        "--attention",
        type=Path,
        metavar="OUT",
        help="a folder for each image lit by where the network looked (attention rollout), as PNG",
    )
    add_labels(parser)
    parser.add_argument("--image-size", type=int, metavar="N", help="pixels a side; positions are resized")
    add_device(parser)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")
    parser.add_argument("--batch", type=int, metavar="N", help="images at once (default: by the device)")
    parser.add_argument(
        "--workers", type=int, default=-1, metavar="N", help="threads that read images (default: by the cores)"
    )
