"""What `vitrail finetune` does."""

import argparse

from vitrail.cli import training
from vitrail.core.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    if not args.weights:
        if args.resume is not None:
            return training.run(args, None)
        raise ConfigError("which weights? give --from WEIGHTS: a file, a folder, or NAME:TAG")
    if not args.data and not args.recipe:
        raise ConfigError("which pictures? give --data SOURCE: a folder with a folder a class, or another source")
    return training.run(args, training.asked_by(args, "finetune", args.weights))
