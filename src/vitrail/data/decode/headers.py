"""Image headers, read before any decoder runs: format, size and orientation.

The decoder then gets only what the pixels need. EXIF, profiles, texts, thumbnails and further frames are removed, so
that they cannot cause errors or warnings, or take memory or time.

PBM, PGM, PPM and PFM are rewritten as the variant that Pillow decodes in C. It reads their headers byte by byte in
Python, and pixels in text or with an unusual maximum value by value, so that a comment of 20 MB would take ten seconds.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.data.decode.exif_tiff import UPRIGHT, PieceLimit, read_exif, read_profile, read_xmp, strip_tiff
from vitrail.data.decode.heif import detect_brand, strip_heif

LONGEST: Final = 1 << 16  # bytes of a header, its comments included
GAP: Final = rb"(?:\s|#[^\r\n]*+[\r\n])++"
NUMBER: Final = GAP + rb"(\d{1,10})"
BITMAP: Final = re.compile(rb"P([14])" + NUMBER * 2 + rb"\s")
PIXMAP: Final = re.compile(rb"P([2356])" + NUMBER * 3 + rb"\s")
FLOATS: Final = re.compile(rb"P(f)" + NUMBER * 2 + GAP + rb"([-+.\deE]{1,10})\s")
COMMENT: Final = re.compile(rb"#[^\r\n]*+")
DIGITS: Final = re.compile(rb"[0-9\s]*+")
LONG_NUMBER: Final = re.compile(rb"\d{11}")


def strip_netpbm(data: bytes) -> tuple[bytes, int, tuple[int, int]]:
    """The same image as a binary file with a short header, its orientation and (width, height). BadImage if it is
    truncated."""
    head = data[:LONGEST]
    found = BITMAP.match(head) or PIXMAP.match(head) or FLOATS.match(head)
    if found is None:
        raise BadImage(f"damaged PPM: no width and height in its first {len(head):,} bytes")
    magic, body = found[1], data[found.end() :]
    size = (int(found[2]), int(found[3]))
    if min(size) < 1:
        raise BadImage(f"damaged PPM: {size[0]} x {size[1]} pixels")
    if magic == b"f":
        content = b"Pf %d %d %s\n" % (*size, found[4]) + body
    elif magic in b"14":
        content = b"P4 %d %d\n" % size + (body if magic == b"4" else pack_bits(body, size))
    else:
        content = rescale_values(int(magic), size, int(found[4]), body)
    return content, UPRIGHT, size


def rescale_values(kind: int, size: tuple[int, int], most: int, body: bytes) -> bytes:
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
        kind_of_value = np.dtype(">u2" if most > 255 else "u1")
        if len(body) < (length := count * kind_of_value.itemsize):
            raise BadImage(f"truncated PPM: {length - len(body):,} bytes are missing")
        values = np.frombuffer(body, kind_of_value, count)
    else:
        values = text_values(body, count)
        if int(values.max()) > most:
            raise BadImage(f"damaged PPM: a value of {int(values.max())} where {most} is the largest")
    table = np.rint(np.arange(most + 1) / most * ours).astype(">u2" if ours == 65535 else "u1")
    return head + table[np.minimum(values, most)].tobytes()


def text_values(body: bytes, count: int) -> "NDArray[np.int64]":
    """Numbers in text, with comments between them."""
    if len(body) < 2 * count - 1:
        raise BadImage("truncated PPM: it ends before its pixels do")
    text = drop_comments(body)
    if DIGITS.fullmatch(text) is None:
        raise BadImage("damaged PPM: something other than numbers is among its pixels")
    if LONG_NUMBER.search(text):
        raise BadImage("damaged PPM: a number of more than ten digits is among its pixels")
    values = np.fromstring(text, np.int64, count, sep=" ") if text.strip() else np.empty(0, np.int64)
    if values.size < count:
        raise BadImage("truncated PPM: it ends before its pixels do")
    return values


def pack_bits(body: bytes, size: tuple[int, int]) -> bytes:
    """Zeros and ones in text, with or without space between them, eight to a byte."""
    width, height = size
    bits = drop_comments(body).translate(None, b" \t\n\r\v\f")[: width * height]
    if len(bits) < width * height:
        raise BadImage("truncated PPM: it ends before its pixels do")
    if bits.translate(None, b"01"):
        raise BadImage("damaged PPM: something other than 0 and 1 is among its pixels")
    rows = np.frombuffer(bits, np.uint8).reshape(height, width) == ord("1")
    return np.packbits(rows, axis=1).tobytes()


def drop_comments(body: bytes) -> bytes:
    PieceLimit("PPM", body).step(body.count(b"#"))
    return COMMENT.sub(b" ", body) if b"#" in body else body


# JPEG includes MPO, the stereo and phone cameras' JPEG with further images behind the first. JPEG 2000 is not read:
# image collections do not come in it, and its decoder allocates by what a stream says as it goes, so that a bomb cannot
# be refused from the header.
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIC")
MAGIC: Final = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
}
OTHERS: Final = {
    "PostScript": (b"%!PS",),
    "EPS": (b"\xc5\xd0\xd3\xc6",),
    "PDF": (b"%PDF",),
    "Photoshop": (b"8BPS",),
    "a zip archive": (b"PK\x03\x04",),
    "gzip": (b"\x1f\x8b",),
    "JPEG 2000": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\xff\x0a", b"\0\0\0\x0cJXL "),
    "SVG": (b"<svg",),
    "a Windows icon": (b"\0\0\1\0",),
    "the stump of a JPEG": (b"\xff\xd8",),
    "a PNG that was altered as text, or a stump of one": (b"\x89PNG",),
}
BRANDS: Final = {b"mif1": "HEIF of a coding that is not HEVC or AV1", b"crx ": "a raw photograph (CR3)"}
SCAN: Final = 0xDA
FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
KEPT: Final = FRAMES | {0xC4, 0xCC, 0xDA, 0xDB, 0xDD, 0xE0, 0xEE}
MAX_SCANS: Final = 100  # a progressive JPEG has about ten; each costs a pass over all of the image
MAX_TEXT: Final = 1 << 16  # bytes of a PNG's compressed text that are read
MAX_BLOCKS: Final = 16  # EXIF and XMP blocks that are searched for an orientation
MAX_TABLES: Final = 1 << 20  # bytes of a JPEG's tables and frame, which Pillow parses in Python


MetadataBlock: TypeAlias = tuple[Callable[[bytes], int], bytes]  # reads an orientation; the content


def read_text_chunk(chunk: bytes) -> int:
    """Reads the orientation from a text chunk of ImageMagick's, compressed or not."""
    text = chunk.partition(b"\0")[2]
    if text.startswith(b"\0"):  # zTXt: the compression method comes first
        try:
            text = zlib.decompressobj().decompress(text[1:], MAX_TEXT)
        except zlib.error:
            return UPRIGHT
    return read_profile(text)


