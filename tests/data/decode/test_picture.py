"""Bytes to right RGB pixels, or to a reason why not."""

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.data.decode import hostile
from tests.data.decode.hostile import chunk, exif, photo, pixels, png, saved, segment, tiff_of, with_segments
from vitrail.core.errors import BadImage
from vitrail.data.decode.image import EncodedImage, upright_rgb

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
PHOTO = photo()


def plain(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def grey(values: "NDArray[Any]") -> NDArray[Any]:
    return np.repeat(values[:, :, None], 3, axis=2)


# What is read


@pytest.mark.parametrize("kind", sorted(hostile.samples()))
def test_every_sample_is_read(kind: str) -> None:
    found = pixels(hostile.samples()[kind])
    assert found.std() > 20


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"exif": exif(1), "comment": "é"}),
        ("PNG", {}),
    ],
)
def test_pixels_are_plain_pillows(mode: str, kind: str, options: dict[str, Any]) -> None:
    content = saved(Image.fromarray(photo(61, 83)).convert(mode), kind, **options)
    assert np.array_equal(pixels(content), plain(content))


@pytest.mark.slow
def test_real_pictures_are_plain_pillows() -> None:
    path = SHARED / "imagenet_val_1000.tar"
    if not path.exists():
        pytest.skip("needs ../shared/data")
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.name.endswith(".webp")][::100]
        for content in (archive.extractfile(member).read() for member in members):  # type: ignore[union-attr]
            again = [saved(Image.open(io.BytesIO(content)).convert("RGB"), kind) for kind in ("JPEG", "PNG", "TIFF")]
            assert all(np.array_equal(pixels(data), plain(data)) for data in (content, *again))


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("scale", [1, 8])
def test_thin_pictures(size: tuple[int, int], kind: str, scale: int) -> None:
    assert pixels(saved(photo(*size), kind), scale).shape == (*size, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO", "TIFF"])
def test_first_frame_of_many(kind: str) -> None:
    content = hostile.animated(kind, 3, **({"lossless": True} if kind == "WEBP" else {}))
    assert hostile.frame_count(content) == 3
    assert np.abs(pixels(content).astype(int) - PHOTO).mean() < 8


def test_a_gif_frame_that_leaves_some_of_its_canvas_free() -> None:
    content = bytearray(saved(Image.fromarray(PHOTO).quantize(64), "GIF", transparency=5))
    content[6:10] = struct.pack("<HH", 50, 40)
    assert pixels(bytes(content)).shape == (40, 50, 3)
    assert np.array_equal(pixels(bytes(content)), plain(bytes(content)))


def test_only_the_first_of_many_frames_costs_anything() -> None:
    """A thousand frames behind the first may be noise, for all we read of them."""
    content = hostile.animated("GIF", 2)
    assert np.array_equal(pixels(content[: len(content) // 2 + 200] + b"\xff" * 9999), pixels(content))


# Which way up


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(orientation: int, scale: int, kind: str) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    if kind == "TIFF":
        tag = Image.Exif()
        tag[0x0112] = orientation
        content = saved(photo(64, 96), kind, exif=tag)
    else:
        content = saved(photo(64, 96), kind, exif=exif(orientation, "<" if orientation % 2 else ">"), **options)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert EncodedImage(content).size == (wanted.height, wanted.width)
    found = pixels(content, scale)
    if scale == 1 or kind != "JPEG":
        assert np.array_equal(found, np.asarray(wanted))
    else:
        half = np.asarray(wanted.resize((wanted.width // 2, wanted.height // 2), Image.Resampling.BOX))
        assert found.shape == half.shape
        assert np.abs(found.astype(int) - half).mean() < 3
    assert np.array_equal(
        np.asarray(upright_rgb(EncodedImage(content).rgb())), pixels(content)
    )  # nobody turns it again


def xmp(orientation: int) -> bytes:
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def raw_profile() -> bytes:
    return b"\nexif\n%8d\n%s\n" % (len(exif(6)), exif(6).hex().encode())


@pytest.mark.parametrize(
    "content",
    [
        with_segments(saved(PHOTO, "JPEG"), segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(6))),
        with_segments(saved(PHOTO, "JPEG"), segment(0xE2, b"MPF\0"), segment(0xFE, b"x"), segment(0xE1, exif(6))),
        with_segments(saved(PHOTO, "JPEG"), segment(0xFE, b"x"), b"\0\0junk", segment(0xE1, exif(6)), b"\xff\xff"),
        saved(PHOTO, "PNG")[:-12] + chunk(b"eXIf", exif(6, prefix=b"")) + saved(PHOTO, "PNG")[-12:],
        saved(PHOTO, "PNG")[:33] + chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)) + saved(PHOTO, "PNG")[33:],
        saved(PHOTO, "PNG")[:33]
        + chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile())
        + saved(PHOTO, "PNG")[33:],
        saved(PHOTO, "PNG")[:33]
        + chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile()))
        + saved(PHOTO, "PNG")[33:],
        saved(PHOTO, "WEBP", xmp=xmp(6)),
    ],
    ids=["jpeg xmp", "jpeg late", "jpeg junk", "png late", "png xmp", "png text", "png packed", "webp xmp"],
)
def test_orientation_is_found_where_programs_put_it(content: bytes) -> None:
    assert EncodedImage(content).size == (32, 24)
    assert np.abs(pixels(content).astype(int) - np.rot90(PHOTO, -1)).mean() < 12


@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0",
        b"Exif\0\0garbage",
        exif(6)[:-9],
        exif(9),
        exif(0),
        exif(6)[:10] + b"\xff\xff\xff\xff" + exif(6)[14:],  # its directory lies beyond the end
        exif(6)[:14] + b"\xff\xff" + b"\x0f\x01\x02\0\xff\xff\xff\x7f\xff\xff\xff\x7f" * 3,  # texts of 2 GB
        exif(6)[:16] + struct.pack("<HHIIHHI", 0x011A, 5, 1, 1 << 30, 0x0128, 3, 2),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_is_ignored(block: bytes, kind: str) -> None:
    assert pixels(saved(PHOTO, kind, exif=block)).shape == PHOTO.shape


# Modes


def test_cmyk_both_ways() -> None:
    """Adobe's writers invert, and mark it; YCCK is CMYK in the colours of JPEG."""
    content = saved(Image.fromarray(PHOTO).convert("CMYK"), "JPEG", quality=100, subsampling=0)
    assert b"Adobe" in content
    assert np.array_equal(pixels(content), plain(content))
    assert np.abs(pixels(content).astype(int) - PHOTO).max() < 12
    ycck = content.replace(b"Adobe\0\x64\0\0\0\0\0", b"Adobe\0\x64\0\0\0\0\2")
    assert ycck != content
    assert np.array_equal(pixels(ycck), plain(ycck))
    assert np.abs(pixels(ycck).astype(int) - pixels(content)).max() > 50


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "I;16"])
def test_grey_palette_and_alpha_in_png(mode: str) -> None:
    image = Image.fromarray(PHOTO).convert("L" if mode == "I;16" else mode)
    wanted = np.asarray(image.convert("RGB"))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    assert np.array_equal(pixels(saved(image, "PNG")), wanted)


