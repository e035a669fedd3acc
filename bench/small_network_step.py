"""Time per step of a small network in the training loop, by mode of compilation, including augmentation and mixing.

    python bench/small_network_step.py                                    # the recipe cifar10, on one GPU: on, graphs
    python bench/small_network_step.py --together 3 --ways graphs         # the same with three runs sharing the card
    python bench/small_network_step.py --recipe quick-cifar10 --ways off --device cpu --steps 4 --rounds 2

Each mode has its own process, and processes take turns, so that a slow moment of the machine affects all of them. With
`--together N` each mode is N processes that train at the same time, and the slowest one is reported. The images are
random.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from vitrail.data.dataset import ArrayDataset, Labels
from vitrail.distributed.process_group import join_world
from vitrail.recipes.registry import load_recipe
from vitrail.recipes.run_overrides import with_changes
from vitrail.train.config import Run
from vitrail.train.data import DataSplits
from vitrail.train.loop import Training
from vitrail.train.observer import NullObserver
from vitrail.train.resolve import resolve
from vitrail.train.resume import open_folder

PICTURES = 20_000
WARM = 20  # steps before the first that is timed: all is compiled and recorded by then
ALWAYS = ("epochs=0", "steps=10000000", "data.watch=none", "data.test=none", "keep.minutes=1000000")


def pictures(run: Run) -> DataSplits:
    """Random ones of the recipe's size."""
    drawn = np.random.default_rng(0)
    classes = tuple(str(number) for number in range(10))
    source = ArrayDataset(
        drawn.integers(0, 256, (PICTURES, *run.augmentation.size, 3), np.uint8),
        Labels(drawn.integers(0, len(classes), PICTURES)),
        classes,
    )
    return DataSplits(
        title="random", class_names=classes, train=source, watch=None, test=None, watch_name="", test_name=""
    )


def serve(run: Run, device: str, steps: int, pipe: Connection) -> None:
    """Trains `steps` steps whenever it is asked to, and says how long that took."""
    with join_world(device) as world, tempfile.TemporaryDirectory() as folder:
        train = pictures(run)
        run = resolve(run, train, world)
        with open_folder(Path(folder) / "run", run, train, world, command={}, force=False, log=str) as out:
            training = Training(run, train, world, out, NullObserver(), micro=0)
            stream = training.parts.batches.iterate(0, run.steps)
            count = WARM
            while count:
                start = time.perf_counter()
                for _ in range(count):
                    training.update(next(stream))
                    training.read_metrics()
                if world.device.type == "cuda":
                    torch.cuda.synchronize(world.device)
                pipe.send((time.perf_counter() - start) / count)
                count = steps if pipe.recv() else 0


def measured(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds a step of each way, round by round."""
    base = with_changes(load_recipe(args.recipe), [*args.set, *ALWAYS])
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Connection]] = {}
    for way in args.ways:
        pipes[way] = []
        for _ in range(args.together):
            here, there = context.Pipe()
            run = replace(base, compile=way)
            context.Process(target=serve, args=(run, args.device, args.steps, there), daemon=True).start()
            pipes[way].append(here)
    for several in pipes.values():
        for pipe in several:
            pipe.recv()  # warm
    found: dict[str, list[float]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way, several in pipes.items():
            for pipe in several:
                pipe.send(True)
            found[way].append(1e3 * max(pipe.recv() for pipe in several))
    for several in pipes.values():
        for pipe in several:
            pipe.send(False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--ways", nargs="+", default=["on", "graphs"], help="values of the setting compile")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    rows = measured(args)
    batch = with_changes(load_recipe(args.recipe), args.set).batch
    for way, times in rows.items():
        middle = statistics.median(times)
        told = (
            f"{middle:.2f} ms a step ({min(times):.2f} to {max(times):.2f}), {1e3 * batch / middle:,.0f} images/s each"
        )
        print(f"compile={way:7} {args.together} at once: {told}")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(json.dumps({"recipe": args.recipe, "set": args.set, "together": args.together, "on": machine, "ms": rows}))


if __name__ == "__main__":
    main()
