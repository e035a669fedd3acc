"""One split of a collection: random access to images, their labels and their names.

Labels and names are kept in arrays. A Python list of strings would be copied page by page into every loader process,
because reading a string changes its reference count; arrays are not copied, and pickle as one block.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from os import fsdecode, fsencode
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.core.text import Pair
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.decode.image import EncodedImage

if TYPE_CHECKING:
    from typing_extensions import Buffer


NONE = -1  # the label of a sample without one, and the padding of rows with several
SPARSE: Final = 1000  # up to this many classes, class numbers may have gaps of any width
SPREAD: Final = 10  # beyond that, at most this many class numbers per class that occurs
PIECE: Final = 1 << 20  # labels compared at a time


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Class numbers: `values` [N], one per sample; or, with `starts` [N + 1], several per sample, concatenated."""

    values: NDArray[np.integer]
    starts: NDArray[np.integer] | None = None

    @classmethod
    def none(cls, count: int) -> "Labels":
        """Labels of N unlabelled samples, which take no memory."""
        return cls(np.broadcast_to(np.int64(NONE), count))

    @classmethod
    def several(cls, rows: Iterable[Iterable[int]]) -> "Labels":
        lists = [list(row) for row in rows]
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(np.array([value for row in lists for value in row], np.int64), starts)

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        """The classes of one sample; empty for an unlabelled sample."""
        if self.starts is None:
            value = int(self.values[index])
            return () if value == NONE else (value,)
        return tuple(int(v) for v in self.values[self.starts[index] : self.starts[index + 1]])

    @property
    def multiple(self) -> bool:
        """Whether a sample may have several labels."""
        return self.starts is not None

    @property
    def multi_label(self) -> bool:
        """Whether some sample has several labels, or none where several are allowed, so that each class is a separate
        decision."""
        return self.starts is not None and bool((np.diff(self.starts) != 1).any())

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The labels of a batch: [B], or [B, most] padded with -1 where samples may have several."""
        if self.starts is None:
            return self.values[indices].astype(np.int64)
        lists = [self[int(i)] for i in indices]
        out = np.full((len(lists), max((len(row) for row in lists), default=0) or 1), NONE, np.int64)
        for line, row in zip(out, lists, strict=True):
            line[: len(row)] = row
        return out

    def take(self, indices: NDArray[np.int64]) -> "Labels":
        """The labels of some samples, in the given order."""
        if self.starts is None:
            return Labels(self.values[indices])
        return Labels.several(self[int(i)] for i in indices)

    def counts(self, classes: int) -> NDArray[np.int64]:
        """Number of samples per class [K]."""
        return np.bincount(self.values[self.values >= 0], minlength=classes)

    def check(self, classes: int, where: str) -> None:
        """Raises BadLabels for a label outside 0 to classes - 1."""
        wrong = np.flatnonzero((self.values < NONE) | (self.values >= classes))
        if wrong.size:
            at = int(wrong[0])
            sample = at if self.starts is None else int(np.searchsorted(self.starts, at, side="right")) - 1
            fact = f"{where}: sample {sample} has label {int(self.values[at])}, but there are {classes} classes"
            raise BadLabels(f"{fact}, 0 to {classes - 1} ({wrong.size} such labels)")


def number_classes(where: str, parts: Sequence[NDArray[np.integer]], remedy: str) -> tuple[str, ...]:
    """Names classes that are only known by number, "0" to "K - 1". Raises BadLabels if the highest number is
    implausible, before memory is allocated for so many names."""
    highest = max((int(part.max(initial=NONE)) for part in parts), default=NONE)
    if highest >= SPARSE:
        seen = np.empty(0, np.int64)
        for piece in (part[start : start + PIECE] for part in parts for start in range(0, len(part), PIECE)):
            seen = np.union1d(seen, piece[piece != NONE])
            if SPREAD * len(seen) > highest:  # enough
                break
        refuse_sparse(where, highest, len(seen), remedy)
    return tuple(map(str, range(highest + 1)))


def refuse_sparse(where: str, highest: int, distinct: int, remedy: str) -> None:
    """Refuses implausible class numbers. `remedy` says how to read the labels as names instead."""
    if highest >= max(SPARSE, SPREAD * distinct):
        shown = f"{highest:,}" if highest < 10**18 else "beyond 10^18"
        fact = f"{where}: the highest label is {shown}, but only {distinct:,} different labels occur"
        raise BadLabels(f"{fact}; are these codes rather than class numbers from 0? {remedy}")


def refuse_negative(where: str, values: NDArray[np.integer]) -> None:
    """Refuses labels below 0. A split whose labels are all -1 is unlabelled, as in Hugging Face's test splits."""
    wrong = np.flatnonzero(values < 0)
    if wrong.size and not (values == NONE).all():
        fact = f"{where}: label {int(values[wrong[0]])} of sample {int(wrong[0])} is below 0"
        raise BadLabels(f"{fact}; classes count from 0, and images without a label belong in a split of their own")


