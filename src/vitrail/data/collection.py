"""Opens the DATA argument of every command: a path or a name, whose kind is recognised from its contents.

    SOURCE[@SPLIT]

    photos/                     a folder: of train, val and test, of classes, of images, of tar or Parquet files
    list.csv  shards.tar        a file: .csv .tsv .jsonl .tar .parquet .npz .npy, and .json of COCO
    list.csv:label=breed        a list or a Parquet file, with its columns chosen: image, label, split
    set/train-{000..146}.tar    several tar files
    classes:photos/             the same, read as said: classes, splits, masks, coco, panoptic, yolo, voc, flat, shards,
                                parquet, saved, manifest, arrays
    digits  shapes/colour       a bundled set; scenes/SIZE for scenes of other sizes
    cifar10  cifar10:DIR        a set by name, in its usual folder or in DIR
    vtab/pets:DIR               one of the 19 tasks of VTAB
    pets@test                   one split of any of them

Contradictions raise one clear error here, before any work starts.
"""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vitrail.core.atomic_files import near_paths
from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.core.text import join_words
from vitrail.data.annotations.segments import SegmentClass
from vitrail.data.dataset import NONE, ImageDataset, Labels, RelabelledDataset
from vitrail.data.datasets import builtin_sets, scenes
from vitrail.data.datasets import open_by_name as opening
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS
from vitrail.data.datasets.open_by_name import Progress
from vitrail.data.readers.detect_format import READINGS, ReadResult, is_pattern, read_as, read_columns, read_path
from vitrail.data.readers.folder import describe_unread, parse_split
from vitrail.data.readers.masks import LAYOUTS

ORDER: Final = ("train", "val", "test")

