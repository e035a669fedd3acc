"""Files of every kind a loader meets: sound ones in odd modes, and those made or come to do harm."""

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from vitrail.data.decode.image import EncodedImage

Values = Sequence[int]


def photo(height: int = 24, width: int = 32) -> NDArray[np.uint8]:
    """Smooth colours with an edge, different in every corner: a turned or mirrored image is another one."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x // max(1, width - 1), 255 * y // max(1, height - 1)
    blue = np.where(x + y > (height + width) // 2, 200, 30)
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def saved(image: "Image.Image | NDArray[Any]", kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(out, kind, **options)
    return out.getvalue()


def pixels(data: "bytes | NDArray[Any]", scale: int = 1) -> NDArray[np.uint8]:
    """What the reader makes of a file; its size must be the one announced."""
    picture = EncodedImage(data)
    image = picture.rgb(scale)
    assert image.mode == "RGB"
    if scale == 1:
        assert picture.size == (image.height, image.width)
    return np.asarray(image)


def exif(orientation: int, order: str = "<", prefix: bytes = b"Exif\0\0") -> bytes:
    """An EXIF block with the one tag."""
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8)
    return prefix + head + struct.pack(order + "HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    """A JPEG with more segments right behind its first marker."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, rows: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG by hand: `rows` unpacked, each with its filter byte; `extra` chunks before the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    found, at = list[tuple[bytes, bytes]](), 8
    while at < len(content):
        length = int.from_bytes(content[at : at + 4])
        found.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def tiff(tags: Mapping[int, "tuple[int, Values]"], body: bytes = b"", order: str = "<") -> bytes:
    """A TIFF by hand: `tags` give type and values; `body` lies at byte 8, the directory behind it."""
    codes = {1: "B", 3: "H", 4: "I", 12: "d"}
    start = 8 + len(body) + len(body) % 2
    behind = start + 2 + 12 * len(tags) + 4
    rows, values = b"", b""
    for tag, (kind, numbers) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(numbers)}{codes[kind]}", *numbers)
        if len(packed) > 4:
            packed, values = struct.pack(order + "I", behind + len(values)), values + packed
        rows += struct.pack(order + "HHI", tag, kind, len(numbers)) + packed.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, start)
    directory = struct.pack(order + "H", len(tags)) + rows + struct.pack(order + "I", 0)
    return head + body + b"\0" * (len(body) % 2) + directory + values


def tiff_of(pixels: "NDArray[Any]", order: str = "<", more: "Mapping[int, tuple[int, Values]] | None" = None) -> bytes:
    """One channel of any type, uncompressed, in either byte order."""
    body = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    form = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    height, width = pixels.shape
    tags: dict[int, tuple[int, Values]] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [8 * pixels.dtype.itemsize]),
        259: (3, [1]),
        262: (3, [1]),
        273: (4, [8]),
        277: (3, [1]),
        278: (4, [height]),
        279: (4, [len(body)]),
        339: (3, [form]),
    }
    return tiff({**tags, **(more or {})}, body, order)


