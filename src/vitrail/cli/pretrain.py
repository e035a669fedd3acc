"""What `vitrail pretrain` does."""

import argparse

from vitrail.cli import training
from vitrail.core.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    args.data = args.data or ""
    if not args.recipe:
        if args.resume is not None:
            return training.run(args, None)
        raise ConfigError("which recipe? `vitrail recipes` lists them")
    return training.run(args, training.asked_by(args, "pretrain"))
