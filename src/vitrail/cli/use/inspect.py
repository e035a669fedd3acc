"""`vitrail inspect`: a page of figures of what a network attends to and has learned."""

import contextlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.inputs import read_labels
from vitrail.cli.options.use import InspectOptions
from vitrail.cli.progress import bars
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.console import format_millions, print_table
from vitrail.core.errors import BadImage, ConfigError, DataError, unknown_name
from vitrail.core.text import format_size, join_words, pluralise
from vitrail.models.family import ModelConfig

if TYPE_CHECKING:
    import torch

    from vitrail.data.dataset import ImageDataset
    from vitrail.evaluation.scoring import Subject
    from vitrail.inspection.context import InspectionContext, Pixels
    from vitrail.inspection.page import InspectionSection
    from vitrail.report.sections import Tile


SHOWN = 4  # images of a set that are shown where none are named
NAMED = 3  # unreadable images that are named
PAGE, RESULT, FIGURES = "report.html", "inspect.json", "figures"


def run_inspect(options: InspectOptions) -> int:
    from vitrail.cli.inputs import load_subject, single_process
    from vitrail.report.figure_style import load_matplotlib

    load_matplotlib()  # before anything that takes time
    options = sort_words(options)
    check_writable(options.out / PAGE)
    wanted = parse_kinds(options.only)
    with single_process(options.device) as device:
        about = load_subject(options.weights, device, image_size=options.image_size)
        looked = gather_images(options, about, wanted)
        done = make_parts(looked.given, wanted, named=options.only is not None)
        parts, left_out = done.parts, done.left_out
        if done.stopped:
            return report_stopped(options, looked, done)
        if not parts and not ("explorer" in wanted and looked.given.transformer):
            raise ConfigError(f"nothing can be drawn: {'; '.join(left_out)}")
        written = write_page(options, looked, parts, left_out, wanted)
    rows = [[part.kind, part.title, ", ".join(one.name for one in part.drawings)] for part in parts]
    if "explorer" in wanted and looked.given.transformer:
        rows.append(["explorer", "Every layer and head, to click through", "in the page"])
    print_table(["kind", "what", "figures"], rows, left=3)
    for line in left_out:
        print(f"skipped: {line}")
    if gone := looked.unreadable:
        print(f"note: skipped {pluralise(len(gone), 'unreadable image')}: {join_words(gone, limit=NAMED)}")
    print(f"page: {written}")
    return 0


def report_stopped(options: InspectOptions, looked: "InspectionInput", done: "InspectionParts") -> int:
    """Writes a page of the finished figures after an interrupt, and prints how to make the others."""
    rest = ",".join(done.stopped)
    print(f"stopped; to make the rest, run the same command with --only {rest}", file=sys.stderr)
    if not done.parts:
        print("nothing was written", file=sys.stderr)
        return 130
    left_out = [*done.left_out, f"{', '.join(done.stopped)}: stopped before they were made"]
    written = write_page(options, looked, done.parts, left_out, [part.kind for part in done.parts])
    print(f"page with {', '.join(part.kind for part in done.parts)}: {written}", file=sys.stderr)
    return 130


def sort_words(options: InspectOptions) -> InspectOptions:
    """Which words are images, and which one is a data set; a first word that is an image leaves out WEIGHTS."""
    from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
    from vitrail.data.readers.folder import has_image_suffix

    weights, words = options.weights, options.words
    if has_image_suffix(weights):  # vitrail inspect cat.jpg
        weights, words = DEFAULT_WEIGHTS, (weights, *words)
    images = (*(word for word in words if has_image_suffix(word)), *options.images)
    sources = [*(word for word in words if not has_image_suffix(word)), *([options.data] if options.data else [])]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)}: one data set at a time; name single images by their files")
    return replace(options, weights=weights, words=(), images=images, data=sources[0] if sources else None)