def bmp(width: int, height: int, *, bits: int = 24, packing: int = 0, body: bytes = b"") -> bytes:
    """A BMP by hand; packing 1 is run-length coded, with a palette of 256 colours."""
    palette = b"".join(bytes([i, 255 - i, i // 2, 0]) for i in range(256)) if bits == 8 else b""
    start = 54 + len(palette)
    head = struct.pack("<2sIHHI", b"BM", start + len(body), 0, 0, start)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, packing, len(body), 0, 0, 0, 0)
    return head + info + palette + body


def gif(width: int, height: int, *, frame: "tuple[int, int, int, int] | None" = None, disposal: int = 0) -> bytes:
    """A GIF by hand whose pixels end at once."""
    control = struct.pack("<BBBBHBB", 0x21, 0xF9, 4, disposal << 2, 0, 0, 0)
    box = struct.pack("<BHHHHB", 0x2C, *(frame or (0, 0, width, height)), 0)
    return struct.pack("<6sHHBBB", b"GIF89a", width, height, 0, 0, 0) + control + box + b"\x02\x02\x4c\x01\x00;"


def riff(*parts: tuple[bytes, bytes]) -> bytes:
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in parts
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, flags: int = 0) -> tuple[bytes, bytes]:
    body = struct.pack("<I", flags) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"VP8X", body


def lossless_webp(width: int, height: int) -> bytes:
    """A whole image of one colour, whatever its size, in 40 bytes or so."""
    content = bytearray(saved(Image.new("RGB", (5, 5)), "WEBP", lossless=True))
    bits = int.from_bytes(content[21:25], "little") & ~0xFFFFFFF
    content[21:25] = (bits | (width - 1) | (height - 1) << 14).to_bytes(4, "little")
    return bytes(content)


def jpeg_header(width: int, height: int) -> bytes:
    """A JPEG that claims a size, with the tables of a real one and next to no pixels."""
    content = saved(photo(), "JPEG")
    frame = content.index(b"\xff\xc0")
    return content[: frame + 5] + struct.pack(">HH", height, width) + content[frame + 9 : -100]


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    content = saved(photo(64, 64), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * count + content[-2:]


def animated(kind: str, frames: int = 3, **options: Any) -> bytes:
    """The photograph, then other images."""
    images = [Image.fromarray(np.roll(photo(), 5 * i, axis=1)) for i in range(frames)]
    images = [image.quantize(64) for image in images] if kind == "GIF" else images
    return saved(images[0], kind, save_all=True, append_images=images[1:], duration=50, **options)


def frame_count(content: bytes) -> int:
    with Image.open(io.BytesIO(content)) as image:
        return sum(1 for _ in ImageSequence.Iterator(image))


@cache
def bombs() -> dict[str, bytes]:
    """Small files that claim, or unpack to, gigabytes."""
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * (1 << 20)))
    profile = chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * (60 << 20), 1))
    strips = {256: (4, [10]), 257: (4, [10]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1])}
    return {
        "png": png(60000, 60000),
        "png under the limit": png(13000, 13000),
        "png of texts": png(60000, 60000, extra=text * 60),
        "png of a profile": png(60000, 60000, extra=profile),
        "gif": gif(65535, 65535),
        "gif by its frame": gif(10, 10, frame=(60000, 60000, 5000, 5000), disposal=2),
        "gif by its frame, where Pillow warns": gif(10, 10, frame=(0, 0, 11000, 11000), disposal=2),
        "gif under the limit": gif(13000, 13000, disposal=2),
        "jpeg": jpeg_header(65500, 65500),
        "jpeg under the limit": jpeg_header(13000, 13000),
        "webp": riff(webp_canvas(1 << 24, 1 << 24), (b"VP8L", b"\x2f" + b"\0" * 20)),
        "webp under the limit": riff(webp_canvas(13000, 13000), (b"VP8L", b"\x2f" + b"\0" * 20)),
        "webp lossless": lossless_webp(12000, 12000),
        "bmp": bmp(65536, 65536),
        "bmp packed": bmp(40000, 4000, bits=8, packing=1, body=b"\x01\x01\0\0" * 20000),
        "ppm": b"P6 100000 100000 255\n" + b"\0" * 100,
        "ppm under the limit": b"P6 13000 13000 255\n" + b"\0" * 100,
        "pgm text": b"P2 100000 100000 255\n1 2 3",
        "tiff": tiff_of(np.zeros((2, 2), np.uint8), more={256: (4, [1 << 20]), 257: (4, [1 << 20])}),
        "tiff of a tile": tiff(
            {**strips, 322: (4, [40000]), 323: (4, [40000]), 324: (4, [8]), 325: (4, [4])}, b"\0" * 64
        ),
        "tiff of strips": tiff({**strips, 273: (4, [8] * 200_000), 278: (4, [1])}, b"\0" * 64),
        "tiff of a tag": tiff({**strips, 273: (4, [8]), 320: (3, [0] * 8)}, b"\0" * 64).replace(
            struct.pack("<HHI", 320, 3, 8), struct.pack("<HHI", 320, 3, 1 << 31)
        ),
    }


