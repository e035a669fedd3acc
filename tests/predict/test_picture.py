"""What is an image, what is several, and what is refused with which reason."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.core.errors import BadImage
from vitrail.predict.image_input import image_from, is_one

BYTES = np.zeros((4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("given", "one"),
    [
        ("a.jpg", True),
        (Path("a.jpg"), True),
        (b"", True),
        (BYTES, True),
        (torch.zeros(3, 4, 5), True),
        (Image.new("RGB", (2, 2)), True),
        (7, True),
        ({"a": 1}, True),
        (BYTES[None], False),
        (torch.zeros(1, 3, 4, 5), False),
        (["a.jpg"], False),
        (iter(["a.jpg"]), False),
        ({"a.jpg"}, False),
    ],
)
def test_one_or_several(given: object, one: bool) -> None:
    assert is_one(given) == one


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            torch.full((3, 4, 5), 1.5),
            r"tensor \[3, 4, 5\]: floats from 1.5 to 1.5 could be bytes, or normalised already",
        ),
        (torch.full((3, 4, 5), -0.1), "floats from -0.1 to -0.1"),
        (np.full((4, 5, 3), np.nan), "floats from nan to nan"),
        (torch.zeros(3, 4, 5, dtype=torch.int64), "int64 could have any range; give uint8 from 0 to 255"),
        (np.zeros((4, 5), np.uint16), "uint16 could have any range"),
        (np.zeros((4, 5), np.bool_), "bool could have any range"),
        (torch.zeros(4, 5, 3), r"is \[3, H, W\].*its channels are last: permute\(2, 0, 1\)"),
        (torch.zeros(7, 4, 5), r"a tensor of an image is \[3, H, W\], \[1, H, W\] or \[H, W\]$"),
        (np.zeros((3, 4, 5), np.uint8), r"its channels are first: transpose\(1, 2, 0\)"),
        (np.zeros((4, 5, 2), np.uint8), r"array \[4, 5, 2\]: an array of uint8 \[4, 5, 2\]; an image is"),
        (np.zeros((0, 5, 3), np.uint8), "an image is uint8"),
        (np.zeros((0, 5, 3)), "an image is uint8"),
        (torch.zeros(5), "an image is uint8"),
        (b"", "0 bytes: empty file"),
        (b"hello", "5 bytes: not an image: starts with 'hello'"),
        (7, "a int is not an image"),
        (None, "a NoneType is not an image"),
        ({"a": 1}, "a dict is not an image"),
        ("https://example.org/cat.jpg", r"is an address, and none is fetched unless asked for: .*urls=True"),
        ("file:///etc/passwd", "is an address, and none is fetched"),
        ("a\0b.jpg", "embedded null byte"),
    ],
)
def test_what_could_mean_two_things_or_nothing_is_refused(given: object, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        image_from(given)


def test_files_that_are_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "broken.jpg").symlink_to(tmp_path / "nowhere")
    for name, reason in {
        "text.jpg": "text.jpg: not an image: starts with 'hello'",
        "broken.jpg": "broken.jpg: No such file or directory",
        ".": "is a folder; give its files",
    }.items():
        with pytest.raises(BadImage, match=reason):
            image_from(tmp_path / name)


def test_a_picture_on_its_side_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.new("RGB", (8, 4)).save(path, exif=exif)
    assert image_from(path).size == (4, 8)
