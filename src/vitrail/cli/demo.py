"""Pre-train a small ViT on 8x8 digits at 16 px, fine-tune it at 32 px with resized positions, and show the report.

The paper's way from 224 to 384 px, on data that are in the package, in under three minutes on two cores.
"""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from vitrail.cli import training
from vitrail.cli.live import duration, observer
from vitrail.core.errors import ConfigError
from vitrail.distributed.world import joined
from vitrail.recipes.asked import Asked, planned
from vitrail.train.folder.run import is_done
from vitrail.train.loop import Observer, Result, train

BAR = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help="(default: runs/demo)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def run(args: argparse.Namespace) -> int:
    out: Path = args.out
    if is_done(out / "finetune"):
        print(f"The demo has been run here: see {out / 'finetune' / 'report.html'}, or give another --out")
        return 0
    begun = time.monotonic()
    pretrain = Asked(verb="pretrain", recipe="digits", seed=args.seed)
    finetune = replace(
        pretrain, verb="finetune", recipe="finetune-digits", weights=str(out / "pretrain" / "last.safetensors")
    )
    torch.set_num_threads(1)  # so small a network is quicker without a pool
    with observer(0) as watching:
        watching.told("1  Pre-training: a small ViT from scratch on 16 px digits, 16 patches an image")
        low = step(pretrain, out / "pretrain", args.device, watching)
        if low.test is None:
            return stopped(out)
        watching.told("2  Fine-tuning (3.2): the same weights at 32 px, 64 patches, positions resized, a new head")
        high = step(finetune, out / "finetune", args.device, watching)
        if high.test is None:
            return stopped(out)
    print()
    print(f"held-out digits, 16 px: {low.test['accuracy']:.2%}    32 px: {high.test['accuracy']:.2%}", end="")
    print(f"    ({high.test['count']} pictures, {duration(time.monotonic() - begun)} in all)")
    print(f"report:  {high.folder / 'report.html'}")
    print(f"weights: {high.folder / 'last.safetensors'}")
    return 0 if high.test["accuracy"] > BAR else 1


def step(asked: Asked, out: Path, device: str, watching: Observer) -> Result:
    """One run of the two; what was begun before is gone on with."""
    with joined(device) as world:
        if world.size > 1:
            raise ConfigError("the demo is for one process; start it without torchrun")
        command = {**asdict(asked), "go_on": training.go_on(asked, out)}
        return train(planned(asked).run, out=out, world=world, command=command, observer=watching)


def stopped(out: Path) -> int:
    print(f"stopped; `vitrail demo --out {out}` goes on")
    return 0
