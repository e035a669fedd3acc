"""TIFF directories, which EXIF uses too: the orientation of an image and the tags its pixels need; and `PieceLimit`.

They are parsed here rather than by Pillow, because decoders warn about odd metadata, and warning filters are global:
other threads would see them change. The decoder only gets what it needs, so it has nothing to warn about.

`PieceLimit` bounds the number of pieces (segments, chunks, blocks, comments) of a file. Valid files have few or large
ones; a hostile file has millions of empty ones, each of which costs a step in Python.
"""

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from vitrail.core.errors import BadImage

FREE: Final = 10_000  # pieces that any file may have, whatever its size


class PieceLimit:
    """Counts the pieces of one file. BadImage if there are more than FREE and they hold fewer than `average` bytes on
    average."""

    __slots__ = ("kind", "most", "pieces")

    def __init__(self, kind: str, data: bytes, average: int = 1024) -> None:
        self.kind, self.pieces, self.most = kind, 0, FREE + len(data) // average

    def step(self, count: int = 1) -> None:
        self.pieces += count
        if self.pieces > self.most:
            raise BadImage(f"{self.kind} of more than {self.most:,} pieces, made to take long; save it again")


ORIENTATION: Final = 0x0112
WIDTH, HEIGHT, BITS, COMPRESSION, SAMPLES = 256, 257, 258, 259, 277
STRIPS, ROWS_PER_STRIP, TILE_WIDTH, TILE_HEIGHT, TILES = 273, 278, 322, 323, 324
SINGLE: Final = {256, 257, 259, 262, 266, 277, 278, 284, 292, 293, 317, 322, 323, 531}  # exactly one value, or ignored
NEEDED: Final = SINGLE | {258, 273, 279, 320, 324, 325, 338, 339, 347, 529, 530, 532}
UNITS: Final = {1: 1, 3: 2, 4: 4, 5: 8, 7: 1, 16: 8}  # bytes, shorts, longs, rationals, opaque, longs of BigTIFF
CODES: Final = {1: "B", 3: "H", 4: "I", 16: "Q"}
# Excluded: old-style JPEG, which no two programs read alike, and compressions that are not used for such images.
PACKINGS: Final = {1, 2, 3, 4, 5, 7, 8, 32773, 32946, 50000}  # none, fax, LZW, JPEG, deflate, PackBits, deflate, zstd
LARGE_TILE: Final = 1 << 24  # pixels; a tile may be larger than a small image, but not arbitrarily large
LONGEST_PROFILE: Final = 1 << 16  # bytes; the tag in question is among the first
UPRIGHT: Final = 1


class TiffTag(NamedTuple):
    """One tag: its type, how many values, and the 4 (BigTIFF: 8) bytes that hold them or say where they are."""

    tag: int
    kind: int
    amount: int
    value: bytes

    @property
    def length(self) -> int:
        """The length of its values in bytes; they are in `value` if they fit."""
        return UNITS.get(self.kind, 0) * self.amount


