"""A file made of millions of pieces that hold nothing is refused, or read, within a bounded number of steps."""

import io
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.decode import hostile
from tests.data.decode.hostile import chunk, photo, pixels, saved, tiff
from vitrail.core.errors import BadImage
from vitrail.data.decode.exif_tiff import FREE
from vitrail.data.decode.image import EncodedImage

PHOTO = photo()
MANY = 150_000  # pieces: as many steps as this are far too many
STEPS = 500_000  # lines of Python, ours and Pillow's, for any of the files below


class TooMany(BaseException):
    """Is caught by nobody on the way."""


def steps(work: Callable[[], object]) -> int:
    """Lines of Python that some work takes; TooMany where it takes more than STEPS."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        del frame, arg
        count += event == "line"
        if count > STEPS:
            raise TooMany
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def behind_start(content: bytes, piece: bytes, at: int) -> bytes:
    return content[:at] + piece * MANY + content[at:]


def with_runs(body: bytes) -> bytes:
    return hostile.bmp(2000, 2000, bits=8, packing=1, body=body)


@cache
def files() -> dict[str, bytes]:
    jpeg, png, gif = saved(PHOTO, "JPEG"), saved(PHOTO, "PNG"), saved(Image.fromarray(PHOTO).quantize(64), "GIF")
    first = gif.index(b"\x2c", 13 + 3 * 64)
    text = chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\n\n\n" + b"4" * 60_000))
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 5000) + struct.pack("<HHII", 1, 4, 1, 0) * 5000
    tagged = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    webp = saved(PHOTO, "WEBP", exif=hostile.exif(3))
    strips = {256: (4, [1]), 257: (4, [MANY]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1])}
    return {
        "ppm comment": b"P6\n#" + b"a" * MANY + b"\n32 24 255\n" + PHOTO.tobytes(),
        "ppm spaces": b"P6" + b" " * MANY + b"32 24 255\n" + PHOTO.tobytes(),
        "ppm comments among pixels": b"P2 4 4 255\n" + b"#\n" * MANY + b"1 " * 16,
        "ppm numbers in text": b"P2 500 500 255\n" + b"1 " * 250_000,
        "ppm bits in text": b"P1 500 500\n" + b"1" * 250_000,
        "ppm of an odd maximum": b"P5 500 500 200\n" + b"1" * 250_000,
        "jpeg segments": behind_start(jpeg, b"\xff\xe2\0\2", 2),
        "jpeg fill": behind_start(jpeg, b"\xff", 2),
        "jpeg stuffing": behind_start(jpeg, b"\xff\0", 2),
        "jpeg tables": jpeg[:2] + (b"\xff\xdb\xff\xff" + (b"\0" + b"\1" * 64) * 1008 + b"\0" * 13) * 40 + jpeg[2:],
        "jpeg exif": jpeg[:2] + tagged * 200 + jpeg[2:],
        "png empty pixels": behind_start(png, chunk(b"IDAT", b""), png.index(b"IDAT") - 4),
        "png unknown chunks": behind_start(png, chunk(b"aaAa", b""), 33),
        "png texts": png[:33] + text * 500 + png[33:],
        "png behind its end": png + chunk(b"aaAa", b"") * MANY,
        "gif blocks": gif[:first] + b"\x21\xfe" + b"\1a" * MANY + b"\0" + gif[first:],
        "gif zeros": behind_start(gif, b"\0", first),
        "webp chunks": b"RIFF" + struct.pack("<I", len(webp) - 8 + 8 * MANY) + webp[8:] + b"aaaa\0\0\0\0" * MANY,
        "tiff strips": tiff({**strips, 273: (4, [8] * MANY), 278: (4, [1])}, b"\0" * 64),
        "bmp deltas": with_runs(b"\0\2\0\0" * 600_000),
        "bmp runs": hostile.bmp(4000, 4000, bits=4, packing=2, body=b"\xff\x12" * 70_000),
    }


@pytest.mark.parametrize("kind", sorted(files()))
def test_a_bounded_number_of_steps(kind: str) -> None:
    content = files()[kind]

    def read() -> None:
        with suppress(BadImage):
            EncodedImage(content).rgb()

    assert steps(read) < STEPS


@pytest.mark.parametrize("kind", ["ppm comment", "jpeg segments", "png empty pixels", "gif blocks", "webp chunks"])
def test_what_is_made_to_take_long_is_refused(kind: str) -> None:
    with pytest.raises(BadImage):
        EncodedImage(files()[kind])


@pytest.mark.slow
def test_an_honest_file_may_have_many_pieces() -> None:
    png, jpeg = saved(PHOTO, "PNG"), saved(PHOTO, "JPEG")
    at = png.index(b"IDAT") - 4
    end = at + 12 + int.from_bytes(png[at : at + 4])
    apart = b"".join(chunk(b"IDAT", png[i : i + 1]) for i in range(at + 8, end - 4))
    assert np.array_equal(pixels(png[:at] + apart + png[end:]), PHOTO)
    assert FREE >= 10_000
    profile = b"\xff\xe2\xff\xff" + b"p" * 65533
    assert np.array_equal(pixels(jpeg[:2] + profile * 255 + jpeg[2:]), pixels(jpeg))
    # Chunks of the usual 8 kB, however many
    large = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), dtype=np.uint8)
    assert np.array_equal(pixels(saved(large, "PNG", compress_level=0)), large)


def random_of(kind: str, shape: tuple[int, ...], most: int) -> tuple[bytes, bytes]:
    """The same values in text and in bytes."""
    values = np.random.default_rng(7).integers(0, most + 1, shape)
    text = b"# by hand\n" + " ".join(map(str, values.flat)).encode() + b"\n# the end"
    raw = values.astype(">u2" if most > 255 else "u1").tobytes()
    head = f" {shape[1]}\n# wide\n{shape[0]} {most}\n".encode()
    plain, binary = {"grey": (b"P2", b"P5"), "colour": (b"P3", b"P6")}[kind]
    return plain + head + text, binary + head + raw


@pytest.mark.parametrize("most", [1, 7, 255, 300, 4095, 65535])
@pytest.mark.parametrize("kind", ["grey", "colour"])
def test_netpbm_as_pillow_reads_it(kind: str, most: int) -> None:
    """What is read by numpy is what Pillow reads value by value; text and bytes agree."""
    for content in random_of(kind, (13, 9) if kind == "grey" else (13, 9, 3), most):
        with Image.open(io.BytesIO(content)) as image:
            expected = np.asarray(image)
        ours = np.asarray(EncodedImage(content).image)
        assert ours.dtype == expected.dtype
        assert np.array_equal(ours, expected)


def test_netpbm_bits_as_pillow_reads_them() -> None:
    rows = b"10110\n01 1 0 1\n# half\n11111 00000"
    content = b"P1\n5 4\n" + rows
    with Image.open(io.BytesIO(content)) as image:
        assert np.array_equal(np.asarray(EncodedImage(content).image), np.asarray(image))


@pytest.mark.parametrize(
    "content",
    [
        b"P2 2 2 255\n1 2 3",
        b"P2 2 2 255\n1 2 3 x",
        b"P2 2 2 255\n1 2 3 256",
        b"P2 2 2 255\n1 2 3 -4",
        b"P2 2 2 255\n1 2 3 99999999999999999999",
        b"P2 2 2 255\n",
        b"P2 2 2 255\n" + b" " * 9,
        b"P1 2 2\n1 0 1",
        b"P1 2 2\n1 0 1 2",
        b"P5 2 2 200\n123",
        b"P5 0 2 255\n",
        b"P5 2 2 0\n1234",
        b"P5 2 2 70000\n12345678",
        b"Pf 2 2 x\n" + b"\0" * 16,
        b"Pf 2 2 0\n" + b"\0" * 16,
        b"P6 2",
    ],
)
def test_damaged_netpbm(content: bytes) -> None:
    with pytest.raises(BadImage) as caught:
        pixels(content)
    words = str(caught.value)
    assert words.isprintable()
    assert not any(theirs in words for theirs in ("unpack", "invalid literal", "Error", "convert", "buffer", "index"))
