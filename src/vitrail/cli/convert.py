"""What `vitrail convert` does."""

import argparse

from vitrail.cli.labels import new_names
from vitrail.core.console import print_table


def run(args: argparse.Namespace) -> int:
    import torch

    from vitrail.checkpoint.convert import Conversion, convert
    from vitrail.models.walk import parameters

    given = {"heads": args.heads, "position": args.position, "image": args.image_size}
    facts = {name: value for name, value in given.items() if value is not None}
    dtype = None if args.type is None else getattr(torch, args.type)
    name = lambda bundle: new_names(args, bundle.card.labels, bundle.config.classes)  # noqa: E731
    done: Conversion = convert(
        args.source, args.target, args.to, dtype=dtype, unofficial=args.unofficial, name=name, **facts
    )
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
