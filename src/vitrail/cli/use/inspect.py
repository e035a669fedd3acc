"""`vitrail inspect`: writes a page of figures that show what a network attends to and has learned."""

import contextlib
import itertools
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.cli.inputs import load_batches, load_subject, read_labels, single_process
from vitrail.cli.open_data import open_data
from vitrail.cli.options.use import InspectOptions
from vitrail.cli.progress import bars
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.console import format_millions, print_table
from vitrail.core.errors import BadImage, ConfigError, DataError, unknown_name
from vitrail.core.text import format_size, join_words, pluralise
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.folder import has_image_suffix
from vitrail.evaluation.frozen.features import is_readable
from vitrail.evaluation.result import Measure, Result, describe_data
from vitrail.evaluation.scoring import Subject, choose_split
from vitrail.inspection.context import InspectionContext, Pixels, choose_portion
from vitrail.inspection.page import InspectionSection, inspection_page, prepare_image
from vitrail.inspection.sections import KINDS, NO_TOKENS, build_explorer
from vitrail.models.family import ModelConfig
from vitrail.report.figure_style import LIGHT, load_matplotlib, save_figure
from vitrail.report.sections import Tile
from vitrail.tasks.classification.metrics import is_numeric
from vitrail.tasks.registry import TASKS

SHOWN = 4  # images of a set to show if none are named
NAMED = 3  # unreadable images to name
PAGE, RESULT, FIGURES = "report.html", "inspect.json", "figures"


def run_inspect(options: InspectOptions) -> int:
    load_matplotlib()  # before anything that takes time
    options = sort_words(options)
    check_writable(options.out / PAGE)
    wanted = parse_kinds(options.only)
    with single_process(options.device) as device:
        about = load_subject(options.weights, device, image_size=options.image_size, patch=options.patch_size)
        given, data, unreadable = gather_images(options, about, wanted)
        parts, missing, stopped = make_parts(given, wanted, named=options.only is not None)
        if stopped:  # the page has the finished figures
            print(f"stopped; for the rest, run the same command with --only {','.join(stopped)}", file=sys.stderr)
            missing.append(f"{', '.join(stopped)}: stopped before they were made")
            wanted = [part.kind for part in parts]
            if not parts:
                print("nothing was written", file=sys.stderr)
                return 130
        explorer = "explorer" in wanted and given.transformer
        if not parts and not explorer:
            raise ConfigError(f"nothing can be drawn: {'; '.join(missing)}")
        written = write_page(options, about, given, data, parts, missing, wanted)
    if stopped:
        print(f"page with {', '.join(wanted)}: {written}", file=sys.stderr)
        return 130
    rows = [[part.kind, part.title, ", ".join(one.name for one in part.drawings)] for part in parts]
    if explorer:
        rows.append(["explorer", "Every layer and head, to click through", "in the page"])
    print_table(["kind", "what", "figures"], rows, left=3)
    for line in missing:
        print(f"skipped: {line}")
    if unreadable:
        print(f"note: skipped {pluralise(len(unreadable), 'unreadable image')}: {join_words(unreadable, limit=NAMED)}")
    print(f"page: {written}")
    return 0


def sort_words(options: InspectOptions) -> InspectOptions:
    """Sorts words into images and a data set. WEIGHTS may be omitted before an image."""
    weights, words = options.weights, options.words
    if has_image_suffix(weights):  # vitrail inspect cat.jpg
        weights, words = DEFAULT_WEIGHTS, (weights, *words)
    images = (*(word for word in words if has_image_suffix(word)), *options.images)
    sources = [*(word for word in words if not has_image_suffix(word)), *([options.data] if options.data else [])]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)}: give one data set; name single images by their files")
    return replace(options, weights=weights, words=(), images=images, data=sources[0] if sources else None)


def parse_kinds(text: str | None) -> list[str]:
    """Parses the requested kinds of figure, in the page's order; all by default."""
    known = [*KINDS, "explorer"]
    if text is None:
        return known
    asked = [word.strip() for word in text.split(",") if word.strip()]
    if not asked:
        raise ConfigError(f"--only names no kind; known: {', '.join(known)}")
    for word in asked:
        if word not in known:
            raise unknown_name("kind of figure", word, known)
    return [kind for kind in known if kind in asked]


