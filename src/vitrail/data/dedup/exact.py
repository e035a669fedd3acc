"""The hash of decoded pixels: the same picture in another file, or under another name, has the same."""

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

BYTES: Final = 16
Digests = NDArray[np.void]  # [N] of 16 bytes


def digest(picture: Image) -> bytes:
    """16 bytes from the size and the RGB pixels. Two pictures that differ at all share it once in 2**128."""
    made = blake2b(f"{picture.height}x{picture.width}:".encode(), digest_size=BYTES)
    made.update(picture.tobytes())
    return made.digest()


def equal(train: Digests, test: Digests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each train picture that is in the test set too: itself and the first such test picture. Not every pair, for
    a thousand blank pictures in both sets would make a million."""
    known, first = np.unique(test, return_index=True)
    if not len(known):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    place = np.searchsorted(known, train).clip(0, len(known) - 1)
    hit = np.flatnonzero(known[place] == train)
    return hit, first[place[hit]].astype(np.int64)
