"""Image files of formats that are not read are listed with what to do, wherever a folder is read."""

from pathlib import Path

import pytest
from PIL import Image

from vitrail.cli.use.predict_inputs import list_images
from vitrail.core.errors import DataError
from vitrail.data.collection import open_collection
from vitrail.data.decode import image as support


@pytest.fixture(autouse=True)
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    support.readable_suffixes.cache_clear()
    yield  # type: ignore[misc]
    support.readable_suffixes.cache_clear()


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".png", ".avif")):
            Image.new("RGB", (8, 6)).save(folder / name)
        else:
            (folder / name).write_bytes(b"x")
    return folder


def test_they_are_told_apart_from_other_files(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "a/2.avif", "a/IMG_1.HEIC", "b/1.png", "b/2.CR2", "b/3.jxl", "b/notes.txt")
    opened = open_collection(tmp_path)
    assert len(opened.split("train")) == 3
    unread, ignored = opened.notes
    assert "3 image files" in unread
    assert "IMG_1.HEIC" in unread
    assert "vitrail[heic]" in unread
    assert "JPEG" in unread
    assert "notes.txt" in ignored
    assert "1 file" in ignored
    assert "vitrail[heic]" not in open_collection(write(tmp_path / "raw", "c/1.png", "c/2.nef")).notes[0]


@pytest.mark.parametrize("names", [["1.heic", "2.heic"], ["a/1.heic", "b/1.png"]])
def test_a_folder_of_nothing_else_is_refused_with_the_remedy(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vitrail\[heic\]"):
        open_collection(write(tmp_path, *names))


def test_predict_lists_them_too(tmp_path: Path) -> None:
    found = list_images([str(write(tmp_path / "some", "1.png", "2.heic", "3.dng", "x.txt"))])
    assert len(found.paths) == 1
    assert any("2 image files" in note and "vitrail[heic]" in note for note in found.notes)
    with pytest.raises(DataError, match=r"vitrail\[heic\]"):
        list_images([str(write(tmp_path / "none", "2.heic"))])


def test_with_the_library_heic_is_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: object())
    support.readable_suffixes.cache_clear()
    assert len(open_collection(write(tmp_path, "a/1.heic", "b/1.png")).split("train")) == 2
