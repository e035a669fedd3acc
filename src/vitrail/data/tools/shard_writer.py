"""Writes one shard: encodes samples, writes the same bytes for the same samples, and verifies the file before it gets
its name."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadImage, DataError
from vitrail.core.processes import available_cores, map_in_processes
from vitrail.core.text import Pair
from vitrail.data.annotations import rle
from vitrail.data.annotations.packed_segments import format_segments
from vitrail.data.annotations.segments import Segments
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.tar import BLOCK, MASKS, SEGMENTS, scan_shard
from vitrail.data.segment_targets import SegmentTargets
from vitrail.data.targets import Geometry, MaskTargets

CHUNK: Final = 8  # samples per task
END: Final = bytes(2 * BLOCK)
SUFFIXES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp", b"P": "ppm"}
SUFFIXES.update(dict.fromkeys((b"II", b"MM"), "tif"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSample:
    """A sample in a shard: a key and its members."""

    index: int
    key: str
    members: tuple[tuple[str, bytes], ...]  # suffix and bytes, the image first
    reencoded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSample:
    """An unreadable sample, with the reason."""

    index: int
    name: str
    reason: str


Sample: TypeAlias = PackedSample | SkippedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEncoder:
    """Encodes samples. Images beyond `max_side` are shrunk, and encoded with this quality if they become JPEGs.
    `strict` stops at the first unreadable one."""

    max_side: int | None
    quality: int
    strict: bool

    def __call__(self, source: ImageDataset, index: int) -> Sample:
        """Encodes one sample. It decodes the image and its mask even if they stay unchanged, so that the pack is known
        to be readable."""
        try:
            content = source.read(index)
            suffix, data, changed = self.encode_image(content)
            size = EncodedImage(content).size
            masks = ((MASKS[0], self.encode_mask(source, index, size, data)),) if source.pixel_classes else ()
            if source.segment_classes:
                masks += ((SEGMENTS, encode_segments(source, index, size, EncodedImage(data).size)),)
        except (BadImage, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if self.strict:
                raise BadImage(f"{source.name(index)}: {reason}") from None
            return SkippedSample(index=index, name=source.name(index), reason=reason)
        members = ((suffix, data), *encode_labels(source, index), *masks)
        return PackedSample(index=index, key=make_key(index, source.name(index)), members=members, reencoded=changed)

    def encode_image(self, data: "bytes | NDArray[np.uint8]") -> tuple[str, bytes, bool]:
        """Returns the suffix, the bytes, and whether the image was shrunk. Pixels become PNG."""
        image = EncodedImage(data)
        longest = max(image.size)
        small = self.max_side is None or longest <= self.max_side
        if isinstance(data, np.ndarray):
            return ("png", encode(Image.fromarray(data), "png"), False) if small else self.shrink(image, "png")
        suffix = next((suffix for start, suffix in SUFFIXES.items() if data.startswith(start)), None)
        if small:
            if suffix is None:  # a format that is not in SUFFIXES
                return "png", encode(image.rgb(), "png"), False
            image.rgb(scale=8)  # decoding a JPEG at 1/8 reads it to its end in a third of the time
            return suffix, data, False
        lossy = suffix == "jpg" or (suffix == "webp" and data[12:16] != b"VP8L")
        return self.shrink(image, "jpg" if lossy else "png")

    def encode_mask(self, source: ImageDataset, index: int, size: Pair, packed: bytes) -> bytes:
        """Encodes the mask of a sample, whose image had `size`, as PNG: unchanged, or shrunk with the image."""
        indices = MaskTargets().read(source, index, size).numpy()
        height, width = EncodedImage(packed).size
        if indices.shape != (height, width):
            return encode(Image.fromarray(indices).resize((width, height), Image.Resampling.NEAREST), "png")
        data = source.mask(index)
        return data if isinstance(data, bytes) else encode(Image.fromarray(data), "png")

    def shrink(self, image: EncodedImage, suffix: str) -> tuple[str, bytes, bool]:
        """Shrinks an image to upright RGB with its longer side at the limit, and encodes it."""
        assert self.max_side is not None
        longest = max(image.size)
        scale = next((scale for scale in (8, 4, 2) if longest >= 2 * scale * self.max_side), 1)
        height, width = (max(1, round(side * self.max_side / longest)) for side in image.size)
        pixels = image.rgb(scale).resize((width, height), Image.Resampling.LANCZOS)
        return suffix, encode(pixels, suffix, self.quality), True


def encode_segments(source: ImageDataset, index: int, size: Pair, packed: Pair) -> bytes:
    """Encodes the segments of a sample, whose image had `size`, at the size `packed` of the packed image."""
    found = SegmentTargets().read(source, index, size)
    return format_segments(found if packed == size else resize_segments(found, packed)).encode()


def resize_segments(found: Segments, size: Pair) -> Segments:
    """Resizes segments, with nearest-neighbour sampling of masks. Drops segments whose masks become empty."""
    down, across = (new / old for new, old in zip(size, found.size, strict=True))
    boxes = found.boxes * np.array([across, down, across, down])
    if found.masks is None:
        return replace(found, size=size, boxes=boxes)
    geometry = Geometry(whole=found.size, box=(0, 0, *found.size), inner=size)
    masks = [rle.encode(geometry.mask(torch.from_numpy(rle.decode(mask)), 0).numpy()) for mask in found.masks]
    kept = np.array([mask.area > 0 for mask in masks], np.bool_)
    left = tuple(mask for mask in masks if mask.area)
    return Segments(size=size, classes=found.classes[kept], boxes=boxes[kept], crowd=found.crowd[kept], masks=left)


def encode(pixels: Image.Image, suffix: str, quality: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels.save(buffer, "JPEG" if suffix == "jpg" else "PNG", quality=quality)  # PNG ignores the quality
    return buffer.getvalue()


def encode_labels(source: ImageDataset, index: int) -> tuple[tuple[str, bytes], ...]:
    """Encodes the labels: a number in KEY.cls, or a list in KEY.json if samples may have several."""
    labels = source.labels[index]
    if source.labels.multiple:
        return (("json", json.dumps({"labels": list(labels)}).encode()),)
    return (("cls", str(labels[0]).encode()),) if labels else ()


def make_key(index: int, name: str) -> str:
    """Makes a key such as 000000123-cat_12 from the index in the data set and the recognisable end of the name.

    A key has under 100 bytes, so that it fits every kind of tar file, and no dots, which would end it.
    """
    parts = [part for part in re.split(r"[/\\]", name.rpartition(":")[2])[-2:] if part not in ("", ".", "..")]
    words = re.sub(r"\.\w{2,4}$", "", re.sub(r"^\d{9}-", "", "_".join(parts)))
    plain = "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in words).strip("_")
    short = plain.encode()[-60:].decode("utf-8", "ignore")
    return f"{index:09d}-{short}" if short else f"{index:09d}"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A finished shard: samples `first` to `next` of a split, except unreadable ones."""

    split: str
    name: str
    first: int
    next: int
    samples: int
    reencoded: int
    bytes: int
    sha256: str
    unreadable: tuple[SkippedSample, ...] = field(default=())

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "ShardInfo":
        row |= {"unreadable": tuple(SkippedSample(**skipped) for skipped in row["unreadable"])}
        return cls(**row)

    def is_intact(self, folder: Path) -> bool:
        """Whether the file still has the bytes that were written."""
        try:
            return (folder / self.name).stat().st_size == self.bytes and hash_file(folder / self.name) == self.sha256
        except OSError:
            return False


