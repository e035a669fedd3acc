"""MATLAB's .mat files of version 5: arrays of numbers, text and structures. No more than the data sets here need.

A file is a header of 128 bytes and a row of elements: a tag (type and length), the bytes, and filling up to eight. A
matrix is an element of elements: flags, dimensions, name, values. Compressed elements are zlib streams that hold one
element. Every length is checked against what is there, so that a damaged file gives DataError and nothing else.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, reason_of

MATRIX: Final = 14
COMPRESSED: Final = 15
TEXT: Final = {16: "utf-8", 17: "utf-16", 18: "utf-32"}
NUMBERS: Final = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES: Final = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
STRUCTURE, CHARACTERS = 2, 4
COMPLEX: Final = 0x08
DEEPEST: Final = 8
MOST: Final = 4 * 2**30  # bytes of an unpacked element; the largest of the sets here has 1.6 GB


Order = Literal["<", ">"]


class Malformed(Exception):
    """A file that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Elements in a piece of memory, in the byte order of the file."""

    data: memoryview
    order: Order

    def number(self, at: int) -> int:
        if at + 4 > len(self.data):
            raise Malformed("cut short")
        return struct.unpack_from(f"{self.order}I", self.data, at)[0]

    def elements(self) -> Iterator[tuple[int, memoryview]]:
        """Type and bytes of each."""
        at = 0
        while at < len(self.data):
            first = self.number(at)
            if first >> 16:  # four bytes or fewer lie in the tag itself
                kind, length, start, end = first & 0xFFFF, first >> 16, at + 4, at + 8
                if length > 4:
                    raise Malformed(f"an element of {length} bytes in four")
            else:
                kind, length, start = first, self.number(at + 4), at + 8
                end = start + (length if kind == COMPRESSED else -(-length // 8) * 8)
            if start + length > len(self.data):
                raise Malformed("cut short")
            yield kind, self.data[start : start + length]
            at = end

    def inflated(self, data: memoryview) -> "Reader":
        """What a compressed element holds; not a byte more than it says."""
        stream = zlib.decompressobj()
        head = stream.decompress(data, 8)
        if len(head) < 8:
            raise Malformed("cut short")
        length = Reader(memoryview(head), self.order).number(4)
        if length > MOST:
            raise Malformed(f"an element of {length:,} bytes")
        body = stream.decompress(stream.unconsumed_tail, length) if length else b""
        if len(body) < length:
            raise Malformed("cut short")
        return Reader(memoryview(head + body), self.order)


def read_mat(path: Path, *names: str) -> dict[str, Any]:
    """The variables of these names, numbers as arrays (Fortran order kept), text as str, structures as lists of dicts.

    DataError where one is missing or the file is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    try:
        order: Order | None = "<" if data[126:128] == b"IM" else ">" if data[126:128] == b"MI" else None
        if len(data) < 128 or order is None or data[:6] == b"\x89HDF\r\n":
            raise Malformed("no .mat file of version 5")
        found = dict(variables(Reader(memoryview(data)[128:], order), set(names)))
    except (Malformed, zlib.error, struct.error, ValueError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        raise DataError(f"{path} is damaged or no MATLAB file ({reason_of(error)}); download it again") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{path} holds no variable {missing[0]!r}; it holds {', '.join(found) or 'none'}")
    return found


def variables(reader: Reader, wanted: set[str]) -> Iterator[tuple[str, Any]]:
    for kind, data in reader.elements():
        inner = reader.inflated(data) if kind == COMPRESSED else None
        for held, body in inner.elements() if inner else [(kind, data)]:
            if held == MATRIX and len(body):
                name, value = matrix(Reader(body, reader.order), wanted, 0)
                if name in wanted:
                    yield name, value


def matrix(reader: Reader, wanted: set[str] | None, depth: int) -> tuple[str, Any]:
    """Name and value. `wanted` None: whatever it is called."""
    if depth > DEEPEST:
        raise Malformed("structures nest too deep")
    parts = reader.elements()
    flags = part(parts)
    shape = tuple(int(n) for n in values(part(parts), reader.order))
    name = bytes(part(parts)[1]).decode("latin-1")
    if len(flags[1]) < 8 or len(shape) < 2 or min(shape) < 0:
        raise Malformed("no matrix")
    if wanted is not None and name not in wanted:
        return name, None
    word = struct.unpack_from(f"{reader.order}I", flags[1])[0]
    kind, flag = word & 0xFF, word >> 8 & 0xFF
    if kind in CLASSES and not flag & COMPLEX:
        read = values(part(parts), reader.order)
        if read.size != prod(shape):
            raise Malformed(f"{read.size} values for {' x '.join(map(str, shape))}")
        return name, read.astype(CLASSES[kind], copy=False).reshape(shape, order="F")
    if kind == CHARACTERS:
        return name, text(next(parts, (1, memoryview(b""))), reader.order)
    if kind == STRUCTURE:
        return name, structures(parts, prod(shape), reader.order, depth)
    raise Malformed(f"a variable of class {kind}, which no data set here has")


def structures(parts: Iterator[tuple[int, memoryview]], count: int, order: Order, depth: int) -> list[dict[str, Any]]:
    widths = values(part(parts), order)
    labels = bytes(part(parts)[1])
    width = int(widths[0]) if widths.size == 1 else 0
    if width < 1 or len(labels) % width or count > 1_000_000:
        raise Malformed("no structure")
    fields = [labels[i : i + width].partition(b"\0")[0].decode("latin-1") for i in range(0, len(labels), width)]
    made: list[dict[str, Any]] = []
    for _ in range(count):
        one: dict[str, Any] = {}
        for field in fields:
            kind, body = part(parts)
            if kind != MATRIX:
                raise Malformed("no structure")
            one[field] = matrix(Reader(body, order), None, depth + 1)[1] if len(body) else None
        made.append(one)
    return made


def part(parts: Iterator[tuple[int, memoryview]]) -> tuple[int, memoryview]:
    found = next(parts, None)
    if found is None:
        raise Malformed("cut short")
    return found


def values(element: tuple[int, memoryview], order: Order) -> NDArray[Any]:
    kind, data = element
    if kind not in NUMBERS:
        raise Malformed(f"numbers of type {kind}")
    return np.frombuffer(data, np.dtype(NUMBERS[kind]).newbyteorder(order))


def text(element: tuple[int, memoryview], order: Order) -> str:
    kind, data = element
    if kind in TEXT:
        ending = "" if kind == 16 else "-le" if order == "<" else "-be"
        return bytes(data).decode(TEXT[kind] + ending)
    return "".join(map(chr, values(element, order)))
