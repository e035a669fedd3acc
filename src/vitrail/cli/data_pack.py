"""What `vitrail data pack` does."""

import argparse
import sys

from vitrail.cli.progress import bars, on_interrupt


def run(args: argparse.Namespace) -> int:
    from vitrail.cli.data import readable
    from vitrail.cli.opening import open_data
    from vitrail.data.packing.pack import pack

    collection = open_data(args.source, download=args.download)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    kept = f"the shards that are complete stay in {args.out}; the same command resumes"
    with bars() as bar, on_interrupt(kept):
        report = pack(
            collection.splits,
            args.out,
            shard_size=args.shard_size,
            max_side=args.max_side,
            quality=args.quality,
            workers=args.workers,
            strict=args.strict,
            progress=lambda done, total: bar("packing", done, total),
        )
    for split, count in report.splits.items():
        print(f"{split}: {count:,} images")
    kept = f" ({report.kept} of them from before)" if report.kept else ""
    shards = f"{report.shards} {'shard' if report.shards == 1 else 'shards'}{kept}"
    print(f"{shards}, {readable(report.bytes)}, in {report.out}")
    if report.reencoded:
        print(f"{report.reencoded:,} images made smaller")
    if report.unreadable:
        print(f"{report.unreadable:,} left out, for they cannot be read: {report.out / 'unreadable.jsonl'}")
    return 0
