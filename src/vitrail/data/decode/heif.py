"""The boxes of AVIF and HEIC (ISO 14496-12, 23008-12): how large an image is, by its description and by its own stream.

A decoder takes memory by what the compressed stream says, whatever the boxes around it claim. So both are read here, of
every item that can be decoded, and the larger counts. Metadata are hidden from the decoder: an item of type Exif or
mime gets a type that nobody reads, in a copy, without moving a byte. Which way up an image is, its irot and imir boxes
say; decoders of HEIC apply them, Pillow tells of those of AVIF. By the standard EXIF is not asked.

The size of frames by the streams themselves: AV1's sequence header (5.5), HEVC's parameter set (7.3.2.2).
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from vitrail.core.errors import BadImage
from vitrail.data.decode.exif_tiff import PieceLimit

SEQUENCE_HEADER = 1  # type of an OBU
PARAMETER_SET = 33  # type of a NAL unit


class BitReader:
    """Bits from the first on. BadImage where there are no more."""

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


def av1_size(streams: Iterable[bytes], walk: PieceLimit) -> tuple[int, int]:
    """The largest frame that the sequence headers of some OBUs allow."""
    found = [
        sequence_size(payload)
        for stream in streams
        for kind, payload in read_obus(stream, walk)
        if kind == SEQUENCE_HEADER
    ]
    if not found:
        raise BadImage("damaged AVIF: its stream has no sequence header")
    return max(found, key=lambda size: size[0] * size[1])


def read_obus(stream: bytes, walk: PieceLimit) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(stream):
        walk.step()
        head, at = stream[at], at + 1
        at += head >> 2 & 1
        length, shift = len(stream) - at, 0
        if head & 2:
            length = 0
            while True:
                if at >= len(stream) or shift > 56:
                    raise BadImage("damaged AVIF: a piece of its stream has no length")
                length |= (stream[at] & 0x7F) << shift
                shift, at = shift + 7, at + 1
                if not stream[at - 1] & 0x80:
                    break
        yield head >> 3 & 15, stream[at : at + min(length, 256)] if head >> 3 & 15 == SEQUENCE_HEADER else b""
        at += length


def sequence_size(payload: bytes) -> tuple[int, int]:
    bits = BitReader(payload)
    bits.take(4)  # profile, still image
    if bits.take(1):  # a still image of the short kind
        bits.take(5)
    else:
        skip_operating_points(bits)
    across, down = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(across) + 1, bits.take(down) + 1


def skip_operating_points(bits: BitReader) -> None:
    """What stands between, read over."""
    model, delay = 0, 0
    if bits.take(1):  # timing
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
        if bits.take(5) > 7:
            bits.take(1)
        if model and bits.take(1):
            bits.take(2 * delay + 1)
        if display and bits.take(1):
            bits.take(4)


def hevc_size(configurations: Sequence[bytes], stream: bytes, walk: PieceLimit) -> tuple[int, int]:
    """The largest image of the parameter sets in hvcC boxes, and in the stream itself."""
    found: list[tuple[int, int]] = []
    width = 4
    for config in configurations:
        width = (config[21] & 3) + 1
        at = 23
        for _ in range(config[22]):
            count = int.from_bytes(config[at + 1 : at + 3])
            at += 3
            for _ in range(count):
                walk.step()
                length = int.from_bytes(config[at : at + 2])
                found += parameter_size(config[at + 2 : at + 2 + length])
                at += 2 + length
    at = 0
    while at + width < len(stream):
        walk.step()
        length = int.from_bytes(stream[at : at + width])
        found += parameter_size(stream[at + width : at + width + min(length, 512)])
        at += width + length
    if not found:
        raise BadImage("damaged HEIC: its stream has no parameter set")
    return max(found, key=lambda size: size[0] * size[1])


def parameter_size(unit: bytes) -> list[tuple[int, int]]:
    """Of a sequence parameter set; nothing of another NAL unit."""
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
    if bits.golomb() == 3:
        bits.take(1)
    return [(bits.golomb(), bits.golomb())]


AVIF: Final = frozenset((b"avif", b"avis"))
HEIC: Final = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"))
CODED: Final = {b"av01": "AVIF", b"hvc1": "HEIC", b"hev1": "HEIC"}
SHOWN: Final = frozenset((*CODED, b"grid", b"iden"))  # what a decoder sees: coded images, and what is made of them
SPARE: Final = 4  # times the image: alpha, depth, thumbnails and tiles that lap over
SMALL: Final = 1 << 22  # pixels of such things that any file may have
LARGEST: Final = 1 << 16  # pixels a side

Size = tuple[int, int]


@dataclass(slots=True)
class HeifBoxes:
    """What the boxes say, by the number of an item: its type, its properties, and where its bytes lie."""

    kinds: dict[int, bytes] = field(default_factory=dict[int, bytes])
    places: dict[int, int] = field(default_factory=dict[int, int])  # of an item's type in the file
    properties: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    owned: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    extents: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    primary: int = -1
    tracks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # first samples: offset, length
    framed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # sizes that tracks claim


def detect_brand(data: bytes) -> str | None:
    """AVIF or HEIC by the brands of a file, or none."""
    length = min(int.from_bytes(data[:4]), len(data), 4096)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, length - 3, 4))}
    if brands & AVIF:
        return "AVIF"
    return "HEIC" if brands & HEIC else None


def strip_heif(data: bytes, kind: str) -> tuple[bytes, Size]:
    """The file without its metadata, and the (width, height) of the image as it is stored."""
    boxes, walk = HeifBoxes(), PieceLimit(kind, data, 256)
    for name, start, end in iter_boxes(data, 0, len(data), walk):
        if name == b"meta":
            read_meta(data, start + 4, end, boxes, walk)
        elif name == b"moov" and kind == "AVIF":
            read_movie(data, start, end, boxes, walk)
    refuse_repeated(data, boxes, kind)
    coded = {item: size_of_item(data, item, boxes, walk) for item, name in boxes.kinds.items() if CODED.get(name)}
    sizes = [*coded.values(), *(av1_size([data[at : at + length]], walk) for at, length in boxes.tracks)]
    claimed = [(max(size[0], 1), max(size[1], 1)) for size in claimed_sizes(data, boxes)]
    if not sizes or (boxes.primary not in boxes.kinds and not boxes.tracks):
        raise BadImage(f"damaged {kind}: no image in it")
    width, height = max([*claimed, *sizes], key=lambda size: size[0] * size[1])
    if max(width, height) > LARGEST:
        raise BadImage(f"damaged {kind}: {width} x {height} pixels")
    total = sum(across * down for across, down in sizes)
    if total > SPARE * width * height + SMALL:
        raise BadImage(f"a decompression bomb: {kind} of {total:,} pixels in {len(sizes)} pieces")
    return hide_metadata(data, boxes), (width, height)


def refuse_repeated(data: bytes, boxes: HeifBoxes, kind: str) -> None:
    """Items that all lie on the same bytes would be read again and again."""
    read = [item for item, name in boxes.kinds.items() if name in SHOWN]
    total = sum(length or max(len(data) - at, 0) for item in read for at, length in boxes.extents.get(item, []))
    if total > 2 * len(data):
        raise BadImage(f"damaged {kind}: its items claim {total:,} bytes of {len(data):,}")


def iter_boxes(data: bytes, start: int, end: int, walk: PieceLimit) -> Iterator[tuple[bytes, int, int]]:
    """The boxes within a span: their names, and where their contents begin and end."""
    while start + 8 <= end:
        walk.step()
        length, head = int.from_bytes(data[start : start + 4]), 8
        name = data[start + 4 : start + 8]
        if length == 1:
            length, head = int.from_bytes(data[start + 8 : start + 16]), 16
        stop = end if length == 0 else start + length
        if stop > end or stop < start + head:
            raise BadImage("truncated or damaged: a box ends beyond the file or before it begins")
        yield name, start + head, stop
        start = stop


def read_meta(data: bytes, start: int, end: int, boxes: HeifBoxes, walk: PieceLimit) -> None:
    base = 0
    for name, first, last in iter_boxes(data, start, end, walk):
        match name:
            case b"pitm":
                boxes.primary = read_number(data, first + 4, 2 if data[first] == 0 else 4)
            case b"iinf":
                read_items(data, first, last, boxes, walk)
            case b"iprp":
                for inner, begin, stop in iter_boxes(data, first, last, walk):
                    if inner == b"ipco":
                        boxes.properties = [(kind, data[a:b]) for kind, a, b in iter_boxes(data, begin, stop, walk)]
                    elif inner == b"ipma":
                        read_owners(data, begin, boxes, walk)
            case b"idat":
                base = first
            case _:
                pass
    for name, first, _ in iter_boxes(data, start, end, walk):
        if name == b"iloc":
            read_places(data, first, base, boxes, walk)


def read_number(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise BadImage("truncated: it ends within its header")
    return int.from_bytes(data[at : at + width])


def read_items(data: bytes, start: int, end: int, boxes: HeifBoxes, walk: PieceLimit) -> None:
    """infe: the type of each item."""
    first = start + 4 + (2 if data[start] == 0 else 4)
    for name, at, _ in iter_boxes(data, first, end, walk):
        if name == b"infe" and data[at] in (2, 3):
            wide = 2 if data[at] == 2 else 4
            place = at + 4 + wide + 2
            item = read_number(data, at + 4, wide)
            boxes.kinds[item], boxes.places[item] = data[place : place + 4], place


def read_owners(data: bytes, start: int, boxes: HeifBoxes, walk: PieceLimit) -> None:
    """ipma: the properties of each item."""
    wide, long = (2 if data[start] < 1 else 4), data[start + 3] & 1
    at = start + 8
    for _ in range(read_number(data, start + 4, 4)):
        walk.step()
        item, count = read_number(data, at, wide), read_number(data, at + wide, 1)
        at += wide + 1
        each = 2 if long else 1
        mask = 0x7FFF if long else 0x7F
        boxes.owned.setdefault(item, []).extend(
            (read_number(data, at + each * i, each) & mask) - 1 for i in range(count)
        )
        at += each * count


def read_places(data: bytes, start: int, base: int, boxes: HeifBoxes, walk: PieceLimit) -> None:
    """iloc: where the bytes of each item lie."""
    version = data[start]
    sizes = read_number(data, start + 4, 2)
    offset, length, origin, index = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    wide = 2 if version < 2 else 4
    at = start + 6 + wide
    for _ in range(read_number(data, start + 6, wide)):
        walk.step()
        item = read_number(data, at, wide)
        at += wide
        method = read_number(data, at, 2) & 15 if version else 0
        at += (2 if version else 0) + 2
        begin = read_number(data, at, origin) + (base if method == 1 else 0)
        count = read_number(data, at + origin, 2)
        at += origin + 2
        for _ in range(count):
            walk.step()
            at += index if version else 0
            boxes.extents.setdefault(item, []).append(
                (begin + read_number(data, at, offset), read_number(data, at + offset, length))
            )
            at += offset + length


def item_bytes(data: bytes, item: int, boxes: HeifBoxes) -> list[bytes]:
    return [data[at : at + length] if length else data[at:] for at, length in boxes.extents.get(item, [])]


def properties_of(item: int, boxes: HeifBoxes, *names: bytes) -> list[bytes]:
    """The properties of an item by their names."""
    known = [boxes.properties[at] for at in boxes.owned.get(item, []) if 0 <= at < len(boxes.properties)]
    return [content for name, content in known if name in names]


def size_of_item(data: bytes, item: int, boxes: HeifBoxes, walk: PieceLimit) -> Size:
    """What the stream of an item says."""
    stream = b"".join(item_bytes(data, item, boxes))
    if CODED[boxes.kinds[item]] == "AVIF":
        return av1_size([*(one[4:] for one in properties_of(item, boxes, b"av1C")), stream], walk)
    return hevc_size(properties_of(item, boxes, b"hvcC"), stream, walk)


def claimed_sizes(data: bytes, boxes: HeifBoxes) -> list[Size]:
    """What the description says: ispe of every item, and the canvas of a grid."""
    found: list[Size] = [*boxes.framed]
    for name, content in boxes.properties:
        if name == b"ispe":
            found.append(struct.unpack_from(">II", content, 4))
    for item, name in boxes.kinds.items():
        content = b"".join(item_bytes(data, item, boxes))[:12] if name == b"grid" else b""
        if content:
            found.append(struct.unpack_from(">II" if content[1] & 1 else ">HH", content, 4))
    return found


def read_movie(data: bytes, start: int, end: int, boxes: HeifBoxes, walk: PieceLimit) -> None:
    """moov: the first sample of each track, which is what is decoded of an animation."""
    inner = {b"trak", b"mdia", b"minf", b"stbl"}
    offset = length = 0
    for name, first, last in iter_boxes(data, start, end, walk):
        if name in inner:
            read_movie(data, first, last, boxes, walk)
        elif name in (b"stco", b"co64") and read_number(data, first + 4, 4):
            offset = read_number(data, first + 8, 4 if name == b"stco" else 8)
        elif name == b"tkhd":
            place = first + (88 if data[first] == 1 else 76)
            boxes.framed.append((read_number(data, place, 4) >> 16, read_number(data, place + 4, 4) >> 16))
        elif name == b"stsd":
            boxes.framed.append((read_number(data, first + 40, 2), read_number(data, first + 42, 2)))
        elif name == b"stsz":
            length = read_number(data, first + 4, 4) or (read_number(data, first + 12, 4) if last > first + 12 else 0)
    if offset and length:
        boxes.tracks.append((offset, length))


def hide_metadata(data: bytes, boxes: HeifBoxes) -> bytes:
    hidden = [place for item, place in boxes.places.items() if boxes.kinds[item] not in SHOWN]
    if not hidden:
        return data
    copy = bytearray(data)
    for place in hidden:
        copy[place : place + 4] = b"skip"
    return bytes(copy)