# How blocks with an orientation start: segments of JPEG, and chunks of PNG with their names.
METADATA: Final[dict[bytes, Callable[[bytes], int]]] = {
    b"Exif\0\0": read_exif,
    b"http://ns.adobe.com/xap/1.0/\0": read_xmp,
    b"eXIf": read_exif,
    b"iTXtXML:com.adobe.xmp\0": read_xmp,
    **dict.fromkeys((b"tEXtRaw profile type exif\0", b"tEXtRaw profile type APP1\0"), read_text_chunk),
    **dict.fromkeys((b"zTXtRaw profile type exif\0", b"zTXtRaw profile type APP1\0"), read_text_chunk),
}


class ImageHeader(NamedTuple):
    """What to decode: Pillow's name of the format, the bytes for its decoder, the orientation (EXIF's 1 to 8), and
    (width, height) for formats whose decoder allocates memory on creation."""

    kind: str
    data: bytes
    orientation: int = UPRIGHT
    size: tuple[int, int] | None = None


def read_header(data: bytes) -> ImageHeader:
    """Reads a header. BadImage if the format is not supported; struct.error, KeyError or IndexError if the header is
    truncated."""
    return READERS[detect_format(data)](data)


def detect_format(data: bytes) -> str:
    """The name of the format by the file's first bytes, regardless of its name. BadImage says what other kind of file
    it is."""
    for kind, starts in MAGIC.items():
        if data.startswith(starts):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if re.match(rb"P[1-6f]\s", data):
        return "PPM"
    film = data[4:8] == b"ftyp"
    if film and (kind := detect_brand(data)):
        return kind
    if not data:
        raise BadImage("empty file")
    if not any(data):
        raise BadImage(f"not an image: all of its {len(data):,} bytes are zero")
    others = (name for name, starts in OTHERS.items() if data.startswith(starts))
    other = BRANDS.get(data[8:12], "a film") if film else next(others, None)
    if other is not None:
        raise BadImage(f"{other}, which is not read; {', '.join(FORMATS)} are")
    start = data[:24].split(b"\n")[0].strip()
    if start and all(32 <= byte < 127 for byte in start):
        raise BadImage(f"not an image: starts with {start.decode('ascii')!r}")
    raise BadImage(f"not an image: starts with the bytes {data[:8].hex(' ')}")


