"""What the loop adds to the bare step: data order, flips on the device, normalisation, metrics, schedule, flags.

    python -m bench.training_loop                                  # ViT-B/16 at 224 px, bfloat16, on one GPU
    python -m bench.training_loop --device cpu --model Ti/16 --image-size 32 --batch 8 --steps 4 --rounds 2

Both run the same compiled objective, optimiser and clipping, alternating in one process. The bare step always gets the
same batch; the loop draws a new one each time from a set that is on the device, and reads its metrics.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.turns import add_lock, take_turn
from vitrail.data.dataset import ArrayDataset, Labels
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import Squash
from vitrail.distributed.process_group import join_world
from vitrail.models.zoo import model_config
from vitrail.optim.config import Optim, Schedule
from vitrail.optim.optimiser import clip_factor, total_norm
from vitrail.train.config import Data, Keep, Run
from vitrail.train.data import DataSplits
from vitrail.train.loop import Training
from vitrail.train.observer import NullObserver
from vitrail.train.resolve import resolve
from vitrail.train.resume import open_folder

CLASSES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    model: str
    batch: int
    bare_ms: float
    loop_ms: float
    overhead: float
    device: str


def source(count: int, side: int) -> ArrayDataset:
    """Random images with random labels."""
    drawn = np.random.default_rng(0)
    pixels = drawn.integers(0, 256, (count, side, side, 3), np.uint8)
    labels = Labels(drawn.integers(0, CLASSES, count))
    return ArrayDataset(pixels, labels, tuple(str(number) for number in range(CLASSES)))


def timed(work: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(args: argparse.Namespace, folder: Path) -> Result:
    side = args.image_size
    run = Run(
        name="loop",
        model=model_config(f"ViT-{args.model}", image_size=side, classes=CLASSES),
        augmentation=Augmentation(crop=Squash(size=(side, side))),
        data=Data(source="arrays", resident="on", watch="none", test="none"),
        optim=Optim(lr=1e-4, weight_decay=0.1, clip=1.0),
        schedule=Schedule(warmup=10),
        batch=args.batch,
        micro=args.batch,
        steps=10_000_000,
        keep=Keep(minutes=1e6),
    )
    train = source(max(4 * args.batch, 64), side)
    splits = DataSplits(
        title="random", class_names=train.classes, train=train, watch=None, test=None, watch_name="", test_name=""
    )
    with join_world(args.device) as world:
        run = resolve(run, splits, world)
        with open_folder(folder / "run", run, splits, world, command={}, force=False, log=print) as out:
            training = Training(run, splits, world, out, NullObserver(), micro=0)
            parts = training.parts
            stream = parts.batches.iterate(0, run.steps)
            fixed = parts.objective.inputs(next(stream), seed=0, step=0)

            def bare() -> None:
                for _ in range(args.steps):
                    outcome = parts.parallel(*fixed)
                    outcome.total.backward()
                    norm = total_norm(parts.optimiser.gradients()) / outcome.count
                    divisor = outcome.count / clip_factor(norm, run.optim.clip)
                    parts.optimiser.step(1e-4, divisor=divisor, ok=norm.isfinite())
                    parts.optimiser.zero_grad()

            def loop() -> None:
                for _ in range(args.steps):
                    training.update(next(stream))
                    training.read_metrics()
                    training.flags(training.step, (False, world.is_main and training.is_save_due()))

            for warm in (bare, loop):
                timed(warm, world.device)
            with take_turn(args.lock):
                for warm in (bare, loop):
                    timed(warm, world.device)
                pairs = [(timed(bare, world.device), timed(loop, world.device)) for _ in range(args.rounds)]
            training.store.close()
            stream.close()
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.machine()
    return Result(
        model=args.model,
        batch=args.batch,
        bare_ms=1e3 * statistics.median(one for one, _ in pairs) / args.steps,
        loop_ms=1e3 * statistics.median(other for _, other in pairs) / args.steps,
        overhead=statistics.median(other / one for one, other in pairs) - 1,
        device=f"{name}, torch {torch.__version__}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="auto")
    add_lock(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    print(
        f"ViT-{result.model}, batch {result.batch}: bare step {result.bare_ms:.2f} ms, in the loop "
        f"{result.loop_ms:.2f} ms, {result.overhead:+.1%} ({result.device})"
    )
    if args.out:
        args.out.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
