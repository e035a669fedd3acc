"""Follow one image through a network: every step with the shape that comes out, its parameters and its MACs."""

import argparse
from dataclasses import dataclass

from vitrail.core.text import Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """The options of `vitrail trace`."""

    model: str
    image_size: int | Pair | None = None
    classes: int | None = None
    all: bool = False


OPTIONS = TraceOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a network, as in ViT-L/32 or vit_l_32")
    parser.add_argument("--image-size", type=image_size, default=None, help="pixels a side, or HEIGHTxWIDTH")
    parser.add_argument("--classes", type=int, default=None, help="classes of the head (default: 1000)")
    parser.add_argument("--all", action="store_true", help="every block; by default blocks that repeat are folded")


def image_size(text: str) -> int | Pair:
    parts = [int(part) for part in text.lower().split("x")]
    if len(parts) > 2:
        raise ValueError(text)
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])