def read_jpeg(data: bytes) -> ImageHeader:
    """Reads a JPEG. Tables, frame and scans are kept, and the JFIF and Adobe segments, which define how colours are
    coded."""
    pieces, since, at, frame = list[bytes](), 0, 2, b""
    walk, tables, tagged = PieceLimit("JPEG", data), 0, list[MetadataBlock]()
    while True:
        walk.step()
        start = data.find(b"\xff", at)  # bytes between two segments are skipped, as in other decoders
        if start < 0 or start + 4 > len(data):
            raise BadImage("truncated JPEG: it ends before its pixels")
        marker, end = data[start + 1], start + 2 + int.from_bytes(data[start + 2 : start + 4])
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD9:  # not a segment: stuffing, fill, restart, end
            end = start + (1 if marker == 0xFF else 2)
        elif marker == 0xE1 and (reader := find_reader(data, start + 4)):
            tagged.append((reader, data[start + 4 : end]))
        elif marker in FRAMES:
            frame = data[start:end]
        if marker in KEPT and marker != SCAN:
            tables += end - start
        if start > at or marker not in KEPT:
            pieces.append(data[since:at])
            since = start if marker in KEPT else end
        at = end
        if marker == SCAN:
            break
    if tables > MAX_TABLES:
        raise BadImage(f"JPEG with {tables:,} bytes of tables, made to take long; {MAX_TABLES:,} are read")
    if len(frame) < 10 or start + 4 >= len(data):
        raise BadImage("damaged JPEG: its frame is missing")
    # Only a progressive JPEG, or one whose first scan lacks a component, has more scans than one.
    several = frame[1] in (0xC2, 0xC6, 0xCA, 0xCE) or data[start + 4] < frame[9]
    if several and (scans := data.count(b"\xff\xda", start)) > MAX_SCANS:
        raise BadImage(f"JPEG of {scans:,} scans, made to take for ever; {MAX_SCANS} are read")
    return ImageHeader("JPEG", b"".join([*pieces, data[since:]]) if pieces else data, find_first_orientation(tagged))


def find_reader(data: bytes, at: int) -> Callable[[bytes], int] | None:
    """The reader of the orientation in a block that starts here; None for other blocks."""
    return next((reader for start, reader in METADATA.items() if data.startswith(start, at)), None)


def find_first_orientation(blocks: list[MetadataBlock]) -> int:
    """The orientation of an image, from the first of its metadata blocks that has one. Only the first MAX_BLOCKS are
    read."""
    found = (reader(block) for reader, block in blocks[:MAX_BLOCKS])
    return next((turned for turned in found if turned != UPRIGHT), UPRIGHT)


