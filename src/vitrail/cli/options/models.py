"""List the networks by name: parameters, sequence length and multiply-accumulates at two image sizes."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="a part of a name or a shell pattern, as in 'vit-*/16'")
    parser.add_argument("--classes", type=int, default=1000, help="classes of the head (default: 1000)")
    parser.add_argument("--json", action="store_true", help="exact numbers, one JSON object a line")