def test_transparency_is_dropped() -> None:
    """The colour under a transparent pixel counts, as in torchvision's, timm's and TensorFlow's readers."""
    clear = np.concatenate([PHOTO, np.zeros_like(PHOTO[:, :, :1])], axis=2)
    assert np.array_equal(pixels(saved(clear, "PNG")), PHOTO)
    assert np.array_equal(pixels(saved(Image.fromarray(PHOTO), "PNG", transparency=(0, 0, 30))), PHOTO)
    palette = Image.fromarray(PHOTO).quantize(64)
    wanted = np.asarray(palette.convert("RGB"))
    for transparency in (5, bytes(range(64))):
        assert np.array_equal(pixels(saved(palette, "PNG", transparency=transparency)), wanted)
    assert np.array_equal(pixels(saved(palette, "GIF", transparency=5)), wanted)
    for mode in ("PA", "LA", "RGBA", "La", "RGBa"):
        image = Image.fromarray(PHOTO).convert("RGBA")
        image = palette.convert("PA") if mode == "PA" else image.convert(mode.upper()).convert(mode)
        assert upright_rgb(image).mode == "RGB"
    palette.info["transparency"] = bytes(range(64))
    assert np.array_equal(np.asarray(upright_rgb(palette)), wanted)
    assert "transparency" in palette.info  # whoever owns the image keeps it as it is


