"""Rewrite weights in another format, and print a certificate of what came out."""

import argparse
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from vitrail.cli.options.grammar import add_out
from vitrail.cli.options.groups import add_labels
from vitrail.cli.options.trace import image_size
from vitrail.core.text import Pair
from vitrail.models.family import CHOICES, Position

NumberType: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """The options of `vitrail convert`."""

    source: str
    target: str
    to: str | None = None
    type: NumberType | None = None
    heads: int | None = None
    position: Position | None = None
    image_size: int | Pair | None = None
    unofficial: bool = False
    labels: str | None = None
    rename: tuple[str, ...] = ()


OPTIONS = ConvertOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="WEIGHTS", help="a weight file or folder of any format; it is recognised by what is in it"
    )
    add_out(parser, "MODEL.safetensors, MODEL.npz, MODEL.pth or a folder", dest="target", kind=str)
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help="vitrail (default for .safetensors), npz, npz-linen, npz-big-vision, npz-bit, "
        "hf (default for a folder), timm, torchvision",
    )
    parser.add_argument("--type", choices=get_args(NumberType), help="of the numbers (default: as they are)")
    parser.add_argument(
        "--heads", type=int, help="attention heads, where a state dict of an unusual width does not say"
    )
    parser.add_argument(
        "--position",
        choices=CHOICES["position"],
        help="positions of a file that stores none (default: big_vision's sincos2d)",
    )
    parser.add_argument(
        "--image-size", type=image_size, metavar="N", help="of a file that does not say: pixels a side, or HEIGHTxWIDTH"
    )
    parser.add_argument(
        "--unofficial", action="store_true", help="write a .npz even if Google's code reads it as another network"
    )
    add_labels(parser)
