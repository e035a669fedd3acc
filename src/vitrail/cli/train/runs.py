"""`vitrail recipes`, `report`, `replay` and `demo`."""

import io
import json
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from vitrail.cli.options.train import DemoOptions, RecipesOptions, ReplayOptions, ReportOptions
from vitrail.cli.progress import waiting
from vitrail.cli.train.display import TrainingPanel, make_observer
from vitrail.core.atomic_files import write_file
from vitrail.core.config_overrides import list_fields, to_plain
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_duration
from vitrail.data.collection import open_collection
from vitrail.distributed.process_group import join_world
from vitrail.recipes.launch import record_command
from vitrail.recipes.registry import find_recipe, list_recipes, load_recipe
from vitrail.recipes.run_overrides import with_changes
from vitrail.recipes.run_request import RunCommand, build_plan
from vitrail.report.contact_sheet import draw_mosaic
from vitrail.tasks.registry import task_of
from vitrail.train.data import open_splits
from vitrail.train.dry_run import replay
from vitrail.train.loop import train
from vitrail.train.observer import Observer, get_advance
from vitrail.train.resume import read_run
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.run_folder.files import is_done
from vitrail.train.scoring import TrainingResult


def run_recipes(options: RecipesOptions) -> int:
    """Lists the recipes, or shows the docstring and the flat config of one, in which changed defaults are marked."""
    if options.name is None:
        for group in dict.fromkeys(entry.group for entry in list_recipes().values()):
            rows = [(name, entry.help) for name, entry in list_recipes().items() if entry.group == group]
            print_table(["recipe", "what it is"], rows, title=group, left=2)
        print("vitrail recipes NAME shows the settings of one; each can be changed with --set NAME=VALUE.")
        return 0
    entry = find_recipe(options.name)
    chosen = with_changes(load_recipe(entry.name), options.set)
    if options.json:
        print(json.dumps(to_plain(chosen), indent=2))
        return 0
    print(f"{entry.name}: {entry.text}\n")
    rows = [(line.name, line.text, "" if line.default else "*") for line in list_fields(chosen)]
    print_table(["setting", "value", ""], rows, left=3)
    print("* not the default. Any of these can be changed with --set NAME=VALUE.")
    return 0


def run_report(options: ReportOptions) -> int:
    print(describe_run(options.run))
    return 0


MAX_ROWS = 20
MAX_TILES = 64


def run_replay(options: ReplayOptions) -> int:
    config = read_run(options.run)
    with join_world(options.device) as world, waiting(f"running step {options.step} again"):
        splits = open_splits(config.data, task_of(config.objective))
        found = replay(config, splits, options.run, options.step, world)
    weights = "the weights of the start" if found.weights_step < 0 else f"the weights of step {found.weights_step:,}"
    state = "finite" if found.is_finite else "NOT finite"
    print(f"Step {found.step:,} with {weights}: loss {found.loss:.4g}, gradient norm {found.norm:.4g}, {state}")
    bad = sum(not math.isfinite(one.loss) for one in found.images)
    print(f"{len(found.images):,} images, {bad:,} of them with a loss that is not finite by itself. Worst first:")
    if any(one.label for one in found.images):
        rows = [(one.name, one.label, f"{one.loss:.4g}") for one in found.images[:MAX_ROWS]]
        print_table(("image", "label", "loss"), rows, left=2)
    else:
        print_table(("image", "loss"), [(one.name, f"{one.loss:.4g}") for one in found.images[:MAX_ROWS]])
    tiles, numbers = found.images[:MAX_TILES], f"loss {found.loss:.4g}, gradient norm {found.norm:.4g}; worst first"
    footer = f"{len(tiles)} of {len(found.images)} images, augmented and mixed"
    path = options.run / f"replay-{options.step}.png"
    draw_mosaic(f"Step {found.step:,}", numbers, [one.pixels for one in tiles], footer=footer).save(path)
    print(f"The batch as the network saw it: {path}")
    return 0


MIN_ACCURACY: Final = 0.95
MAX_SCORES: Final = 5  # of a run that are shown; its report has them all
SAMPLE_INDEX: Final = 3  # the held-out digit that is written as an image


