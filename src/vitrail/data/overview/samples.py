"""Which samples of a split a contact sheet shows, and their pixels."""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadPicture
from vitrail.data.collection import Collection
from vitrail.data.draws import keyed, number
from vitrail.data.labels import Labels
from vitrail.data.source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

MOST: Final = 60  # classes on one sheet ...
LARGEST: Final = 144  # ... or so many pictures, where classes have one or two
UNLABELLED: Final = 96
SIDE: Final = 208  # pixels that are enough for a tile


def sheet_of(collection: Collection, split: str) -> "Image":
    """The contact sheet of one split: some samples of every class, or of all where there are no classes. Which ones is
    drawn by lot, always the same."""
    from vitrail.report.sheet import Group, contact_sheet, layout, mosaic

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
    most = int(np.median(counts[there]))  # pictures of a class; a few larger ones do not make room for all
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
    return indices[np.argsort(keyed(number("contact sheet"), indices), kind="stable")]


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


def pixels_of(source: Source, index: int) -> NDArray[np.uint8] | None:
    """A sample at about the size that a tile needs; none where it cannot be read."""
    try:
        picture = source.picture(index)
        short = min(picture.size)
        scale = next((scale for scale in (8, 4, 2) if short // scale >= SIDE), 1)
        image = picture.rgb(scale)
    except BadPicture:
        return None
    short = min(image.size)
    if short > 2 * SIDE:
        image = image.reduce(short // SIDE)
    return np.asarray(image)
