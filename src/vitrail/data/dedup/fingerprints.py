"""Fingerprints of images: a hash of the pixels, perceptual hashes and a thumbnail, about 1.3 kB per image.

The hash of the decoded pixels finds the same image in another file. The perceptual hash has 63 bits: the signs of the
lowest 8 x 8 cosine coefficients, without the first, of a grey thumbnail of 32 x 32. It is also computed for nine
windows of 0.9 of each side, so that a cropped copy still matches one of them, and for the mirror image. All sums are of
integers that float64 represents exactly, so the bits are the same on any machine and in any batch.

The fingerprints of a data set are stored in block files, in a folder named after the content, so that a repeated or
interrupted run reuses them. Several processes, or ranks on one file system, may fill the same folder.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadImage, DataError, describe_error
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup.align_pair import SIDE, Thumbnails, measure_contrast

VERSION: Final = 1  # of the fingerprints and the pair rules; a new number starts a new cache
DIGEST_BYTES: Final = 16
LOW: Final = 8  # coefficients per side
SHRINK: Final = 0.9  # size of the windows relative to the side
OFFSETS: Final = (0.0, 0.05, 0.1)
WINDOWS: Final = ((0.0, 1.0, 0.0, 1.0), *((y, SHRINK, x, SHRINK) for y in OFFSETS for x in OFFSETS))  # top, height, ...
VIEWS: Final = len(WINDOWS)  # hashes of an image; its mirror image has as many
SCALE: Final = 128.0  # of the cosines, before they are rounded to integers
CROWD: Final = 1_000_000  # candidates per pair of blocks, beyond which the images are not photographs
CELLS: Final = 8  # per side, of the chroma
FLAT: Final = 1.5  # levels of contrast below which a perceptual hash is meaningless
SMALL: Final = 16  # pixels per side below which it is meaningless, too
READ, PLAIN, UNREADABLE = 0, 1, 2  # PLAIN: blank or tiny, compared by exact pixels only
PROBES: Final = 32
PATIENCE_S: Final = 1800.0  # time within which another rank should write something


def hash_pixels(image: Image.Image) -> bytes:
    """Hashes the size and the RGB pixels to 16 bytes."""
    size = f"{image.height}x{image.width}:"
    return blake2b(size.encode() + image.tobytes(), digest_size=DIGEST_BYTES).digest()


def find_equal(train: NDArray[np.void], test: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds each train digest that is also in test, and the first such test digest. It does not list every pair: a
    thousand blank images in both sets would make a million."""
    known, first = np.unique(test, return_index=True)
    place = np.searchsorted(known, train).clip(0, len(known) - 1)
    hit = np.flatnonzero(known[place] == train) if len(known) else np.zeros(0, np.int64)
    return hit, first[place[hit]].astype(np.int64)


def cosine_rows(low: float, size: float) -> NDArray[np.float64]:
    """Returns the integer matrix [8, 32] that maps a row of pixels to the lowest cosine coefficients of the interval of
    length `size` from `low`."""
    at = np.clip((low + (np.arange(SIDE) + 0.5) / SIDE * size) * SIDE - 0.5, 0, SIDE - 1)
    left = np.minimum(np.floor(at).astype(np.int64), SIDE - 2)
    part = at - left
    sampled = np.zeros((SIDE, SIDE))
    sampled[np.arange(SIDE), left] += 1 - part
    sampled[np.arange(SIDE), left + 1] += part
    waves = np.cos(np.pi * np.arange(LOW)[:, None] * (2 * np.arange(SIDE) + 1) / (2 * SIDE))
    return np.rint(waves @ sampled * SCALE)


@lru_cache(maxsize=1)
def cosine_operator() -> NDArray[np.float64]:
    """Stacks the matrices of the full side and of the three positions of the window: [4 * 8, 32]."""
    return np.concatenate([cosine_rows(0.0, 1.0), *(cosine_rows(low, SHRINK) for low in OFFSETS)])