def gather_images(
    options: InspectOptions, about: Subject, wanted: list[str]
) -> tuple[InspectionContext, dict[str, object], list[str]]:
    """Gathers what to inspect: named images, or some of the set, and the whole set for statistics. Also returns facts
    about the data, and the unreadable images of the set."""
    title, source, unreadable = open_samples(options, options.data) if options.data else ("", None, [])
    named = [(Path(name).name, *open_image(Path(name), about)) for name in options.images]
    if not named and source is not None:
        named = pick_samples(source, about)
    if not named and any(kind == "explorer" or KINDS[kind].pictures for kind in wanted):
        raise ConfigError("there are no images to look at; name files or a data set, or use --only filters,positions")
    config = about.network.config
    empty = torch.zeros((0, 3, *config.image), dtype=torch.uint8)
    pixels = torch.stack([tensor for _, tensor, _ in named]) if named else empty
    images = about.preprocessing.normalise(pixels).to(about.device)
    labels = find_class_names(options, about, source)
    task = TASKS.get(get_card(about.network).task)
    given = InspectionContext(
        model=about.network,
        images=images,
        pixels=[view for _, _, view in named],
        names=[name for name, _, _ in named],
        crowd=(lambda: iter(images.split(4))) if source is None else (lambda: iter_batches(options, about, source)),
        count=len(images) if source is None else len(source),
        labels=labels,
        asked=parse_class(options.asked, labels, config.classes),
        layers=[layer - 1 for layer in options.layers],
        patch=parse_patch(options.patch, config),
        has_classes=task is not None and task.has_classes,  # outputs of an unregistered task are plain numbers
    )
    data: dict[str, object] = {"images": list(options.images)}
    if source is not None:
        name, _, split = title.rpartition("@")
        data |= describe_data(name, split, source, deduplicated=None)
    return given, data, unreadable


def open_samples(options: InspectOptions, data: str) -> tuple[str, ImageDataset, list[str]]:
    """Opens evenly spaced images of the set, and names those that are unreadable. These are found before anything is
    measured, because every number states how many images it is measured on."""
    if options.count < 1:
        raise ConfigError(f"--count {options.count} must be at least 1")
    collection = open_data(data, download=options.download)
    split, source = choose_split(collection, "val", "test", "train")
    title = f"{collection.title}@{split}"
    places = np.unique(np.linspace(0, len(source) - 1, min(options.count, len(source))).astype(np.int64))
    sound = np.array([is_readable(source, int(at)) for at in places], dtype=np.bool_)
    if not sound.any():
        raise DataError(f"none of the {len(places):,} images of {title} can be read; give other data")
    return title, SubsetDataset(source, places[sound]), [source.name(int(at)) for at in places[~sound]]


def iter_batches(options: InspectOptions, about: Subject, source: ImageDataset) -> Iterator[torch.Tensor]:
    """Yields the prepared, readable images of the set. Attention of all heads is large, so batches are small."""
    size = options.batch or (min(16, choose_portion(about.network)) if about.network.config.tokens else 16)
    for batch in load_batches(replace(options, batch=size), source, about.preprocessing, about.device):
        if bool(batch.valid.any()):
            yield about.preprocessing.normalise(batch.pixels[batch.valid]).to(about.device)


