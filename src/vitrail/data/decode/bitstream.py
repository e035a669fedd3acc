"""The size of frames by the streams themselves: AV1's sequence header (5.5), HEVC's parameter set (7.3.2.2)."""

from collections.abc import Iterable, Iterator, Sequence

from vitrail.core.errors import BadPicture
from vitrail.data.decode.bounds import Walk

SEQUENCE_HEADER = 1  # type of an OBU
PARAMETER_SET = 33  # type of a NAL unit


class Bits:
    """Bits from the first on. BadPicture where there are no more."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data), 8 * len(data)

    def take(self, count: int) -> int:
        if count > self.left:
            raise BadPicture("truncated: its stream ends within its header")
        self.left -= count
        return self.value >> self.left & ((1 << count) - 1)

    def golomb(self) -> int:
        """ue(v), and AV1's uvlc."""
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > 31:
                raise BadPicture("damaged: a number in its header is beyond 32 bits")
        return (1 << zeros) - 1 + self.take(zeros)


def av1_size(streams: Iterable[bytes], walk: Walk) -> tuple[int, int]:
    """The largest frame that the sequence headers of some OBUs allow."""
    found = [
        sequence_size(payload) for stream in streams for kind, payload in obus(stream, walk) if kind == SEQUENCE_HEADER
    ]
    if not found:
        raise BadPicture("damaged AVIF: its stream has no sequence header")
    return max(found, key=lambda size: size[0] * size[1])


def obus(stream: bytes, walk: Walk) -> Iterator[tuple[int, bytes]]:
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
                    raise BadPicture("damaged AVIF: a piece of its stream has no length")
                length |= (stream[at] & 0x7F) << shift
                shift, at = shift + 7, at + 1
                if not stream[at - 1] & 0x80:
                    break
        yield head >> 3 & 15, stream[at : at + min(length, 256)] if head >> 3 & 15 == SEQUENCE_HEADER else b""
        at += length


def sequence_size(payload: bytes) -> tuple[int, int]:
    bits = Bits(payload)
    bits.take(4)  # profile, still picture
    if bits.take(1):  # a still picture of the short kind
        bits.take(5)
    else:
        operating_points(bits)
    across, down = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(across) + 1, bits.take(down) + 1


def operating_points(bits: Bits) -> None:
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


def hevc_size(configurations: Sequence[bytes], stream: bytes, walk: Walk) -> tuple[int, int]:
    """The largest picture of the parameter sets in hvcC boxes, and in the stream itself."""
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
        raise BadPicture("damaged HEIC: its stream has no parameter set")
    return max(found, key=lambda size: size[0] * size[1])


def parameter_size(unit: bytes) -> list[tuple[int, int]]:
    """Of a sequence parameter set; nothing of another NAL unit."""
    if len(unit) < 3 or unit[0] >> 1 & 63 != PARAMETER_SET:
        return []
    bits = Bits(unit[2:].replace(b"\0\0\3", b"\0\0"))
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