Encoded: TypeAlias = bytes | NDArray[np.uint8]

HASHED: Final = 1 << 30  # most bytes of pixels in memory that a fingerprint covers
DIGESTED_BYTES: Final = 256 << 20  # read for the digest of a source; smaller sources are read completely
DIGESTED_IMAGES: Final = (1024, 100_000)  # least number of images to read, whatever their size, and most


class ImageDataset(ABC):
    """N samples. The reader of a format provides `classes`, `labels`, `read`, and `name` or `names`. It opens files
    lazily, in the process that reads, and keeps facts about samples in arrays, so that loader processes share them."""

    classes: tuple[str, ...] = ()  # K names; empty without labels
    pixel_classes: tuple[str, ...] = ()  # names of the class indices in masks; empty without masks
    segment_classes: tuple[SegmentClass, ...] = ()  # of annotated segments; empty without any
    segments_overlap: bool = False  # whether segments may overlap (instances), or each pixel has at most one (panoptic)
    boxes_only: bool = False  # whether segments are boxes without masks
    generated_size: Pair | None = None  # height and width of all images, where pixels [H, W, 3] are drawn when read
    labels: Labels
    names: "StringArray"

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """The bytes of an image file, or pixels [H, W, 3] or [H, W]. Raises BadImage or OSError."""

    def name(self, index: int) -> str:
        """The sample's display name: a path, an archive member, a row. One of `names`, if the reader has those."""
        return self.names[index]

    def mask(self, index: int) -> Encoded:
        """The class of every pixel: bytes of a PNG of class indices, or uint8 [H, W]. Raises BadImage or
        OSError."""
        raise DataError(f"{self.name(index)} has no mask: the dataset has none")

    def segments(self, index: int) -> Segments:
        """The annotated segments of a sample. Raises BadImage or OSError."""
        raise DataError(f"{self.name(index)} has no segments: the dataset has none")

    def copy_annotations(self, source: "ImageDataset") -> None:
        """Copies another dataset's description of its masks and segments."""
        self.pixel_classes, self.segment_classes = source.pixel_classes, source.segment_classes
        self.segments_overlap, self.boxes_only = source.segments_overlap, source.boxes_only

    def sizes(self) -> "NDArray[np.int64] | None":
        """Returns the bytes of each sample [N] if they are cheap to find; they are part of the fingerprint."""
        return None

    def open_image(self, index: int) -> EncodedImage:
        """A sample with its header read and checked. Raises BadImage, with the sample's name, if it is unusable."""
        try:
            return EncodedImage(self.read(index))
        except (BadImage, OSError) as error:
            raise BadImage(f"{self.name(index)}: {getattr(error, 'strerror', None) or error}") from None

    def content_hash(self, index: int) -> int:
        """64 bits of a sample's content, independent of its name and position; 0 if unreadable. The last bit is set for
        pixels, so that they never equal the hash of an image file."""
        try:
            return hash_content(self.read(index))
        except (BadImage, OSError):
            return 0

    @cached_property
    def content_digest(self) -> str:
        """16 hex digits of the contents in order: of all samples within DIGESTED_BYTES and DIGESTED_IMAGES, else of
        evenly spaced ones. Names, locations and times do not matter."""
        hashes = np.fromiter((self.content_hash(int(place)) for place in sample_indices(self)), np.uint64)
        return sha256(f"{len(self)}|".encode() + hashes.astype("<u8").tobytes()).hexdigest()[:16]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, labels, classes and sizes, in order."""
        return hash_names(self, [*self.classes, *pixel_class_words(self)])


def hash_content(content: Encoded) -> int:
    """Hashes the bytes of an image file (even hash) or shape and pixels (odd hash) to 64 bits."""
    if isinstance(content, bytes):
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") & ~1
    digest = blake2b(str(content.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(content).data)
    return int.from_bytes(digest.digest(), "little") | 1


def sample_indices(source: ImageDataset) -> "NDArray[np.int64]":
    """Chooses the samples that the content digest reads."""
    count, (least, most) = len(source), DIGESTED_IMAGES
    some = min(count, most, max(least, DIGESTED_BYTES * count // max(total_bytes(source), 1)))
    return np.linspace(0, count - 1, some).astype(np.int64)


def total_bytes(source: ImageDataset) -> int:
    """Counts the bytes of all samples; if sizes are unknown, all are assumed to be as large as the first."""
    sizes = source.sizes()
    if sizes is not None:
        return int(np.maximum(sizes, 0).sum())
    try:
        first = source.read(0) if len(source) else b""
    except (BadImage, OSError):
        return 0
    return len(source) * (len(first) if isinstance(first, bytes) else first.nbytes)


def hash_parts(
    kind: str, words: Iterable[str], arrays: "Iterable[NDArray[Any] | None]", rest: "Iterable[Buffer]" = ()
) -> str:
    """Hashes words, integers and bytes, with separators."""
    digest = sha256("\0".join([kind, *words]).encode("utf-8", "surrogateescape"))
    for array in arrays:
        digest.update(b"|" if array is None else f"|{len(array)}|".encode())
        digest.update(b"" if array is None else np.ascontiguousarray(array, np.int64).data)
    for piece in rest:
        digest.update(piece)
    return digest.hexdigest()


def hash_names(source: ImageDataset, words: Iterable[str]) -> str:
    """Computes the fingerprint of a dataset from its words, labels, sizes and sample names."""
    names = (source.name(i).encode("utf-8", "surrogateescape") + b"\0" for i in range(len(source)))
    return hash_parts("source", words, [source.labels.values, source.labels.starts, source.sizes()], names)


def pixel_class_words(source: ImageDataset) -> tuple[str, ...]:
    """Returns the words that masks and segments add to a fingerprint; none without them."""
    masks = ("masks", *source.pixel_classes) if source.pixel_classes else ()
    kinds = (f"{one.name}\0{one.thing}" for one in source.segment_classes)
    return (*masks, *(("segments", *kinds) if source.segment_classes else ()))


class DerivedDataset(ImageDataset):
    """Samples of other datasets; `locate` says which."""

    @abstractmethod
    def locate(self, index: int) -> tuple[ImageDataset, int]:
        """The dataset that holds a sample, and the sample's index there."""

    def read(self, index: int) -> Encoded:
        dataset, within = self.locate(index)
        return dataset.read(within)

    def name(self, index: int) -> str:
        dataset, within = self.locate(index)
        return dataset.name(within)

    def mask(self, index: int) -> Encoded:
        dataset, within = self.locate(index)
        return dataset.mask(within)

    def segments(self, index: int) -> Segments:
        dataset, within = self.locate(index)
        return dataset.segments(within)

    def content_hash(self, index: int) -> int:
        dataset, within = self.locate(index)
        return dataset.content_hash(within)