class TiffDirectory:
    """The first directory of a TIFF or of an EXIF block. struct.error or KeyError if there is none."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = {b"II": "<", b"MM": ">"}[data[:2]]
        self.big = {42: False, 43: True}[self.number("H", 2)]
        self.word = "Q" if self.big else "I"
        start = self.number(self.word, 8 if self.big else 4)
        first = start + (8 if self.big else 2)
        row = struct.Struct(f"{self.order}HH{self.word}{'8s' if self.big else '4s'}")
        count = min(self.number("Q" if self.big else "H", start), (len(data) - first) // row.size, 65535)
        rows = row.iter_unpack(data[first : first + count * row.size])
        # The first one of a tag counts, as in libtiff.
        self.entries = {entry.tag: entry for entry in reversed([*map(TiffTag._make, rows)])}

    def number(self, code: str, where: int) -> int:
        return int(struct.unpack_from(self.order + code, self.data, where)[0])

    def first_value(self, tag: int, otherwise: int) -> int:
        """The first, mostly the only, value of a tag that holds whole numbers."""
        entry = self.entries.get(tag)
        if entry is None or not entry.amount or (code := CODES.get(entry.kind)) is None:
            return otherwise
        if entry.length <= len(entry.value):
            return int(struct.unpack_from(self.order + code, entry.value)[0])
        return self.number(code, int(struct.unpack(self.order + self.word, entry.value)[0]))


def read_exif(exif: bytes) -> int:
    """Reads the orientation, 1 to 8, from an EXIF block, with or without its prefix; 1 if it is damaged or has none."""
    try:
        directory = TiffDirectory(exif.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0"))
        value = directory.first_value(ORIENTATION, UPRIGHT)
    except (KeyError, struct.error, OverflowError):
        return UPRIGHT
    return value if 1 <= value <= 8 else UPRIGHT


def read_xmp(xmp: bytes) -> int:
    found = re.search(rb"""tiff:Orientation(?:\s*=\s*["']|>)\s*([1-8])\s*["'<]""", xmp)
    return int(found[1]) if found else UPRIGHT


def read_profile(text: bytes) -> int:
    """Reads the orientation from the "Raw profile type exif" text that ImageMagick writes to PNG: a name, a length,
    hexadecimal digits."""
    digits = b"".join(text[:LONGEST_PROFILE].split(b"\n")[3:])
    try:
        return read_exif(bytes.fromhex(digits[: len(digits) // 2 * 2].decode("ascii")))
    except ValueError:
        return UPRIGHT


TURNING: Final[dict[str, Callable[[bytes], int]]] = {
    "exif": read_exif,
    "Raw profile type exif": read_profile,
    "xmp": read_xmp,
    "XML:com.adobe.xmp": read_xmp,
}


def find_orientation(info: Mapping[Any, Any]) -> int:
    """The orientation, from what Pillow keeps of a file (`Image.info`); EXIF takes precedence over XMP."""
    for key, read in TURNING.items():
        value = info.get(key)
        block = value.encode("utf-8", "replace") if isinstance(value, str) else value
        turned = read(block) if isinstance(block, bytes) else UPRIGHT
        if turned != UPRIGHT:
            return turned
    return UPRIGHT


def strip_tiff(data: bytes) -> tuple[bytes, int, tuple[int, int]]:
    """The first image of a TIFF, with only the tags that its pixels need, its orientation, and its (width, height)."""
    directory = TiffDirectory(data)
    kept, total = list[TiffTag](), 0
    for entry in sorted(directory.entries.values()):
        if entry.tag not in NEEDED or not entry.length or (entry.tag in SINGLE and entry.amount != 1):
            continue
        if entry.length > len(entry.value):
            total += entry.length
            if struct.unpack(directory.order + directory.word, entry.value)[0] + entry.length > len(data):
                raise BadImage(f"damaged TIFF: the values of tag {entry.tag} lie beyond the end of the file")
        kept.append(entry)
    if total > len(data):
        raise BadImage(f"damaged TIFF: its tags claim {total:,} bytes of {len(data):,}")
    size = (directory.first_value(WIDTH, 0), directory.first_value(HEIGHT, 0))
    check_layout(directory, *size)
    turned = directory.first_value(ORIENTATION, UPRIGHT)
    # A new directory at the end of the file. Values stay where they are, so no offset changes.
    order, word, start = directory.order, directory.word, len(data) + len(data) % 2
    rows = [struct.pack(f"{order}HH{word}{len(entry.value)}s", *entry) for entry in kept]
    head = data[: 8 if directory.big else 4] + struct.pack(order + word, start)
    count = struct.pack(order + ("Q" if directory.big else "H"), len(rows))
    parts = [head, data[len(head) :], b"\0" * (start - len(data)), count, *rows, struct.pack(order + word, 0)]
    return b"".join(parts), turned if 1 <= turned <= 8 else UPRIGHT, size


def check_layout(directory: TiffDirectory, width: int, height: int) -> None:
    """Raises BadImage for an unsupported compression, and for blocks whose number or size does not fit the image."""
    packing = directory.first_value(COMPRESSION, 1)
    if packing not in PACKINGS:
        raise BadImage(f"TIFF of a compression that is not read ({packing})")
    across, down = 1, height
    if TILES in directory.entries:
        tile = (directory.first_value(TILE_WIDTH, 0), directory.first_value(TILE_HEIGHT, 0))
        if min(tile) < 1 or tile[0] * tile[1] > max(LARGE_TILE, 4 * width * height):
            raise BadImage(f"damaged TIFF: tiles of {tile[0]} x {tile[1]} in an image of {width} x {height}")
        across, down = -(-width // tile[0]), -(-height // tile[1])
    blocks = max((entry.amount for tag, entry in directory.entries.items() if tag in (STRIPS, TILES)), default=0)
    if blocks > across * down * max(1, directory.first_value(SAMPLES, 1)):
        raise BadImage(f"damaged TIFF: {blocks:,} pieces for an image of {width} x {height}")
    PieceLimit("TIFF", directory.data, 512).step(blocks)  # Pillow lists them, in Python
