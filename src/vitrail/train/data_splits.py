"""Which images a run sees: the training split, the one that is watched, the one for the end.

What the weights of a run will say of the images they were trained on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.bundle import renaming
from vitrail.checkpoint.store.reader import Saved
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset, total_bytes
from vitrail.data.splits import Selection, dev_split, share_split
from vitrail.data.training_record import KEY as KEY
from vitrail.data.training_record import (
    MOST_BYTES,
    MOST_IMAGES,
    Hashes,
    find_exposure,
    hash_contents,
    interleave,
    record_training,
)
from vitrail.distributed.process_group import World
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.task import Task
from vitrail.train.config import Data
from vitrail.train.runtime.observer import Advance, ignore


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """The splits of a run by their part in it. `classes` are the names of the network's outputs, none without labels.
    `chooses` says whether the watched one may choose the best weights: one without labels cannot, and the split that is
    scored at the end may not. `without` is what was left out of the training split."""

    title: str
    classes: tuple[str, ...]
    train: ImageDataset
    watch: ImageDataset | None
    test: ImageDataset | None
    watched: str  # the name of the split, "" for none
    tested: str
    notes: tuple[str, ...] = ()
    others: dict[str, ImageDataset] = field(
        default_factory=dict[str, ImageDataset]
    )  # all splits but the one to train on
    without: Selection | None = None
    renamed: dict[str, Any] = field(default_factory=dict[str, Any])  # what the data call the classes, if otherwise
    out_of: int = 0  # images of the split that the training images were chosen from

    @property
    def chooses(self) -> bool:
        return self.watch is not None and bool(self.classes) and self.watched != self.tested

    @property
    def fingerprint(self) -> dict[str, str]:
        """Of each split, whether it is scored or not: another order, another label or another file is another one."""
        parts = {"train": self.train, **self.others}
        return {name: part.fingerprint[:16] for name, part in parts.items()}

    @property
    def content(self) -> dict[str, str]:
        """A digest of what the images of each split contain: other bytes under the same names are other images."""
        parts = {"train": self.train, **self.others}
        return {name: part.content_digest for name, part in parts.items()}

    @property
    def provenance(self) -> dict[str, Any]:
        """What weights tell of these images: against which sets, by name and fingerprint, copies were left out; and
        the names of the classes in the data, if they are others."""
        if self.without is None or self.without.rule.get("name") != "dedup":
            return self.renamed
        return {
            **self.renamed,
            "deduplicated": {"selection": self.without.hash, "against": self.without.rule.get("against", {})},
        }


def find_pictures(data: Data, task: Task | None = CLASSIFICATION) -> Pictures:
    """Opens the source and cuts it up as the config says. One that lacks the targets of the task is refused; without a
    task the images are enough."""
    if not data.source:
        raise ConfigError("there are no images to train on; name DATA behind the recipe, or set data.source")
    collection = open_collection(data.source)
    return cut(collection, data, task)


def cut(collection: Collection, data: Data, task: Task | None = CLASSIFICATION) -> Pictures:
    whole = only_or(collection, data.train)
    known = collection.classes if task is None else task.output_names(collection)
    train, without = available(collection, data)
    dev: ImageDataset | None = None
    if data.dev:
        rest, held = dev_split(train, data.dev)
        if not len(held.indices):
            raise DataError(f"data.dev={data.dev} of {len(train)} images leaves none to choose by; hold out more")
        train, dev = rest.apply(train), held.apply(train)
    parts = {**collection.splits, **({} if dev is None else {"dev": dev})}
    usual = ("dev", "val") if dev else ("val",)
    if data.watch == "any":
        watched = chosen("auto", parts, (*usual, "test"), "data.watch")
    else:
        watched = chosen(data.watch, parts, usual, "data.watch")
    tested = chosen(data.test, parts, ("test",), "data.test")
    names = output_names(collection, data, known)
    return Pictures(
        title=collection.title,
        classes=names,
        renamed=renaming(known, names),
        train=train,
        watch=parts[watched] if watched else None,
        test=parts[tested] if tested else None,
        watched=watched,
        tested=tested,
        notes=collection.notes,
        others={name: part for name, part in parts.items() if part is not whole},
        without=without,
        out_of=len(whole),
    )


def output_names(collection: Collection, data: Data, known: tuple[str, ...]) -> tuple[str, ...]:
    """What the outputs are called: as the run says, or as the data do."""
    if data.names and len(data.names) != len(known):
        raise ConfigError(f"data.names has {len(data.names):,} names, but {collection.name} has {len(known):,} classes")
    return data.names or known


def available(collection: Collection, data: Data) -> tuple[ImageDataset, Selection | None]:
    """What there is to learn from, before a part of it is held out, and what was left out of it."""
    train, without = only_or(collection, data.train), None
    if data.without:
        train, without = left_of(train, data.without)
    return part_of(train, data) if data.part < 1 else train, without


def left_of(train: ImageDataset, file: str) -> tuple[ImageDataset, Selection]:
    """Without what `vitrail data dedup` wants left out, and its selection."""
    try:
        without = Selection.load(Path(file))
    except DataError as error:  # which names the file
        raise DataError(f"data.without={error}") from None
    if not without.drop:
        raise DataError(f"data.without={file} says which images to take, and none to leave out")
    try:
        left = without.apply(train)
    except DataError as error:
        raise DataError(f"data.without={file}: {error}") from None
    if not len(left):
        raise DataError(f"data.without={file} leaves none of {len(train):,} images to train on")
    return left, without


def part_of(train: ImageDataset, data: Data) -> ImageDataset:
    try:
        return share_split(train, data.part, seed=data.part_seed).apply(train)
    except BadLabels as error:
        raise DataError(f"data.part={data.part} of {len(train):,} training images: {error}") from None


def only_or(collection: Collection, name: str) -> ImageDataset:
    """The named split; a collection of one split, whatever it is called, is meant whole."""
    if len(collection.splits) == 1:
        return next(iter(collection.splits.values()))
    return collection.split(name)


def chosen(asked: str, parts: dict[str, ImageDataset], usual: tuple[str, ...], field: str) -> str:
    if asked == "auto":
        return next((name for name in usual if name in parts), "")
    if asked in ("", "none"):
        return ""
    if asked not in parts:
        raise ConfigError(
            f"{field}={asked} is not a split here; use {', '.join(parts)}, none or auto (--set {field}=auto)"
        )
    return asked


def on_all(data: Data) -> Data:
    """The same data with nothing held out: the last run of a search (Section 4.1)."""
    return replace(data, dev=0.0, watch="none" if data.watch == "dev" else data.watch)


READING: Final = "reading the images"


def training_records(
    data: Data, pictures: Pictures, world: World, saved: Saved | None, advance: Advance = ignore
) -> list[dict[str, Any]]:
    """One record, or several where a resumed run was made to train on other images than before: all of them count. The
    processes share the work, and a run that resumes with the same images keeps what it had."""
    before: list[dict[str, Any]] = [] if saved is None else saved.facts.get(KEY, [])
    same = any(
        (record["fingerprint"], record["digest"]) == (pictures.train.fingerprint, pictures.train.content_digest)
        for record in before
    )
    if world.agree(same):
        return before
    selection = {
        "source": data.source,
        "split": data.train,
        "part": data.part,
        "part_seed": data.part_seed,
        "dev": data.dev,
        "without": "" if pictures.without is None else pictures.without.hash,
    }
    made = record_training(
        pictures.train,
        out_of=pictures.out_of or len(pictures.train),
        selection=selection,
        others=pictures.others,
        hashing=lambda source: hash_together(source, world, advance),
    )
    return [*before, made]


def note_seen(
    pictures: Pictures,
    records: list[dict[str, Any]],
    start: Mapping[str, Any],
    world: World,
    tell: Callable[[str], None],
) -> None:
    """Says which images that the run is scored on were trained on: by the run itself, or by the weights it starts from,
    whose provenance is `start`. A set that is too large to record is not read for it."""
    provenance = {**start, KEY: records}
    for name, part in ((pictures.watched, pictures.watch), (pictures.tested, pictures.test)):
        if part is None or len(part) > MOST_IMAGES or total_bytes(part) > MOST_BYTES:
            continue
        count = find_exposure(provenance, part, lambda source: hash_together(source, world)).count
        if count:
            tell(
                f"{count:,} of the {len(part):,} images of {name} are trained on, too, or were by the weights that the "
                "run starts from: its score says less about new images; `vitrail data dedup` finds such copies"
            )


def hash_together(source: ImageDataset, world: World, advance: Advance = ignore) -> Hashes:
    """The content hashes of a source; the processes share the reading."""
    tell = lambda done: advance(READING, done, len(source))  # noqa: E731
    return interleave(world.gather(hash_contents(source, rank=world.rank, world=world.size, advance=tell)))
