"""`vitrail demo`: trains a network from scratch in a minute or two, and prints what to type next."""

import io
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

from vitrail.cli.options import train as declared
from vitrail.cli.train.display import TrainingPanel, make_observer
from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.text import format_duration
from vitrail.data.collection import open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.distributed.process_group import join_world
from vitrail.predict.predictor import Predictor
from vitrail.recipes import launch
from vitrail.recipes.run_request import RunCommand, build_plan
from vitrail.report.image_grid import draw_grid
from vitrail.report.segment_drawing import choose_colours_alike, choose_segment_colours, draw_segments
from vitrail.tasks.mask_queries.prediction import PredictedSegments
from vitrail.train.loop import train
from vitrail.train.observer import Observer, get_advance
from vitrail.train.run_folder.files import is_done
from vitrail.train.scoring import TrainingResult

MIN_ACCURACY: Final = 0.95
MAX_SCORES: Final = 5  # scores shown during a run; its report has all of them
SAMPLE_INDEX: Final = 3  # the held-out digit that is written as an image
OUT: Final = {"classification": Path("runs/demo"), "segmentation": Path("runs/demo-segmentation")}
MIN_QUALITY: Final = 0.5
SCENES: Final = "scenes/simple"
SHOWN: Final = (0, 1, 2, 3)  # held-out scenes that are drawn
PANE, LETTERS = 320, 14  # pixels: the side of an image, and the height of letters
OWN_IMAGES: Final = {  # the command that trains on them
    "classification": "fit vitrail-cifar10 FOLDER --out mine.safetensors  (a subfolder per class)",
    "segmentation": "finetune WEIGHTS FOLDER --out RUN  (masks, or COCO json)",
}


def run_demo(options: declared.DemoOptions) -> int:
    demos = {"classification": run_classification_demo, "segmentation": run_segmentation_demo}
    if options.kind not in demos:
        raise unknown_name("demo", options.kind, demos)
    return demos[options.kind](options, options.out or OUT[options.kind])


def run_classification_demo(options: declared.DemoOptions, out: Path) -> int:
    """Pre-trains on digits at 16 px, then fine-tunes at 32 px (3.2)."""
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
            return report_interrupted(out, options)
        watching = DemoObserver(panel)
        watching.log("\n2  Fine-tuning (3.2): the same weights at 32 px, 64 patches, positions resized, a new head")
        high = train_stage(finetune, out / "finetune", options.device, watching)
        if high.test is None:
            return report_interrupted(out, options)
    accuracies = f"16 px: {low.test['accuracy']:.2%}    32 px: {high.test['accuracy']:.2%}"
    print(f"\nheld-out digits, {accuracies}    ({high.test['count']} images)\n")
    show_next_steps(high.folder, write_digit(out))
    print_duration(begun)
    return 0 if high.test["accuracy"] > MIN_ACCURACY else 1


def run_segmentation_demo(options: declared.DemoOptions, out: Path) -> int:
    """Trains a panoptic network on generated scenes: every shape, and the sky and the ground behind them."""
    if is_done(out):
        print(f"The demo is finished in {out}; use another --out to run it again.")
        show_next_steps(out, write_scene(out), "segmentation")
        return 0
    begun = time.monotonic()
    asked = RunCommand(verb="pretrain", recipe="demo-scenes", seed=options.seed)
    torch.set_num_threads(min(torch.get_num_threads(), 2))  # more threads wait for each other longer than they compute
    with make_observer(0) as panel:
        watching = DemoObserver(panel)
        watching.log("Panoptic segmentation from scratch: a small hybrid with queries (EoMT), 64 px")
        found = train_stage(asked, out, options.device, watching)
    if found.test is None:
        return report_interrupted(out, options)
    picture = write_comparison(out)
    quality = f"PQ {found.test['pq']:.1%}, things {found.test['pq_things']:.1%}, stuff {found.test['pq_stuff']:.1%}"
    print(f"\nheld-out scenes, {quality}    ({found.test['count']:,} images)\n")
    print(f"Look at some:        {picture.absolute().as_uri()}")
    show_next_steps(out, write_scene(out), "segmentation")
    print_duration(begun)
    return 0 if found.test["pq"] > MIN_QUALITY else 1