def parse_kinds(text: str | None) -> list[str]:
    """The kinds that were asked for, in the page's order; all where none were."""
    from vitrail.inspection.registry import KINDS

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


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectionInput:
    """The images to inspect, and their origin."""

    about: "Subject"
    given: "InspectionContext"
    data: dict[str, object]
    unreadable: tuple[str, ...]  # of the set


def gather_images(options: InspectOptions, about: "Subject", wanted: list[str]) -> InspectionInput:
    """The images by name, or some of the set, and the set for what takes many."""
    import torch

    from vitrail.evaluation.result import describe_data
    from vitrail.inspection.context import InspectionContext
    from vitrail.inspection.registry import KINDS

    title, source, gone = open_samples(options, options.data) if options.data else ("", None, ())
    named = [(Path(name).name, *open_image(Path(name), about)) for name in options.images]
    if not named and source is not None:
        named = pick_samples(source, about)
    if not named and any(kind == "explorer" or KINDS[kind].pictures for kind in wanted):
        raise ConfigError(
            "there are no images to look at; name some files or a data set behind the weights, or ask for what needs "
            "none: --only filters,positions"
        )
    config = about.network.config
    shape = (0, 3, *config.image)
    pixels = torch.stack([tensor for _, tensor, _ in named]) if named else torch.zeros(shape, dtype=torch.uint8)
    images = about.preprocessing.normalise(pixels).to(about.device)
    labels = find_class_names(options, about, source)
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
        has_classes=has_classes(about),
    )
    facts: dict[str, object] = {"images": [str(name) for name in options.images]}
    if source is not None:
        name, _, split = title.rpartition("@")
        facts |= describe_data(name, split, source, deduplicated=None)
    return InspectionInput(about=about, given=given, data=facts, unreadable=gone)


def open_samples(options: InspectOptions, data: str) -> "tuple[str, ImageDataset, tuple[str, ...]]":
    """Images of the set, evenly spread over it, and the names of those among them that cannot be read. These are
    found before anything is measured: every number says of how many images it is."""
    import numpy as np

    from vitrail.cli.inputs import open_data
    from vitrail.data.dataset import SubsetDataset
    from vitrail.evaluation.frozen.features import is_readable
    from vitrail.evaluation.scoring import choose_split

    if options.count < 1:
        raise ConfigError(f"--count {options.count}: one image at least")
    collection = open_data(data, download=options.download)
    split, source = choose_split(collection, "val", "test", "train")
    places = np.unique(np.linspace(0, len(source) - 1, min(options.count, len(source))).astype(np.int64))
    sound = np.array([is_readable(source, int(at)) for at in places], dtype=np.bool_)
    if not sound.any():
        raise DataError(
            f"none of the {len(places):,} images of {collection.title}@{split} can be read; give other data"
        )
    gone = tuple(source.name(int(at)) for at in places[~sound])
    return f"{collection.title}@{split}", SubsetDataset(source, places[sound]), gone


def iter_batches(options: InspectOptions, about: "Subject", source: "ImageDataset") -> "Iterator[torch.Tensor]":
    """Prepared images of the set, those that can be read. Attention of all heads is large, so batches are small."""
    from vitrail.cli.inputs import load_batches
    from vitrail.inspection.context import choose_portion

    size = options.batch or (min(16, choose_portion(about.network)) if about.network.config.tokens else 16)
    for batch in load_batches(replace(options, batch=size), source, about.preprocessing, about.device):
        if bool(batch.valid.any()):
            yield about.preprocessing.normalise(batch.pixels[batch.valid]).to(about.device)


def open_image(path: Path, about: "Subject") -> "tuple[torch.Tensor, Pixels]":
    """Prepared bytes [3, H, W] of a file, and the same to look at."""
    from vitrail.data.decode.image import EncodedImage
    from vitrail.inspection.page import prepare_image

    if path.is_dir():
        raise DataError(f"{path} is a folder; name it behind the weights, not behind --images")
    try:
        return prepare_image(EncodedImage(path.read_bytes()).rgb(), about.preprocessing)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except BadImage as error:
        raise BadImage(f"{path}: {error}") from None


