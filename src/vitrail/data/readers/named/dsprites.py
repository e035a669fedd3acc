"""dSprites for two questions: where across is the sprite, and how is it turned? From the .npz of its authors.

Unpacked, its 737,280 pictures of 64 x 64 take 3 GB for one bit a pixel. They are read in a stream once and kept in the
cache as bits, 377 MB, from where single pictures are read.
"""

import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import IO, Final, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, reason_of
from vitrail.core.storage import cache_folder, replacing
from vitrail.data.labels import Labels
from vitrail.data.readers.named.pieces import Bits
from vitrail.data.readers.named.places import present
from vitrail.data.source import Source

FILE: Final = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
ORIENTATION, ACROSS = 3, 4  # columns of latents_classes: colour, shape, scale, orientation, x, y
ORIENTATIONS, PLACES = 40, 32
BINS: Final = 16
AT_ONCE: Final = 4096  # pictures


def location(root: Path) -> dict[str, Source]:
    """The place from left to right, 32 of them two by two."""
    return read(root, ACROSS, PLACES)


def orientation(root: Path) -> dict[str, Source]:
    """The turn, 40 of them in 16 steps of two and a half."""
    return read(root, ORIENTATION, ORIENTATIONS)


def binned(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """floor(v / (count / 16)), in whole numbers."""
    return values * BINS // count


def read(root: Path, column: int, count: int) -> dict[str, Source]:
    path = present(root, FILE)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            latents = cast("NDArray[np.int64]", held["latents_classes"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or cut short ({reason_of(error)}); download it again") from None
    if latents.ndim != 2 or latents.shape[1] != 6 or latents.dtype.kind not in "iu":
        raise DataError(f"{path} holds latents_classes {latents.shape}, not N x 6")
    bits, shape = packed(path)
    if shape[0] != len(latents):
        raise DataError(f"{path} holds {shape[0]} pictures for {len(latents)} latents")
    labels = Labels(binned(latents[:, column].astype(np.int64), count).astype(np.int16))
    classes = [str(i) for i in range(BINS)]
    labels.check(BINS, str(path))
    source = Bits(
        bits, start=0, stride=prod(shape[1:]) // 8, shape=(shape[1], shape[2]), labels=labels, classes=classes
    )
    source.called = "dsprites"
    return {"train": source}


def packed(path: Path) -> tuple[Path, tuple[int, ...]]:
    """The pictures as bits, and the shape they have in the file. Made once, in pieces of a few megabytes."""
    try:
        with zipfile.ZipFile(path) as opened, opened.open("imgs.npy") as member:
            shape = header(member, path)
            checksum = opened.getinfo("imgs.npy").CRC
            target = cache_folder("data") / "dsprites" / f"imgs-{checksum:08x}.bits"
            size = prod(shape) // 8
            if target.is_file() and target.stat().st_size == size:
                return target, shape
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                left, piece = prod(shape), AT_ONCE * prod(shape[1:])
                while left:
                    data = member.read(min(piece, left))
                    if not data:
                        raise EOFError("cut short")
                    while len(data) % 8 and (more := member.read(8 - len(data) % 8)):
                        data += more
                    file.write(np.packbits(np.frombuffer(data, np.uint8)).tobytes())
                    left -= len(data)
            return target, shape
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DataError(f"{path} is damaged or cut short ({reason_of(error)}); download it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked to {cache_folder('data')} ({error.strerror or error})") from None


def header(member: IO[bytes], path: Path) -> tuple[int, ...]:
    """The shape of an array of bytes in a .npy stream, which stands at its first value afterwards."""
    try:
        version = np.lib.format.read_magic(member)
        reads = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reads(member)
    except ValueError as error:
        raise DataError(f"{path}: imgs is not an array ({reason_of(error)})") from None
    if fortran or dtype != np.uint8 or len(shape) != 3 or shape[2] % 8:
        raise DataError(f"{path} holds imgs {shape} of {dtype}, not N x 64 x 64 of uint8")
    return shape
