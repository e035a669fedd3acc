"""Describes a collection in numbers and on a contact sheet: images, classes, sizes, formats, unreadable files."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.core.processes import available_cores, map_in_processes
from vitrail.core.text import Pair, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import EpochOrder, hash_keys, hash_word
from vitrail.data.sized_annotations import read_sized_mask, read_sized_segments
from vitrail.data.tools.annotated_sheet import has_annotations, make_annotated_sheet
from vitrail.data.tools.segment_summary import ImageSegments, SegmentSummary, measure_segments, summarise_segments

if TYPE_CHECKING:
    from PIL.Image import Image

CHUNK: Final = 32  # samples per task
FEW: Final = 256  # samples up to which starting processes is not worthwhile
SAMPLE: Final = 1000  # headers read per split, unless all are asked for
GENERATED: Final = 100  # samples per split of a generated set whose segments are computed
SEED: Final = 20
MOST_CLASSES: Final = 60  # on one sheet ...
MOST_IMAGES: Final = 144  # ... or this many images, if classes have one or two
UNLABELLED: Final = 96
ANNOTATED: Final = 24
TILE_SIDE: Final = 208  # pixels


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """Size, format and bytes of one sample; `reason` says why it is unreadable."""

    index: int
    height: int = 0
    width: int = 0
    format: str = ""  # JPEG RGB, PNG P, pixels L
    bytes: int = 0
    reason: str = ""
    segments: ImageSegments | None = field(default=None, compare=False)


def inspect_sample(source: ImageDataset, index: int, *, decode: bool) -> SampleInfo:
    """Reads the header and the segments of one sample and, with `decode`, all of its pixels and its mask."""
    try:
        data = source.read(index)
        image = EncodedImage(data)
        kind = f"{image.image.format or 'pixels'} {image.image.mode}"
        if decode:
            image.rgb()
            if source.pixel_classes:
                read_sized_mask(source, index, image.size)
        segments = read_segments(source, index, image.size) if source.segment_classes else None
    except (BadImage, OSError) as error:
        return SampleInfo(index, reason=getattr(error, "strerror", None) or str(error))
    height, width = image.size
    size = data.nbytes if isinstance(data, np.ndarray) else len(data)
    return SampleInfo(index, height, width, kind, size, segments=segments)


def read_segments(source: ImageDataset, index: int, size: Pair) -> ImageSegments:
    """Measures the segments of a sample for the summary. BadImage if they are for an image of another size."""
    return measure_segments(read_sized_segments(source, index, size))


def decode_chunk(source: ImageDataset, indices: Sequence[int]) -> list[SampleInfo]:
    return [inspect_sample(source, index, decode=True) for index in indices]


def inspect_samples(
    source: ImageDataset,
    indices: Sequence[int],
    *,
    decode: bool = False,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[SampleInfo]:
    """Inspects samples in order. `workers` is the number of processes that decode, by default one per core; `progress`
    is called with the number of newly finished samples."""
    workers = available_cores() if workers is None else workers

    def describe_loss(chunks: Sequence[Sequence[int]]) -> str:
        names = ", ".join(source.name(index) for index in chunks[0][:3])
        return f"a process was killed, perhaps for lack of memory, soon after {names}; try --workers 1"

    if not decode and source.generated_size is not None:
        results = ([found] for found in describe_generated(source, indices, source.generated_size))
    elif decode and workers > 1 and len(indices) > FEW:
        chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
        results = map_in_processes(decode_chunk, source, chunks, workers=workers, describe_loss=describe_loss)
    else:
        results = ([inspect_sample(source, index, decode=decode)] for index in indices)
    for found in results:
        yield from found
        if progress is not None:
            progress(len(found))


def describe_generated(source: ImageDataset, indices: Sequence[int], size: Pair) -> Iterator[SampleInfo]:
    """Describes samples of a known size without drawing them. Segments are read for some samples, evenly spaced."""
    step = max(1, -(-len(indices) // GENERATED))
    for at, index in enumerate(indices):
        segments = read_segments(source, index, size) if source.segment_classes and at % step == 0 else None
        yield SampleInfo(index, *size, "pixels RGB", size[0] * size[1] * 3, segments=segments)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitSummary:
    """One split. Sizes, formats and unreadable files are those of the inspected samples."""

    images: int
    masks: int = 0  # images with a mask
    classes: tuple[str, ...]
    counts: NDArray[np.int64]  # [K] images of each class
    labelled: int
    labels: int  # in total; more than `labelled` if an image has several
    multiple: bool
    looked: int
    decoded: bool  # whether all pixels were decoded, or only headers read
    sizes: NDArray[np.int64]  # [readable, 2] height and width
    formats: dict[str, int]
    bytes: int  # of the inspected samples
    unreadable: tuple[tuple[str, str], ...]  # name and reason
    segments: SegmentSummary | None = None  # of the inspected samples, or of some of them; None without segments

    @property
    def median(self) -> tuple[int, int] | None:
        """The median height and width."""
        return None if not len(self.sizes) else (int(np.median(self.sizes[:, 0])), int(np.median(self.sizes[:, 1])))

    def extreme(self, which: Callable[[NDArray[np.int64]], Any]) -> tuple[int, int] | None:
        """The size with the fewest or the most pixels, by `np.argmin` or `np.argmax`."""
        if not len(self.sizes):
            return None
        height, width = self.sizes[int(which(self.sizes[:, 0] * self.sizes[:, 1]))]
        return int(height), int(width)

    @property
    def all_bytes(self) -> int:
        """Bytes of the split, estimated if not all samples were inspected."""
        return self.bytes if self.looked == self.images else round(self.bytes / max(1, self.looked) * self.images)

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain values."""
        smallest, largest = self.extreme(np.argmin), self.extreme(np.argmax)
        return {
            "images": self.images, "masks": self.masks,
            "classes": {name: int(count) for name, count in zip(self.classes, self.counts, strict=True)},
            "labelled": self.labelled, "labels": self.labels, "multiple": self.multiple,
            "looked_at": self.looked, "decoded": self.decoded,
            "size": {"median": self.median, "smallest": smallest, "largest": largest},
            "formats": self.formats, "bytes": self.all_bytes,
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
            **({} if self.segments is None else {"segments": self.segments.to_dict()}),
        }  # fmt: skip


