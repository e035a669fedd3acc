"""Write a network for other runtimes and libraries, and run what was written next to it before it gets its name.

onnx is a file for ONNX Runtime and others, with preprocessing and class names in its metadata; --int8 makes it about a
quarter of the size. torch-export is a graph that needs torch alone. hf, timm, npz and torchvision are other libraries'
weights, loaded there where they are installed."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from vitrail.cli.options.grammar import add_data_word
from vitrail.cli.options.groups import add_labels

Form: TypeAlias = Literal["onnx", "torch-export", "hf", "timm", "npz", "torchvision"]
FORMS: Final = get_args(Form)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """The options of `vitrail export`."""

    weights: str
    data: str | None = None
    to: Form
    out: Path | None = None
    labels: str | None = None
    rename: tuple[str, ...] = ()
    image_size: int | None = None
    fixed_size: bool = False
    int8: bool = False
    with_preprocessing: bool = False
    opset: int = 20
    by_number: bool = False
    agreement: float = 0.95
    workers: int = -1
    download: bool = False


OPTIONS = ExportOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help="a file, a run's folder or a name, in any format")
    add_data_word(parser, "onnx: images to score both on, and to calibrate int8 with", needed=False)
    parser.add_argument("--to", choices=FORMS, required=True, help="what to write")
    parser.add_argument("--out", type=Path, metavar="PATH", help="where (default: here, named after the weights)")
    add_labels(parser)
    parser.add_argument("--image-size", type=int, metavar="N", help="pixels a side; positions are resized")
    parser.add_argument(
        "--fixed-size", action="store_true", help="onnx, torch-export: this image size only, where others were possible"
    )
    onnx = parser.add_argument_group("onnx")
    onnx.add_argument("--int8", action="store_true", help="matrix products and convolutions in eight bits")
    onnx.add_argument(
        "--with-preprocessing", action="store_true", help="take bytes of 0 to 255 and normalise them in the graph"
    )
    onnx.add_argument("--opset", type=int, default=20, metavar="N", help="of ONNX's operators, 18 to 23 (default: 20)")
    onnx.add_argument("--by-number", action="store_true", help="class 7 is output 7, whatever they are called")
    onnx.add_argument(
        "--agreement",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="of the images, that int8 must answer as the network does (default: 0.95)",
    )
    onnx.add_argument("--workers", type=int, default=-1, metavar="N", help="loader processes (default: by the cores)")
    onnx.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")
