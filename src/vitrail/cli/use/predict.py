"""`vitrail predict`: classifies images, and optionally writes masks and attention maps."""

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import numpy as np
import torch
from PIL import Image
from rich.text import Text
from torch import Tensor

from vitrail.checkpoint.known_weights import is_bundled
from vitrail.cli.inputs import rename_predictor, single_process
from vitrail.cli.options.use import PredictOptions
from vitrail.cli.progress import bars, on_interrupt, reading
from vitrail.cli.use.predict_inputs import OVERLAY, ImageFile, ImageListing, list_images, split_words
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.console import format_millions, make_console, wrap_words
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import format_size, pluralise
from vitrail.data.class_names import read_class_names
from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.context import run_in_portions
from vitrail.inspection.layer_taps import require_transformer
from vitrail.inspection.rollout import overlay, rollout
from vitrail.predict.image_input import image_from, prepare_ahead, split_batches
from vitrail.predict.predictor import Predictor, View, predictor
from vitrail.report.page import printable
from vitrail.tasks.task import Task, TaskPrediction

BAR_WIDTH = 24  # characters of a full bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


def run_predict(options: PredictOptions) -> int:
    for name, value in (("--topk", options.topk), ("--batch", options.batch)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    weights, words = split_words(options.words) if options.weights is None else (options.weights, options.words)
    found = list_images(words, options.attention, options.out)
    with single_process(options.device) as device:
        asker = load_predictor(options, weights, device)
        done = PredictSession(
            asker=asker,
            out=make_writer(asker, options),
            topk=options.topk,
            attention=None if options.attention is None else AttentionImages(options.attention, asker),
            files=None if options.out is None else PredictionFiles(options.out, asker, found.known_images()),
        )
        print(describe_predictor(weights, asker), file=sys.stderr)
        for line in (*found.notes, *found.closed):
            print_note(line)
        with on_interrupt("the predictions so far are complete; run again with the remaining images"):
            try:
                predict_all(done, found, options.workers)
            finally:
                if done.files is not None:
                    done.files.finish()
    if not done.seen:
        raise DataError("stdin named no images")
    if done.failed:
        verb = "was" if done.failed == 1 else "were"
        print_note(f"{done.failed:,} of {pluralise(done.seen, 'image')} {verb} unreadable")
    return 1 if done.failed or found.closed else 0


def load_predictor(options: PredictOptions, weights: str, device: torch.device) -> Predictor[Any]:
    """Loads the requested network; refuses one without classes, and options that its task does not take."""
    batch = options.batch or (128 if device.type == "cuda" else 32)
    if options.windows is not None and options.attention is not None:
        raise ConfigError("--attention draws what the network sees at once; omit --windows")
    how: dict[str, Any] = {"precision": options.precision, "batch": batch, "threshold": options.threshold}
    how["windows"] = options.windows
    with reading(weights):
        asker = predictor(weights, device=device, image_size=options.image_size, patch=options.patch, **how)
    if not asker.labels:
        raise ConfigError(f"{weights} has no head, so it names no classes; give it one with `vitrail fit` or finetune")
    offered, task = asker.task.prediction_options(multi_label=asker.multi_label), asker.task.name
    if options.topk is not None and "topk" not in offered:
        raise ConfigError(f"--topk {options.topk} is for weights that rank classes, not {task}; omit it for {weights}")
    if options.threshold is not None and "threshold" not in offered:
        why = "has one class for each image; --topk N shows more classes" if "topk" in offered else f"is for {task}"
        given = f"--threshold {options.threshold:g}"
        raise ConfigError(f"{given} is for multi-label weights and for segments, and {weights} {why}")
    return rename_predictor(asker, options.labels, options.rename)


def describe_predictor(weights: str, asker: Predictor[Any]) -> str:
    """Describes weights in one line: "w.npz: ViT, 5.72M parameters, 224x224 px, 1,000 classes, bfloat16"."""
    kind = type(asker.network.config).__name__.removesuffix("Config")
    network, size = asker.network, f"{format_size(asker.preprocessing.image)} px"
    count = format_millions(sum(parameter.numel() for parameter in network.parameters()))
    named = f"{weights} (bundled)" if is_bundled(weights) else printable(weights)
    classes = asker.task.describe_outputs(asker.labels)
    classes += f", multi-label; predicted from {100 * asker.threshold:g} %" if asker.multi_label else ""
    if not asker.multi_label and "threshold" in asker.task.prediction_options(multi_label=False):
        classes += f", with a score of at least {asker.threshold:g}"
    classes += ", with ImageNet's names" if asker.labels == read_class_names("imagenet") else ""
    classes += f", {asker.precision}" if asker.precision not in ("auto", "float32") else ""
    return f"{named}: {kind}, {count} parameters, {size}, {classes}"


class LineWriter:
    """Writes one line per image. `made` are the files written for it, by kind."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def answer(self, path: str, prediction: TaskPrediction, made: Mapping[str, str]) -> None:
        files = ", ".join(printable(made[kind]) for kind in ("file", "overlay") if kind in made)
        self.file.write(f"{printable(path)}: {prediction}{f' -> {files}' if files else ''}\n")

    def write_failure(self, path: str, reason: str) -> None:
        """Writes nothing; failures are on stderr."""


class JsonWriter(LineWriter):
    """Writes JSON Lines: one object per image, in ASCII, so that any file name can be written."""

    def answer(self, path: str, prediction: TaskPrediction, made: Mapping[str, str]) -> None:
        self.file.write(json.dumps({"path": path, **prediction.to_dict(), **made}) + "\n")

    def write_failure(self, path: str, reason: str) -> None:
        self.file.write(json.dumps({"path": path, "error": reason}) + "\n")


class CsvWriter(LineWriter):
    """Writes CSV: one row per prediction, and for an unreadable image one row with the reason."""

    def __init__(self, file: TextIO, task: Task, *, multi_label: bool = False) -> None:
        self.table, self.task = csv.writer(file, lineterminator="\n"), task
        self.columns = task.columns(multi_label=multi_label)
        self.table.writerow(["path", *self.columns, "error"])

    def answer(self, path: str, prediction: TaskPrediction, made: Mapping[str, str]) -> None:
        self.table.writerows([path, *row, ""] for row in self.task.rows(prediction))

    def write_failure(self, path: str, reason: str) -> None:
        self.table.writerow([path, *("" for _ in self.columns), reason])


class TerminalWriter(LineWriter):
    """Writes one block per image, with bars if the task has them."""

    def __init__(self, file: TextIO, task: Task) -> None:
        self.console, self.task = make_console(file=file, highlight=False), task

    def answer(self, path: str, prediction: TaskPrediction, made: Mapping[str, str]) -> None:
        block = Text(printable(path), style="bold")
        for written in made.values():
            block.append(f"  {printable(written)}", style="not bold dim")
        bars = self.task.bars(prediction)
        if not bars:
            block.append(f"\n  {prediction}", style="not bold")
        room = max(min(self.console.width - BAR_WIDTH - 12, 40), 8)
        wide = min(max((len(one.label) for one in bars), default=0), room)
        for one in bars:
            label, *more = wrap_words(printable(one.label), wide) or [""]
            strong, colour = ("bold", "not bold green") if one.chosen else ("not bold", "not bold dim")
            block.append(f"\n  {label:<{wide}}  ", style=strong)
            block.append(f"{draw_bar(one.share):<{BAR_WIDTH}}", style=colour)
            block.append(f" {100 * one.share:5.1f} %", style="not bold")
            for line in more:
                block.append(f"\n    {line}", style=strong)
        self.console.print(block, soft_wrap=True)


def make_writer(asker: Predictor[Any], options: PredictOptions) -> LineWriter:
    """The writer for stdout that the options ask for; characters that stdout cannot encode are escaped."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    if options.json:
        return JsonWriter(sys.stdout)
    if options.csv:
        return CsvWriter(sys.stdout, asker.task, multi_label=asker.multi_label)
    return TerminalWriter(sys.stdout, asker.task) if sys.stdout.isatty() else LineWriter(sys.stdout)


def draw_bar(share: float) -> str:
    """A bar whose length is proportional to a share, to an eighth of a character."""
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + (EIGHTHS[eighths] if eighths else "")


MAX_DRAWING: Final = 1536  # pixels: the longer side of a drawing, at most
MAX_NAME: Final = 200  # bytes of a name; file systems allow 255


def take_name(taken: set[str], above: str, name: str, *endings: str) -> str:
    """Reserves a file name: shortened to what file systems allow, and numbered if it is taken with one of the endings.
    Case is ignored, since some file systems do not distinguish Cat from cat."""
    if len(os.fsencode(name)) > MAX_NAME:
        short = os.fsencode(name)[: MAX_NAME - 20].decode("utf-8", "ignore")
        name = f"{short}-{sha256(os.fsencode(name)).hexdigest()[:16]}"
    tried, number = os.path.join(above, name), 1
    while not taken.isdisjoint(files := {f"{tried}{ending}".casefold() for ending in endings}):
        number += 1
        tried = os.path.join(above, f"{name}.{number}")
    taken |= files
    return tried


def limit_size(image: Image.Image) -> Image.Image:
    """The image, or a smaller copy that is large enough to draw on, since batches of full photographs take much
    memory."""
    if max(image.size) <= MAX_DRAWING:
        return image
    small = image.copy()
    small.thumbnail((MAX_DRAWING, MAX_DRAWING), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return small


class PredictionFiles:
    """Writes predictions to a folder: one file per image, named after it, and one for all images if the task has one.
    No file is written to a folder with input images, which it might replace, and no two have the same name."""

    def __init__(self, folder: Path, asker: Predictor[Any], images: Iterable[ImageFile]) -> None:
        task = asker.task
        if not task.has_files:
            raise ConfigError(f"--out {folder}: predictions of {task.name} are not files; --json writes them as text")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file; name a folder")
        check_writable(folder / f"image{OVERLAY}")
        self.folder, self.task, self.every = folder, task, task.collect(asker.options())
        self.taken, self.occupied = set[str](), set[tuple[int, int] | None]()
        targets = set[str]()
        if self.every is not None:
            self.taken.add(self.every.name.casefold())
            targets.add("")
        for found in images:
            self.occupied.add(identify(os.path.dirname(found.path) or os.curdir))
            targets.add(os.path.dirname(found.inside))
        for target in targets:
            self._check_free(folder / target)

    def write(self, found: ImageFile, prediction: Any, image: Image.Image) -> dict[str, str]:
        """Writes the files that the task makes of a prediction; returns their paths by kind: "file", "overlay"."""
        content, drawing = self.task.file_of(prediction), self.task.draw(prediction, image)
        suffix = "" if content is None else content[0]
        self.occupied.add(identify(os.path.dirname(found.path) or os.curdir))
        above, name = os.path.split(found.inside)  # animals/cat.jpg -> animals/cat, and the second one animals/cat.2
        name = take_name(self.taken, above, os.path.splitext(name)[0], suffix, OVERLAY)
        self._check_free((self.folder / name).parent)
        files = {} if content is None else {"file": (suffix, content[1])}
        if drawing is not None:
            files["overlay"] = (OVERLAY, encode_png(drawing))
        for ending, body in files.values():
            write_file(self.folder / f"{name}{ending}", body)
        if self.every is not None:
            self.every.add(found.inside, prediction, {kind: f"{name}{ending}" for kind, (ending, _) in files.items()})
        return {kind: str(self.folder / f"{name}{ending}") for kind, (ending, _) in files.items()}

    def finish(self) -> None:
        """Writes the file for all images."""
        if self.every is not None:
            write_file(self.folder / self.every.name, self.every.to_bytes())

    def _check_free(self, folder: Path) -> None:
        if (place := identify(folder)) is not None and place in self.occupied:
            raise ConfigError(f"--out {self.folder}: {folder} contains input images; name another folder")


def encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def identify(folder: str | Path) -> tuple[int, int] | None:
    """The identity of a folder, which is the same for all of its paths; None if it does not exist."""
    try:
        status = os.stat(folder)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino)


VIEW_SIZES: Final = (256, 768)  # pixels: the longer side, at least and at most


def crop_view(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The part of an image that the network sees, including borders, in the image's own aspect ratio and at a size for
    viewing."""
    left, top, right, bottom = preprocessing.view_box((image.height, image.width))
    width, height = right - left, bottom - top
    least, most = VIEW_SIZES
    scale = min(max(least / max(width, height), 1.0), most / max(width, height))
    inside = (max(left, 0.0), max(top, 0.0), min(right, image.width), min(bottom, image.height))

    def size(box: tuple[float, float, float, float]) -> tuple[int, int]:
        return max(round((box[2] - box[0]) * scale), 1), max(round((box[3] - box[1]) * scale), 1)

    part = image.resize(size(inside), Image.Resampling.BICUBIC, inside)
    view = Image.new("RGB", size((left, top, right, bottom)))
    view.paste(part, (round((inside[0] - left) * scale), round((inside[1] - top) * scale)))
    return view


class AttentionImages:
    """Writes attention maps to a folder. File names are flat, so that none leads outside of it, and unique."""

    def __init__(self, folder: Path, asker: Predictor[Any]) -> None:
        require_transformer(asker.network)  # refuses networks without attention
        check_writable(folder / "image.png")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--attention {folder} is a file; name a folder")
        self.folder, self.asker, self.taken = folder, asker, set[str]()

    def maps(self, batch: Tensor) -> Tensor:
        """Where the network looked: uint8 [N, 3, H, W] -> [N, rows, columns]."""
        network = self.asker.network
        return run_in_portions(network, self.asker.normalise(batch), lambda images: rollout(network, images)).cpu()

    def draw(self, inside: str, view: Image.Image, map: Tensor) -> str:
        """Writes an image and returns its path."""
        path = self.folder / self.free_name(inside)
        write_file(path, encode_png(Image.fromarray(overlay(np.asarray(view), map))))
        return str(path)

    def free_name(self, inside: str) -> str:
        """A free file name: animals/cat.jpg -> animals--cat.jpg.png; for a second image of that name,
        animals--cat.jpg.2.png. The suffix is always added, so that images in the output folder are not replaced."""
        flat = printable(inside).replace(os.sep, "--").replace("/", "--") or "picture"
        return f"{take_name(self.taken, '', flat, '.png')}.png"


class LoadedImage(NamedTuple):
    """An image as the network sees it, and the images to draw on: the visible part, or all of it."""

    view: View
    seen: Image.Image | None = None
    whole: Image.Image | None = None


@dataclass(kw_only=True, slots=True)
class PredictSession:
    """The predictor, its outputs, and the counts so far."""

    asker: Predictor[Any]
    out: LineWriter
    topk: int | None
    attention: AttentionImages | None
    files: PredictionFiles | None
    seen: int = 0
    failed: int = 0

    def prepare(self, found: ImageFile) -> LoadedImage:
        """Prepares the network's input and, if requested, the image to draw on."""
        if self.attention is None and self.files is None:
            return LoadedImage(self.asker.view(found.path))
        image = upright_rgb(image_from(found.path))
        seen = None if self.attention is None else crop_view(image, self.asker.preprocessing)
        return LoadedImage(self.asker.view(image), seen, None if self.files is None else limit_size(image))

    def answer(self, batch: Sequence[tuple[ImageFile, LoadedImage | BadImage]]) -> None:
        """Predicts one batch and writes one result per image, in order."""
        views = [thing.view for _, thing in batch if not isinstance(thing, BadImage)]
        answers, maps = iter(()), iter(())
        if self.asker.windows is not None:
            answers = map(self.asker.slide, views)
        elif views:
            pixels, geometries = torch.stack([view.pixels for view in views]), [view.geometry for view in views]
            answers = iter(self.asker.interpret(self.asker.outputs(pixels), geometries, self.topk))
            maps = iter(() if self.attention is None else self.attention.maps(pixels))
        for found, thing in batch:
            self.seen += 1
            if isinstance(thing, BadImage):
                self.failed += 1
                reason = str(thing).removeprefix(f"{found.path}: ")
                print_note(f"skipped {found.path}: {reason}")
                self.out.write_failure(found.path, reason)
                continue
            prediction, made = next(answers), dict[str, str]()
            if self.attention is not None and thing.seen is not None:
                made["attention"] = self.attention.draw(found.inside, thing.seen, next(maps))
            if self.files is not None and thing.whole is not None:
                made |= self.files.write(found, prediction, thing.whole)
            self.out.answer(found.path, prediction, made)


def predict_all(done: PredictSession, found: ImageListing, workers: int) -> None:
    """Predicts all images, batch by batch, and writes each batch's results at once."""
    threads = 0 if found.total == 1 else workers
    # A bar would interleave with predictions on the same terminal.
    with bars() if not sys.stdout.isatty() else contextlib.nullcontext(lambda *_: None) as progress:
        for burst in found.bursts():
            made = prepare_ahead(burst, done.prepare, ahead=2 * done.asker.batch, threads=threads)
            with contextlib.closing(made):
                for some in split_batches(made, done.asker.batch):
                    done.answer(some)
                    sys.stdout.flush()
                    progress("images", done.seen, found.total)


def print_note(line: str) -> None:
    print(f"vitrail: {printable(line)}", file=sys.stderr)
