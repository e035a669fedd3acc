"""Writing one shard: the same bytes for the same samples, and read back before it gets its name.

One sample on its way into a pack: its bytes as they are, or a smaller image where a longest side is given.

Samples encoded by several processes, and handed over in the order of the source.
"""

import io
import json
import multiprocessing
import os
import re
import signal
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadImage, DataError, WorkerDied
from vitrail.core.text import Pair
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.tar import BLOCK, MASKS, scan
from vitrail.data.targets import MaskTargets

STARTS: Final = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II": "tif",
    b"MM": "tif",
    b"P": "ppm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What a sample becomes: a key and the members that go with it."""

    index: int
    key: str
    members: tuple[tuple[str, bytes], ...]  # suffix and bytes, the image first
    reencoded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A sample that cannot be read, and why."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """Which images are made smaller, and how well JPEGs among them are kept. `strict` stops at one it cannot read."""

    max_side: int | None
    quality: int
    strict: bool

    def __call__(self, source: ImageDataset, index: int) -> Packed | Left:
        """Every image is decoded, whether it changes or not: what is in a pack has been read once. So is its mask."""
        try:
            content = source.read(index)
            suffix, data, changed = self.picture(content)
            size = EncodedImage(content).size
            masks = ((MASKS[0], self.mask(source, index, size, data)),) if source.pixel_classes else ()
        except (BadImage, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if self.strict:
                raise BadImage(f"{source.name(index)}: {reason}") from None
            return Left(index=index, name=source.name(index), reason=reason)
        members = ((suffix, data), *described(source, index), *masks)
        return Packed(index=index, key=key(index, source.name(index)), members=members, reencoded=changed)

    def picture(self, data: "bytes | NDArray[np.uint8]") -> tuple[str, bytes, bool]:
        """Suffix, bytes, and whether it was made smaller. Pixels become PNG."""
        picture = EncodedImage(data)
        longest = max(picture.size)
        small = self.max_side is None or longest <= self.max_side
        if isinstance(data, np.ndarray):
            return ("png", encoded(Image.fromarray(data), "png"), False) if small else self.smaller(picture, "png")
        suffix = next((suffix for start, suffix in STARTS.items() if data.startswith(start)), None)
        if small and suffix is None:  # a format without a name here
            return "png", encoded(picture.rgb(), "png"), False
        if small and suffix:
            picture.rgb(scale=8)  # a JPEG is read to its end for a third of the time
            return suffix, data, False
        lossy = suffix == "jpg" or (suffix == "webp" and data[12:16] != b"VP8L")
        return self.smaller(picture, "jpg" if lossy else "png")

    def mask(self, source: ImageDataset, index: int, size: Pair, packed: bytes) -> bytes:
        """The mask of a sample, whose image had `size`, as PNG: as it is, or made smaller with the image."""
        indices = MaskTargets().read(source, index, size).numpy()
        height, width = EncodedImage(packed).size
        if indices.shape != (height, width):
            return encoded(Image.fromarray(indices).resize((width, height), Image.Resampling.NEAREST), "png")
        data = source.mask(index)
        return data if isinstance(data, bytes) else encoded(Image.fromarray(data), "png")

    def smaller(self, picture: EncodedImage, suffix: str) -> tuple[str, bytes, bool]:
        """Upright RGB with its longer side at the limit. What was lossless stays so."""
        assert self.max_side is not None
        longest = max(picture.size)
        scale = next((scale for scale in (8, 4, 2) if longest >= 2 * scale * self.max_side), 1)
        height, width = (max(1, round(side * self.max_side / longest)) for side in picture.size)
        pixels = picture.rgb(scale).resize((width, height), Image.Resampling.LANCZOS)
        return suffix, encoded(pixels, suffix, self.quality), True


def encoded(pixels: Image.Image, suffix: str, quality: int = 0) -> bytes:
    buffer = io.BytesIO()
    if suffix == "jpg":
        pixels.save(buffer, "JPEG", quality=quality)
    else:
        pixels.save(buffer, "PNG")
    return buffer.getvalue()


def described(source: ImageDataset, index: int) -> tuple[tuple[str, bytes], ...]:
    """The labels: a number in KEY.cls, or a list in KEY.json where samples may have several."""
    labels = source.labels[index]
    if source.labels.multiple:
        return (("json", json.dumps({"labels": list(labels)}).encode()),)
    return (("cls", str(labels[0]).encode()),) if labels else ()


def key(index: int, name: str) -> str:
    """000000123-cat_12: the place in the source, and as much of its name there as a person knows it by.

    Under 100 bytes, so that it fits every kind of tar file; without dots, for those end a key.
    """
    parts = [part for part in re.split(r"[/\\]", name.rpartition(":")[2])[-2:] if part not in ("", ".", "..")]
    words = re.sub(r"\.\w{2,4}$", "", re.sub(r"^\d{9}-", "", "_".join(parts)))
    plain = "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in words).strip("_")
    short = plain.encode()[-60:].decode("utf-8", "ignore")
    return f"{index:09d}-{short}" if short else f"{index:09d}"


END: Final = bytes(2 * BLOCK)
T = TypeVar("T")


class Peek(Generic[T]):
    """An iterator whose next item can be looked at before it is taken."""

    def __init__(self, items: Iterator[T]) -> None:
        self.items = items
        self.head: T | None = next(items, None)

    def take(self) -> T:
        assert self.head is not None
        taken, self.head = self.head, next(self.items, None)
        return taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A finished shard: samples `first` to `next` of a split, less the unreadable ones."""

    split: str
    name: str
    first: int
    next: int
    samples: int
    reencoded: int
    bytes: int
    sha256: str
    unreadable: tuple[Left, ...] = field(default=())

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Written":
        made: Any = {**row, "unreadable": tuple(Left(**left) for left in row["unreadable"])}
        return cls(**made)

    def intact(self, folder: Path) -> bool:
        """Whether the file is there with the bytes that were written."""
        try:
            return (folder / self.name).stat().st_size == self.bytes and hashed(folder / self.name) == self.sha256
        except OSError:
            return False


