"""The hash of decoded pixels: the same image in another file, or under another name, has the same.

A perceptual hash of 63 bits that knows the image's inner windows and its mirror image.

An image becomes a grey thumbnail of 32 x 32; the signs of its lowest 8 x 8 cosine coefficients, without the first, are
the hash. The same is done for nine windows of 0.9 of each side (so that a copy with a border cut away still meets one
of them) and for the mirror image. All sums are of whole numbers that float64 holds exactly: the bits are the same on
any machine and in any batch.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from vitrail.core.errors import DataError

BYTES: Final = 16
Digests = NDArray[np.void]  # [N] of 16 bytes


def digest(picture: Image) -> bytes:
    """16 bytes from the size and the RGB pixels. Two images that differ at all share it once in 2**128."""
    made = blake2b(f"{picture.height}x{picture.width}:".encode(), digest_size=BYTES)
    made.update(picture.tobytes())
    return made.digest()


def equal(train: Digests, test: Digests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each train image that is in the test set too: itself and the first such test image. Not every pair, for
    a thousand blank images in both sets would make a million."""
    known, first = np.unique(test, return_index=True)
    if not len(known):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    place = np.searchsorted(known, train).clip(0, len(known) - 1)
    hit = np.flatnonzero(known[place] == train)
    return hit, first[place[hit]].astype(np.int64)


SIDE: Final = 32  # of the thumbnail
LOW: Final = 8  # coefficients kept a side
SHRINK: Final = 0.9  # of a side: what the windows leave of it
OFFSETS: Final = (0.0, 0.05, 0.1)
WINDOWS: Final = ((0.0, 1.0, 0.0, 1.0), *((y, SHRINK, x, SHRINK) for y in OFFSETS for x in OFFSETS))  # top, height, ...
VIEWS: Final = len(WINDOWS)  # hashes of the image as it is; as many again of its mirror image
SCALE: Final = 128.0  # of the cosines, before they are rounded to whole numbers
CROWD: Final = 1_000_000  # candidates a pair of blocks beyond which the sets are not photographs


def cosines(low: float, size: float) -> NDArray[np.float64]:
    """[8, 32]: from a row of pixels to the lowest coefficients of the part that begins at `low`, as whole numbers."""
    at = np.clip((low + (np.arange(SIDE) + 0.5) / SIDE * size) * SIDE - 0.5, 0, SIDE - 1)
    left = np.minimum(np.floor(at).astype(np.int64), SIDE - 2)
    part = at - left
    sampled = np.zeros((SIDE, SIDE))
    sampled[np.arange(SIDE), left] += 1 - part
    sampled[np.arange(SIDE), left + 1] += part
    waves = np.cos(np.pi * np.arange(LOW)[:, None] * (2 * np.arange(SIDE) + 1) / (2 * SIDE))
    return np.rint(waves @ sampled * SCALE)


@lru_cache(maxsize=1)
def operator() -> NDArray[np.float64]:
    """[4 * 8, 32]: the whole side and the three places of the window, one below the other."""
    return np.concatenate([cosines(0.0, 1.0), *(cosines(low, SHRINK) for low in OFFSETS)])


def hashes(thumbs: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Thumbnails [N, 32, 32] to hashes [N, 20]: the image and its windows, then the same of its mirror image."""
    whole = thumbs.astype(np.float64)
    whole -= np.floor(whole.mean((1, 2), keepdims=True))
    return np.concatenate([views(whole), views(whole[:, :, ::-1])], axis=1)


def views(pixels: NDArray[np.float64]) -> NDArray[np.uint64]:
    """[N, 10]: one two-sided product holds the coefficients of all windows, as blocks of 8 x 8."""
    along = operator()
    blocks = (along @ pixels @ along.T).reshape(-1, 1 + len(OFFSETS), LOW, 1 + len(OFFSETS), LOW) > 0
    places = [(0, 0), *((y, x) for y in range(1, 4) for x in range(1, 4))]
    bits = np.stack([blocks[:, y, :, x, :].reshape(-1, LOW * LOW) for y, x in places], axis=1)
    bits[:, :, 0] = False  # the brightness
    return np.packbits(bits, axis=2).view(np.uint64)[:, :, 0]


def closest(
    train: NDArray[np.uint64], test: NDArray[np.uint64], most: int, *, step: int = 512, crowd: int = CROWD
) -> NDArray[np.int64]:
    """Every (train, test) whose hashes differ in at most `most` bits in some view: rows of train, test, view, mirrored
    and bits [5, M], at most one a pair and mirroring. A view v < 10 is a window of the train image that looks like
    the test image, 10 + v a window of the test image that looks like the train image."""
    found, count = [np.zeros((5, 0), np.int64)], 0
    for a in range(0, len(train), step):
        for b in range(0, len(test), step):
            met = nearest(meet(train[a : a + step], test[b : b + step], most))
            found.append(met + np.array([[a], [b], [0], [0], [0]]))
            count += met.shape[1]
            if count > crowd:
                raise DataError(
                    f"more than {crowd:,} pairs of {len(train):,} x {len(test):,} images look alike by perceptual "
                    "hash: these are no photographs; compare them exactly, or by embeddings"
                )
    return np.concatenate(found, axis=1)


def nearest(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of several views of one pair and mirroring the one with the fewest bits, then the lowest."""
    rows = rows[:, np.lexsort((rows[2], rows[4], rows[3], rows[1], rows[0]))]
    first = np.ones(rows.shape[1], bool)
    first[1:] = (rows[[0, 1, 3], 1:] != rows[[0, 1, 3], :-1]).any(0)
    return rows[:, first]


def meet(train: NDArray[np.uint64], test: NDArray[np.uint64], most: int) -> NDArray[np.int64]:
    """Two blocks, all views: rows of train, test, view, mirrored and bits [5, M]. This is the inner loop."""
    bits = np.empty((len(train), len(test)), np.uint64)
    count, near = np.empty(bits.shape, np.uint8), np.empty(bits.shape, bool)
    out: list[NDArray[np.int64]] = [np.zeros((5, 0), np.int64)]
    for mirrored in (0, 1):
        other = np.ascontiguousarray(test[:, mirrored * VIEWS : (mirrored + 1) * VIEWS].T)
        for view in range(2 * VIEWS - 1):
            ours, theirs = (view, 0) if view < VIEWS else (0, view - VIEWS + 1)
            np.bitwise_xor(train[:, ours, None], other[theirs], out=bits)
            np.bitwise_count(bits, out=count)
            at = np.flatnonzero(np.less_equal(count, most, out=near))
            if at.size:
                i, j = np.divmod(at, len(test))
                named = np.full_like(i, ours if view < VIEWS else VIEWS + theirs)
                out.append(np.stack([i, j, named, np.full_like(i, mirrored), count[i, j].astype(np.int64)]))
    return np.concatenate(out, axis=1)
