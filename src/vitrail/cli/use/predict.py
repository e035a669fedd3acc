"""`vitrail predict`: classifies images, and optionally writes masks and attention maps."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL.Image import Image

from vitrail.checkpoint.known_weights import is_bundled
from vitrail.cli.inputs import rename_predictor, single_process
from vitrail.cli.options.use import PredictOptions
from vitrail.cli.progress import bars, on_interrupt, reading
from vitrail.cli.use.predict_inputs import ImageFile, ImageListing, list_images, split_words
from vitrail.cli.use.predict_outputs import (
    AttentionImages,
    LineWriter,
    PredictionFiles,
    crop_view,
    limit_size,
    make_writer,
)
from vitrail.core.console import format_millions
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import format_size, pluralise
from vitrail.data.class_names import read_class_names
from vitrail.data.decode.image import upright_rgb
from vitrail.predict.image_input import image_from, prepare_ahead, split_batches
from vitrail.predict.predictor import THRESHOLD, Predictor, View, predictor
from vitrail.report.page import printable


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
            files=None if options.out is None else PredictionFiles(options.out, asker.task, found.known()),
        )
        print(describe_predictor(weights, asker), file=sys.stderr)
        for line in (*found.notes, *found.closed):
            print_note(line)
        with on_interrupt("the predictions so far are complete; run again with the remaining images"):
            predict_all(done, found, options.workers)
    if not done.seen:
        raise DataError("stdin named no images")
    if done.failed:
        verb = "was" if done.failed == 1 else "were"
        print_note(f"{done.failed:,} of {pluralise(done.seen, 'image')} {verb} unreadable")
    return 1 if done.failed or found.closed else 0


def load_predictor(options: PredictOptions, weights: str, device: torch.device) -> Predictor[Any]:
    """The requested network, if it has classes and its task takes the options."""
    batch = options.batch or (128 if device.type == "cuda" else 32)
    threshold = THRESHOLD if options.threshold is None else options.threshold
    size, precision = options.image_size, options.precision
    with reading(weights):
        asker = predictor(
            weights, device=device, image_size=size, precision=precision, batch=batch, threshold=threshold
        )
    if not asker.labels:
        remedy = "give it one with `vitrail fit`, or fine-tune it"
        raise ConfigError(f"{weights} has no head, so it names no classes; {remedy}")
    offered, task = asker.task.prediction_options(multi_label=asker.multi_label), asker.task.name
    if options.topk is not None and "topk" not in offered:
        raise ConfigError(f"--topk {options.topk} is for weights that rank classes, not {task}; omit it for {weights}")
    if options.threshold is not None and "threshold" not in offered:
        why = "has one class for each image; --topk N shows more classes" if "topk" in offered else f"is for {task}"
        raise ConfigError(f"--threshold {options.threshold:g} is for multi-label weights, and {weights} {why}")
    return rename_predictor(asker, options.labels, options.rename)


def describe_predictor(weights: str, asker: Predictor[Any]) -> str:
    """The weights in one line: "w.npz: ViT, 5.72M parameters, 224x224 px, 1,000 classes"."""
    network, size = asker.network, f"{format_size(asker.preprocessing.image)} px"
    count = format_millions(sum(parameter.numel() for parameter in network.parameters()))
    named = f"{weights} (bundled)" if is_bundled(weights) else printable(weights)
    classes = asker.task.describe_outputs(asker.labels)
    classes += f", each by itself; chosen from {100 * asker.threshold:g} %" if asker.multi_label else ""
    classes += ", named as ImageNet's" if asker.labels == read_class_names("imagenet") else ""
    return f"{named}: {type(network).__name__}, {count} parameters, {size}, {classes}"


class PreparedImage(NamedTuple):
    """An image as the network sees it, and the images to draw on: the visible part, or all of it."""

    view: View
    seen: Image | None = None
    whole: Image | None = None


@dataclass(kw_only=True, slots=True)
class PredictSession:
    """The predictor, the outputs, and the counts so far."""

    asker: Predictor[Any]
    out: LineWriter
    topk: int | None
    attention: AttentionImages | None
    files: PredictionFiles | None
    seen: int = 0
    failed: int = 0

    def prepare(self, found: ImageFile) -> PreparedImage:
        """The network's input, and what is drawn on if requested."""
        if self.attention is None and self.files is None:
            return PreparedImage(self.asker.view(found.path))
        image = upright_rgb(image_from(found.path))
        seen = None if self.attention is None else crop_view(image, self.asker.preprocessing)
        return PreparedImage(self.asker.view(image), seen, None if self.files is None else limit_size(image))

    def answer(self, batch: Sequence[tuple[ImageFile, PreparedImage | BadImage]]) -> None:
        """Predicts one batch and writes one result per image, in order."""
        views = [thing.view for _, thing in batch if not isinstance(thing, BadImage)]
        answers, maps = iter(()), iter(())
        if views:
            pixels, geometries = torch.stack([view.pixels for view in views]), [view.geometry for view in views]
            answers = iter(self.asker.interpret(self.asker.logits(pixels), geometries, self.topk))
            maps = iter(() if self.attention is None else self.attention.maps(pixels))
        for found, thing in batch:
            self.seen += 1
            if isinstance(thing, BadImage):
                self.failed += 1
                reason = str(thing).removeprefix(f"{found.path}: ")
                print_note(f"skipped {found.path}: {reason}")
                self.out.failed(found.path, reason)
                continue
            prediction, made = next(answers), dict[str, str]()
            if self.attention is not None and thing.seen is not None:
                made["attention"] = self.attention.draw(found.inside, thing.seen, next(maps))
            if self.files is not None and thing.whole is not None:
                made |= self.files.write(found, prediction, thing.whole)
            self.out.answer(found.path, prediction, made)


def predict_all(done: PredictSession, found: ImageListing, workers: int) -> None:
    """Predicts all images, batch by batch; results are written as they come."""
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
