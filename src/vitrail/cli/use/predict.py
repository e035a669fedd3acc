"""`vitrail predict`: classifies images, and optionally writes masks and attention maps."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.cli.inputs import rename_predictor
from vitrail.cli.options.use import PredictOptions
from vitrail.cli.progress import bars, on_interrupt, reading
from vitrail.cli.use.predict_outputs import PredictionWriter, make_writer
from vitrail.core.console import format_millions
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import format_size, pluralise
from vitrail.data.class_names import read_class_names
from vitrail.report.page import printable

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from vitrail.cli.use.predict_inputs import ImageFile, ImageListing
    from vitrail.cli.use.predict_outputs import AttentionImages, PredictionFiles
    from vitrail.predict.predictor import Predictor, View


def run_predict(options: PredictOptions) -> int:
    from vitrail.cli.inputs import single_process
    from vitrail.cli.use.predict_inputs import list_images, split_words

    for name, value in (("--topk", options.topk), ("--batch", options.batch)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    weights, words = split_words(options.words) if options.weights is None else (options.weights, options.words)
    found = list_images(words, options.attention, options.out)
    with single_process(options.device) as device:
        asker = load_predictor(options, weights, device)
        done = PredictSession(
            asker=asker,
            out=make_writer(asker, as_json=options.json, as_csv=options.csv),
            topk=options.topk,
            drawn=make_drawer(options.attention, asker),
            files=make_files(options.out, asker, found),
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


def load_predictor(options: PredictOptions, weights: str, device: "torch.device") -> "Predictor[Any]":
    """The requested network, if it has classes."""
    from vitrail.predict.predictor import THRESHOLD, predictor

    batch = options.batch or (128 if device.type == "cuda" else 32)
    threshold = THRESHOLD if options.threshold is None else options.threshold
    with reading(weights):
        asker = predictor(
            weights,
            device=device,
            image_size=options.image_size,
            precision=options.precision,
            batch=batch,
            threshold=threshold,
        )
    if not asker.labels:
        raise ConfigError(
            f"{weights} has no head, so it names no classes; give it one with `vitrail fit`, or fine-tune it"
        )
    check_task(options, asker, weights)
    return rename_predictor(asker, options.labels, options.rename)


def check_task(options: PredictOptions, asker: "Predictor[Any]", weights: str) -> None:
    """Refuses options that do not apply to the task of the weights."""
    offered = asker.task.prediction_options(multi_label=asker.multi_label)
    if options.topk is not None and "topk" not in offered:
        raise ConfigError(
            f"--topk {options.topk} is for weights that rank classes, and {weights} is for {asker.task.name}; leave it "
            "out"
        )
    if options.threshold is not None and "threshold" not in offered:
        if "topk" not in offered:
            raise ConfigError(
                f"--threshold {options.threshold:g} is for multi-label weights, and {weights} is for "
                f"{asker.task.name}; leave it out"
            )
        raise ConfigError(
            f"--threshold {options.threshold:g} is for multi-label weights, and {weights} has one class for each "
            "image; --topk N shows more classes"
        )


def describe_predictor(weights: str, asker: "Predictor[Any]") -> str:
    """The weights in one line: "w.npz: ViT, 5.72M parameters, 224x224 px, 1,000 classes"."""
    from vitrail.checkpoint.known_weights import is_bundled

    network, image = asker.network, asker.preprocessing.image
    count = format_millions(sum(parameter.numel() for parameter in network.parameters()))
    named = f"{weights} (bundled)" if is_bundled(weights) else printable(weights)
    classes = asker.task.describe_outputs(asker.labels) + (
        f", each by itself; chosen from {100 * asker.threshold:g} %" if asker.multi_label else ""
    )
    classes += ", named as ImageNet's" if asker.labels == read_class_names("imagenet") else ""
    return f"{named}: {type(network).__name__}, {count} parameters, {format_size(image)} px, {classes}"


def make_drawer(folder: Path | None, asker: "Predictor[Any]") -> "AttentionImages | None":
    if folder is None:
        return None
    from vitrail.cli.use.predict_outputs import AttentionImages

    return AttentionImages(folder, asker)


def make_files(folder: Path | None, asker: "Predictor[Any]", found: "ImageListing") -> "PredictionFiles | None":
    if folder is None:
        return None
    from vitrail.cli.use.predict_outputs import PredictionFiles

    return PredictionFiles(folder, asker.task, found.known())


class PreparedImage(NamedTuple):
    """An image as the network sees it, and the images to draw on: the visible part, or all of it."""

    view: "View"
    seen: "Image | None" = None
    whole: "Image | None" = None


@dataclass(kw_only=True, slots=True)
class PredictSession:
    """The predictor, the outputs, and the counts so far."""

    asker: "Predictor[Any]"
    out: PredictionWriter
    topk: int | None
    drawn: "AttentionImages | None"
    files: "PredictionFiles | None"
    seen: int = 0
    failed: int = 0

    def prepare(self, found: "ImageFile") -> PreparedImage:
        """The network's input, and what is drawn on if requested."""
        if self.drawn is None and self.files is None:
            return PreparedImage(self.asker.view(found.path))
        from vitrail.cli.use.predict_outputs import limit_size
        from vitrail.data.decode.image import upright_rgb
        from vitrail.predict.image_input import image_from

        image = upright_rgb(image_from(found.path))
        return PreparedImage(
            self.asker.view(image),
            None if self.drawn is None else self.drawn.show(image),
            None if self.files is None else limit_size(image),
        )

    def answer(self, batch: "Sequence[tuple[ImageFile, PreparedImage | BadImage]]") -> None:
        """Predicts one batch and writes one result per image, in order."""
        import torch

        views = [thing.view for _, thing in batch if not isinstance(thing, BadImage)]
        pixels = torch.stack([view.pixels for view in views]) if views else None
        answers = iter(() if pixels is None else self.predict(pixels, views))
        maps = iter(() if pixels is None or self.drawn is None else self.drawn.maps(pixels))
        for found, thing in batch:
            self.seen += 1
            if isinstance(thing, BadImage):
                self.failed += 1
                reason = str(thing).removeprefix(f"{found.path}: ")
                print_note(f"skipped {found.path}: {reason}")
                self.out.failed(found.path, reason)
                continue
            prediction, made = next(answers), dict[str, str]()
            if self.drawn is not None and thing.seen is not None:
                made["attention"] = self.drawn.draw(found.inside, thing.seen, next(maps))
            if self.files is not None and thing.whole is not None:
                made |= self.files.write(found, prediction, thing.whole)
            self.out.answer(found.path, prediction, made)

    def predict(self, pixels: "torch.Tensor", views: "Sequence[View]") -> Sequence[Any]:
        return self.asker.interpret(self.asker.logits(pixels), [view.geometry for view in views], self.topk)


def predict_all(done: PredictSession, found: "ImageListing", workers: int) -> None:
    """Predicts all images, batch by batch; results are written as they come."""
    from vitrail.predict.image_input import prepare_ahead, split_batches

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
