"""Reads the boxes of AVIF and HEIC (ISO 14496-12, 23008-12): the size of an image, by its description and by its
stream.

A decoder allocates memory by the size in the compressed stream, whatever the boxes around it claim. So both sizes are
read here, for every item that can be decoded, and the larger counts. Metadata are hidden from the decoder: items of
type Exif or mime get an unknown type, in a copy, without moving a byte. The irot and imir boxes give the orientation;
HEIC decoders apply them, and Pillow reports those of AVIF. According to the standard, EXIF's orientation is ignored.

The size of frames by the streams themselves: AV1's sequence header (5.5), HEVC's parameter set (7.3.2.2).
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Final

from vitrail.core.errors import BadImage
from vitrail.data.decode.exif_tiff import UPRIGHT, PieceLimit

SEQUENCE_HEADER = 1  # type of an OBU
PARAMETER_SET = 33  # type of a NAL unit

Size = tuple[int, int]


class BitReader:
    """Reads bits from the start of some bytes. BadImage at their end."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data), 8 * len(data)

    def take(self, count: int) -> int:
        if count > self.left:
            raise BadImage("truncated: its stream ends within its header")
        self.left -= count
        return self.value >> self.left & ((1 << count) - 1)

    def golomb(self) -> int:
        """ue(v), and AV1's uvlc."""
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > 31:
                raise BadImage("damaged: a number in its header is beyond 32 bits")
        return (1 << zeros) - 1 + self.take(zeros)


