"""List the networks by name: parameters, sequence length and multiply-accumulates at two image sizes."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsOptions:
    """The options of `vitrail models`."""

    pattern: str = "*"
    classes: int = 1000
    json: bool = False
    pin: tuple[str, ...] = ()
    verify: bool = False


OPTIONS = ModelsOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="a part of a name or a shell pattern, as in 'vit-*/16'")
    parser.add_argument("--classes", type=int, default=1000, help="classes of the head (default: 1000)")
    parser.add_argument("--json", action="store_true", help="exact numbers, one JSON object a line")
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME:TAG",
        help="record the checksum of public weights, downloaded if need be: nothing else passes for them afterwards",
    )
    checks.add_argument(
        "--verify", action="store_true", help="hold all public weights in the cache against what is known of them"
    )
