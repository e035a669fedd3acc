"""`vitrail data`, `data pack` and `data dedup`: what is in a data set, tar shards, and duplicates."""

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vitrail.cli.options.look import DataOptions, DedupOptions, PackOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from vitrail.data.collection import Collection
    from vitrail.data.dataset import ImageDataset
    from vitrail.data.dedup.match import Embed
    from vitrail.data.tools.overview import SplitSummary


SHOWN: Final = 20  # unreadable files that are listed
NAMED: Final = 12  # classes that are
INCLUDED, FETCHED, BY_HAND = "in the package", "--download", "by hand"  # where the files of a named set come from
SOFTWARE: Final = "vitrail contact sheet"  # how a sheet of ours is known again


def run_data(options: DataOptions) -> int:
    if options.source is None:
        return list_data_sets(options.json)
    from vitrail.cli.inputs import open_data
    from vitrail.data.tools.overview import SAMPLE, summarise

    collection = open_data(options.source, download=options.download)
    counts = [len(source) for source in collection.splits.values()]
    total, done = sum(counts) if options.check else sum(min(count, SAMPLE) for count in counts), 0
    with bars() as bar:

        def progress(more: int) -> None:
            nonlocal done
            done += more
            bar("decoding" if options.check else "reading headers", done, total)

        summaries = summarise(
            collection, check=options.check, strict=options.strict, workers=options.workers, progress=progress
        )
    if options.json:
        print(json.dumps(summary_record(collection, summaries)))
    else:
        show_summaries(collection, summaries)
    if options.sheet or not (options.json or options.no_sheet):
        target = (
            Path(options.sheet)
            if options.sheet
            else Path(f"contact-sheet-{sheet_name(collection, options.source)}.png")
        )
        said = write_sheet(collection, target)
        if not options.json:
            print(said)
    return 1 if options.check and any(summary.unreadable for summary in summaries.values()) else 0


def show_summaries(collection: "Collection", summaries: "dict[str, SplitSummary]") -> None:
    """The table of the splits, then what does not fit into one."""
    from vitrail.data.tools.overview import printable_name

    where = f" at {printable_name(str(collection.path))}" if collection.path is not None else ""
    heads = ["split", "images", "classes", "fewest", "most", "median HxW", "smallest", "largest", "bytes", "unreadable"]
    print_table(
        heads,
        [summary_row(split, summary) for split, summary in summaries.items()],
        title=f"{printable_name(collection.name)}: {collection.kind}{where}",
    )
    classes = [printable_name(name) for name in collection.classes]
    if classes:
        print(f"classes: {join_class_names(classes)}")
    if collection.pixel_classes:
        counts = [f"{summary.masks:,} in {split}" for split, summary in summaries.items() if summary.masks]
        print(f"images with a mask: {', '.join(counts)}")
        print(f"pixel classes: {join_class_names([printable_name(name) for name in collection.pixel_classes])}")
    for split, summary in summaries.items():
        for line in describe_split(split, summary):
            print(line)
    for note in collection.notes:
        print(f"note: {printable_name(note)}")
    for split, summary in summaries.items():
        for name, reason in summary.unreadable[:SHOWN]:
            print(f"unreadable in {split}: {printable_name(name)}: {printable_name(reason)}")
        if len(summary.unreadable) > SHOWN:
            print(f"unreadable in {split}: and {len(summary.unreadable) - SHOWN:,} more; --json lists all")


def join_class_names(classes: list[str]) -> str:
    return ", ".join(classes[:NAMED]) + (f", ... ({len(classes):,})" if len(classes) > NAMED else "")


def summary_row(split: str, summary: "SplitSummary") -> list[str]:
    import numpy as np

    def size(pair: tuple[int, int] | None) -> str:
        return "-" if pair is None else f"{pair[0]}x{pair[1]}"

    present = summary.counts[summary.counts > 0]
    return [
        split,
        f"{summary.images:,}",
        f"{len(summary.classes):,}" if summary.classes else "-",
        f"{present.min():,}" if present.size else "-",
        f"{present.max():,}" if present.size else "-",
        size(summary.median),
        size(summary.extreme(np.argmin)),
        size(summary.extreme(np.argmax)),
        f"{'' if summary.looked == summary.images else '~'}{format_size(summary.all_bytes)}",
        f"{len(summary.unreadable):,}",
    ]


