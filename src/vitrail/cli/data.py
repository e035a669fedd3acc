"""`vitrail data` shows what is in a data set, `data pack` writes tar shards, and `data dedup` finds duplicates."""

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vitrail.cli.options.look import DataOptions, DedupOptions, PackOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.atomic_files import replace_on_success
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.processes import available_cores
from vitrail.core.text import format_bytes, format_size, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.datasets.builtin_sets import CLASSES, DIGITS, SHAPES
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS
from vitrail.data.datasets.open_by_name import find_places, find_set, folder_of
from vitrail.data.datasets.scenes import SCENES, THINGS

if TYPE_CHECKING:  # `vitrail data` alone starts fast without torch
    from vitrail.data.dedup.match import Embed
    from vitrail.data.tools.overview import SplitSummary
    from vitrail.data.tools.segment_summary import SegmentSummary

SHOWN: Final = 20  # unreadable files to list
NAMED: Final = 12  # classes to list
INCLUDED, FETCHED, BY_HAND = "in the package", "--download", "by hand"  # where the files of a named set come from
PROCESSES: Final = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets them
SOFTWARE: Final = "vitrail contact sheet"  # by which our own sheets are recognised


def run_data(options: DataOptions) -> int:
    if options.source is None:
        return list_data_sets(options.json)
    from vitrail.cli.open_data import open_data
    from vitrail.data.tools.overview import SAMPLE, summarise

    collection = open_data(options.source, download=options.download)
    counts = [len(source) for source in collection.splits.values()]
    total, done = sum(counts) if options.check else sum(min(count, SAMPLE) for count in counts), 0
    with bars() as bar:

        def progress(more: int) -> None:
            nonlocal done
            done += more
            bar("decoding" if options.check else "reading headers", done, total)

        how = {"check": options.check, "strict": options.strict}
        summaries = summarise(collection, **how, workers=options.workers, progress=progress)
    if options.json:
        path = None if collection.path is None else str(collection.path)
        record = {name: getattr(collection, name) for name in ("classes", "pixel_classes", "notes")}
        if collection.segment_classes:
            record["segment_classes"] = [one._asdict() for one in collection.segment_classes]
        record |= {"splits": {split: summary.to_dict() for split, summary in summaries.items()}}
        print(json.dumps({"name": collection.name, "kind": collection.kind, "path": path, **record}))
    else:
        show_summaries(collection, summaries)
    if options.sheet or not (options.json or options.no_sheet):
        target = Path(options.sheet or f"contact-sheet-{sheet_name(collection, options.source)}.png")
        replaced = write_sheet(collection, target)
        if not options.json:
            print(f"contact sheet: {target}{' (replaced)' if replaced else ''}")
    return 1 if options.check and any(summary.unreadable for summary in summaries.values()) else 0


def show_summaries(collection: Collection, summaries: "dict[str, SplitSummary]") -> None:
    """Prints the table of splits, then what does not fit into a table."""
    from vitrail.data.tools.overview import printable_name

    where = f" at {printable_name(str(collection.path))}" if collection.path is not None else ""
    heads = ["split", "images", "classes", "fewest", "most", "median HxW", "smallest", "largest", "bytes", "unreadable"]
    rows = [summary_row(split, summary) for split, summary in summaries.items()]
    told = [at for at in range(len(heads)) if any(row[at] != "-" for row in rows)]  # a set may have only masks
    heads, rows = [heads[at] for at in told], [[row[at] for at in told] for row in rows]
    print_table(heads, rows, title=f"{printable_name(collection.name)}: {collection.kind}{where}")

    def join_names(classes: tuple[str, ...]) -> str:
        more = f", ... ({len(classes):,})" if len(classes) > NAMED else ""
        return ", ".join(map(printable_name, classes[:NAMED])) + more

    if collection.classes:
        print(f"classes: {join_names(collection.classes)}")
    if collection.pixel_classes and not collection.segment_classes:  # masks of segments are counted elsewhere
        counts = [f"{summary.masks:,} in {split}" for split, summary in summaries.items() if summary.masks]
        print(f"images with a mask: {', '.join(counts)}")
        print(f"pixel classes: {join_names(collection.pixel_classes)}")
    for split, summary in summaries.items():
        print(*describe_split(split, summary), sep="\n")
    show_segments({split: one for split, summary in summaries.items() if (one := summary.segments) is not None})
    for note in collection.notes:
        print(f"note: {printable_name(note)}")
    for split, summary in summaries.items():
        for name, reason in summary.unreadable[:SHOWN]:
            print(f"unreadable in {split}: {printable_name(name)}: {printable_name(reason)}")
        if len(summary.unreadable) > SHOWN:
            print(f"unreadable in {split}: and {len(summary.unreadable) - SHOWN:,} more; --json lists all")


