"""What the images of a source contain, as hashes, and where its samples come from."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitrail.data.source import Relabelled, Source, Subset

Hashes = NDArray[np.uint64]


def hash_contents(source: Source, *, rank: int = 0, world: int = 1) -> Hashes:
    """The content hash of every sample, or of every world-th one from `rank` on; 0 for one that cannot be read."""
    places = range(rank, len(source), world)
    return np.fromiter((source.content_hash(place) for place in places), np.uint64, len(places))


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