def pick_samples(source: "ImageDataset", about: "Subject") -> "list[tuple[str, torch.Tensor, Pixels]]":
    """A few images of the set to show, evenly spread over it; for one that cannot be read the next that can."""
    from vitrail.inspection.page import prepare_image

    found = dict[int, "tuple[torch.Tensor, Pixels]"]()
    for start in sorted({round(index * (len(source) - 1) / max(SHOWN - 1, 1)) for index in range(SHOWN)}):
        for at in range(start, len(source)):
            if at not in found:
                with contextlib.suppress(BadImage):
                    found[at] = prepare_image(source.open_image(at).rgb(), about.preprocessing)
                    break
    return [(Path(source.name(at)).name, *both) for at, both in found.items()]


def find_class_names(
    options: InspectOptions, about: "Subject", source: "ImageDataset | None"
) -> tuple[str, ...] | None:
    """The class names: from a file, from the weights, or from the data set if it has as many."""
    from vitrail.tasks.classification.metrics import is_numeric

    config = about.network.config
    classes = config.classes
    if options.labels is not None:
        return read_labels(options.labels, classes)
    if about.labels is not None:
        return about.labels
    told = () if source is None else source.pixel_classes if config.has_patch_head else source.classes
    return told if len(told) == classes and not is_numeric(told) else None


def has_classes(about: "Subject") -> bool:
    """Whether outputs are classes; those of an unregistered task are plain numbers."""
    from vitrail.checkpoint.bundle import get_card
    from vitrail.tasks.registry import TASKS

    task = TASKS.get(get_card(about.network).task)
    return task is not None and task.has_classes


def parse_class(text: str | None, labels: tuple[str, ...] | None, classes: int) -> int | None:
    if text is None:
        return None
    if not classes:
        raise ConfigError(f"--class {text}: this network has no head, so no classes")
    if text.isascii() and text.isdecimal():
        if int(text) >= classes:
            raise ConfigError(f"--class {text}: this network knows the classes 0 to {classes - 1}")
        return int(text)
    if labels is None:
        raise ConfigError(f"--class {text}: the names of the classes are not known; give a number, or --labels FILE")
    found = [at for at, name in enumerate(labels) if name.lower() == text.lower().replace("_", " ")]
    if not found:
        raise unknown_name("class", text, labels)
    if len(found) > 1:
        raise ConfigError(
            f"--class {text}: classes {' and '.join(map(str, found))} are both called {labels[found[0]]}; give a number"
        )
    return found[0]


def parse_patch(text: str | None, config: ModelConfig) -> tuple[int, int] | None:
    """Row and column, from 0."""
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


@dataclass(kw_only=True, slots=True)
class InspectionParts:
    """The parts so far, and why others are not there. `stopped` are the kinds that an interrupt left undone."""

    parts: "list[InspectionSection]"
    left_out: list[str]
    stopped: tuple[str, ...] = ()


def make_parts(given: "InspectionContext", wanted: list[str], *, named: bool) -> InspectionParts:
    """Everything that was asked for, or as much of it as an interrupt left time for; `named` is whether it was asked
    for by name."""
    from vitrail.inspection.registry import KINDS, NO_TOKENS

    parts, reasons = list["InspectionSection"](), dict[str, list[str]]()
    todo = [kind for kind in wanted if kind != "explorer"]
    stopped: tuple[str, ...] = ()
    with bars() as progress:
        for done, kind in enumerate(todo):
            progress("figures", done, len(todo))
            why = KINDS[kind].obstacle(given)
            if why is None:
                try:
                    with count_layers(given.model, kind):
                        parts.append(KINDS[kind].make(given))
                except KeyboardInterrupt:
                    stopped = tuple(one for one in wanted if one == "explorer" or one in todo[done:])
                    break
            elif named or not KINDS[kind].resnet:  # nobody misses Grad-CAM in a transformer who did not ask for it
                reasons.setdefault(why, []).append(kind)
    if "explorer" in wanted and not given.transformer:
        reasons.setdefault(NO_TOKENS, []).append("explorer")
    left_out = [f"{', '.join(kinds)}: {why}" for why, kinds in reasons.items()]
    return InspectionParts(parts=parts, left_out=left_out, stopped=stopped)