class TarWriter:
    """Writes plain tar files: time 0, owner 0, mode 0644, and a running checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, sha256()
        self.images: list[str] = []
        self.reencoded = 0

    def size_with(self, sample: PackedSample) -> int:
        """Returns the size of the file if this sample were its last."""
        return self.size + sum(BLOCK + pad(len(data)) for _, data in sample.members) + len(END)

    def add(self, sample: PackedSample) -> None:
        for suffix, data in sample.members:
            info = tarfile.TarInfo(f"{sample.key}.{suffix}")
            info.size = len(data)
            self.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
            self.write(data)
            self.write(bytes(pad(len(data)) - len(data)))
        self.images.append(f"{sample.key}.{sample.members[0][0]}")
        self.reencoded += sample.reencoded

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def finish(self) -> str:
        """Ends the file, syncs it to disk and reads it back, to verify its bytes and the images in its headers. Returns
        the checksum."""
        self.write(END)
        self.file.flush()
        os.fsync(self.file.fileno())
        if hasattr(os, "posix_fadvise"):  # drops the page cache, so that the file is read from disk
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = Path(self.file.name)
        rows = scan_shard(path)
        names, count = "".join(self.images).encode("utf-8", "surrogateescape"), len(self.images)
        same = len(rows["size"]) == count and rows["names"].tobytes() == names
        if hash_file(path) != self.digest.hexdigest() or not same:
            raise DataError(f"{path}: reading it back gives other bytes than were written; is the disk failing?")
        return self.digest.hexdigest()


def write_shards(
    folder: Path, split: str, number: int, first: int, stop: int, samples: Iterator[Sample], shard_size: int
) -> Iterator[ShardInfo]:
    """Writes shards one by one, from sample `first` on. Each ends where the next sample would make it too large."""
    sample = next(samples, None)
    while sample is not None:
        name, skipped = f"{split}-{number:05d}.tar", list[SkippedSample]()
        with replace_on_success(folder / name) as file:
            tar = TarWriter(file)
            while sample is not None:
                if isinstance(sample, SkippedSample):
                    skipped.append(sample)
                elif tar.images and tar.size_with(sample) > shard_size:
                    break
                else:
                    tar.add(sample)
                sample = next(samples, None)
            if not tar.images:
                reason = f"; {skipped[0].name}: {skipped[0].reason}" if skipped else ""
                raise DataError(f"no image of the split {split} is readable{reason}")
            digest = tar.finish()
        end = stop if sample is None else sample.index
        yield ShardInfo(split, name, first, end, len(tar.images), tar.reencoded, tar.size, digest, tuple(skipped))
        number, first = number + 1, end


def pad(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def encode_chunk(shared: tuple[ImageDataset, SampleEncoder], first: int) -> list[Sample]:
    source, encode = shared
    return [encode(source, index) for index in range(first, min(first + CHUNK, len(source)))]


def encode_samples(
    source: ImageDataset, start: int, encode: SampleEncoder, workers: int | None, heard: Callable[[int], object]
) -> Iterator[Sample]:
    """Encodes the samples from `start` on, in order, in several processes, or in this one with one worker. `heard` is
    called with the index of each."""
    workers = available_cores() if workers is None else workers

    def describe_loss(firsts: Sequence[int]) -> str:
        last = min(firsts[0] + CHUNK, len(source)) - 1
        place = f"{source.name(firsts[0])} to {source.name(last)} or soon after"
        return f"a process of the pack ended at {place}; is memory exhausted, or does an image crash the decoder?"

    firsts, workers = range(start, len(source), CHUNK), workers if workers > 1 else 0
    for chunk in map_in_processes(encode_chunk, (source, encode), firsts, workers=workers, describe_loss=describe_loss):
        for sample in chunk:
            heard(sample.index)
            yield sample