class SubsetDataset(DerivedDataset):
    """Some samples of another dataset, in the given order. A subset of a subset refers to the original."""

    def __init__(self, source: ImageDataset, indices: "NDArray[np.int64] | Sequence[int]") -> None:
        self.source = source
        self.indices = np.asarray(indices, np.int64)
        if self.indices.size and not (int(self.indices.min()) >= 0 and int(self.indices.max()) < len(source)):
            raise DataError(f"a subset refers to sample {int(self.indices.max())} of a dataset of {len(source)}")
        self.classes, self.labels = source.classes, source.labels.take(self.indices)
        self.generated_size = source.generated_size
        self.copy_annotations(source)
        if isinstance(source, SubsetDataset):
            self.source, self.indices = source.source, source.indices[self.indices]

    @cached_property
    def fingerprint(self) -> str:
        """The subset's fingerprint, which is that of the original if nothing is dropped or reordered."""
        if np.array_equal(self.indices, np.arange(len(self.source))):
            return self.source.fingerprint
        return hash_parts("subset", [self.source.fingerprint], [self.indices])

    def locate(self, index: int) -> tuple[ImageDataset, int]:
        return self.source, int(self.indices[index])

    def sizes(self) -> "NDArray[np.int64] | None":
        sizes = self.source.sizes()
        return None if sizes is None else sizes[self.indices]