def run_demo(options: DemoOptions) -> int:
    out = options.out
    if is_done(out / "finetune"):
        print(f"The demo is finished in {out}; use another --out to run it again.")
        show_next_steps(out / "finetune", write_digit(out))
        return 0
    begun = time.monotonic()
    pretrain = RunCommand(verb="pretrain", recipe="digits", seed=options.seed)
    weights = str(out / "pretrain" / "last.safetensors")
    finetune = replace(pretrain, verb="finetune", recipe="finetune-digits", weights=weights)
    torch.set_num_threads(1)  # a network this small is faster on one thread
    with make_observer(0) as panel:
        watching = DemoObserver(panel)
        watching.log("1  Pre-training: a small ViT from scratch on 16 px digits, 16 patches per image")
        low = train_stage(pretrain, out / "pretrain", options.device, watching)
        if low.test is None:
            return report_interrupted(out)
        watching = DemoObserver(panel)
        watching.log("\n2  Fine-tuning (3.2): the same weights at 32 px, 64 patches, positions resized, a new head")
        high = train_stage(finetune, out / "finetune", options.device, watching)
        if high.test is None:
            return report_interrupted(out)
    accuracies = f"16 px: {low.test['accuracy']:.2%}    32 px: {high.test['accuracy']:.2%}"
    print(f"\nheld-out digits, {accuracies}    ({high.test['count']} images)\n")
    show_next_steps(high.folder, write_digit(out))
    took, of_cpu = format_duration(time.monotonic() - begun), format_duration(time.process_time())
    print(f"The demo took {took}, {of_cpu} of CPU time.")
    return 0 if high.test["accuracy"] > MIN_ACCURACY else 1


class DemoObserver:
    """Passes on what is worth reading in a run of half a minute: a few of its scores, and between them no numbers but
    those of a panel that is redrawn."""

    def __init__(self, inner: Observer) -> None:
        self.inner, self.steps, self.next = inner, 0, 0
        self.log, self.advance = inner.log, get_advance(inner)

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self.steps = row["steps"]
            if isinstance(self.inner, TrainingPanel):
                self.inner.progress(row)
        elif row["kind"] == "baseline":
            self.inner.progress(row)
        elif self.steps and (row["step"] >= self.next or row["step"] == self.steps):
            self.inner.progress(row)
            self.next = row["step"] + self.steps / MAX_SCORES


def train_stage(asked: RunCommand, out: Path, device: str, watching: Observer) -> TrainingResult:
    """One of the two runs; an interrupted one is resumed."""
    with join_world(device) as world:
        if world.size > 1:
            raise ConfigError("the demo is for one process; start it without torchrun")
        command = record_command(asked, out, None)
        return train(build_plan(asked).run, out=out, world=world, command=command, observer=watching)


def write_digit(out: Path) -> Path:
    """A held-out digit as an image, large enough to look at."""
    source = open_collection("digits").splits["test"]
    path = out / f"a-{source.classes[int(source.labels.rows(np.array([SAMPLE_INDEX]))[0])]}.png"
    file = io.BytesIO()
    source.open_image(SAMPLE_INDEX).rgb().resize((128, 128), Image.Resampling.BILINEAR).save(file, "PNG")
    write_file(path, file.getvalue())
    return path


def show_next_steps(run: Path, image: Path) -> None:
    """Prints what to do next, as commands and links."""
    vitrail, weights = vitrail_command(), shlex.quote(str(run))
    print(f"Open the report:     {(run / 'report.html').absolute().as_uri()}")
    print(f"Try it in a browser: {vitrail} serve {weights}")
    print(f"Predict with it:     {vitrail} predict {weights} {shlex.quote(str(image))}")
    print(f"Use your images:     {vitrail} fit vitrail-cifar10 FOLDER --out mine.safetensors  (a subfolder per class)")


def vitrail_command() -> str:
    """How `vitrail` is typed here: by its name where that finds this installation, else by its path."""
    here = Path(sys.executable).parent / "vitrail"
    if not here.exists():
        return f"{shlex.quote(sys.executable)} -m vitrail"
    found = shutil.which("vitrail")
    if found is not None and Path(found).exists() and Path(found).samefile(here):
        return "vitrail"
    path = os.path.relpath(here)
    return shlex.quote(str(here) if path.startswith(os.pardir) else path)


def report_interrupted(out: Path) -> int:
    print(f"stopped; resume with: {vitrail_command()} demo --out {out}")
    return 0
