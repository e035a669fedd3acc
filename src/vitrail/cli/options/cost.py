"""Say what a network costs: parameters, multiply-accumulates, exaFLOPs of training, memory; and its speed here.

A network is named as in `vitrail models`, or given as weights. Training is counted by the paper's formula (Table 6) for
its own three data sets, or for yours. With --measure the network is run: images a second and memory over batch and
image sizes on this device (D.5), as a table, a figure and JSON.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.cli.options.groups import add_device
from vitrail.evaluation.defaults import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    """The options of `vitrail cost`."""

    models: tuple[str, ...]
    image_size: tuple[int, ...] = ()
    classes: int | None = None
    data: str = ""
    images: int = 0
    epochs: float = 0.0
    measure: bool = False
    batch: tuple[int, ...] = ()
    precision: Literal["auto"] | Precision = "auto"
    seconds: float = 0.0
    device: str = "auto"
    out: Path | None = None


OPTIONS = CostOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a network by name (ViT-B/16, vit_b_16), or weights: a file, NAME:TAG",
    )
    add("--image-size", type=int, nargs="+", default=[], metavar="N", help="pixels a side; one or several")
    add("--classes", type=int, default=None, metavar="N", help="of the head (default: the network's own)")
    add("--data", default="", metavar="NAME", help="the set to train on: jft, or any --data of the other commands")
    add("--images", type=int, default=0, metavar="N", help="images to train on, in the place of --data")
    add("--epochs", type=float, default=0.0, metavar="E", help="how often each image is seen (default: the paper's)")
    add("--measure", action="store_true", help="run it here: images a second and memory over batches and sizes")
    add("--batch", type=int, nargs="+", default=[], metavar="N", help="batches to measure (default: 1, 2, 4, ...)")
    add("--precision", choices=("auto", "float32", "autocast", "bfloat16"), default="auto",
        help="of what is measured (default: bfloat16 on a GPU, float32 on a CPU)")  # fmt: skip
    add("--seconds", type=float, default=0.0, metavar="S", help="to measure for, each network (default: 60; GPU: 120)")
    add_device(parser)
    add("--out", type=Path, metavar="DIR", help="where JSON and figure go (default: runs/cost-NAME, if measured)")