class TarFile:
    """The plainest of tar files: time 0, owner 0, mode 0644, and a running checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, sha256()
        self.pictures: list[str] = []
        self.reencoded = 0

    def room(self, sample: Packed) -> int:
        """The size of the file if it ended after this sample."""
        return self.size + sum(BLOCK + padded(len(data)) for _, data in sample.members) + len(END)

    def add(self, sample: Packed) -> None:
        for suffix, data in sample.members:
            info = tarfile.TarInfo(f"{sample.key}.{suffix}")
            info.size = len(data)
            self.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
            self.write(data)
            self.write(bytes(padded(len(data)) - len(data)))
        self.pictures.append(f"{sample.key}.{sample.members[0][0]}")
        self.reencoded += sample.reencoded

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def finish(self) -> str:
        """Ends the file, puts it on disk and reads it back: the same bytes, and the same images by its headers."""
        self.write(END)
        self.file.flush()
        os.fsync(self.file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is the disk that answers
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = Path(self.file.name)
        rows = scan(path)
        names = "".join(self.pictures).encode("utf-8", "surrogateescape")
        if hashed(path) != self.digest.hexdigest() or len(rows) != len(self.pictures) or rows.names.tobytes() != names:
            raise DataError(f"{path}: what was read back is not what was written; is the disk failing?")
        return self.digest.hexdigest()


def write_shard(
    folder: Path, split: str, number: int, first: int, stop: int, stream: Peek[Packed | Left], shard_size: int
) -> Written:
    """Takes samples from the stream until the next one would make the file too big, or there are none."""
    name = f"{split}-{number:05d}.tar"
    left: list[Left] = []
    with replace_on_success(folder / name) as file:
        tar = TarFile(file)
        while stream.head is not None:
            if isinstance(stream.head, Packed):
                if tar.pictures and tar.room(stream.head) > shard_size:
                    break
                tar.add(stream.head)
            else:
                left.append(stream.head)
            stream.take()
        if not tar.pictures:
            reason = f"; {left[0].name}: {left[0].reason}" if left else ""
            raise DataError(f"no image of the split {split} can be read{reason}")
        digest = tar.finish()
    return Written(
        split=split,
        name=name,
        first=first,
        next=stop if stream.head is None else stream.head.index,
        samples=len(tar.pictures),
        reencoded=tar.reencoded,
        bytes=tar.size,
        sha256=digest,
        unreadable=tuple(left),
    )


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def hashed(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


CHUNK: Final = 8  # samples a task
WAITING: Final = 4  # tasks a process, so that memory stays bounded while one is slow
IDLE: Final = -1

mine: dict[str, Any] = {}  # in a worker process: its source, its encoding and where it says what it reads


def in_order(source: ImageDataset, start: int, encoding: Encoding, workers: int | None) -> Iterator[Packed | Left]:
    """Samples from `start` on. With one worker all is done here."""
    workers = cores() if workers is None else workers
    if workers <= 1 or len(source) - start <= CHUNK:
        for index in range(start, len(source)):
            yield encoding(source, index)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")  # threads do not fork
    # Without a lock: a process that is ended while it holds one would never give it back. Each writes to its own place.
    reading: Any = context.Array("q", [IDLE] * workers, lock=False)
    slots: Any = context.Value("i", 0)
    pool = ProcessPoolExecutor(workers, context, prepare, (source, encoding, reading, slots))
    waiting: deque[Future[list[Packed | Left]]] = deque()
    try:
        for first in range(start, len(source), CHUNK):
            waiting.append(pool.submit(encode, first, min(first + CHUNK, len(source))))
            if len(waiting) >= WAITING * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        names = [source.name(index) for index in reading if index != IDLE]
        said = f"while it read one of: {', '.join(names)}" if names else "before it read anything"
        raise WorkerDied(f"a process of the pack ended {said}; out of memory, or an image that crashes it?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(source: ImageDataset, encoding: Encoding, reading: Any, slots: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that packs hears it, and ends this one
    with slots.get_lock():
        slot = slots.value
        slots.value += 1
    mine.update(source=source, encoding=encoding, reading=reading, slot=slot)


def encode(first: int, last: int) -> list[Packed | Left]:
    results: list[Packed | Left] = []
    for index in range(first, last):
        mine["reading"][mine["slot"]] = index
        results.append(mine["encoding"](mine["source"], index))
    mine["reading"][mine["slot"]] = IDLE
    return results
