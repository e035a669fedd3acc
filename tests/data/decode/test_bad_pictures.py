"""What is not an image, or a harmful one, is refused from its header with a reason that a person understands."""

import os
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from tests.data.decode import hostile
from tests.data.decode.hostile import chunk, photo, pixels, png, saved, tiff_of
from vitrail.core.errors import BadImage
from vitrail.data.decode.headers import FORMATS
from vitrail.data.decode.image import DECODERS, MAX_PIXELS, SMALL, EncodedImage

PHOTO = photo()


@pytest.mark.parametrize("kind", sorted(hostile.no_pictures()))
def test_no_picture_says_what_it_is(kind: str) -> None:
    content, words = hostile.no_pictures()[kind]
    with pytest.raises(BadImage) as caught:
        EncodedImage(content)
    assert words in str(caught.value)


def test_only_the_list_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Pillow has registered, no decoder but ours is asked: neither for EPS nor for a JPEG."""
    assert tuple(DECODERS) == FORMATS

    def asked(*_: object) -> bool:
        raise AssertionError("another plugin was asked")

    monkeypatch.setattr(Image, "open", asked)
    for name, (opener, _) in list(Image.OPEN.items()):
        monkeypatch.setitem(Image.OPEN, name, (opener, asked))
    for content, _ in hostile.no_pictures().values():
        with pytest.raises(BadImage):
            EncodedImage(content)
    for content in hostile.samples().values():
        pixels(content)


@pytest.mark.parametrize("kind", sorted(hostile.samples()))
def test_truncated(kind: str) -> None:
    """Every prefix is read or refused, and a half is refused; text formats and a first frame may be whole in it."""
    content = hostile.samples()[kind]
    for end in [*range(min(len(content), 120)), *range(120, len(content), 53)]:
        with suppress(BadImage):
            pixels(content[:end])
    if kind not in ("jpeg mpo", "gif animated", "png animated", "webp animated", "bmp packed"):
        with pytest.raises(BadImage):
            pixels(content[: len(content) // 2])


def test_bad_checksums_of_png() -> None:
    content = saved(PHOTO, "PNG")
    for name in (b"IHDR", b"IDAT"):
        at = content.index(name)
        end = at + 4 + int.from_bytes(content[at - 4 : at])
        with pytest.raises(BadImage, match="checksum"):
            pixels(content[:end] + bytes([content[end] ^ 1]) + content[end + 1 :])


def claims_itself_twice() -> bytes:
    """A TIFF whose lists of offsets and lengths, 600 each, are one and the same bytes."""
    lists = {tag: (4, [600 + tag]) for tag in (279, 324, 325)}
    content = tiff_of(np.zeros((600, 1), np.uint8), more={273: (4, [8] * 600), **lists})
    where = content[content.index(struct.pack("<HHI", 273, 4, 600)) + 8 :][:4]
    for tag in (279, 324):
        entry = struct.pack("<HHII", tag, 4, 1, 600 + tag)
        content = content.replace(entry, struct.pack("<HHI", tag, 4, 600) + where)
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (hostile.many_scans(500), "scans, made to take for ever"),
        (saved(PHOTO, "JPEG")[:200], "truncated JPEG"),
        (saved(PHOTO, "PNG")[:-40], "truncated PNG"),
        (b"GIF89a\1\0\1\0\0\0\0;", "GIF without an image"),
        (b"RIFF\x20\0\0\0WEBPXXXX" + b"\0" * 30, "damaged WEBP"),
        (b"BMW builds cars", "unreadable BMP"),
        (b"II*\0\x08\0\0\0\0\0\0\0\0\0", "unreadable TIFF"),
        (tiff_of(np.zeros((4, 4), np.uint8), more={259: (3, [6])}), "compression that is not read"),
        (claims_itself_twice(), "its tags claim 7,200 bytes of 3,"),
        (b"P6 x y z", "damaged PPM"),
    ],
)
def test_reasons(content: bytes, words: str) -> None:
    with pytest.raises(BadImage) as caught:
        pixels(content)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_honest_progressive_jpeg_has_few_scans() -> None:
    assert pixels(hostile.many_scans(20)).shape == (64, 64, 3)


@pytest.mark.parametrize(
    "error", [MemoryError(), ZeroDivisionError(), struct.error("x"), RecursionError("deep"), OSError()]
)
def test_whatever_a_decoder_throws_is_a_bad_picture(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    picture = EncodedImage(saved(PHOTO, "PNG"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(BadImage, match="PNG"):
        picture.rgb()
    monkeypatch.setitem(DECODERS, "PNG", fail)
    with pytest.raises(BadImage, match="PNG"):
        EncodedImage(saved(PHOTO, "PNG"))


def test_an_interrupt_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(DECODERS, "PNG", stop)
    with pytest.raises(KeyboardInterrupt):
        EncodedImage(saved(PHOTO, "PNG"))


# Bombs


@pytest.mark.parametrize("kind", sorted(hostile.bombs()))
def test_bombs_are_refused_from_the_header(kind: str) -> None:
    with pytest.raises(BadImage) as caught:
        EncodedImage(hostile.bombs()[kind])
    assert "unreadable" not in str(caught.value)  # not left to a decoder to find out


MEASURE = """
import resource, sys, warnings
warnings.simplefilter("error")
from pathlib import Path
from vitrail.core.errors import BadImage
from vitrail.data.decode.image import EncodedImage
files = sorted(Path(sys.argv[1]).iterdir())
EncodedImage(files[0].read_bytes()).rgb()
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in files[1:]:
    try:
        EncodedImage(path.read_bytes()).rgb()
        sys.exit(f"{path.name} was read")
    except BadImage:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) >> 10)