def summary_row(split: str, summary: "SplitSummary") -> list[str]:
    present = summary.counts[summary.counts > 0]
    sizes = (summary.median, summary.extreme(np.argmin), summary.extreme(np.argmax))
    return [
        split,
        f"{summary.images:,}",
        f"{len(summary.classes):,}" if summary.classes else "-",
        *((f"{present.min():,}", f"{present.max():,}") if present.size else ("-", "-")),
        *("-" if size is None else format_size(size) for size in sizes),
        f"{'' if summary.looked == summary.images else '~'}{format_bytes(summary.all_bytes)}",
        f"{len(summary.unreadable):,}",
    ]


def describe_split(split: str, summary: "SplitSummary") -> list[str]:
    """Describes one split: how many images were inspected, their formats, class balance and labels."""
    from vitrail.data.tools.overview import printable_name

    looked = f"{summary.looked:,}" if summary.looked < summary.images else f"all {summary.looked:,}"
    parts = [f"{count:,} {name}" for name, count in list(summary.formats.items())[:4]]
    parts += ["..."] if len(summary.formats) > 4 else []
    how = "decoded" if summary.decoded else "headers of"
    lines = [f"{split}: {how} {looked}: {', '.join(parts) or 'none readable'}"]
    if summary.multiple:
        labelled, each = summary.labelled, summary.labels / max(1, summary.labelled)
        labels = f"{summary.labels:,} labels on {labelled:,} images, {each:.2f} each"
        lines.append(f"{split}: {labels}; {summary.images - labelled:,} have none")
    counts = summary.counts
    if len(counts) > 1 and counts.max() > 1.5 * max(1, counts[counts > 0].min()):
        low = int((counts + (counts == 0) * (counts.max() + 1)).argmin())
        high = int(counts.argmax())
        small, large = (f"{counts[at]:,} ({printable_name(summary.classes[at])})" for at in (low, high))
        lines.append(f"{split}: class sizes differ {counts[high] / counts[low]:.1f}-fold, from {small} to {large}")
    return lines


def show_segments(summaries: "dict[str, SegmentSummary]") -> None:
    """Prints a line or two about the segments of each split, and a table of classes for the first split."""
    from vitrail.data.tools.overview import printable_name

    for split, found in summaries.items():
        print(*describe_segments(split, found), sep="\n")
    if not summaries:
        return
    split, found = next(iter(summaries.items()))
    stuff = not all(one.thing for one in found.classes)
    order = sorted(range(len(found.classes)), key=lambda at: -found.segments[at])
    area = "box area" if found.boxes_only else "pixels"
    rows = [
        [
            printable_name(found.classes[at].name),
            *([("thing" if found.classes[at].thing else "stuff")] if stuff else []),
            f"{found.segments[at]:,}",
            f"{found.images[at]:,}",
            f"{100 * found.shares[at]:.1f} %",
        ]
        for at in order[:SHOWN]
    ]
    heads = ["class", *(["kind"] if stuff else []), "boxes" if found.boxes_only else "segments", "images", area]
    print_table(
        heads, rows, title=f"{split}: classes of {'boxes' if found.boxes_only else 'segments'}", left=2 if stuff else 1
    )
    if len(order) > SHOWN:
        print(f"and {pluralise(len(order) - SHOWN, 'more class', 'more classes')}; --json lists all")