def hash_thumbnails(thumbs: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hashes thumbnails [N, 32, 32] to [N, 20]: the image and its windows, then those of its mirror image."""
    centred = thumbs.astype(np.float64)
    centred -= np.floor(centred.mean((1, 2), keepdims=True))
    return np.concatenate([hash_views(centred), hash_views(centred[:, :, ::-1])], axis=1)


def hash_views(pixels: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Hashes the image and its windows to [N, 10]. One two-sided product holds all coefficients, in blocks of 8 x 8."""
    along = cosine_operator()
    blocks = (along @ pixels @ along.T).reshape(-1, 1 + len(OFFSETS), LOW, 1 + len(OFFSETS), LOW) > 0
    places = [(0, 0), *((y, x) for y in range(1, 4) for x in range(1, 4))]
    bits = np.stack([blocks[:, y, :, x, :].reshape(-1, LOW * LOW) for y, x in places], axis=1)
    bits[:, :, 0] = False  # the brightness
    return np.packbits(bits, axis=2).view(np.uint64)[:, :, 0]


def find_similar(
    train: NDArray[np.uint64], test: NDArray[np.uint64], most: int, *, step: int = 512, crowd: int = CROWD
) -> NDArray[np.int64]:
    """Finds every (train, test) whose hashes differ in at most `most` bits in some view: rows of train, test, view,
    mirrored and bits [5, M], at most one per pair and mirroring. A view v < 10 is a window of the train image that
    matches the test image, and 10 + v a window of the test image that matches the train image."""
    found, count = [np.zeros((5, 0), np.int64)], 0
    for a in range(0, len(train), step):
        for b in range(0, len(test), step):
            rows = compare_views(train[a : a + step], test[b : b + step], most)
            # For each pair and mirroring, keep the view with the fewest differing bits; the lowest view breaks ties.
            rows = rows[:, np.lexsort((rows[2], rows[4], rows[3], rows[1], rows[0]))]
            rows = rows[:, is_first(rows[[0, 1, 3]])]
            found.append(rows + np.array([[a], [b], [0], [0], [0]]))
            count += rows.shape[1]
            if count > crowd:
                alike = f"more than {crowd:,} pairs of {len(train):,} x {len(test):,} images have similar hashes"
                raise DataError(f"{alike}, so these are not photographs; compare them exactly, or by embeddings")
    return np.concatenate(found, axis=1)


def is_first(columns: "NDArray[np.int64]") -> NDArray[np.bool_]:
    """Whether each of the sorted columns [R, M] differs from the one before it [M]."""
    first = np.ones(columns.shape[1], bool)
    first[1:] = (columns[:, 1:] != columns[:, :-1]).any(0)
    return first


def compare_views(train: NDArray[np.uint64], test: NDArray[np.uint64], most: int) -> NDArray[np.int64]:
    """Compares two blocks in all views: rows of train, test, view, mirrored and bits [5, M]. This is the inner loop."""
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
                number = np.full_like(i, ours if view < VIEWS else VIEWS + theirs)
                out.append(np.stack([i, j, number, np.full_like(i, mirrored), count[i, j].astype(np.int64)]))
    return np.concatenate(out, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprints:
    """The fingerprints of a block of N images. `bad` maps the index of each unreadable image to the reason."""

    digests: NDArray[np.void]  # [N] of 16 bytes
    hashes: NDArray[np.uint64]  # [N, 20]
    small: Thumbnails
    state: NDArray[np.uint8]  # [N]
    bad: dict[int, str]

    @property
    def comparable(self) -> NDArray[np.int64]:
        """The images whose perceptual hash is meaningful."""
        return np.flatnonzero(self.state == READ)


def compute_fingerprints(source: ImageDataset, start: int, stop: int) -> Fingerprints:
    """Reads and decodes a block of a data set."""
    count = stop - start
    digests = np.zeros((count, DIGEST_BYTES), np.uint8)
    small = np.full((count, SIDE, SIDE, 3), 128, np.uint8)
    state = np.zeros(count, np.uint8)
    bad: dict[int, str] = {}
    for row in range(count):
        try:
            image = decode(source, start + row)
        except BadImage as error:
            state[row], bad[start + row] = UNREADABLE, str(error)
            continue
        digests[row], small[row] = np.frombuffer(hash_pixels(image), np.uint8), make_thumbnail(image)
        state[row] = PLAIN if min(image.size) < SMALL else READ
    grey = np.ascontiguousarray(small[..., 0])
    state[(state == READ) & (measure_contrast(grey) < FLAT)] = PLAIN
    cell = SIDE // CELLS
    cells = small[..., 1:].reshape(count, CELLS, cell, CELLS, cell, 2).astype(np.uint32).sum((2, 4)) // cell**2
    digest_view, thumbs = digests.view(f"V{DIGEST_BYTES}")[:, 0], Thumbnails(grey=grey, chroma=cells.astype(np.uint8))
    return Fingerprints(digest_view, hash_thumbnails(grey), thumbs, state, bad)


def decode(source: ImageDataset, index: int) -> Image.Image:
    """Decodes one image at full size. BadImage names the sample, for errors in the header and in the pixels."""
    image = source.open_image(index)
    try:
        return image.rgb()
    except BadImage as error:
        raise BadImage(f"{source.name(index)}: {error}") from None


def make_thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """Makes a thumbnail [32, 32, 3], one channel of luma and two of chroma. It ignores the aspect ratio, so that a copy
    squeezed to a square is found."""
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small.convert("YCbCr"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFiles:
    """One file per block of a data set, in one folder. Block b starts at image b * size."""

    folder: Path
    length: int
    size: int

    def __len__(self) -> int:
        return -(-self.length // self.size)

    def path(self, block: int) -> Path:
        return self.folder / f"{block:06d}.npz"

    def span(self, block: int) -> tuple[int, int]:
        return block * self.size, min(self.length, (block + 1) * self.size)

    def missing(self) -> list[int]:
        return [block for block in range(len(self)) if not self.path(block).is_file()]

    def wait(self, patience: float = PATIENCE_S, pause: Callable[[float], None] = time.sleep) -> list[Path]:
        """Waits for the files that other ranks still write, and returns all paths. DataError if the folder does not
        change for `patience` seconds."""
        waited, seen = 0.0, -1
        while missing := self.missing():
            files = sum(1 for _ in self.folder.glob("*")) if self.folder.is_dir() else 0
            waited, seen = (0.0, files) if files != seen else (waited, seen)
            if waited >= patience:
                path = self.path(missing[0])
                raise DataError(f"{path} was not written within {patience:.0f} s; has another rank stopped?")
            pause(0.5)
            waited += 0.5
        return [self.path(block) for block in range(len(self))]


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Writes an .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_on_success(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with open(path, "rb") as content, np.load(content, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({describe_error(error)}); remove it") from None


def save_fingerprints(path: Path, prints: Fingerprints) -> None:
    bad = json.dumps(prints.bad).encode("utf-8", "surrogatepass")  # names that are not UTF-8 contain surrogates
    digests = prints.digests.view(np.uint8).reshape(-1, DIGEST_BYTES)
    arrays: dict[str, NDArray[Any]] = {"digests": digests, "hashes": prints.hashes, "state": prints.state}
    arrays |= {"grey": prints.small.grey, "chroma": prints.small.chroma, "bad": np.frombuffer(bad, np.uint8)}
    write_arrays(path, arrays)


def load_fingerprints(path: Path) -> Fingerprints:
    """Loads one block. DataError if the file is damaged or has other contents."""
    arrays = read_arrays(path)
    try:
        names = json.loads(arrays["bad"].tobytes().decode("utf-8", "surrogatepass"))
        digests = np.ascontiguousarray(arrays["digests"]).view(f"V{DIGEST_BYTES}")[:, 0]
        thumbs, bad = Thumbnails(grey=arrays["grey"], chroma=arrays["chroma"]), {int(i): names[i] for i in names}
        return Fingerprints(digests, arrays["hashes"], thumbs, arrays["state"], bad)
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not a block of fingerprints ({error!r}); remove it") from None


def hash_source(source: ImageDataset) -> str:
    """Hashes a data set's fingerprint, which covers names and sizes, and a few samples. If the sizes are unknown, it
    hashes all samples, because other images could then have the same fingerprint."""
    digest, count = sha256(source.fingerprint.encode()), len(source)
    few = sorted({count * i // PROBES for i in range(PROBES)}) if source.sizes() is not None and count else None
    for index in few or range(count):
        try:
            data = source.read(index)
            digest.update(data if isinstance(data, bytes) else str(data.shape).encode() + data.tobytes())
        except (BadImage, OSError):
            digest.update(b"unreadable")
    return digest.hexdigest()