class ByteReader:
    """Reads whole numbers of some bytes each, from an offset on. BadImage at the end of the bytes."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, width: int) -> int:
        self.at += width
        if self.at > len(self.data):
            raise BadImage("truncated: it ends within its header")
        return int.from_bytes(self.data[self.at - width : self.at])


def av1_size(streams: Iterable[bytes], walk: PieceLimit) -> Size:
    """The largest frame that the sequence headers of some OBUs allow."""
    found: list[Size] = []
    for stream in streams:
        at = 0
        while at < len(stream):
            walk.step()
            head = stream[at]
            at += 1 + (head >> 2 & 1)
            length, at = read_leb128(stream, at) if head & 2 else (len(stream) - at, at)
            if head >> 3 & 15 == SEQUENCE_HEADER:
                found.append(sequence_size(stream[at : at + min(length, 256)]))
            at += length
    if not found:
        raise BadImage("damaged AVIF: its stream has no sequence header")
    return max(found, key=prod)


def read_leb128(stream: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for place, byte in enumerate(stream[at : at + 9]):
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, at + place + 1
    raise BadImage("damaged AVIF: a piece of its stream has no length")


def sequence_size(payload: bytes) -> Size:
    bits = BitReader(payload)
    bits.take(4)  # profile, still image
    if bits.take(1):  # a still image of the short kind
        bits.take(5)
    else:  # timing and operating points, read over
        model, delay = 0, 0
        if bits.take(1):
            bits.take(64)
            if bits.take(1):
                bits.golomb()
            model = bits.take(1)
            if model:
                delay = bits.take(5) + 1
                bits.take(42)
        display = bits.take(1)
        for _ in range(bits.take(5) + 1):
            bits.take(12)
            bits.take(1 if bits.take(5) > 7 else 0)
            bits.take(2 * delay + 1 if model and bits.take(1) else 0)
            bits.take(4 if display and bits.take(1) else 0)
    across, down = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(across) + 1, bits.take(down) + 1


def hevc_size(configurations: Sequence[bytes], stream: bytes, walk: PieceLimit) -> Size:
    """The largest image of the parameter sets in hvcC boxes, and in the stream itself."""
    found: list[Size] = []
    width = 4
    for config in configurations:
        width, at = (config[21] & 3) + 1, 23
        for _ in range(config[22]):
            count, at = int.from_bytes(config[at + 1 : at + 3]), at + 3
            for _ in range(count):
                walk.step()
                first, at = at + 2, at + 2 + int.from_bytes(config[at : at + 2])
                found += parameter_size(config[first:at])
    at = 0
    while at + width < len(stream):
        walk.step()
        first, length = at + width, int.from_bytes(stream[at : at + width])
        found += parameter_size(stream[first : first + min(length, 512)])
        at = first + length
    if not found:
        raise BadImage("damaged HEIC: its stream has no parameter set")
    return max(found, key=prod)


def parameter_size(unit: bytes) -> list[Size]:
    """The sizes in a sequence parameter set; none for other NAL units."""
    if len(unit) < 3 or unit[0] >> 1 & 63 != PARAMETER_SET:
        return []
    bits = BitReader(unit[2:].replace(b"\0\0\3", b"\0\0"))
    bits.take(4)
    layers = bits.take(3)
    bits.take(1 + 96)
    present = [(bits.take(1), bits.take(1)) for _ in range(layers)]
    bits.take(2 * (8 - layers) if layers else 0)
    for profile, level in present:
        bits.take(88 * profile + 8 * level)
    bits.golomb()
    bits.take(1 if bits.golomb() == 3 else 0)
    return [(bits.golomb(), bits.golomb())]


AVIF: Final = frozenset((b"avif", b"avis"))
HEIC: Final = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"))
CODED: Final = {b"av01": "AVIF", b"hvc1": "HEIC", b"hev1": "HEIC"}
SHOWN: Final = frozenset((*CODED, b"grid", b"iden"))  # what a decoder sees: coded images, and images derived from them
SPARE: Final = 4  # times the image: alpha, depth, thumbnails and overlapping tiles
SMALL: Final = 1 << 22  # pixels of these that any file may have
LARGEST: Final = 1 << 16  # pixels a side


class HeifBoxes:
    """The contents of a file's boxes by item number: type, properties, and where the bytes lie."""

    def __init__(self, data: bytes, kind: str) -> None:
        self.data, self.walk, self.primary = data, PieceLimit(kind, data, 256), -1
        self.kinds: dict[int, bytes] = {}
        self.places: dict[int, int] = {}  # of an item's type in the file
        self.properties: list[tuple[bytes, bytes]] = []
        self.owned: dict[int, list[int]] = defaultdict(list)
        self.extents: dict[int, list[tuple[int, int]]] = defaultdict(list)  # offset, length
        self.tracks: list[tuple[int, int]] = []  # first samples: offset, length
        self.framed: list[Size] = []  # sizes that tracks claim
        for name, start, end in self.boxes(0, len(data)):
            if name == b"meta":
                self.read_meta(start + 4, end)
            elif name == b"moov" and kind == "AVIF":
                self.read_movie(start, end)

    def boxes(self, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """The boxes within a span: their names, and where their contents begin and end."""
        while start + 8 <= end:
            self.walk.step()
            length, head = self.number(start, 4), 8
            if length == 1:
                length, head = int.from_bytes(self.data[start + 8 : start + 16]), 16
            stop = end if length == 0 else start + length
            if stop > end or stop < start + head:
                raise BadImage("truncated or damaged: a box ends beyond the file or before it begins")
            yield self.data[start + 4 : start + 8], start + head, stop
            start = stop

    def number(self, at: int, width: int) -> int:
        return ByteReader(self.data, at).take(width)

    def read_meta(self, start: int, end: int) -> None:
        found = list(self.boxes(start, end))
        base = {name: first for name, first, _ in found}.get(b"idat", 0)
        for name, first, last in found:
            match name:
                case b"pitm":
                    self.primary = self.number(first + 4, 2 if self.data[first] == 0 else 4)
                case b"iinf":
                    for kind, at, _ in self.boxes(first + 4 + (2 if self.data[first] == 0 else 4), last):
                        if kind == b"infe" and self.data[at] in (2, 3):  # the type of an item
                            wide = 2 if self.data[at] == 2 else 4
                            item, place = self.number(at + 4, wide), at + 4 + wide + 2
                            self.kinds[item], self.places[item] = self.data[place : place + 4], place
                case b"iprp":
                    self.read_properties(first, last)
                case b"iloc":
                    self.read_places(first, base)
                case _:
                    pass

    def read_properties(self, start: int, end: int) -> None:
        """ipco: all properties; ipma: which of them each item has."""
        for name, first, last in self.boxes(start, end):
            if name == b"ipco":
                self.properties = [(kind, self.data[a:b]) for kind, a, b in self.boxes(first, last)]
            elif name == b"ipma":
                wide, each = 2 if self.data[first] < 1 else 4, 2 if self.data[first + 3] & 1 else 1
                read, mask = ByteReader(self.data, first + 4), 0x7FFF if each == 2 else 0x7F
                for _ in range(read.take(4)):
                    self.walk.step()
                    item, count = read.take(wide), read.take(1)
                    self.owned[item] += [(read.take(each) & mask) - 1 for _ in range(count)]

    def read_places(self, start: int, base: int) -> None:
        """iloc: where the bytes of each item lie."""
        version, read = self.data[start], ByteReader(self.data, start + 4)
        sizes, wide = read.take(2), 2 if version < 2 else 4
        offset, length, origin, index = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
        for _ in range(read.take(wide)):
            self.walk.step()
            item = read.take(wide)
            method = read.take(2) & 15 if version else 0
            read.take(2)
            begin = read.take(origin) + (base if method == 1 else 0)
            for _ in range(read.take(2)):
                self.walk.step()
                read.take(index if version else 0)
                self.extents[item].append((begin + read.take(offset), read.take(length)))

    def read_movie(self, start: int, end: int) -> None:
        """moov: the first sample of each track, which is what is decoded of an animation."""
        offset = length = 0
        for name, first, last in self.boxes(start, end):
            if name in (b"trak", b"mdia", b"minf", b"stbl"):
                self.read_movie(first, last)
            elif name in (b"stco", b"co64") and self.number(first + 4, 4):
                offset = self.number(first + 8, 4 if name == b"stco" else 8)
            elif name == b"tkhd":
                place = first + (88 if self.data[first] == 1 else 76)
                self.framed.append((self.number(place, 4) >> 16, self.number(place + 4, 4) >> 16))
            elif name == b"stsd":
                self.framed.append((self.number(first + 40, 2), self.number(first + 42, 2)))
            elif name == b"stsz":
                length = self.number(first + 4, 4) or (self.number(first + 12, 4) if last > first + 12 else 0)
        if offset and length:
            self.tracks.append((offset, length))

    def content(self, item: int) -> bytes:
        places = self.extents.get(item, [])
        return b"".join(self.data[at : at + length] if length else self.data[at:] for at, length in places)

    def coded_size(self, item: int) -> Size:
        """The size in the stream of an item."""
        known = [self.properties[at] for at in self.owned.get(item, []) if 0 <= at < len(self.properties)]
        if CODED[self.kinds[item]] == "AVIF":
            heads = [content[4:] for name, content in known if name == b"av1C"]
            return av1_size([*heads, self.content(item)], self.walk)
        return hevc_size([content for name, content in known if name == b"hvcC"], self.content(item), self.walk)

    def claimed_sizes(self) -> Iterator[Size]:
        """The sizes in the description: tracks, ispe of every item, and the canvas of a grid."""
        yield from self.framed
        yield from (struct.unpack_from(">II", content, 4) for name, content in self.properties if name == b"ispe")
        for item, name in self.kinds.items():
            if name == b"grid" and (content := self.content(item)[:12]):
                yield struct.unpack_from(">II" if content[1] & 1 else ">HH", content, 4)


def detect_brand(data: bytes) -> str | None:
    """AVIF or HEIC, by the brands of a file; None for others."""
    length = min(int.from_bytes(data[:4]), len(data), 4096)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, length - 3, 4))}
    return "AVIF" if brands & AVIF else "HEIC" if brands & HEIC else None