def open_image(path: Path, about: Subject) -> tuple[torch.Tensor, Pixels]:
    """The prepared bytes [3, H, W] of a file, and its pixels for display."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name it after the weights, not after --images")
    try:
        return prepare_image(EncodedImage(path.read_bytes()).rgb(), about.preprocessing)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except BadImage as error:
        raise BadImage(f"{path}: {error}") from None


def pick_samples(source: ImageDataset, about: Subject) -> list[tuple[str, torch.Tensor, Pixels]]:
    """Picks a few evenly spaced images of the set to show; an unreadable one is replaced by the next readable one."""
    found = dict[int, tuple[torch.Tensor, Pixels]]()
    for start in sorted({round(index * (len(source) - 1) / max(SHOWN - 1, 1)) for index in range(SHOWN)}):
        for at in range(start, len(source)):
            if at not in found:
                with contextlib.suppress(BadImage):
                    found[at] = prepare_image(source.open_image(at).rgb(), about.preprocessing)
                    break
    return [(Path(source.name(at)).name, *both) for at, both in found.items()]


def find_class_names(options: InspectOptions, about: Subject, source: ImageDataset | None) -> tuple[str, ...] | None:
    """The class names: from --labels, from the weights, or from the data set if it has as many classes."""
    config = about.network.config
    if options.labels is not None:
        return read_labels(options.labels, config.classes)
    if about.labels is not None or source is None:
        return about.labels
    names = source.pixel_classes if config.has_patch_head else source.classes
    return names if len(names) == config.classes and not is_numeric(names) else None


def parse_class(text: str | None, labels: tuple[str, ...] | None, classes: int) -> int | None:
    if text is None:
        return None
    if not classes:
        raise ConfigError(f"--class {text}: this network has no head, so no classes")
    if text.isascii() and text.isdecimal():
        if int(text) >= classes:
            raise ConfigError(f"--class {text}: this network has the classes 0 to {classes - 1}")
        return int(text)
    if labels is None:
        raise ConfigError(f"--class {text}: the class names are unknown; give a number, or --labels FILE")
    found = [at for at, name in enumerate(labels) if name.lower() == text.lower().replace("_", " ")]
    if not found:
        raise unknown_name("class", text, labels)
    if len(found) > 1:
        raise ConfigError(f"--class {text}: classes {' and '.join(map(str, found))} have this name; give a number")
    return found[0]


def parse_patch(text: str | None, config: ModelConfig) -> tuple[int, int] | None:
    """Parses --patch into row and column, from 0."""
    if text is None or not config.tokens:
        return None
    try:
        row, column = (int(part) - 1 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--patch {text}: a row and a column, counted from 1, as in 4,7") from None
    rows, columns = config.grid
    if not (0 <= row < rows and 0 <= column < columns):
        raise ConfigError(f"--patch {text}: this network has {rows} rows and {columns} columns, from 1,1")
    return row, column


def make_parts(
    given: InspectionContext, wanted: list[str], *, named: bool
) -> tuple[list[InspectionSection], list[str], list[str]]:
    """Makes the requested sections, until an interrupt. Also returns why others are missing, and the kinds that an
    interrupt left undone."""
    parts, reasons, stopped = list[InspectionSection](), dict[str, list[str]](), list[str]()
    todo = [kind for kind in wanted if kind != "explorer"]
    with bars() as progress:
        for done, kind in enumerate(todo):
            progress("figures", done, len(todo))
            why = KINDS[kind].obstacle(given)
            if why is None:
                try:
                    with count_layers(given.model, kind):
                        parts.append(KINDS[kind].make(given))
                except KeyboardInterrupt:
                    stopped = [one for one in wanted if one == "explorer" or one in todo[done:]]
                    break
            elif named or KINDS[kind].is_common:  # Grad-CAM, for example, is not missed in a transformer
                reasons.setdefault(why, []).append(kind)
    if "explorer" in wanted and not given.transformer:
        reasons.setdefault(NO_TOKENS, []).append("explorer")
    return parts, [f"{', '.join(kinds)}: {why}" for why, kinds in reasons.items()], stopped


@contextlib.contextmanager
def count_layers(model: torch.nn.Module, kind: str) -> Generator[None]:
    """Shows how many layers the images have passed through while a figure is made."""
    blocks = [one for block in getattr(model, "blocks", [model]) for one in (block, getattr(block, "mlp", None)) if one]
    passed = itertools.count(1)
    with bars() as progress, contextlib.ExitStack() as hooks:
        for block in blocks:
            count = block.register_forward_hook(lambda *_: progress(f"{kind}, layers", next(passed), None))
            hooks.callback(count.remove)
        yield


def write_page(
    options: InspectOptions,
    about: Subject,
    given: InspectionContext,
    data: dict[str, object],
    parts: list[InspectionSection],
    missing: list[str],
    wanted: list[str],
) -> Path:
    """Writes the figures, the numbers and the page."""
    out, count = options.out, len(given.names)
    with bars() as progress:
        drawings = [drawing for part in parts for drawing in part.drawings]
        for at, drawing in enumerate(drawings):
            progress("drawing", at, len(drawings))
            save_figure(drawing.draw(LIGHT), out / FIGURES / drawing.name)
        progress("drawing", len(drawings), len(drawings))
        explorer = build_explorer(given) if "explorer" in wanted and given.transformer else None
        progress("writing the page", 0, None)
        shown = pluralise(count, "image") if count else "its weights alone"
        more = "" if given.count <= count else f", and over {given.count} of {data.get('name')} together"
        lead = f"What this network looks at and what it has learned, from {shown}{more}."
        title, facts = f"Inside {Path(about.name).name}", describe_network(about, given)
        text = inspection_page(title, parts, lead=lead, facts=facts, explorer=explorer, left_out=missing)
    write_file(out / PAGE, text.encode())
    numbers = [(name, value, part.count) for part in parts for name, value in part.numbers.items()]
    measures = [Measure(name=name, value=value, unit="number", count=count) for name, value, count in numbers]
    view = {"image": list(about.preprocessing.image), "preprocessing": about.preprocessing.to_dict()}
    what = {"kinds": wanted, "layers": list(options.layers), "class": options.asked, "patch": options.patch}
    result = Result(kind="inspect", weights=about.facts, data=data, measures=tuple(measures), config={**view, **what})
    result.write(out / RESULT)
    return out / PAGE


def describe_network(about: Subject, given: InspectionContext) -> list[Tile]:
    """Describes the network in numbers."""
    config = about.network.config
    count = sum(parameter.numel() for parameter in about.network.parameters())
    tiles = [(format_millions(count), "parameters", ""), (format_size(config.image), "pixels", "")]
    if config.tokens:
        other = f"and {pluralise(config.prefix, 'other token')}" if config.prefix else ""
        rows = dict(config.card_rows)
        heads = f"of {rows['heads']} heads, width {rows['width']}"
        tiles += [(format_size(config.grid), "patches", other), (str(config.layers), "layers", heads)]
        if config.has_queries:
            tiles.append((rows["queries"], "queries", f"through {pluralise(int(rows['query blocks']), 'block')}"))
    else:
        tiles.append((str(config.units), "blocks", f"in {config.layers} stages"))
    if config.classes:
        tiles.append((f"{config.classes:,}", "classes" if given.has_classes else "outputs", ""))
    return [Tile(value=value, label=label, note=note) for value, label, note in tiles]