def summarise(
    collection: Collection,
    *,
    check: bool = False,
    strict: bool = False,
    sample: int = SAMPLE,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, SplitSummary]:
    """Summarises every split. With `check` every sample is decoded, else the headers of up to `sample` are read; the
    images of a generated set, whose size is known, are not drawn. With `strict` the first unreadable file raises
    BadImage. `progress` is called with the number of newly finished samples."""
    out: dict[str, SplitSummary] = {}
    for split, source in collection.splits.items():
        chosen = range(len(source)) if check else choose_samples(len(source), sample)
        found = inspect_samples(source, chosen, decode=check, workers=workers, progress=progress)
        out[split] = summarise_split(source, found, check, strict)
    return out


def choose_samples(count: int, sample: int) -> list[int]:
    """Chooses all samples, or `sample` random ones, always the same."""
    if count <= sample:
        return list(range(count))
    return np.sort(EpochOrder(count, SEED)(0, np.arange(sample, dtype=np.int64))).tolist()


def summarise_split(source: ImageDataset, samples: Iterable[SampleInfo], decoded: bool, strict: bool) -> SplitSummary:
    formats: Counter[str] = Counter()
    sizes: list[tuple[int, int]] = []
    unreadable: list[tuple[str, str]] = []
    segments = list[ImageSegments]()
    looked = size = 0
    for found in samples:
        looked, size = looked + 1, size + found.bytes
        if found.reason and strict:
            raise BadImage(f"{source.name(found.index)}: {found.reason}")
        if found.reason:
            unreadable.append((source.name(found.index), found.reason))
        else:
            sizes.append((found.height, found.width))
            formats[found.format] += 1
            segments += [] if found.segments is None else [found.segments]
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
        segments=summarise_segments(kinds, source.boxes_only, segments) if (kinds := source.segment_classes) else None,
    )