def strip_heif(data: bytes, kind: str) -> tuple[bytes, int, Size]:
    """The file without its metadata, its orientation, and the (width, height) of the image as it is stored."""
    boxes = HeifBoxes(data, kind)
    read = [item for item, name in boxes.kinds.items() if name in SHOWN]
    total = sum(length or max(len(data) - at, 0) for item in read for at, length in boxes.extents.get(item, []))
    if total > 2 * len(data):  # items that share the same bytes would be read again and again
        raise BadImage(f"damaged {kind}: its items claim {total:,} bytes of {len(data):,}")
    sizes = [boxes.coded_size(item) for item in read if boxes.kinds[item] in CODED]
    sizes += [av1_size([data[at : at + length]], boxes.walk) for at, length in boxes.tracks]
    claimed = [(max(across, 1), max(down, 1)) for across, down in boxes.claimed_sizes()]
    if not sizes or (boxes.primary not in boxes.kinds and not boxes.tracks):
        raise BadImage(f"damaged {kind}: no image in it")
    width, height = max([*claimed, *sizes], key=prod)
    if max(width, height) > LARGEST:
        raise BadImage(f"damaged {kind}: {width} x {height} pixels")
    total = sum(map(prod, sizes))
    if total > SPARE * width * height + SMALL:
        raise BadImage(f"a decompression bomb: {kind} of {total:,} pixels in {len(sizes)} pieces")
    stripped = bytearray(data)
    for item, place in boxes.places.items():
        if boxes.kinds[item] not in SHOWN:
            stripped[place : place + 4] = b"skip"
    return bytes(stripped), UPRIGHT, (width, height)