def test_sixteen_bits_are_scaled_with_rounding() -> None:
    every = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    wanted = grey(np.rint(every / 257).astype(np.uint8))
    for content in (
        saved(every, "PNG"),
        tiff_of(every, "<"),
        tiff_of(every, ">"),
        saved(every, "TIFF", compression="tiff_lzw"),
        b"P5 256 256 65535\n" + every.astype(">u2").tobytes(),
    ):
        assert np.array_equal(pixels(content), wanted)
    dark = (every // 300).astype(np.uint16)  # at most 218 of 65535: black, and stays black
    assert pixels(saved(dark, "PNG")).max() == 1


def test_thirty_two_bits_and_signed() -> None:
    ramp = np.linspace(0, 1, 300)[None].repeat(2, axis=0)
    wanted = grey(np.rint(255 * ramp).astype(np.uint8))
    for low, high, kind in (
        (0, 4e9, np.uint32),
        (-2e9, 2e9, np.int32),
        (-30000, 30000, np.int16),
        (0, 65535, np.int32),
        (1e9, 1e9 + 25500, np.int32),
    ):
        found = pixels(tiff_of(np.rint(low + (high - low) * ramp).astype(kind)))
        assert np.abs(found.astype(int) - wanted).max() <= 1, (low, high)
        assert (found.min(), found.max()) == (0, 255)


def test_floats() -> None:
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None].repeat(3, axis=0)
    wanted = grey(np.rint(255 * ramp.astype(np.float64)).astype(np.uint8))
    assert np.array_equal(pixels(tiff_of(ramp)), wanted)
    assert np.array_equal(pixels(tiff_of(ramp, ">")), wanted)
    assert pixels(tiff_of(ramp / 2)).max() == 128  # within [0, 1]: as dark as it says
    for stretched in (ramp * 1000 - 500, ramp * 3e38, ramp.astype(np.float64) * 6e38 - 3e38):
        assert np.abs(pixels(tiff_of(stretched.astype(np.float32))).astype(int) - wanted).max() <= 1
    assert pixels(tiff_of(np.full((4, 4), 7, np.float32))).max() == 0  # no range at all
    odd = ramp.copy() * 2 - 1
    odd[0, :3] = np.nan, np.inf, -np.inf
    assert list(pixels(tiff_of(odd))[0, :3, 0]) == [0, 255, 0]
    signalling = tiff_of(ramp).replace(struct.pack("<f", 1.0), b"\1\0\x80\x7f")
    assert pixels(signalling)[0, -1, 0] == 0
    with pytest.raises(BadImage, match="none of its pixels is a finite number"):
        pixels(tiff_of(np.full((4, 4), np.nan, np.float32)))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_arrays(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    wanted = values[:, :, :3] if shape[2:] in ((3,), (4,)) else grey(values.reshape(5, 7))
    assert np.array_equal(pixels(values), wanted)
    assert np.array_equal(pixels(np.asfortranarray(values)[::-1]), wanted[::-1])


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((5, 7), np.float32),
        np.zeros((5, 7, 3), np.uint16),
        np.zeros((5, 7), bool),
        np.zeros((3, 5, 7), np.uint8),
        np.zeros(35, np.uint8),
        np.zeros((1, 5, 7, 3), np.uint8),
        np.zeros((0, 7, 3), np.uint8),
    ],
)
def test_arrays_that_are_no_picture(values: NDArray[Any]) -> None:
    with pytest.raises(BadImage, match="an image is uint8"):
        EncodedImage(values)