def make_sheet(collection: Collection, split: str) -> "Image":
    """Draws the contact sheet of one split: some samples of each class, or of the whole split if it has no classes.
    The choice is random but always the same."""
    from vitrail.report.contact_sheet import SheetGroup, choose_layout, draw_contact_sheet, draw_mosaic

    source = collection.split(split)
    count, classes = len(source), source.classes
    marked = source.segment_classes or source.pixel_classes
    what = "pixels" if not source.segment_classes else "boxes" if source.boxes_only else "segments"
    kinds = f"{pluralise(len(marked), 'class', 'classes')} of {what}"
    said = kinds if has_annotations(source) else "no labels"
    parts = [pluralise(count, "image"), pluralise(len(classes), "class", "classes") if classes else said]
    subtitle = "  ·  ".join([split, *parts, collection.kind])
    title = printable_name(collection.title)
    if has_annotations(source):
        return make_annotated_sheet(source, title, subtitle, shuffle(np.arange(count))[:ANNOTATED].tolist())
    if not classes:
        chosen = shuffle(np.arange(count))[:UNLABELLED]
        return draw_mosaic(title, subtitle, [load_tile(source, int(i)) for i in chosen])
    counts = source.labels.counts(len(classes))
    present = np.flatnonzero(counts)
    most = int(np.median(counts[present]))  # images per class, so that a few larger classes do not set the layout
    chosen = space_evenly(present, MOST_CLASSES if most >= 3 else MOST_IMAGES // most)
    members = pick_samples(source.labels, chosen, choose_layout(len(chosen), most)[1])
    tiles = [[load_tile(source, int(i)) for i in members[int(k)]] for k in chosen]
    names = [printable_name(classes[k]) for k in chosen]
    rows = zip(names, counts[chosen].tolist(), tiles, strict=True)
    groups = [SheetGroup(name=name, said=f"{n:,}", weight=float(n), pictures=images) for name, n, images in rows]
    left = len(classes) - len(chosen)
    footer = f"and {pluralise(left, 'more class', 'more classes')}" if left else ""
    return draw_contact_sheet(title, subtitle, groups, footer=footer)


def printable_name(text: str) -> str:
    """Makes a name printable: bytes that are not UTF-8 become replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shuffle(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return indices[np.argsort(hash_keys(hash_word("contact sheet"), indices), kind="stable")]


def space_evenly(values: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Takes at most `most` of the values, evenly spaced."""
    return values[np.rint(np.linspace(0, len(values) - 1, min(most, len(values)))).astype(np.int64)]


def pick_samples(labels: Labels, classes: NDArray[np.int64], most: int) -> dict[int, NDArray[np.int64]]:
    """Picks up to `most` random samples of each class."""
    values = np.asarray(labels.values)
    owner = np.arange(len(labels))
    owner = owner if labels.starts is None else np.repeat(owner, np.diff(labels.starts))
    order = np.argsort(values, kind="stable")
    edges = np.searchsorted(values[order], np.stack([classes, classes + 1]))
    spans = zip(classes.tolist(), *edges, strict=True)
    return {k: shuffle(owner[order[first:last]])[:most] for k, first, last in spans}


def load_tile(source: ImageDataset, index: int) -> NDArray[np.uint8] | None:
    """Loads a sample at about the size that a tile needs. None if it is unreadable."""
    try:
        encoded = source.open_image(index)
        short = min(encoded.size)
        scale = next((scale for scale in (8, 4, 2) if short // scale >= TILE_SIDE), 1)
        image = encoded.rgb(scale)
    except BadImage:
        return None
    short = min(image.size)
    if short > 2 * TILE_SIDE:
        image = image.reduce(short // TILE_SIDE)
    return np.asarray(image)
