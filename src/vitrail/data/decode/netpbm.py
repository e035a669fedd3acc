"""PBM, PGM, PPM and PFM, rewritten as the variety that Pillow decodes in C.

Pillow reads these headers byte by byte, and numbers in text or with an odd maximum value by value, all in Python: a
comment of 20 MB takes ten seconds. Here numpy does it, with the same results.
"""

import re
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.data.decode.bounds import Walk

LONGEST: Final = 1 << 16  # bytes of a header, its comments included
GAP: Final = rb"(?:\s|#[^\r\n]*+[\r\n])++"
NUMBER: Final = GAP + rb"(\d{1,10})"
BITMAP: Final = re.compile(rb"P([14])" + NUMBER * 2 + rb"\s")
PIXMAP: Final = re.compile(rb"P([2356])" + NUMBER * 3 + rb"\s")
FLOATS: Final = re.compile(rb"P(f)" + NUMBER * 2 + GAP + rb"([-+.\deE]{1,10})\s")
COMMENT: Final = re.compile(rb"#[^\r\n]*+")
DIGITS: Final = re.compile(rb"[0-9\s]*+")
LONG_NUMBER: Final = re.compile(rb"\d{11}")


def bare_netpbm(data: bytes) -> tuple[bytes, tuple[int, int]]:
    """The same image as a binary file with a short header, and its (width, height). BadImage where it is cut."""
    head = data[:LONGEST]
    found = BITMAP.match(head) or PIXMAP.match(head) or FLOATS.match(head)
    if found is None:
        raise BadImage(f"damaged PPM: no width and height in its first {len(head):,} bytes")
    magic, body = found[1], data[found.end() :]
    size = (int(found[2]), int(found[3]))
    if min(size) < 1:
        raise BadImage(f"damaged PPM: {size[0]} x {size[1]} pixels")
    if magic == b"f":
        return b"Pf %d %d %s\n" % (*size, found[4]) + body, size
    if magic == b"4":
        return b"P4 %d %d\n" % size + body, size
    if magic == b"1":
        return b"P4 %d %d\n" % size + packed_bits(body, size), size
    return rescaled(int(magic), size, int(found[4]), body), size


def rescaled(kind: int, size: tuple[int, int], most: int, body: bytes) -> bytes:
    """Grey or colour with a maximum of 255, or grey with one of 65535."""
    if not 0 < most < 65536:
        raise BadImage(f"damaged PPM: its largest value is {most}; it lies between 1 and 65535")
    grey = kind in (2, 5)
    ours = 65535 if grey and most > 255 else 255
    head = b"P%d %d %d %d\n" % (5 if grey else 6, *size, ours)
    count = size[0] * size[1] * (1 if grey else 3)
    if kind in (5, 6):
        if most == ours:
            return head + body
        values = binary_values(body, count, ">u2" if most > 255 else "u1")
    else:
        values = text_values(body, count)
        if int(values.max()) > most:
            raise BadImage(f"damaged PPM: a value of {int(values.max())} where {most} is the largest")
    table = np.rint(np.arange(most + 1) / most * ours).astype(">u2" if ours == 65535 else "u1")
    return head + table[np.minimum(values, most)].tobytes()


def binary_values(body: bytes, count: int, kind: Literal[">u2", "u1"]) -> "NDArray[np.generic]":
    length = count * np.dtype(kind).itemsize
    if len(body) < length:
        raise BadImage(f"truncated PPM: {length - len(body):,} bytes are missing")
    return np.frombuffer(body, kind, count)


def text_values(body: bytes, count: int) -> "NDArray[np.int64]":
    """Numbers in text, with comments between them."""
    if len(body) < 2 * count - 1:
        raise BadImage("truncated PPM: it ends before its pixels do")
    text = without_comments(body)
    if DIGITS.fullmatch(text) is None:
        raise BadImage("damaged PPM: something other than numbers is among its pixels")
    if LONG_NUMBER.search(text):
        raise BadImage("damaged PPM: a number of more than ten digits is among its pixels")
    values = np.fromstring(text, np.int64, count, sep=" ") if text.strip() else np.empty(0, np.int64)
    if values.size < count:
        raise BadImage("truncated PPM: it ends before its pixels do")
    return values


def packed_bits(body: bytes, size: tuple[int, int]) -> bytes:
    """Zeros and ones in text, with or without space between them, eight to a byte."""
    width, height = size
    bits = without_comments(body).translate(None, b" \t\n\r\v\f")[: width * height]
    if len(bits) < width * height:
        raise BadImage("truncated PPM: it ends before its pixels do")
    if bits.translate(None, b"01"):
        raise BadImage("damaged PPM: something other than 0 and 1 is among its pixels")
    rows = np.frombuffer(bits, np.uint8).reshape(height, width) == ord("1")
    return np.packbits(rows, axis=1).tobytes()


def without_comments(body: bytes) -> bytes:
    Walk("PPM", body).step(body.count(b"#"))
    return COMMENT.sub(b" ", body) if b"#" in body else body