@cache
def no_pictures() -> dict[str, tuple[bytes, str]]:
    """What lies in image folders under an image's name, and what a person should read about it."""
    return {
        "empty": (b"", "empty file"),
        "zeros": (b"\0" * 5000, "all of its 5,000 bytes are zero"),
        "html": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "starts with '<!DOCTYPE html>'"),
        "text": (b"this is not an image", "starts with 'this is not an image'"),
        "noise": (bytes(range(200, 256)), "starts with the bytes c8 c9 ca"),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript, which is not read"),
        "dos eps": (b"\xc5\xd0\xd3\xc6" + b"\0" * 60, "EPS, which is not read"),
        "pdf": (b"%PDF-1.7\n", "PDF"),
        "zip": (b"PK\x03\x04" + b"\0" * 40, "a zip archive"),
        "avif": (b"\0\0\0\x20ftypavif" + b"\0" * 40, "damaged AVIF"),
        "heic": (b"\0\0\0\x20ftypheic" + b"\0" * 40, "HEIC"),
        "film": (b"\0\0\0\x20ftypisom" + b"\0" * 40, "a film"),
        "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0" * 40, "JPEG 2000"),
        "stump": (b"\xff\xd8", "the stump of a JPEG"),
        "psd": (b"8BPS\0\1" + b"\0" * 40, "Photoshop"),
    }


@cache
def samples() -> dict[str, bytes]:
    """Sound files of every format in every variety that its decoder has a path of its own for."""
    pixels, image = photo(), Image.fromarray(photo())
    grey16 = (pixels[:, :, 0].astype(np.uint16) << 8) + 7
    rle = b"".join(bytes([32, 7 * y % 256, 0, 0]) for y in range(24)) + b"\0\1"
    return {
        "jpeg": saved(pixels, "JPEG", exif=exif(6)),
        "jpeg grey": saved(image.convert("L"), "JPEG"),
        "jpeg cmyk": saved(image.convert("CMYK"), "JPEG"),
        "jpeg progressive": saved(pixels, "JPEG", progressive=True, subsampling=0),
        "jpeg mpo": saved(image, "MPO", save_all=True, append_images=[image.rotate(90)]),
        "png": saved(pixels, "PNG", exif=exif(8)),
        "png grey 16": saved(grey16, "PNG"),
        "png palette": saved(image.quantize(200), "PNG", transparency=bytes(range(200))),
        "png one bit": saved(image.convert("1"), "PNG"),
        "png alpha": saved(image.convert("RGBA"), "PNG"),
        "png animated": animated("PNG"),
        "gif": saved(image.quantize(64), "GIF", transparency=3, interlace=1),
        "gif animated": animated("GIF"),
        "webp": saved(pixels, "WEBP", exif=exif(3)),
        "webp lossless": saved(image.convert("RGBA"), "WEBP", lossless=True),
        "webp animated": animated("WEBP"),
        "bmp": saved(pixels, "BMP"),
        "bmp palette": saved(image.quantize(64), "BMP"),
        "bmp packed": bmp(32, 24, bits=8, packing=1, body=rle),
        "tiff": saved(pixels, "TIFF"),
        "tiff lzw": saved(pixels, "TIFF", compression="tiff_lzw"),
        "tiff deflate": saved(pixels, "TIFF", compression="tiff_adobe_deflate"),
        "tiff jpeg": saved(pixels, "TIFF", compression="jpeg"),
        "tiff fax": saved(image.convert("1"), "TIFF", compression="group4"),
        "tiff 16 big": tiff_of(grey16, ">", {0x0112: (3, [5])}),
        "tiff float": tiff_of(pixels[:, :, 0].astype(np.float32) / 255),
        "tiff int": tiff_of(pixels[:, :, 0].astype(np.int32) - 100),
        "ppm": saved(pixels, "PPM"),
        "pgm 12 bits": b"P5 32 24 4095\n" + (grey16 >> 4).astype(">u2").tobytes(),
        "pgm text": b"P2\n# made by hand\n32 24\n255\n" + " ".join(map(str, pixels[:, :, 0].flat)).encode(),
        "pfm": b"Pf\n32 24\n-1.0\n" + (pixels[:, :, 0].astype("<f4") / 255).tobytes(),
    }
