"""What `vitrail finetune` does."""

import argparse

from vitrail.cli import training
from vitrail.core.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    settle(args)
    if not args.weights:
        if args.resume is not None:
            return training.run(args, None)
        raise ConfigError("which weights? vitrail finetune WEIGHTS DATA: a file, a folder, a run, or NAME:TAG")
    if not args.data and not args.recipe:
        raise ConfigError(
            "which images? vitrail finetune WEIGHTS DATA: a folder with one subfolder per class, or another source"
        )
    return training.run(args, training.asked_by(args, "finetune", args.weights))


def settle(args: argparse.Namespace) -> None:
    """WEIGHTS DATA, or --from WEIGHTS and DATA in either form."""
    args.data = args.data or ""
    if not args.start:
        args.weights = args.weights or ""
        return
    if args.weights and args.data:
        raise ConfigError(f"--from {args.start} and {args.weights} both name weights; leave one out")
    args.weights, args.data = args.start, args.data or args.weights or ""