def walk_png(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The chunks up to the last one: name, start and end. BadImage where one is cut."""
    walk, at, name = PieceLimit("PNG", data), 8, b""
    while at < len(data) and name != b"IEND":
        walk.step()
        if at + 12 > len(data):
            raise BadImage("truncated PNG: it ends within a chunk")
        length, name = struct.unpack_from(">I4s", data, at)
        start, at = at, at + 12 + length
        if at > len(data):
            raise BadImage(f"truncated PNG: {at - len(data):,} bytes are missing")
        yield name, start, at


def read_png(data: bytes) -> ImageHeader:
    """Reads a PNG. Header, palette and pixels are kept. An animated PNG counts as its still image, and transparency
    (tRNS) is dropped."""
    kept, since, end, tagged = list[bytes](), 0, 8, list[MetadataBlock]()
    for name, start, end in walk_png(data):
        if name == b"IHDR" and zlib.crc32(data[start + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise BadImage("damaged PNG: the checksum of its header is wrong")
        if name not in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            if reader := find_reader(data, start + 4):
                tagged.append((reader, data[start + 8 : end - 4]))
            kept.append(data[since:start])
            since = end
    return ImageHeader("PNG", b"".join([*kept, data[since:end]]), find_first_orientation(tagged))


def check_png(data: bytes) -> None:
    """Raises BadImage if a checksum over the pixels is wrong, which Pillow ignores."""
    for name, start, end in walk_png(data):
        if name == b"IDAT" and zlib.crc32(memoryview(data)[start + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise BadImage("damaged PNG: the checksum of its pixels is wrong")


def read_gif(data: bytes) -> ImageHeader:
    """Reads a GIF: the canvas, extended by the first frame. Of everything before that frame, only its transparency is
    kept."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    first = at = 13 + (3 << ((flags & 7) + 1) if flags & 128 else 0)
    control, walk = b"", PieceLimit("GIF", data, 64)
    while data[at] != 0x2C:
        walk.step()
        if data[at] == 0x3B:
            raise BadImage("GIF without an image")
        at += 1
        if data[at - 1] == 0x21:  # an extension: a label, blocks that give their length, a zero
            if data[at : at + 2] == b"\xf9\x04" and data[at + 2] & 1:
                control = b"\x21\xf9\x04\x01\0\0" + data[at + 5 : at + 6] + b"\0"
            at += 1
            while data[at]:
                walk.step()
                at += 1 + data[at]
            at += 1
    left, top, across, down = struct.unpack_from("<4H", data, at + 1)
    size = (max(width, left + across), max(height, top + down))
    return ImageHeader("GIF", data[:first] + control + data[at:], UPRIGHT, size)


def read_webp(data: bytes) -> ImageHeader:
    """Reads a WebP and the size of its canvas; libwebp refuses frames that do not fit it, and lists all chunks when it
    opens a file."""
    walk, at, stop = PieceLimit("WEBP", data), 12, min(8 + int.from_bytes(data[4:8], "little"), len(data))
    while at + 8 <= stop:
        walk.step()
        at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        at += at % 2
    chunk = data[12:16]
    if chunk == b"VP8X":
        size = (int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1)
    elif chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        size = ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    elif chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        size = (width & 0x3FFF, height & 0x3FFF)
    else:
        raise BadImage("damaged WEBP: no image in it")
    return ImageHeader("WEBP", data, UPRIGHT, size)


READERS: Final[dict[str, Callable[[bytes], ImageHeader]]] = {
    "JPEG": read_jpeg,
    "PNG": read_png,
    "BMP": lambda data: ImageHeader("BMP", data),
    "GIF": read_gif,
    "WEBP": read_webp,
    "TIFF": lambda data: ImageHeader("TIFF", *strip_tiff(data)),
    "PPM": lambda data: ImageHeader("PPM", *strip_netpbm(data)),
    "AVIF": lambda data: ImageHeader("AVIF", *strip_heif(data, "AVIF")),
    "HEIC": lambda data: ImageHeader("HEIC", *strip_heif(data, "HEIC")),
}