class ConcatDataset(DerivedDataset):
    """Datasets with the same classes, one after the other: Flowers' train and val, for example."""

    def __init__(self, sources: Sequence[ImageDataset]) -> None:
        self.sources = tuple(sources)
        if len({(source.classes, source.pixel_classes, source.segment_classes) for source in sources}) != 1:
            raise DataError("datasets with different classes, or different classes of masks, cannot be concatenated")
        self.classes = self.sources[0].classes
        self.copy_annotations(self.sources[0])
        self.ends: NDArray[np.int64] = np.cumsum([len(source) for source in sources])
        if any(source.labels.multiple for source in sources):
            self.labels = Labels.several(source.labels[i] for source in sources for i in range(len(source)))
        else:
            self.labels = Labels(np.concatenate([source.labels.values for source in sources]))

    @cached_property
    def fingerprint(self) -> str:
        return hash_parts("concat", [source.fingerprint for source in self.sources], [])

    def sizes(self) -> "NDArray[np.int64] | None":
        known = [sizes for source in self.sources if (sizes := source.sizes()) is not None]
        return np.concatenate(known) if len(known) == len(self.sources) else None

    def locate(self, index: int) -> tuple[ImageDataset, int]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.sources[part], index - (int(self.ends[part - 1]) if part else 0)


class RelabelledDataset(DerivedDataset):
    """The same images with other labels: ReaL's, another task of a set, merged classes."""

    def __init__(self, source: ImageDataset, labels: Labels, classes: Sequence[str]) -> None:
        if len(labels) != len(source):
            raise DataError(f"{len(labels)} labels for {len(source)} samples")
        self.source, self.labels, self.classes = source, labels, tuple(classes)
        self.copy_annotations(source)

    @cached_property
    def fingerprint(self) -> str:
        words = [self.source.fingerprint, *self.classes]
        return hash_parts("relabelled", words, [self.labels.values, self.labels.starts])

    def locate(self, index: int) -> tuple[ImageDataset, int]:
        return self.source, index

    def sizes(self) -> "NDArray[np.int64] | None":
        return self.source.sizes()


class ArrayDataset(ImageDataset):
    """Images in memory: uint8 [N, H, W, 3] or [N, H, W], an array or anything indexed like one."""

    def __init__(
        self, pictures: NDArray[Any], labels: Labels | None = None, classes: Sequence[str] = (), called: str = "array"
    ) -> None:
        self.pictures, self.called, self.classes = pictures, called, tuple(classes)
        self.labels = Labels.none(len(pictures)) if labels is None else labels
        if len(self.labels) != len(pictures):
            raise DataError(f"{called}: {len(self.labels)} labels for {len(pictures)} images")

    def read(self, index: int) -> Encoded:
        return np.asarray(self.pictures[index])

    def name(self, index: int) -> str:
        return f"{self.called}[{index}]"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the pixels; of evenly spaced images if there are too many."""
        size = np.asarray(self.pictures[0]).nbytes if len(self) else 1
        some = np.linspace(0, len(self) - 1, min(len(self), max(4096, HASHED // size))).astype(np.int64)
        pixels = (np.ascontiguousarray(self.pictures[int(index)]).data for index in some)
        words = [self.called, *self.classes, *pixel_class_words(self)]
        return hash_parts("arrays", words, [self.labels.values, self.labels.starts], pixels)


class StringArray(Sequence[str]):
    """An immutable list of strings in two arrays; file names that are not UTF-8 survive."""

    __slots__ = ("bytes", "starts")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        encoded = [fsencode(string) for string in strings]
        self.starts: NDArray[np.int64] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self.bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), np.uint8)

    @classmethod
    def from_arrays(cls, data: NDArray[np.uint8], starts: NDArray[np.int64]) -> "StringArray":
        """Strings that are already in arrays, memory-mapped ones for example."""
        made = cls.__new__(cls)
        made.bytes, made.starts = data, starts
        return made

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return fsdecode(self.bytes[self.starts[index] : self.starts[index + 1]].tobytes())