# How to provide labels, by kind of source; for all others, with one subfolder per class.
LABELLING: Final = {
    "tar shards": 'in a tar file an image KEY.jpg has its class number in KEY.cls, or as "label" in KEY.json; folders '
    "inside it are not classes. Unpack it and give the folder, or pack that folder with `vitrail data pack`",
    "manifest": 'give the list a column "label", or say which column it is: LIST.csv:label=COLUMN',
    **dict.fromkeys(("Parquet", "Hugging Face dataset"), 'give the table a column "label"'),
    "arrays": "give it an array called labels",
    **dict.fromkeys(
        ("COCO", "COCO panoptic", "YOLO", "Pascal VOC"),
        "its annotations say where objects are; for classes of whole images put the images of each class into a folder "
        "of its own",
    ),
    "images and masks": "masks say the class of every pixel, which `vitrail finetune` and `vitrail pretrain` learn "
    "with --task segmentation; for classes of whole images put the images of each class into a folder of its own",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """The splits of one set, all with the same classes."""

    name: str  # as requested, without the split
    kind: str  # a description of the format found
    path: Path | None  # None for a bundled set
    splits: dict[str, ImageDataset]
    notes: tuple[str, ...] = ()  # remarks that are not errors

    @property
    def title(self) -> str:
        """A short name: that of a named set, or the last part of a path."""
        name = self.name.partition(":")[0]
        if self.path is None or name in known_names():
            return name
        return self.path.absolute().name or str(self.path)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the K classes; empty without labels."""
        return next((source.classes for source in self.splits.values() if source.classes), ())

    def need_labels(self) -> None:
        """Raises BadLabels if there are no labels, and says how to provide them."""
        if not self.classes:
            folders = "put the images of each class into a folder of its own, named after it"
            if self.path is not None and (lists := sorted(self.path.glob("*.csv"))):
                folders += f", or give a list of labels: {lists[0]}"
            kind = "images and masks" if self.pixel_classes else self.kind.partition(" (")[0]
            raise BadLabels(f"{self.name} has no labels: {LABELLING.get(kind, folders)}")

    @property
    def pixel_classes(self) -> tuple[str, ...]:
        """The names of the class indices in masks; empty without masks."""
        return next((source.pixel_classes for source in self.splits.values() if source.pixel_classes), ())

    @property
    def segment_classes(self) -> tuple[SegmentClass, ...]:
        """The classes of annotated segments; empty without any."""
        return next((source.segment_classes for source in self.splits.values() if source.segment_classes), ())

    def need_masks(self) -> None:
        """Raises BadLabels if there are no masks, and says how to provide them."""
        if not self.pixel_classes:
            raise BadLabels(f"{self.name} has no masks: give every image one, {LAYOUTS}")

    def split(self, name: str) -> ImageDataset:
        """Returns a split by its name or a common synonym."""
        found = self.splits.get(name) or self.splits.get(parse_split(name) or "")
        if found is None:
            raise DataError(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        return found


def open_collection(
    text: str | Path, *, root: Path | None = None, download: bool = False, progress: Progress = None
) -> Collection:
    """Opens the collection that SOURCE[@SPLIT] refers to. `root` is the folder of a named set's files, unless the text
    gives one. With `download`, missing files are fetched, and `progress` gets (file, bytes done, bytes in total). A
    Path is always a path. If a split is given, the collection has only that split, with the classes of the whole."""
    if isinstance(text, Path):
        return build_collection(str(text), text, read_path(text))
    by_name = partial(open_by_name, root=root, download=download, progress=progress)
    whole = resolve(text, by_name)
    found = re.fullmatch(r"(.+)@([\w-]+)", text, re.DOTALL)
    part = resolve(found[1], by_name) if found else None
    if found is None or part is None or (whole and whole.there):
        if found and whole and part and part.there:
            raise DataError(f"{text!r} is a path here, and a split of {found[1]!r}; write {text}/ for the path")
        if whole is None:
            name = found[1] if found else text
            near = difflib.get_close_matches(name.partition(":")[0], [*known_names(), *near_paths(name)], 4, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else "`vitrail data` lists the names"
            fact = f"{name!r} is neither a path nor a known set: nothing at {Path(name).absolute()}"
            raise SourceNotFound(f"{fact}; {hint}")
        return whole.open()
    opened = part.open()
    chosen = opened.split(found[2])
    name = next(name for name, source in opened.splits.items() if source is chosen)
    return replace(opened, splits={name: chosen})


class ResolvedSource(NamedTuple):
    """What a text without a split refers to: whether its files exist, and how to open it."""

    there: bool
    open: Callable[[], Collection]


def resolve(text: str, by_name: Callable[[str, Path | None], Collection]) -> ResolvedSource | None:
    """Resolves a text without a split; None if it refers to nothing. `by_name` opens a set by its name and folder."""
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):
        if text in known_names():
            raise DataError(f"{text!r} is a set and a path here; write ./{text} for the path, {text}: for the set")
        return ResolvedSource(True, lambda: build_collection(text, path, read_path(path)))
    if chosen := re.fullmatch(r"(.+\.(?:csv|tsv|jsonl|parquet)):([^@]+=[^@]+)", text, re.DOTALL | re.IGNORECASE):
        table, columns = Path(os.path.expanduser(chosen[1])), chosen[2]
        there = os.path.exists(table)
        return ResolvedSource(there, lambda: build_collection(text, table, read_columns(table, columns)))
    if is_pattern(text):
        return ResolvedSource(True, lambda: build_collection(text, path, read_as("shards", path)))
    head, _, tail = text.partition(":")
    place = Path(os.path.expanduser(tail)) if tail else None
    if head in READINGS and place is not None:
        return ResolvedSource(os.path.exists(place), lambda: build_collection(text, place, read_as(head, place)))
    if head in known_names() or scenes.is_scene_set(head):
        return ResolvedSource(place is None or os.path.exists(place), lambda: by_name(head, place))
    return None


def known_names() -> dict[str, str]:
    """Lists the names of all sets, each with its kind: embedded, named or vtab."""
    return {
        **dict.fromkeys([builtin_sets.DIGITS, *builtin_sets.SHAPES, scenes.SCENES], "embedded"),
        **dict.fromkeys(SETS, "named"),
        **dict.fromkeys((f"vtab/{task}" for task in VTAB_TASKS), "vtab"),
    }


def open_by_name(name: str, place: Path | None, root: Path | None, download: bool, progress: Progress) -> Collection:
    """Opens a set by name: in the folder `place` from the text, else in `root`, else in its default folder."""
    kind, root = "embedded" if scenes.is_scene_set(name) else known_names()[name], place or root
    if kind == "embedded":
        if place is not None:
            raise DataError(f"{name}:{place}: the set {name} is in the package and has no folder; write {name}")
        read = scenes.read_scenes if scenes.is_scene_set(name) else builtin_sets.read_builtin
        return build_collection(name, None, ("in the package", read(name)))
    task = opening.find_vtab_task(name) if kind == "vtab" else None
    entry = opening.find_set(task.source if task else name)
    open_splits = opening.open_vtab if task else opening.open_named
    splits = open_splits(name, root, download=download, progress=progress)
    odd = [] if task else [f"not as published: {fact}" for fact in opening.find_differences(entry, splits)]
    kind = f"task of VTAB: {task.title}" if task else entry.title
    made = build_collection(name, opening.folder_of(entry, root), (kind, splits))
    return replace(made, notes=(*odd, *made.notes))


def build_collection(name: str, path: Path | None, found: ReadResult) -> Collection:
    """Puts the splits in their usual order, unifies their classes and checks them."""
    kind, splits = found
    order = sorted(splits, key=lambda split: ORDER.index(split) if split in ORDER else len(ORDER))
    agreed, notes = unify_classes(name, {split: splits[split] for split in order})
    notes += check_masks(name, agreed)
    read = dict.fromkeys(note for source in agreed.values() if (note := getattr(unwrap(source), "note", "")))
    return Collection(name=name, kind=kind, path=path, splits=agreed, notes=(*read, *describe_ignored(agreed), *notes))


def describe_ignored(splits: dict[str, ImageDataset]) -> list[str]:
    """Describes ignored files in notes."""
    bare = {split: unwrap(source) for split, source in splits.items()}
    unread = {split: getattr(source, "unsupported", ()) for split, source in bare.items()}
    notes = [f"{split}: {describe_unread(names)}" for split, names in unread.items() if names]
    for split, source in bare.items():
        count, some = getattr(source, "ignored", (0, ()))
        if count:
            what = "file that is not an image" if count == 1 else "files that are not images"
            names = ", ".join([*some, *(["..."] if count > len(some) else [])])
            notes.append(f"{split}: {count:,} {what} ignored ({names})")
    return notes


def unwrap(source: ImageDataset) -> ImageDataset:
    return source.source if isinstance(source, RelabelledDataset) else source


def unify_classes(where: str, splits: dict[str, ImageDataset]) -> tuple[dict[str, ImageDataset], list[str]]:
    """Gives all splits the classes of the first one with labels, which is train if it exists. Refuses empty splits,
    labels outside the range, and splits with classes that the first one lacks."""
    first = next((split for split, source in splits.items() if source.classes), None)
    out: dict[str, ImageDataset] = {}
    notes: list[str] = []
    for split, source in splits.items():
        if not len(source):
            raise DataError(f"{where}: no images in {split}")
        if source.classes or bool((np.asarray(source.labels.values) != NONE).any()):
            source.labels.check(len(source.classes), f"{where}, {split}")
        if first is None or not source.classes:
            out[split] = source
            notes += [] if first is None else [f"{split} has no labels"]
            continue
        classes = splits[first].classes
        out[split] = source if source.classes == classes else renumber(where, split, source, first, classes)
        missing = np.flatnonzero(out[split].labels.counts(len(classes)) == 0)
        if missing.size:
            some = ", ".join(classes[i] for i in missing[:5]) + (", ..." if missing.size > 5 else "")
            notes.append(f"{split} has no images of {missing.size} of {len(classes)} classes ({some})")
    return out, notes


def check_masks(where: str, splits: dict[str, ImageDataset]) -> list[str]:
    """Refuses splits whose masks or segments have different classes. Returns a note for each split without any, if
    others have some."""
    masked = {split: source.pixel_classes for split, source in splits.items() if source.pixel_classes}
    first = next(iter(masked), None)
    for split, names in masked.items():
        if first is not None and names != masked[first]:
            ours, theirs = join_words(names, limit=10), join_words(masked[first], limit=10)
            fact = f"{where}: the masks of {split} have the classes {ours}, those of {first} {theirs}"
            raise BadLabels(f"{fact}; give all splits the same class names")
    described = {split: source.segment_classes for split, source in splits.items() if source.segment_classes}
    for split, kinds in described.items():
        if kinds != (known := next(iter(described.values()))):
            ours, theirs = (join_words([one.name for one in some], limit=10) for some in (kinds, known))
            fact = f"{where}: the segments of {split} have the classes {ours}, those of another split {theirs}"
            raise BadLabels(f"{fact}; give all splits the same classes")
    bare = [f"{split} has no segments" for split in splits if described and split not in described]
    return [*(f"{split} has no masks" for split in splits if masked and split not in masked), *bare]


def renumber(where: str, split: str, source: ImageDataset, first: str, classes: tuple[str, ...]) -> ImageDataset:
    """Renumbers the classes of a split to match another split."""
    place = {name: i for i, name in enumerate(classes)}
    strange = [name for name in source.classes if name not in place]
    if strange:
        lacking = [name for name in classes if name not in set(source.classes)]
        more = f"; {split} lacks {join_words(lacking, limit=10)}" if lacking else ""
        fact = f"{where}: {split} has classes that {first} lacks: {join_words(strange, limit=10)}{more}"
        raise BadLabels(f"{fact} ({len(source.classes)} classes in {split}, {len(classes)} in {first})")
    table = np.array([*(place[name] for name in source.classes), NONE], np.int64)  # -1 finds the last
    return RelabelledDataset(source, Labels(table[source.labels.values], source.labels.starts), classes)
