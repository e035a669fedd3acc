"""Rewrite weights in another format, and print a certificate of what came out."""

import argparse

from vitrail.cli.trace import image_size
from vitrail.core.console import print_table
from vitrail.models.config import CHOICES

TYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a weight file or folder of any format; it is recognised by what is in it")
    parser.add_argument("target", help="MODEL.safetensors, MODEL.npz, MODEL.pth or a folder")
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help="vitrail (default for .safetensors), npz, npz-linen, npz-big-vision, npz-bit, "
        "hf (default for a folder), timm, torchvision",
    )
    parser.add_argument("--type", choices=TYPES, help="of the numbers (default: as they are)")
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


def run(args: argparse.Namespace) -> int:
    import torch

    from vitrail.checkpoint.convert import Conversion, convert
    from vitrail.models.walk import parameters

    given = {"heads": args.heads, "position": args.position, "image": args.image_size}
    facts = {name: value for name, value in given.items() if value is not None}
    dtype = None if args.type is None else getattr(torch, args.type)
    done: Conversion = convert(args.source, args.target, args.to, dtype=dtype, unofficial=args.unofficial, **facts)
    seal = done.certificate
    print(f"{done.source} -> {done.target} ({done.format}), {parameters(done.config):,} parameters")
    if done.inferred is not None:
        print(done.inferred)
    if done.sidecar is not None:
        print(
            f"{done.format} cannot hold {', '.join(done.unheld)}: written to {done.sidecar}, keep it beside the weights"
        )
    print(f"read back: {seal.identical} of {seal.tensors} tensors identical")
    if seal.peer is None:
        print(f"parity: {seal.why_not}")
    else:
        rows = [[row.place, f"{row.absolute:.2e}", f"{row.relative:.2e}"] for row in seal.rows]
        print_table(
            ["place", "largest difference", "relative"], rows, title=f"against {seal.peer}, one seeded batch of 2"
        )
    return 0 if seal.identical == seal.tensors else 1
