"""What is in a collection, in numbers: images, classes, sizes, formats, and the files that cannot be read.

Looks at many samples, by header or by decoding them whole, here or in several processes.

Which samples of a split a contact sheet shows, and their pixels.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, WorkerDied
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import EpochOrder, hash_keys, hash_word
from vitrail.data.targets import MaskTargets

if TYPE_CHECKING:
    from PIL.Image import Image


CHUNK: Final = 32
HERE: Final = 256  # so few samples are not worth starting processes for


@dataclass(frozen=True, slots=True)
class Seen:
    """What one sample turned out to be; `reason` says why it is not an image."""

    index: int
    height: int = 0
    width: int = 0
    format: str = ""  # JPEG RGB, PNG P, pixels L
    bytes: int = 0
    reason: str = ""


def see(source: ImageDataset, index: int, *, decode: bool) -> Seen:
    """One sample by its header and, with `decode`, all of its pixels and its mask."""
    try:
        data = source.read(index)
        picture = EncodedImage(data)
        kind = f"{picture.image.format or 'pixels'} {picture.image.mode}"
        if decode:
            picture.rgb()
            if source.pixel_classes:
                MaskTargets().read(source, index, picture.size)
    except BadImage as error:
        return Seen(index, reason=str(error))
    except OSError as error:
        return Seen(index, reason=error.strerror or str(error))
    height, width = picture.size
    return Seen(index, height, width, kind, data.nbytes if isinstance(data, np.ndarray) else len(data))


def survey(
    source: ImageDataset,
    indices: Sequence[int],
    *,
    decode: bool = False,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Seen]:
    """Looks at the samples in order. `workers` is the number of processes to decode with, by default one a core;
    `progress` hears how many more are done."""
    workers = cores() if workers is None else workers
    if not decode or workers < 2 or len(indices) <= HERE:
        for index in indices:
            yield see(source, index, decode=decode)
            if progress is not None:
                progress(1)
        return
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    done = 0
    # Processes are spawned: a fork next to threads may hang.
    with ProcessPoolExecutor(workers, get_context("spawn"), start, (source, decode)) as pool:
        try:
            for found in pool.map(see_all, chunks):
                yield from found
                done += len(found)
                if progress is not None:
                    progress(len(found))
        except BrokenProcessPool:
            near = ", ".join(source.name(index) for index in indices[done : done + 3])
            raise WorkerDied(
                f"a process that decodes images was killed, by lack of memory perhaps, soon after {near}; "
                f"try --workers 1"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Here:
    """The source of a process in the pool."""

    source: ImageDataset
    decode: bool


def start(source: ImageDataset, decode: bool) -> None:
    Here.source, Here.decode = source, decode


def see_all(indices: Sequence[int]) -> list[Seen]:
    return [see(Here.source, index, decode=Here.decode) for index in indices]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SAMPLE: Final = 1000  # headers that are read of each split, unless all are asked for
SEED: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitSummary:
    """One split. Sizes, formats and unreadable files are those of the samples that were looked at."""

    images: int
    masks: int = 0  # images with a mask
    classes: tuple[str, ...]
    counts: NDArray[np.int64]  # [K] images of each class
    labelled: int
    labels: int  # in all; more than `labelled` where an image has several
    multiple: bool
    looked: int
    decoded: bool  # all of it, or headers only
    sizes: NDArray[np.int64]  # [looked and readable, 2] height and width
    formats: dict[str, int]
    bytes: int  # of the samples that were looked at
    unreadable: tuple[tuple[str, str], ...]  # name and reason

    @property
    def median(self) -> tuple[int, int] | None:
        """Height and width that half of the images fall short of."""
        return None if not len(self.sizes) else (int(np.median(self.sizes[:, 0])), int(np.median(self.sizes[:, 1])))

    def extreme(self, which: Callable[[NDArray[np.int64]], Any]) -> tuple[int, int] | None:
        """The image of the least or the most pixels, by `np.argmin` or `np.argmax`."""
        if not len(self.sizes):
            return None
        height, width = self.sizes[int(which(self.sizes[:, 0] * self.sizes[:, 1]))]
        return int(height), int(width)

    @property
    def all_bytes(self) -> int:
        """Of the whole split; an estimate where not all was looked at."""
        return self.bytes if self.looked == self.images else round(self.bytes / max(1, self.looked) * self.images)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        smallest, largest = self.extreme(np.argmin), self.extreme(np.argmax)
        return {
            "images": self.images,
            "masks": self.masks,
            "classes": {name: int(count) for name, count in zip(self.classes, self.counts, strict=True)},
            "labelled": self.labelled,
            "labels": self.labels,
            "multiple": self.multiple,
            "looked_at": self.looked,
            "decoded": self.decoded,
            "size": {"median": self.median, "smallest": smallest, "largest": largest},
            "formats": self.formats,
            "bytes": self.all_bytes,
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
        }


def summarise(
    collection: Collection,
    *,
    check: bool = False,
    strict: bool = False,
    sample: int = SAMPLE,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, SplitSummary]:
    """A summary of every split. With `check` every sample is decoded, else the headers of up to `sample` are read. With
    `strict` the first file that cannot be read is an error. `progress` hears how many more samples are done."""
    out: dict[str, SplitSummary] = {}
    for split, source in collection.splits.items():
        chosen = range(len(source)) if check else sampled(len(source), sample)
        seen = survey(source, chosen, decode=check, workers=workers, progress=progress)
        out[split] = summary_of(source, stopping(source, seen) if strict else seen, check)
    return out


def sampled(count: int, sample: int) -> list[int]:
    """Which samples to look at: all, or some drawn by lot, always the same ones."""
    if count <= sample:
        return list(range(count))
    return np.sort(EpochOrder(count, SEED)(0, np.arange(sample, dtype=np.int64))).tolist()


def stopping(source: ImageDataset, seen: Iterable[Seen]) -> Iterable[Seen]:
    for found in seen:
        if found.reason:
            raise BadImage(f"{source.name(found.index)}: {found.reason}")
        yield found


def summary_of(source: ImageDataset, seen: Iterable[Seen], decoded: bool) -> SplitSummary:
    sizes: list[tuple[int, int]] = []
    formats: Counter[str] = Counter()
    unreadable: list[tuple[str, str]] = []
    looked = size = 0
    for found in seen:
        looked, size = looked + 1, size + found.bytes
        if found.reason:
            unreadable.append((source.name(found.index), found.reason))
        else:
            sizes.append((found.height, found.width))
            formats[found.format] += 1
    labels = source.labels
    present = int((np.asarray(labels.values) >= 0).sum())
    return SplitSummary(
        images=len(source),
        masks=len(source) if source.pixel_classes else 0,
        classes=source.classes,
        counts=labels.counts(len(source.classes)),
        labelled=present if labels.starts is None else int((np.diff(labels.starts) > 0).sum()),
        labels=present,
        multiple=labels.multiple,
        looked=looked,
        decoded=decoded,
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        formats=dict(formats.most_common()),
        bytes=size,
        unreadable=tuple(unreadable),
    )


MOST: Final = 60  # classes on one sheet ...
LARGEST: Final = 144  # ... or so many images, where classes have one or two
UNLABELLED: Final = 96
SIDE: Final = 208  # pixels that are enough for a tile


def sheet_of(collection: Collection, split: str) -> "Image":
    """The contact sheet of one split: some samples of every class, or of all where there are no classes. Which ones is
    drawn by lot, always the same."""
    from vitrail.report.contact_sheet import Group, contact_sheet, layout, mosaic

    source = collection.split(split)
    count, classes = len(source), source.classes
    parts = [f"{count:,} {'image' if count == 1 else 'images'}"]
    parts += [f"{len(classes):,} {'class' if len(classes) == 1 else 'classes'}"] if classes else ["no labels"]
    subtitle = "  ·  ".join([split, *parts, collection.kind])
    title = shown(collection.title)
    if not classes:
        picked = by_lot(np.arange(count))[:UNLABELLED]
        return mosaic(title, subtitle, [pixels_of(source, int(i)) for i in picked])
    counts = source.labels.counts(len(classes))
    there = np.flatnonzero(counts)
    most = int(np.median(counts[there]))  # images of a class; a few larger ones do not make room for all
    chosen = spread(there, MOST if most >= 3 else LARGEST // most)
    members = samples_of(source.labels, chosen, layout(len(chosen), most).tiles)
    groups = [
        Group(
            name=shown(classes[k]),
            said=f"{counts[k]:,}",
            weight=float(counts[k]),
            pictures=[pixels_of(source, int(i)) for i in members[int(k)]],
        )
        for k in chosen
    ]
    left = len(classes) - len(chosen)
    footer = f"and {left:,} more {'class' if left == 1 else 'classes'}" if left else ""
    return contact_sheet(title, subtitle, groups, footer=footer)


def shown(text: str) -> str:
    """A name for people: bytes that are no UTF-8 are marked."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def by_lot(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return indices[np.argsort(hash_keys(hash_word("contact sheet"), indices), kind="stable")]