def write_comparison(out: Path) -> Path:
    """Draws some held-out scenes, each next to its ground truth and the network's prediction."""
    source, predictor = open_collection(SCENES).splits["test"], Predictor(str(out))
    rows = [draw_comparison(source, index, predictor) for index in SHOWN]
    path, file = out / "scenes.png", io.BytesIO()
    draw_grid(("scene", "truth", "prediction"), rows).save(file, "PNG")
    write_file(path, file.getvalue())
    return path


def draw_comparison(source: ImageDataset, index: int, predictor: Predictor) -> tuple[Image.Image, ...]:
    """A scene, its ground truth and the prediction, in which matched segments have the colours of the true ones."""
    scene = source.open_image(index).rgb()
    large = scene.resize((PANE, PANE), Image.Resampling.BICUBIC)
    truth, found = source.segments(index), predictor(scene)
    assert isinstance(found, PredictedSegments)
    classes, masks = truth.classes.tolist(), list(truth.decode())
    names = [source.segment_classes[one].name for one in classes]
    drawn = draw_segments(large, masks, choose_segment_colours(classes), names, letters=LETTERS)
    own = [one.mask() for one in found.segments]
    colours = choose_colours_alike([one.index for one in found.segments], own, classes, masks)
    labels = [one.label for one in found.segments]
    return large, drawn, draw_segments(large, own, colours, labels, letters=LETTERS)


def write_scene(out: Path) -> Path:
    """Writes a held-out scene as an image, large enough to look at."""
    path, file = out / "a-scene.png", io.BytesIO()
    scene = open_collection(SCENES).splits["test"].open_image(SHOWN[2]).rgb()
    scene.resize((PANE, PANE), Image.Resampling.BICUBIC).save(file, "PNG")
    write_file(path, file.getvalue())
    return path


def print_duration(begun: float) -> None:
    times, spent = format_duration(time.monotonic() - begun), os.times()
    of_cpu = format_duration(spent.user + spent.system + spent.children_user + spent.children_system)
    print(f"The demo took {times}, {of_cpu} of CPU time.")


class DemoObserver:
    """Passes on what is worth reading in a run of half a minute: a few scores, and training metrics only if the panel
    redraws them in place."""

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
    """Trains one of the two runs, or resumes it if it was interrupted."""
    with join_world(device) as world:
        if world.size > 1:
            raise ConfigError("the demo runs in one process; start it without torchrun")
        command = launch.record_command(asked, out, None)
        return train(build_plan(asked).run, out=out, world=world, command=command, observer=watching)


def write_digit(out: Path) -> Path:
    """Writes a held-out digit as an image, large enough to look at."""
    source = open_collection("digits").splits["test"]
    path = out / f"a-{source.classes[int(source.labels.rows(np.array([SAMPLE_INDEX]))[0])]}.png"
    file = io.BytesIO()
    source.open_image(SAMPLE_INDEX).rgb().resize((128, 128), Image.Resampling.BILINEAR).save(file, "PNG")
    write_file(path, file.getvalue())
    return path


def show_next_steps(run: Path, image: Path, kind: str = "classification") -> None:
    """Prints what to do next, as commands and links."""
    vitrail, weights = vitrail_command(), shlex.quote(str(run))
    print(f"Open the report:     {(run / 'report.html').absolute().as_uri()}")
    print(f"Try it in a browser: {vitrail} serve {weights}")
    print(f"Predict with it:     {vitrail} predict {weights} {shlex.quote(str(image))}")
    print(f"Use your images:     {vitrail} {OWN_IMAGES[kind]}")


def vitrail_command() -> str:
    """The command that runs this installation: `vitrail` if the name finds it, else its path."""
    here = Path(sys.executable).parent / "vitrail"
    if not here.exists():
        return f"{shlex.quote(sys.executable)} -m vitrail"
    found = shutil.which("vitrail")
    if found is not None and Path(found).exists() and Path(found).samefile(here):
        return "vitrail"
    path = os.path.relpath(here)
    return shlex.quote(str(here) if path.startswith(os.pardir) else path)


def report_interrupted(out: Path, options: declared.DemoOptions) -> int:
    seed = f" --seed {options.seed}" if options.seed else ""
    print(f"stopped; resume with: {vitrail_command()} demo {options.kind} --out {shlex.quote(str(out))}{seed}")
    return 0
