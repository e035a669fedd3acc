"""Write a set of images as tar shards: any source, in parallel, verified; a pack that was stopped goes on."""

import argparse
import re
from dataclasses import dataclass
from typing import Final

from vitrail.cli.options.grammar import add_out
from vitrail.core.errors import ConfigError

SHARD_SIZE: Final = 256_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """The options of `vitrail data pack`."""

    source: str
    out: str
    shard_size: int = SHARD_SIZE
    max_side: int | None = None
    quality: int = 92
    workers: int | None = None
    strict: bool = False
    download: bool = False


OPTIONS = PackOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DATA", help="a path or a name, perhaps @SPLIT, as for `vitrail data`")
    add_out(parser, "the folder to write", kind=str)
    parser.add_argument("--shard-size", type=size, default=SHARD_SIZE, help="of a tar file (default: 256MB)")
    parser.add_argument("--max-side", type=int, help="bring images with a longer side down to it")
    parser.add_argument("--quality", type=int, default=92, help="of JPEGs that are made smaller (default: 92)")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--strict", action="store_true", help="stop at the first file that cannot be read")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")


def size(text: str) -> int:
    """256MB -> 256000000; KiB, MiB and GiB are powers of two."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"{text!r} is not a size; write 256MB, 1GiB or a number of bytes")
    base = 1024 if found[3] else 1000
    return round(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))