def spread(values: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most so many of the values, evenly spaced."""
    if len(values) <= most:
        return values
    return values[np.rint(np.linspace(0, len(values) - 1, most)).astype(np.int64)]


def samples_of(labels: Labels, classes: NDArray[np.int64], most: int) -> dict[int, NDArray[np.int64]]:
    """A few samples of each class, by lot."""
    values = np.asarray(labels.values)
    owner = (
        np.arange(len(values)) if labels.starts is None else np.repeat(np.arange(len(labels)), np.diff(labels.starts))
    )
    order = np.argsort(values, kind="stable")
    edges = np.searchsorted(values[order], np.stack([classes, classes + 1]))
    return {
        int(k): by_lot(owner[order[first:last]])[:most]
        for k, first, last in zip(classes, edges[0], edges[1], strict=True)
    }


def pixels_of(source: ImageDataset, index: int) -> NDArray[np.uint8] | None:
    """A sample at about the size that a tile needs; none where it cannot be read."""
    try:
        picture = source.open_image(index)
        short = min(picture.size)
        scale = next((scale for scale in (8, 4, 2) if short // scale >= SIDE), 1)
        image = picture.rgb(scale)
    except BadImage:
        return None
    short = min(image.size)
    if short > 2 * SIDE:
        image = image.reduce(short // SIDE)
    return np.asarray(image)
