"""What decoding takes is counted before it is taken."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.data.decode.hostile import photo, saved
from vitrail.core.errors import BadImage
from vitrail.data.decode.image import EncodedImage, decoding_bytes

KINDS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


@pytest.mark.parametrize("kind", KINDS)
def test_reserved_once_before_anything_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(photo(), kind) if kind != "GIF" else saved(Image.fromarray(photo()).quantize(64), "GIF")
    asked: list[int] = []
    picture = EncodedImage(content, reserve=asked.append)
    assert asked == [decoding_bytes(kind, (32, 24), len(content))]
    assert asked[0] > 4 * 32 * 24
    picture.rgb()
    assert len(asked) == 1


class Full(Exception):
    pass


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_whoever_has_no_room_raises_his_own(kind: str) -> None:
    def refuse(size: int) -> None:
        raise Full(size)

    with pytest.raises(Full):
        EncodedImage(saved(photo(), kind), reserve=refuse)


def blank_webp(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "WEBP", lossless=True, quality=0, method=0)
    return out.getvalue()


def test_a_small_webp_of_many_pixels_is_a_bomb() -> None:
    content = blank_webp(6000, 5000)
    with pytest.raises(BadImage, match="bomb"):
        EncodedImage(content)
    with pytest.raises(BadImage, match="bomb"):
        EncodedImage(content + b"\0" * 100_000)
    assert EncodedImage(content + b"\0" * 200_000).size == (5000, 6000)


@pytest.mark.slow
def test_one_picture_has_a_limit_of_memory() -> None:
    """The same number of pixels is fine as a JPEG."""
    with pytest.raises(BadImage, match="GB"):
        EncodedImage(blank_webp(12000, 10000) + b"\0" * 1_000_000)


MEASURE = """
import sys
from pathlib import Path
from PIL import Image
from vitrail.data.decode.image import EncodedImage, decoding_bytes

def most():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

small, large = (Path(name).read_bytes() for name in sys.argv[1:])
EncodedImage(small).rgb()
before, said = most(), []
EncodedImage(large, reserve=said.append).rgb()
print((most() - before) / said[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process its memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_no_more_is_taken_than_was_counted(kind: str, mode: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, side in (("small", 8), ("large", 3000)):
        image = Image.linear_gradient("L").resize((side, side)).convert(mode)
        if kind in ("JPEG", "PPM", "BMP") and mode == "RGBA":
            image = image.convert("CMYK") if kind == "JPEG" else image.convert("RGB")
        options = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}
        image.save(tmp_path / name, kind, **options, **({"progressive": True} if kind == "JPEG" else {}))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.2 < float(done.stdout) <= 1.1
