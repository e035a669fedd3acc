"""What `vitrail replay` does."""

import math

from PIL import Image

from vitrail.cli.options.replay import ReplayOptions
from vitrail.cli.progress import waiting
from vitrail.core.console import print_table
from vitrail.distributed.process_group import joined
from vitrail.report.contact_sheet import mosaic
from vitrail.tasks.registry import task_of
from vitrail.train.data import open_splits
from vitrail.train.dry_run import Replay, replay
from vitrail.train.resume import read_run

MAX_ROWS = 20
MAX_TILES = 64


def run_replay(options: ReplayOptions) -> int:
    config = read_run(options.run)
    with joined(options.device) as world, waiting(f"running step {options.step} again"):
        splits = open_splits(config.data, task_of(config.objective))
        found = replay(config, splits, options.run, options.step, world)
    show_replay(found)
    path = options.run / f"replay-{options.step}.png"
    draw_batch(found).save(path)
    print(f"The batch as the network saw it: {path}")
    return 0


def show_replay(found: Replay) -> None:
    weights = "the weights of the start" if found.weights_step < 0 else f"the weights of step {found.weights_step:,}"
    state = "finite" if found.finite else "NOT finite"
    print(f"Step {found.step:,} with {weights}: loss {found.loss:.4g}, gradient norm {found.norm:.4g}, {state}")
    bad = sum(not math.isfinite(one.loss) for one in found.seen)
    print(f"{len(found.seen):,} images, {bad:,} of them with a loss that is not finite by itself. Worst first:")
    if any(one.label for one in found.seen):
        rows = [(one.name, one.label, f"{one.loss:.4g}") for one in found.seen[:MAX_ROWS]]
        print_table(("picture", "label", "loss"), rows, left=2)
    else:
        print_table(("picture", "loss"), [(one.name, f"{one.loss:.4g}") for one in found.seen[:MAX_ROWS]])


def draw_batch(found: Replay) -> Image.Image:
    return mosaic(
        f"Step {found.step:,}",
        f"loss {found.loss:.4g}, gradient norm {found.norm:.4g}; worst first",
        [one.pixels for one in found.seen[:MAX_TILES]],
        footer=f"{min(len(found.seen), MAX_TILES)} of {len(found.seen)} images, augmented and mixed",
    )