def describe_split(split: str, summary: "SplitSummary") -> list[str]:
    """How much was looked at, formats, balance and labels of one split."""
    from vitrail.data.tools.overview import printable_name

    looked = f"{summary.looked:,}" if summary.looked < summary.images else f"all {summary.looked:,}"
    parts = [f"{count:,} {name}" for name, count in list(summary.formats.items())[:4]]
    parts += ["..."] if len(summary.formats) > 4 else []
    lines = [
        f"{split}: {'decoded' if summary.decoded else 'headers of'} {looked}: {', '.join(parts) or 'none readable'}"
    ]
    if summary.multiple:
        without = summary.images - summary.labelled
        lines.append(
            f"{split}: {summary.labels:,} labels on {summary.labelled:,} images, "
            f"{summary.labels / max(1, summary.labelled):.2f} each; {without:,} have none"
        )
    counts = summary.counts
    if len(counts) > 1 and counts.max() > 1.5 * max(1, counts[counts > 0].min()):
        low = int((counts + (counts == 0) * (counts.max() + 1)).argmin())
        high = int(counts.argmax())
        lines.append(
            f"{split}: classes differ in size {counts[high] / counts[low]:.1f} times, from {counts[low]:,} "
            f"({printable_name(summary.classes[low])}) to {counts[high]:,} ({printable_name(summary.classes[high])})"
        )
    return lines


def summary_record(collection: "Collection", summaries: "dict[str, SplitSummary]") -> dict[str, object]:
    return {
        "name": collection.name,
        "kind": collection.kind,
        "path": None if collection.path is None else str(collection.path),
        "classes": list(collection.classes),
        "pixel_classes": list(collection.pixel_classes),
        "notes": list(collection.notes),
        "splits": {split: summary.to_dict() for split, summary in summaries.items()},
    }


