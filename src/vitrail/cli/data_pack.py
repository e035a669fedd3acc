"""Write a set of pictures as tar shards: any source, in parallel, verified; a pack that was stopped goes on."""

import argparse
import re
import sys

from vitrail.cli.progress import bars
from vitrail.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a path or a name, perhaps @SPLIT, as for `vitrail data`")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--shard-size", type=size, default=size("256MB"), help="of a tar file (default: 256MB)")
    parser.add_argument("--max-side", type=int, help="bring pictures with a longer side down to it")
    parser.add_argument("--quality", type=int, default=92, help="of JPEGs that are made smaller (default: 92)")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--strict", action="store_true", help="stop at the first file that cannot be read")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")


def run(args: argparse.Namespace) -> int:
    from vitrail.cli.data import readable
    from vitrail.data.collection import open_collection
    from vitrail.data.packing.pack import pack

    with bars(bytes_=True) as bar:
        collection = open_collection(args.source, download=args.download, progress=bar)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    with bars() as bar:
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


def size(text: str) -> int:
    """256MB -> 256000000; KiB, MiB and GiB are powers of two."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"{text!r} is no size; write 256MB, 1GiB or a number of bytes")
    base = 1024 if found[3] else 1000
    return round(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))
