"""Say what is in a set of images: images, classes, sizes, splits, files that cannot be read; and draw a contact
sheet. Without SOURCE, list the sets that are known by name. `vitrail data pack` writes tar shards, `vitrail data dedup`
compares sets; a folder called pack is written ./pack. Exit status 1: --check found files that cannot be read."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """The options of `vitrail data`."""

    source: str | None = None
    sheet: str | None = None
    no_sheet: bool = False
    check: bool = False
    strict: bool = False
    workers: int | None = None
    download: bool = False
    json: bool = False


OPTIONS = DataOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        help="a path or a name, perhaps @SPLIT: photos/, list.csv, shards/, digits, cifar10, pets:DIR@test",
    )
    parser.add_argument("--sheet", metavar="OUT.png", help="the contact sheet (default: contact-sheet-NAME.png)")
    parser.add_argument("--no-sheet", action="store_true", help="draw no contact sheet")
    parser.add_argument("--check", action="store_true", help="decode every image, not only some headers")
    parser.add_argument("--strict", action="store_true", help="stop at the first file that cannot be read")
    parser.add_argument("--workers", type=int, help="processes that decode (default: one a core)")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object; a sheet only with --sheet")
