"""TensorFlow's record files of `Example`s, read without TensorFlow: the framing and as much protobuf as that takes.

A record is its length in eight bytes, a checksum of these, the bytes and a checksum of those. An Example is a map from
names to lists of byte strings, floats or integers. Lengths are checked at every level, so that a damaged file gives
DataError and nothing else.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from vitrail.core.errors import DataError

MOST: Final = 256 * 2**20  # bytes of a record
HEAD: Final = struct.Struct("<QI")


class Malformed(Exception):
    """Bytes that are no Example."""


@cache
def crc_table() -> tuple[int, ...]:
    """Of CRC-32C, a byte at a time."""
    out: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        out.append(value)
    return tuple(out)


def masked_crc(data: bytes) -> int:
    """CRC-32C as record files keep it."""
    crc, rows = 0xFFFFFFFF, crc_table()
    for byte in data:
        crc = rows[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each record's bytes begin, and the bytes. The checksum of each length is checked: pictures check theirs."""
    with path.open("rb") as file:
        at = 0
        while head := file.read(HEAD.size):
            if len(head) < HEAD.size:
                raise DataError(f"{path} is cut short at byte {at:,}; download it again")
            length, checksum = HEAD.unpack(head)
            if checksum != masked_crc(head[:8]) or length > MOST:
                raise DataError(
                    f"{path} is damaged at byte {at:,}, or no record file: a length does not fit its checksum"
                )
            data = file.read(length)
            if len(data) < length or len(file.read(4)) < 4:
                raise DataError(f"{path} is cut short at byte {at:,}; download it again")
            yield at + HEAD.size, data
            at += HEAD.size + length + 4


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise Malformed("a number without an end")


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field with a length; others are passed over, except that a single integer comes
    as (number, value, -1)."""
    at = start
    while at < end:
        key, at = varint(data, at, end)
        match key & 7:
            case 0:
                value, at = varint(data, at, end)
                yield key >> 3, value, -1
            case 1:
                at += 8
            case 2:
                length, at = varint(data, at, end)
                if length > end - at:
                    raise Malformed("a field beyond the end")
                yield key >> 3, at, at + length
                at += length
            case 5:
                at += 4
            case other:
                raise Malformed(f"a field of type {other}")
    if at > end:
        raise Malformed("a field beyond the end")


def example(data: bytes) -> dict[str, tuple[int, int] | int]:
    """The first value of each feature: a byte string as (start, end) in `data`, an integer as itself; floats are not
    needed here and left out."""
    found: dict[str, tuple[int, int] | int] = {}
    for features in (part for part in fields(data, 0, len(data)) if part[0] == 1):
        for _, start, end in (part for part in fields(data, features[1], features[2]) if part[0] == 1):
            name, value = "", None
            for number, first, last in fields(data, start, end):
                if number == 1:
                    name = data[first:last].decode("utf-8", "replace")
                elif number == 2:
                    value = first_value(data, first, last)
            if value is not None:
                found[name] = value
    return found


def first_value(data: bytes, start: int, end: int) -> tuple[int, int] | int | None:
    """Of a Feature: its list of byte strings (1) or of integers (3), packed or not."""
    for kind, first, last in fields(data, start, end):
        if last < 0:
            raise Malformed("a list that is a number")
        for number, begin, stop in fields(data, first, last):
            if number != 1:
                continue
            if kind == 1 and stop >= 0:
                return begin, stop
            if kind == 3:
                return begin if stop < 0 else varint(data, begin, stop)[0]
    return None