def describe_segments(split: str, found: "SegmentSummary") -> list[str]:
    """Describes how many segments an image has, and how large they are."""
    counts = found.per_image
    if not len(counts):
        return [f"{split}: no image has readable segments"]
    what = "box" if found.boxes_only else "segment"
    each = f"{counts.min():,} to {counts.max():,} per image, {counts.mean():.1f} on average"
    amount = pluralise(found.count, what, "boxes" if found.boxes_only else "")
    empty = f"; {int((counts == 0).sum()):,} have none" if (counts == 0).any() else ""
    lines = [f"{split}: {amount} in {pluralise(len(counts), 'image')}, {each}{empty}"]
    if found.things:
        low, middle, high = (f"{100 * size / found.things:.0f} %" for size in found.sizes)
        crowd = f"; {found.crowd:,} marked as crowd" if found.crowd else ""
        lines.append(f"{split}: things: {low} small (below 32x32), {middle} medium, {high} large (from 96x96){crowd}")
    return lines


def sheet_name(collection: Collection, source: str) -> str:
    """The name of a sheet: shapes/colour@test -> shapes-colour-test; for a path, its last part without the suffix."""
    name = collection.title if collection.path is None or collection.path.is_dir() else Path(collection.title).stem
    split = source.rpartition("@")[2]
    return re.sub(r"[^\w.-]+", "-", f"{name}-{split}" if split in collection.splits else name).strip("-.") or "data"


def write_sheet(collection: Collection, target: Path) -> bool:
    """Draws the first split. An existing file is replaced only if it is a contact sheet; returns whether it was."""
    from vitrail.data.tools.overview import make_sheet

    if target.suffix.lower() != ".png":
        raise DataError(f"--sheet {target}: a contact sheet is a PNG; use a name that ends in .png")
    replaced = target.exists()
    if replaced and not is_sheet(target):
        raise DataError(f"{target} exists and is not a contact sheet; remove it, or name another file with --sheet")
    info = PngInfo()
    info.add_text("Software", SOFTWARE)
    image = make_sheet(collection, next(iter(collection.splits)))
    try:
        with replace_on_success(target) as file:
            image.save(file, "PNG", pnginfo=info, optimize=True)
    except OSError as error:
        raise DataError(f"{target}: {error.strerror or error}; name another file with --sheet, or --no-sheet") from None
    return replaced


def is_sheet(path: Path) -> bool:
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.info.get("Software") == SOFTWARE
    except (OSError, ValueError, SyntaxError):
        return False


def list_data_sets(as_json: bool) -> int:
    """Lists the named sets, and whether their files are here."""
    rows = known_sets()
    if as_json:
        for name, what, classes, images, files in rows:
            print(json.dumps({"name": name, "what": what, "classes": classes, "images": images, "files": files}))
        return 0
    here = {name: files for name, _, _, _, files in rows if files not in (INCLUDED, FETCHED, BY_HAND)}
    table = [
        [name, what, "here" if name in here else files.removeprefix("in the "), f"{classes:,}", f"{images:,}"]
        for name, what, classes, images, files in rows
    ]
    print_table(["name", "what", "files", "classes", "images"], table, left=3)
    for path in dict.fromkeys(here.values()):
        print(f"here: {', '.join(name for name, place in here.items() if place == path)} in {path}")
    print("vitrail data NAME shows one; NAME:FOLDER gives the folder of its files; --download fetches public files.")
    return 0


def known_sets() -> list[tuple[str, str, int, int, str]]:
    """Name, title, classes, total images and location of each named set."""
    rows = [(DIGITS, "handwritten digits, 8x8", 10, 1797, INCLUDED)]
    for name in SHAPES:
        label = name.partition("/")[2] or "shape"
        rows.append((name, f"rendered shapes by {label}", len(CLASSES[label]), 12_000, INCLUDED))
    rows.append((SCENES, "rendered scenes of shapes", len(THINGS) + 2, 11_000, INCLUDED))
    for name, entry in SETS.items():
        rows.append((name, entry.title, entry.classes, sum(entry.splits.values()), locate_files(name)))
    for name, task in VTAB_TASKS.items():
        rows.append((f"vtab/{name}", f"VTAB: {task.title}", task.classes, sum(task.sizes), locate_files(task.source)))
    return rows


def locate_files(name: str) -> str:
    """Where the files of a set are, or how to get them. Checks folders only and opens no files."""
    entry = find_set(name)
    here = next((place for place in find_places(entry, folder_of(entry), search=True) if any(place.iterdir())), None)
    return str(here) if here is not None else FETCHED if entry.is_downloadable else BY_HAND