# Smaller, for less


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_jpeg_at_a_fraction(mode: str, scale: int) -> None:
    content = saved(Image.fromarray(photo(403, 509)).convert(mode), "JPEG", exif=exif(6))
    picture = EncodedImage(content)
    assert picture.size == (509, 403)
    small = picture.rgb(scale)
    assert (small.height, small.width) == (-(-509 // scale), -(-403 // scale))
    whole = np.asarray(EncodedImage(content).rgb().resize(small.size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(small).astype(int) - whole).mean() < 4
    assert EncodedImage(saved(photo(40, 50), "PNG")).rgb(scale).size == (50, 40)


def test_a_second_call_finds_the_same() -> None:
    picture = EncodedImage(saved(PHOTO, "JPEG", exif=exif(6)))
    assert np.array_equal(np.asarray(picture.rgb()), np.asarray(picture.rgb()))


def test_what_a_failed_decoder_left_behind_is_not_handed_out() -> None:
    packed = bytearray(zlib.compress(b"".join(b"\0" + row.tobytes() for row in PHOTO), 0))
    packed[-4] ^= 1  # only the sum behind the last row is wrong
    broken = EncodedImage(png(32, 24).replace(chunk(b"IDAT", zlib.compress(b"")), chunk(b"IDAT", bytes(packed))))
    short = EncodedImage(saved(photo(200, 200), "JPEG")[:-900])
    for picture in (broken, short, broken, short):
        with pytest.raises(BadImage):
            picture.rgb()


# TIFF's directory


def test_tiff_needs_only_the_tags_of_its_pixels() -> None:
    """Odd tags, which Pillow warns about, and a second directory that leads back to the first."""
    odd = {
        269: (1, list(range(200))),
        282: (3, [1, 2, 3]),  # one value is the rule
        305: (12, [1, 2]),
        34665: (4, [1 << 31]),
    }
    values = PHOTO[:, :, 0]
    content = tiff_of(values, more=odd)
    start = struct.unpack_from("<I", content, 4)[0]
    count = struct.unpack_from("<H", content, start)[0]
    end = start + 2 + 12 * count
    looped = content[:end] + struct.pack("<I", start) + content[end + 4 :]
    assert np.array_equal(pixels(looped), grey(values))


@pytest.mark.parametrize("packing", ["tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits", "zstd", None])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "P", "1", "LAB", "YCbCr"])
def test_tiff_packings_are_plain_pillows(packing: str | None, mode: str) -> None:
    image = Image.fromarray(PHOTO).convert(mode)
    try:
        content = saved(image, "TIFF", **({"compression": packing} if packing else {}))
        wanted = plain(content)
    except OSError:
        pytest.skip(f"this Pillow has no {packing} for {mode}")
    assert np.array_equal(pixels(content), wanted)


def test_big_tiff_and_tiles() -> None:
    content = saved(PHOTO, "TIFF", big_tiff=True)
    assert content[2] == 43
    assert np.array_equal(pixels(content), PHOTO)
    tile = np.zeros((16, 16), np.uint8)
    tile[:10, :12] = PHOTO[:10, :12, 0]
    tags = {256: (4, [12]), 257: (4, [10]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1])}
    tiled = hostile.tiff({**tags, 322: (4, [16]), 323: (4, [16]), 324: (4, [8]), 325: (4, [256])}, tile.tobytes())
    assert np.array_equal(pixels(tiled), grey(PHOTO[:10, :12, 0]))
