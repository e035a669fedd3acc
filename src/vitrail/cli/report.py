"""What `vitrail report` does."""

import argparse

from vitrail.train.folder.story import describe


def run(args: argparse.Namespace) -> int:
    print(describe(args.run))
    return 0
