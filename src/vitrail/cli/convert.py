"""What `vitrail convert` does."""

from vitrail.cli.labels import resolve_class_names
from vitrail.cli.options.convert import ConvertOptions
from vitrail.core.console import print_table


def run_convert(options: ConvertOptions) -> int:
    import torch

    from vitrail.checkpoint.convert import Conversion, convert

    given = {"heads": options.heads, "position": options.position, "image": options.image_size}
    facts = {name: value for name, value in given.items() if value is not None}
    dtype = None if options.type is None else getattr(torch, options.type)
    name = lambda bundle: resolve_class_names(options.labels, options.rename, bundle.card.labels, bundle.config.classes)  # noqa: E731
    done: Conversion = convert(
        options.source, options.target, options.to, dtype=dtype, unofficial=options.unofficial, name=name, **facts
    )
    seal = done.certificate
    print(f"{done.source} -> {done.target} ({done.format}), {done.config.parameters:,} parameters")
    if done.inferred is not None:
        print(done.inferred)
    if done.sidecar is not None:
        print(
            f"{done.format} cannot hold {', '.join(done.unheld)}: written to {done.sidecar}, keep it with the weights"
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