def format_size(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def sheet_name(collection: "Collection", source: str) -> str:
    """shapes/colour@test -> shapes-colour-test; of a path its last part, without a suffix."""
    name = collection.title if collection.path is None or collection.path.is_dir() else Path(collection.title).stem
    split = source.rpartition("@")[2]
    return re.sub(r"[^\w.-]+", "-", f"{name}-{split}" if split in collection.splits else name).strip("-.") or "data"


def write_sheet(collection: "Collection", target: Path) -> str:
    """Draws the first split. An existing file is replaced only if it is a contact sheet."""
    from PIL.PngImagePlugin import PngInfo

    from vitrail.core.atomic_files import replace_on_success
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
    return f"contact sheet: {target}{' (replaced)' if replaced else ''}"


def is_sheet(path: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.info.get("Software") == SOFTWARE
    except (OSError, ValueError, SyntaxError):
        return False


def list_data_sets(as_json: bool) -> int:
    """The sets that have a name, and whether their files are here."""
    rows = known_sets()
    if as_json:
        for name, what, classes, images, files in rows:
            print(json.dumps({"name": name, "what": what, "classes": classes, "images": images, "files": files}))
        return 0
    here = {name: files for name, _, _, _, files in rows if files not in (INCLUDED, FETCHED, BY_HAND)}
    print_table(
        ["name", "what", "files", "classes", "images"],
        [
            [name, what, "here" if name in here else files.removeprefix("in the "), f"{classes:,}", f"{images:,}"]
            for name, what, classes, images, files in rows
        ],
        left=3,
    )
    for path in dict.fromkeys(here.values()):
        print(f"here: {', '.join(name for name, place in here.items() if place == path)} in {path}")
    print("vitrail data NAME shows one; NAME:FOLDER says where its files are; --download fetches public files.")
    return 0


def known_sets() -> list[tuple[str, str, int, int, str]]:
    """Name, title, classes, images in all, and where the files are."""
    from vitrail.data.datasets.builtin_sets import CLASSES, DIGITS, SHAPES
    from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS

    rows = [(DIGITS, "handwritten digits, 8x8", 10, 1797, INCLUDED)]
    for name in SHAPES:
        label = name.partition("/")[2] or "shape"
        rows.append((name, f"rendered shapes by {label}", len(CLASSES[label]), 12_000, INCLUDED))
    for name, entry in SETS.items():
        rows.append((name, entry.title, entry.classes, sum(entry.splits.values()), locate_files(name)))
    for name, task in VTAB_TASKS.items():
        rows.append((f"vtab/{name}", f"VTAB: {task.title}", task.classes, sum(task.sizes), locate_files(task.source)))
    return rows


def locate_files(name: str) -> str:
    """Where the files of a set are, or how to get them. Only folders are looked at, nothing is opened."""
    from vitrail.data.datasets.open_by_name import find_places, find_set, folder_of

    entry = find_set(name)
    here = next((place for place in find_places(entry, folder_of(entry), search=True) if any(place.iterdir())), None)
    return str(here) if here is not None else FETCHED if entry.is_downloadable else BY_HAND


def run_pack(options: PackOptions) -> int:
    from vitrail.cli.inputs import open_data
    from vitrail.data.tools.pack import pack

    collection = open_data(options.source, download=options.download)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    kept = f"the shards that are complete stay in {options.out}; the same command resumes"
    with bars() as bar, on_interrupt(kept):
        report = pack(
            collection.splits,
            options.out,
            shard_size=options.shard_size,
            max_side=options.max_side,
            quality=options.quality,
            workers=options.workers,
            strict=options.strict,
            progress=lambda done, total: bar("packing", done, total),
        )
    for split, count in report.splits.items():
        print(f"{split}: {count:,} images")
    kept = f" ({report.kept} of them from before)" if report.kept else ""
    shards = f"{report.shards} {'shard' if report.shards == 1 else 'shards'}{kept}"
    print(f"{shards}, {format_size(report.bytes)}, in {report.out}")
    if report.reencoded:
        print(f"{report.reencoded:,} images made smaller")
    if report.unreadable:
        print(f"{report.unreadable:,} skipped (unreadable): {report.out / 'unreadable.jsonl'}")
    return 0


def run_dedup(options: DedupOptions) -> int:
    from vitrail.core.processes import available_cores
    from vitrail.data.dedup.deduplicate import DedupJob, deduplicate
    from vitrail.data.dedup.match import MatchRule
    from vitrail.data.dedup.record import COLUMNS, write_page

    if not (options.against or options.within):
        raise ConfigError("nothing to compare with; name test sets with --against, or use --within")
    called, train = open_split(options.train, ("train",), options.download)
    tests: dict[str, ImageDataset] = {}
    for text in options.against:
        name, source = open_split(text, ("test", "val"), options.download)
        name = text if name in tests else name  # two folders with the same name are distinguished by their paths
        if name in tests:
            raise ConfigError(f"--against names {name} twice")
        tests[name] = source
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    workers = (
        available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if options.workers is None
        else options.workers
    )
    embedding = identify_weights(options.embed) if options.embed else ""
    with bars() as bar, on_interrupt(f"the work so far is saved in {options.out}; the same command resumes"):
        job = DedupJob(
            train=train,
            tests=tests,
            out=Path(options.out),
            called=called,
            method=MatchRule(near=not options.exact, cosine=options.cosine, embedding=embedding),
            embed=make_embedder(options.embed) if options.embed else None,
            within=options.within,
            workers=workers if workers > 1 else 0,  # one process is this one
            rank=rank,
            world=world,
            progress=bar,
        )
        outcome = deduplicate(job)
    if rank == 0:
        write_page(job.out / "pairs.html", outcome.record, outcome.pairs, train, tests)
        print_table(COLUMNS, outcome.record.rows(), left=2)
        said = f"{outcome.record.dropped:,} of {outcome.record.images:,} images of {called} are duplicates"
        print(f"{said}: {job.out / 'drop.json'}; the pairs: {job.out / 'pairs.html'}")
        if outcome.record.dropped:
            print(f"To train without them: --set data.without={job.out / 'drop.json'}")
            print(f"To score without them: vitrail evaluate ... --without {job.out / 'drop.json'}")
    return 0


def identify_weights(weights: str) -> str:
    """An identifier of a weight file, for its embeddings."""
    from hashlib import file_digest

    try:
        with open(weights, "rb") as file:
            return f"{Path(weights).name} {file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        raise DataError(f"{weights}: {error.strerror}; --embed takes a file of weights") from None


def make_embedder(weights: str) -> "Embed":
    """A function from images to their features, on an accelerator if there is one."""
    import torch

    from vitrail.checkpoint.find_weights import read_bundle
    from vitrail.checkpoint.weights import build_network
    from vitrail.distributed.process_group import find_device

    bundle = read_bundle(weights)
    device = find_device("auto")
    model, preprocessing = build_network(bundle).to(device), bundle.card.preprocessing

    def embed(pictures: "list[Image]") -> "NDArray[np.float32]":
        pixels = torch.stack([preprocessing.pixels(picture) for picture in pictures]).to(device)
        with torch.inference_mode():
            tokens = model.forward_features(preprocessing.normalise(pixels))
            return model.forward_head(tokens, pre_logits=True).float().cpu().numpy()

    return embed


def open_split(text: str, splits: tuple[str, ...], download: bool) -> "tuple[str, ImageDataset]":
    """The split that a text names, else the first of the usual ones, else the only one."""
    from vitrail.cli.inputs import open_data

    collection = open_data(text, download=download)
    there = collection.splits
    name = next((split for split in splits if split in there), None)
    if name is None and len(there) > 1:
        raise DataError(
            f"{text} has no {' or '.join(splits)}; say which split: {', '.join(f'{text}@{s}' for s in there)}"
        )
    name = next(iter(there)) if name is None or len(there) == 1 else name
    return f"{collection.title}@{name}", there[name]
