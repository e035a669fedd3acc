"""Reads the headers of a tar file, and from them the samples of a shard: where each image lies, and its labels.

Nothing is extracted, so a name can do no harm. Only a few kilobytes around each header are read, which takes a third of
the time of `tarfile` and little traffic on a mounted store. A truncated or damaged file is refused with the offset,
because samples would otherwise be lost silently.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels, DataError
from vitrail.data.dataset import NONE
from vitrail.data.decode.image import HEIC, READ

BLOCK: Final = 512
PIECE: Final = 4096  # holds a label and the two headers around it
LONGEST: Final = 1 << 20  # bytes of an extended header or a label; honest ones have a few hundred
ZEROS: Final = bytes(BLOCK)
NOT_TAR: Final = "not a tar file, or a damaged one"
COMPRESSED: Final = {b"\x1f\x8b": "gzip -d", b"(\xb5/\xfd": "zstd -d", b"\xfd7zXZ": "xz -d", b"BZh": "bzip2 -d"}
COMPRESSED[b"PK\3\4"] = "unzip"


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int  # of its first byte
    size: int


class TarReader:
    """An open tar file: one pass over its members, with the contents of small ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size
        self.piece, self.start = b"", 0

    def __enter__(self) -> "TarReader":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read_at(self, offset: int, length: int) -> bytes:
        """A few bytes at an offset; fewer at the end of the file. Neighbours come from the same read."""
        begin = offset - self.start
        if begin < 0 or begin + length > len(self.piece):
            self.piece, self.start, begin = os.pread(self.descriptor, max(length, PIECE), offset), offset, 0
        return self.piece[begin : begin + length]

    def read_text(self, member: Member) -> bytes:
        """The bytes of a small member: a label or a description."""
        if member.size > LONGEST:
            raise self.error(member.offset, f"{member.name} has {member.size:,} bytes; a label has at most {LONGEST:,}")
        return self.read_at(member.offset, member.size)

    def error(self, offset: int, reason: str) -> DataError:
        return DataError(f"{self.path}: at byte {offset:,}: {reason}")

    def members(self) -> Iterator[Member]:
        """Its regular files in order. DataError, with the offset, where it is damaged, cut short or not a tar file."""
        first = self.read_at(0, 8)
        if not first:
            raise DataError(f"{self.path} is empty")
        if command := next((command for magic, command in COMPRESSED.items() if first.startswith(magic)), ""):
            reason = "is compressed, so its images cannot be read one by one"
            raise DataError(f"{self.path} {reason}; decompress it with {command}")
        offset, extra = 0, dict[str, str]()  # `extra` has the extended headers of the next member
        while True:
            block = self.read_at(offset, BLOCK)
            if block == ZEROS:
                # Only zeros may follow the end marker: the second of two joined archives would be lost.
                if offset + 2 * BLOCK > self.size:
                    raise self.error(offset, "cut short in its end marker; write or copy it again")
                for at in range(offset, self.size, 1 << 20):
                    if os.pread(self.descriptor, 1 << 20, at).strip(b"\0"):
                        raise self.error(at, "continues after its end marker; were archives joined? Keep them separate")
                return
            kind, name, size = self.parse_header(offset, block)
            data = offset + BLOCK
            if kind not in b"LKxg" and "size" in extra:
                if not re.fullmatch("[0-9]{1,18}", extra["size"]):
                    raise self.error(offset, f"damaged extended header: size {extra['size'][:40]!r}")
                size = int(extra["size"])
            offset = data + -(-size // BLOCK) * BLOCK
            if data + size > self.size:
                raise self.error(data, f"cut short: {name} should have {size:,} bytes; write or copy it again")
            match kind:
                case 0x4C:  # L: the next name, by GNU
                    extra["path"] = decode_name(self.read_text(Member("a long name", data, size)).partition(b"\0")[0])
                case 0x78:  # x: the next member, by POSIX
                    extra |= self.parse_records(Member("an extended header", data, size))
                case 0x67 | 0x35 | 0x4B:  # g, 5, K: what holds for all, a folder, a long link: not needed
                    extra = extra if kind == 0x4B else {}
                case 0x30 | 0x00 | 0x37:
                    if extra and any(key.startswith("GNU.sparse") for key in extra):
                        raise self.error(data, f"{name} is stored sparsely; pack without --sparse")
                    yield Member(extra.get("path", name), data, size)
                    extra = {}
                case _:
                    what = f"{extra.get('path', name)} is a link, sparse or special (type {chr(kind)!r})"
                    raise self.error(data - BLOCK, f"{what}; pack it with tar --dereference --hard-dereference")

    def parse_header(self, offset: int, block: bytes) -> tuple[int, str, int]:
        """Kind, name and size from a header, whose checksum is compared."""
        if len(block) < BLOCK:
            known = f"if you know that it is complete: head -c 1024 /dev/zero >> {self.path.name}"
            raise self.error(offset, f"ends without an end marker; write or copy it again ({known})")
        said = self.parse_number(block[148:156], offset)
        if said != sum(block) - sum(block[148:156]) + 8 * 32:
            raise self.error(offset, "damaged header: its checksum does not match" if offset else NOT_TAR)
        name = block[:100].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and block[345]:
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        return block[156], decode_name(name), self.parse_number(block[124:136], offset)

    def parse_number(self, field: bytes, offset: int) -> int:
        """Octal digits; or, where the first bit is set, a binary number."""
        if field[0] & 0x80:
            return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        try:
            return int(field.partition(b"\0")[0].strip() or b"0", 8)
        except ValueError:
            what = "damaged header" if offset else NOT_TAR
            raise self.error(offset, f"{what}: {field!r} is not a number") from None

    def parse_records(self, member: Member) -> dict[str, str]:
        """The fields of an extended header, lines of "LENGTH key=value"."""
        rest, found = self.read_text(member), dict[str, str]()
        while rest:
            digits = rest.partition(b" ")[0]
            length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
            key, equals, value = rest[len(digits) + 1 : length - 1].partition(b"=")
            if not (len(digits) < length <= len(rest) and equals and rest[length - 1 : length] == b"\n"):
                raise self.error(member.offset, "damaged extended header")
            found[decode_name(key)] = decode_name(value)
            rest = rest[length:]
        return found


def decode_name(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


IMAGES: Final = frozenset(suffix.removeprefix(".") for suffix in (*READ, *HEIC))
MASKS: Final = ("seg.png", "mask.png")  # suffixes of masks; the first has priority
SEGMENTS: Final = "segments.json"  # suffix of annotated segments
DIGITS: Final = 9  # of a label; the index has 32 bits


# N samples in columns, in the order of their first members: offset, size, label (the first, or -1), mask_offset and
# mask_size (0 without a mask), the same of segments; names of the image members, end to end, and name_length; all
# labels, end to end (several), how many a sample has (count), and whether it has a list of them (listed).
ShardColumns: TypeAlias = dict[str, NDArray[Any]]
FIELDS: Final = (
    "offset",
    "size",
    "label",
    "name_length",
    "count",
    "listed",
    "mask_offset",
    "mask_size",
    "segments_offset",
    "segments_size",
)


@dataclass(slots=True, eq=False)
class ShardSample:
    """The members of one key so far."""

    image: Member | None = None
    mask: Member | None = None
    segments: Member | None = None
    labels: tuple[int, ...] | None = None
    listed: bool = False
    ends: str = ""  # suffix of another member, for a message


def scan_shard(path: Path) -> ShardColumns:
    """All samples of a shard, by reading its headers and labels."""
    samples: dict[str, ShardSample] = {}
    with TarReader(path) as tar:
        for member in tar.members():
            # a/b.c.png is c.png of a/b. Hidden files, such as those that macOS adds, have no key.
            folder, slash, last = member.name.removeprefix("./").rpartition("/")
            key, _, kind = last.partition(".")
            if key:
                add_member(tar, samples.setdefault(folder + slash + key, ShardSample()), member, kind.lower())
    for key, sample in samples.items():
        if sample.image is None and sample.labels:
            found = f", only .{sample.ends}" if sample.ends else ""
            raise DataError(f"{path}: {key} has a label and no image{found}; images end in {', '.join(READ)}")
    rows, names, several, empty = list[tuple[int, ...]](), list[bytes](), list[int](), Member("", 0, 0)
    for sample in samples.values():
        if sample.image is None:
            continue
        image, mask, labels = sample.image, sample.mask or empty, sample.labels or ()
        segments = sample.segments or empty
        names.append(fsencode(image.name))
        several += labels
        lengths = len(names[-1]), len(labels), sample.listed
        others = mask.offset, mask.size, segments.offset, segments.size
        rows.append((image.offset, image.size, labels[0] if labels else NONE, *lengths, *others))
    columns = np.array(rows, np.int64).reshape(-1, len(FIELDS)).T
    packed = {"names": np.frombuffer(b"".join(names), np.uint8), "several": np.array(several, np.int32)}
    return {**dict(zip(FIELDS, columns, strict=True)), **packed}


def add_member(tar: TarReader, sample: ShardSample, member: Member, kind: str) -> None:
    if kind in IMAGES:
        if sample.image is not None:
            rule = "give files that belong to an image a second dot (KEY.mask.png), and every image its own key"
            raise tar.error(member.offset, f"{member.name} is a second image next to {sample.image.name}; {rule}")
        sample.image = member
    elif kind in ("cls", "json"):
        text = tar.read_text(member)
        found = text.decode("ascii", "replace") if kind == "cls" else parse_json_label(tar, member, text)
        if found is None:
            return
        listed = isinstance(found, list)
        labels = tuple(parse_label(tar, member, value) for value in (found if listed else [found]))
        if sample.labels is not None and sample.labels != labels:
            raise BadLabels(f"{tar.path}: {member.name} says {list(labels)}, another member {list(sample.labels)}")
        sample.labels, sample.listed = labels, sample.listed or listed
    else:
        if kind == MASKS[0] or (kind in MASKS and sample.mask is None):
            sample.mask = member
        if kind == SEGMENTS:
            sample.segments = member
        sample.ends = kind


def parse_json_label(tar: TarReader, member: Member, text: bytes) -> Any:
    """The label in a JSON member, or the list of them; None where it has none."""
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise tar.error(member.offset, f"{member.name} is not JSON: {error}") from None
    return content.get("labels", content.get("label")) if isinstance(content, dict) else None


def parse_label(tar: TarReader, member: Member, value: Any) -> int:
    """A class number from text or JSON; names are refused."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > DIGITS:
        rule = "labels are numbers from 0, and their names go, in that order, into classes.txt next to the shards"
        raise BadLabels(f"{tar.path}: {member.name} has the label {text[:60]!r}; {rule}")
    return int(text)
