"""Rewrite weights in another format, and print a certificate of what came out."""

import argparse

from vitrail.core.console import print_table

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


def run(args: argparse.Namespace) -> int:
    import torch

    from vitrail.checkpoint.convert import Conversion, convert
    from vitrail.models.walk import parameters

    facts = {} if args.heads is None else {"heads": args.heads}
    dtype = None if args.type is None else getattr(torch, args.type)
    done: Conversion = convert(args.source, args.target, args.to, dtype=dtype, **facts)
    seal = done.certificate
    print(f"{done.source} -> {done.target} ({done.format}), {parameters(done.config):,} parameters")
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