def run_pack(options: PackOptions) -> int:
    from vitrail.cli.open_data import open_data
    from vitrail.data.tools.pack import pack

    collection = open_data(options.source, download=options.download)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    kept = f"the shards that are complete stay in {options.out}; the same command resumes"
    with bars() as bar, on_interrupt(kept):
        how = {name: getattr(options, name) for name in ("shard_size", "max_side", "quality", "workers", "strict")}
        tell = lambda done, total: bar("packing", done, total)  # noqa: E731
        report = pack(collection.splits, options.out, **how, progress=tell)
    for split, count in report.splits.items():
        print(f"{split}: {count:,} images")
    kept = f" ({report.kept} already written)" if report.kept else ""
    print(f"{pluralise(report.shards, 'shard')}{kept}, {format_bytes(report.bytes)}, in {report.out}")
    if report.reencoded:
        print(f"{report.reencoded:,} images shrunk")
    if report.unreadable:
        print(f"{report.unreadable:,} skipped (unreadable): {report.out / 'unreadable.jsonl'}")
    return 0


def run_dedup(options: DedupOptions) -> int:
    from vitrail.data.dedup.deduplicate import COLUMNS, DedupJob, deduplicate, write_page
    from vitrail.data.dedup.match import MatchRule

    if not (options.against or options.within):
        raise ConfigError("nothing to compare with; name test sets with --against, or use --within")
    called, train = open_split(options.train, ("train",), options.download)
    tests: dict[str, ImageDataset] = {}
    for text in options.against:
        name, source = open_split(text, ("test", "val"), options.download)
        name = text if name in tests else name  # two folders with the same name are distinguished by their paths
        if name in tests:
            raise ConfigError(f"--against names {name} twice; give it once")
        tests[name] = source
    rank, world, here = (int(os.environ.get(*name)) for name in PROCESSES)
    workers = available_cores() // here if options.workers is None else options.workers
    with bars() as bar, on_interrupt(f"the work so far is saved in {options.out}; the same command resumes"):
        embedding, embed = make_embedder(options.embed) if options.embed else ("", None)
        job = DedupJob(
            train=train,
            tests=tests,
            out=Path(options.out),
            called=called,
            method=MatchRule(near=not options.exact, cosine=options.cosine, embedding=embedding),
            embed=embed,
            within=options.within,
            workers=workers if workers > 1 else 0,  # a single process is this one
            rank=rank,
            world=world,
            progress=bar,
        )
        outcome = deduplicate(job)
    if rank == 0:
        write_page(job.out / "pairs.html", outcome.record, outcome.pairs, train, tests)
        print_table(COLUMNS, outcome.record.rows(), left=2)
        dropped, drop = outcome.record.dropped, job.out / "drop.json"
        print(f"{dropped:,} of {outcome.record.images:,} images of {called} are duplicates: {drop}", end="; ")
        print(f"the pairs: {job.out / 'pairs.html'}")
        if dropped:
            print(f"To train without them: --set data.without={drop}")
            print(f"To score without them: vitrail evaluate ... --without {drop}")
    return 0


def make_embedder(weights: str) -> "tuple[str, Embed]":
    """An identifier of a weight file, and a function that computes features of images, on an accelerator if there is
    one."""
    import torch

    from vitrail.checkpoint.find_weights import read_bundle
    from vitrail.checkpoint.weights import build_network
    from vitrail.distributed.process_group import find_device

    try:
        with open(weights, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise DataError(f"{weights}: {error.strerror}; --embed takes a file of weights") from None
    bundle, device = read_bundle(weights), find_device("auto")
    model, preprocessing = build_network(bundle).to(device), bundle.card.preprocessing

    def embed(images: list[Image.Image]) -> NDArray[np.float32]:
        pixels = torch.stack([preprocessing.pixels(image) for image in images]).to(device)
        with torch.inference_mode():
            tokens = model.forward_features(preprocessing.normalise(pixels))
            return model.forward_head(tokens, pre_logits=True).float().cpu().numpy()

    return f"{Path(weights).name} {digest}", embed


def open_split(text: str, splits: tuple[str, ...], download: bool) -> tuple[str, ImageDataset]:
    """Opens the split that `text` names, else the first of `splits` that exists, else the only split."""
    from vitrail.cli.open_data import open_data
    from vitrail.evaluation.scoring import choose_split

    collection = open_data(text, download=download)
    name, source = choose_split(collection, *splits)
    return f"{collection.title}@{name}", source
