"""What is in a collection, in numbers: images, classes, sizes, formats, and the files that cannot be read."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadPicture
from vitrail.data.collection import Collection
from vitrail.data.order import Order
from vitrail.data.overview.survey import Seen, survey
from vitrail.data.source import Source

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
        """Height and width that half of the pictures fall short of."""
        return None if not len(self.sizes) else (int(np.median(self.sizes[:, 0])), int(np.median(self.sizes[:, 1])))

    def extreme(self, which: Callable[[NDArray[np.int64]], Any]) -> tuple[int, int] | None:
        """The picture of the least or the most pixels, by `np.argmin` or `np.argmax`."""
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
    return np.sort(Order(count, SEED)(0, np.arange(sample, dtype=np.int64))).tolist()


def stopping(source: Source, seen: Iterable[Seen]) -> Iterable[Seen]:
    for found in seen:
        if found.reason:
            raise BadPicture(f"{source.name(found.index)}: {found.reason}")
        yield found


def summary_of(source: Source, seen: Iterable[Seen], decoded: bool) -> SplitSummary:
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
