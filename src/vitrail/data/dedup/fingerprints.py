"""What is remembered of an image: hash of its pixels, perceptual hashes, a thumbnail. About 1.3 kB, and made once.

A set's prints lie in block files in a folder whose name says what they are of, so a second run, or one that was cut
short, goes on with what there is. Several processes, or ranks on one filesystem, may fill the same folder.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup.align_pair import Small, contrast
from vitrail.data.dedup.block_files import Blocks, read_arrays, write_arrays
from vitrail.data.dedup.perceptual_hash import BYTES, SIDE, digest, hashes

VERSION: Final = 1  # of everything in this file and the three above: another number, another cache
CELLS: Final = 8  # of the chroma, a side
FLAT: Final = 1.5  # levels of contrast below which a perceptual hash means nothing
SMALL: Final = 16  # pixels a side below which it means nothing either
READ, PLAIN, UNREADABLE = 0, 1, 2  # PLAIN: blank or tiny, compared exactly only
PROBES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prints:
    """Those of a block of N images; `bad` names the ones that could not be read and says why."""

    digests: NDArray[np.void]  # [N] of 16 bytes
    hashes: NDArray[np.uint64]  # [N, 20]
    small: Small
    state: NDArray[np.uint8]  # [N]
    bad: dict[int, str]  # by number in the source

    @property
    def comparable(self) -> NDArray[np.int64]:
        """The ones that a perceptual hash can speak of."""
        return np.flatnonzero(self.state == READ)


def prints_of(source: ImageDataset, start: int, stop: int) -> Prints:
    """Reads, decodes and prints a block of a source."""
    count = stop - start
    digests = np.zeros((count, BYTES), np.uint8)
    small = np.full((count, SIDE, SIDE, 3), 128, np.uint8)
    state = np.zeros(count, np.uint8)
    bad: dict[int, str] = {}
    for row in range(count):
        try:
            picture = decoded(source, start + row)
        except BadImage as error:
            state[row], bad[start + row] = UNREADABLE, str(error)
            continue
        digests[row] = np.frombuffer(digest(picture), np.uint8)
        small[row] = thumbnail(picture)
        if min(picture.size) < SMALL:
            state[row] = PLAIN
    grey = np.ascontiguousarray(small[..., 0])
    state[(state == READ) & (contrast(grey) < FLAT)] = PLAIN
    cell = SIDE // CELLS
    cells = small[..., 1:].reshape(count, CELLS, cell, CELLS, cell, 2).astype(np.uint32).sum((2, 4)) // cell**2
    return Prints(
        digests=digests.view(f"V{BYTES}")[:, 0],
        hashes=hashes(grey),
        small=Small(grey=grey, chroma=cells.astype(np.uint8)),
        state=state,
        bad=bad,
    )


def decoded(source: ImageDataset, index: int) -> Image.Image:
    """One image, whole. BadImage names the sample whether its header or its pixels are at fault."""
    picture = source.open_image(index)
    try:
        return picture.rgb()
    except BadImage as error:
        raise BadImage(f"{source.name(index)}: {error}") from None


def thumbnail(picture: Image.Image) -> NDArray[np.uint8]:
    """[32, 32, 3], grey and two of chroma; the aspect is given up, so that a copy squeezed to a square is found."""
    small = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small.convert("YCbCr"))


def save_prints(path: Path, prints: Prints) -> None:
    names = json.dumps({str(index): reason for index, reason in prints.bad.items()})
    arrays = {
        "digests": prints.digests.view(np.uint8).reshape(-1, BYTES),
        "hashes": prints.hashes,
        "grey": prints.small.grey,
        "chroma": prints.small.chroma,
        "state": prints.state,
        "bad": np.frombuffer(names.encode("utf-8", "surrogatepass"), np.uint8),
    }
    write_arrays(path, arrays)


def load_prints(path: Path) -> Prints:
    """One block. A file that is torn or of another shape is an error that says to remove it."""
    arrays = read_arrays(path)
    try:
        names = json.loads(arrays["bad"].tobytes().decode("utf-8", "surrogatepass"))
        return Prints(
            digests=np.ascontiguousarray(arrays["digests"]).view(f"V{BYTES}")[:, 0],
            hashes=arrays["hashes"],
            small=Small(grey=arrays["grey"], chroma=arrays["chroma"]),
            state=arrays["state"],
            bad={int(index): reason for index, reason in names.items()},
        )
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not a block of prints ({error!r}); remove it") from None


def blocks_of(source: ImageDataset, folder: Path, size: int) -> Blocks:
    """Where the prints of a source belong: by its fingerprint, its bytes, our version and the block size."""
    return Blocks(folder=folder / f"{content_key(source)[:32]}-{VERSION}-{size}", length=len(source), size=size)


def content_key(source: ImageDataset) -> str:
    """A hash by which prints may be found again. The fingerprint speaks of names and sizes; a few samples are read as
    well, and all of them where the sizes are not known, for then other images could have the same fingerprint."""
    made = sha256(source.fingerprint.encode())
    if source.sizes() is None:
        chosen: Iterable[int] = range(len(source))
    else:
        chosen = sorted({len(source) * i // PROBES for i in range(PROBES)} if len(source) else set())
    for index in chosen:
        try:
            data = source.read(index)
            made.update(data if isinstance(data, bytes) else str(data.shape).encode() + data.tobytes())
        except (BadImage, OSError):
            made.update(b"unreadable")
    return made.hexdigest()