@contextlib.contextmanager
def count_layers(model: "torch.nn.Module", kind: str) -> Generator[None]:
    """Shows how many layers the images have gone through while a figure is made."""
    blocks = [one for block in getattr(model, "blocks", [model]) for one in (block, getattr(block, "mlp", None)) if one]
    passed = 0
    with bars() as progress:

        def count(*_: object) -> None:
            nonlocal passed
            passed += 1
            progress(f"{kind}, layers", passed, None)

        hooks = [block.register_forward_hook(count) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def write_page(
    options: InspectOptions,
    looked: InspectionInput,
    parts: "list[InspectionSection]",
    left_out: list[str],
    wanted: list[str],
) -> Path:
    """The figures, the numbers and the page."""
    from vitrail.evaluation.result import Measure, Result
    from vitrail.inspection.page import inspection_page
    from vitrail.inspection.sections_learned import build_explorer
    from vitrail.report.figure_style import LIGHT, save_figure

    out, given = options.out, looked.given
    name = Path(looked.about.name).name
    with bars() as progress:
        drawings = [drawing for part in parts for drawing in part.drawings]
        for at, drawing in enumerate(drawings):
            progress("drawing", at, len(drawings))
            save_figure(drawing.draw(LIGHT), out / FIGURES / drawing.name)
        progress("drawing", len(drawings), len(drawings))
        explorer = build_explorer(given) if "explorer" in wanted and given.transformer else None
        progress("writing the page", 0, None)
        text = inspection_page(
            f"Inside {name}",
            parts,
            lead=describe_input(looked),
            facts=describe_network(looked),
            explorer=explorer,
            left_out=left_out,
        )
    write_file(out / PAGE, text.encode())
    Result(
        kind="inspect",
        weights=looked.about.facts,
        data=looked.data,
        measures=tuple(
            Measure(name=name, value=value, unit="number", count=part.count)
            for part in parts
            for name, value in part.numbers.items()
        ),
        config={
            "image": list(looked.about.preprocessing.image),
            "preprocessing": looked.about.preprocessing.to_dict(),
            "kinds": wanted,
            "layers": list(options.layers),
            "class": options.asked,
            "patch": options.patch,
        },
    ).write(out / RESULT)
    return out / PAGE


def describe_input(looked: InspectionInput) -> str:
    given = looked.given
    shown = f"{len(given.names)} image{'s' if len(given.names) != 1 else ''}" if given.names else "its weights alone"
    more = "" if given.count <= len(given.names) else f", and over {given.count} of {looked.data.get('name')} together"
    return f"What this network looks at and what it has learned, from {shown}{more}."


def describe_network(looked: InspectionInput) -> "list[Tile]":
    """The network in numbers."""
    from vitrail.report.sections import Tile

    config = looked.about.network.config
    count = sum(parameter.numel() for parameter in looked.about.network.parameters())
    tiles = [
        Tile(value=format_millions(count), label="parameters"),
        Tile(value=format_size(config.image), label="pixels"),
    ]
    if config.tokens:
        about = dict(config.table)
        tiles += [
            Tile(value=format_size(config.grid), label="patches", note=other(config.prefix)),
            Tile(value=str(config.layers), label="layers", note=f"of {about['heads']} heads, width {config.features}"),
        ]
    else:
        tiles.append(Tile(value=str(config.units), label="blocks", note=f"in {config.layers} stages"))
    if config.classes:
        tiles.append(Tile(value=f"{config.classes:,}", label="classes" if looked.given.has_classes else "outputs"))
    return tiles


def other(tokens: int) -> str:
    return f"and {tokens} other token{'s' if tokens > 1 else ''}" if tokens else ""
