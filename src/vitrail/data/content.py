"""What the images of a source contain, as hashes, and where its samples come from."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.data.source import Relabelled, Source, Subset

Hashes = NDArray[np.uint64]

TOLD: Final = 64  # samples between two words on how far it is


def hash_contents(
    source: Source, *, rank: int = 0, world: int = 1, advance: Callable[[int], None] | None = None
) -> Hashes:
    """The content hash of every sample, or of every world-th one from `rank` on; 0 for one that cannot be read.
    `advance` hears how many samples of all are done."""
    places = range(rank, len(source), world)
    hashes = np.zeros(len(places), np.uint64)
    for at, place in enumerate(places):
        hashes[at] = source.content_hash(place)
        if advance is not None and at % TOLD == 0:
            advance(place)
    if advance is not None:
        advance(len(source))
    return hashes


def interleave(shares: Sequence[Hashes]) -> Hashes:
    """The hashes of a whole source from the shares of all ranks."""
    whole = np.zeros(sum(map(len, shares)), np.uint64)
    for rank, share in enumerate(shares):
        whole[rank :: len(shares)] = share
    return whole


def trace(source: Source) -> tuple[Source, NDArray[np.int64]]:
    """The source that the samples are drawn from, and their places in it."""
    places = np.arange(len(source))
    while isinstance(source, Subset | Relabelled):
        if isinstance(source, Subset):
            places = source.indices[places]
        source = source.source
    return source, places
