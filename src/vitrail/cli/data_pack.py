"""What `vitrail data pack` does."""

import sys

from vitrail.cli.options.data_pack import PackOptions
from vitrail.cli.progress import bars, on_interrupt


def run_pack(options: PackOptions) -> int:
    from vitrail.cli.data import format_size
    from vitrail.cli.opening import open_data
    from vitrail.data.tools.pack import pack

    collection = open_data(options.source, download=options.download)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    kept = f"the shards that are complete stay in {options.out}; the same command resumes"
    with bars() as bar, on_interrupt(kept):
        report = pack(
            collection.splits,
            options.out,
            shard_size=options.shard_size,
            max_side=options.max_side,
            quality=options.quality,
            workers=options.workers,
            strict=options.strict,
            progress=lambda done, total: bar("packing", done, total),
        )
    for split, count in report.splits.items():
        print(f"{split}: {count:,} images")
    kept = f" ({report.kept} of them from before)" if report.kept else ""
    shards = f"{report.shards} {'shard' if report.shards == 1 else 'shards'}{kept}"
    print(f"{shards}, {format_size(report.bytes)}, in {report.out}")
    if report.reencoded:
        print(f"{report.reencoded:,} images made smaller")
    if report.unreadable:
        print(f"{report.unreadable:,} left out, for they cannot be read: {report.out / 'unreadable.jsonl'}")
    return 0
