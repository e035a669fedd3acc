"""AVIF and HEIC: right pixels, the right way up, and sizes that are believed from the stream before it is decoded."""

import contextlib
import io
import struct

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import BadImage
from vitrail.data.decode.exif_tiff import PieceLimit
from vitrail.data.decode.headers import read_header
from vitrail.data.decode.image import EncodedImage, readable_suffixes

KINDS = [
    "AVIF",
    pytest.param("HEIF", marks=pytest.mark.skipif(".heic" not in readable_suffixes(), reason="no pillow-heif")),
]


def drawn(width: int = 96, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Slopes in three channels, so that a turn or a channel too few shows."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, :, 0], pixels[:, :, 1] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    pixels[:, :, 2] = 80
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, width).astype(np.uint8), (height, 1))))
    return image.convert(mode)


def saved(image: Image.Image, kind: str = "AVIF", orientation: int = 1, **more: object) -> bytes:
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = io.BytesIO()
    image.save(content, kind, exif=exif.tobytes(), quality=98, **more)
    return content.getvalue()


def difference(one: Image.Image, other: Image.Image) -> float:
    assert one.size == other.size
    assert one.mode == other.mode == "RGB"
    return float(np.abs(np.asarray(one, int) - np.asarray(other, int)).mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_right_and_upright(kind: str, orientation: int) -> None:
    picture = EncodedImage(saved(drawn(), kind, orientation))
    upright = EncodedImage(saved(drawn(), "JPEG", orientation)).rgb()
    assert picture.size == (upright.height, upright.width)
    assert difference(picture.rgb(), upright) < 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGBA", "L"])
def test_alpha_is_dropped_and_grey_is_grey(kind: str, mode: str) -> None:
    image = drawn(mode=mode)
    assert difference(EncodedImage(saved(image, kind)).rgb(), image.convert("RGB")) < 4


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [drawn(), Image.new("RGB", (96, 64), "red")]
    content = io.BytesIO()
    frames[0].save(content, "AVIF", save_all=True, append_images=frames[1:], duration=50, quality=98)
    header = read_header(content.getvalue())
    assert (header.kind, header.size) == ("AVIF", (96, 64))
    assert difference(EncodedImage(content.getvalue()).rgb(), frames[0]) < 3


def claiming(data: bytes, width: int, height: int) -> bytes:
    """The same file with another size in its description."""
    place = data.index(b"ispe") + 8
    return data[:place] + struct.pack(">II", width, height) + data[place + 8 :]


@pytest.mark.parametrize("kind", KINDS)
def test_the_larger_of_what_is_claimed_and_what_is_streamed_counts(kind: str) -> None:
    data = saved(drawn(320, 240), kind)
    for size in ((8, 8), (320, 240)):
        with pytest.raises(BadImage, match="more than the limit"):
            EncodedImage(claiming(data, *size), max_pixels=320 * 240 - 1)
    with pytest.raises(BadImage, match="more than the limit"):
        EncodedImage(claiming(data, 60000, 60000))
    with pytest.raises(BadImage, match="bomb"):
        EncodedImage(claiming(data, 12000, 12000))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_asked_for_before_it_is_taken(kind: str) -> None:
    asked: list[int] = []
    EncodedImage(saved(drawn(), kind), reserve=asked.append)
    assert len(asked) == 1
    assert asked[0] > 12 * 96 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_do_not_reach_the_decoder(kind: str) -> None:
    header = read_header(saved(drawn(), kind, 6, xmp=b"<x:xmpmeta tiff:Orientation='3'/>"))
    assert b"infe" in header.data
    assert b"Exif\0" not in header.data.split(b"mdat")[0]
    assert EncodedImage(saved(drawn(), kind, 6, xmp=b"<x:xmpmeta tiff:Orientation='3'/>")).size == (96, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_read(kind: str) -> None:
    data = saved(drawn(), kind)
    rng = np.random.default_rng(0)
    for _ in range(150):
        bad = bytearray(data[: rng.integers(12, len(data))] if rng.random() < 0.3 else data)
        for _ in range(rng.integers(1, 6)):
            bad[rng.integers(12, len(bad))] = rng.integers(256)
        with contextlib.suppress(BadImage):
            assert EncodedImage(bytes(bad), max_pixels=1_000_000).rgb().mode == "RGB"


def test_many_empty_boxes_are_refused() -> None:
    data = saved(drawn())
    with pytest.raises(BadImage, match="pieces"):
        EncodedImage(data[:32] + struct.pack(">I4s", 8, b"free") * 200_000 + data[32:])


def test_a_heic_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.data.decode import image as picture

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(picture, "import_module", missing)
    with pytest.raises(BadImage, match=r"vitrail\[heic\]"):
        picture.open_heic(io.BytesIO(b""))


def test_sequence_headers_are_read() -> None:
    from vitrail.data.decode.heif import av1_size

    with pytest.raises(BadImage, match="sequence header"):
        av1_size([b"\x12\x00"], PieceLimit("AVIF", b""))