"""


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "0 sound").write_bytes(saved(PHOTO, "PNG"))
    for name, content in hostile.bombs().items():
        (tmp_path / f"bomb {name}").write_bytes(content)
    source = Path(__file__).parents[3] / "src"
    paths = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50  # MiB, over all of them


def test_metadata_bombs_do_not_keep_a_picture_from_being_read() -> None:
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * (1 << 21)))
    profile = chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * (8 << 20)))
    rows = b"".join(b"\0" + row.tobytes() for row in PHOTO)
    lost = b"".join([text * 100, profile, chunk(b"acTL", b"\0" * 8), chunk(b"acTL", b"\0" * 8)])
    assert np.array_equal(pixels(png(32, 24, rows=rows, extra=lost)), PHOTO)
    notes = PngInfo()
    notes.add_text("note", "n" * 10000)
    assert np.array_equal(pixels(saved(PHOTO, "PNG", pnginfo=notes)), PHOTO)


def test_the_limit_is_an_argument() -> None:
    content = saved(PHOTO, "PNG")
    assert EncodedImage(content, max_pixels=24 * 32).size == (24, 32)
    with pytest.raises(BadImage, match="32 x 24 pixels are more than the limit of 767"):
        EncodedImage(content, max_pixels=767)
    assert 100e6 < MAX_PIXELS < 180e6


def test_large_pictures_are_read_without_a_warning() -> None:
    """Beyond the size where Pillow warns, as long as the file is in proportion; and small ones of one colour."""
    sized = hostile.jpeg_header(10000, 10000) + b"\0" * 100_000
    assert EncodedImage(sized).size == (10000, 10000)
    values = np.zeros((1, 100_000), np.uint8)
    with pytest.raises(BadImage, match="10000 x 10000 pixels are more than the limit of 89,478,485"):
        EncodedImage(tiff_of(values, more={256: (4, [10000]), 257: (4, [10000])}))  # here Pillow cannot but warn
    blank = saved(Image.new("1", (4000, 4000)), "PNG")
    assert SMALL > 4000 * 4000
    assert pixels(blank).shape == (4000, 4000, 3)


def test_pillow_is_left_as_it_was() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    for content in [*hostile.samples().values(), *hostile.bombs().values()]:
        with suppress(BadImage):
            pixels(content)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
