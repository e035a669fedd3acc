"""`vitrail predict` with weights of another task: what it prints, which files it writes, which options it refuses."""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.predict.colour_task import Colour, colour_task, colour_weights
from tests.predict.pictures import drawn, folder_of, weights
from vitrail.cli.app import main
from vitrail.cli.use import predict as predict_output
from vitrail.predict.predictor import Predictor

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with colour_task():
        yield


@pytest.fixture
def path(tmp_path: Path) -> str:
    return colour_weights(tmp_path / "weights")


def read(name: str | Path) -> Image.Image:
    with Image.open(name) as image:
        return image.convert("RGB")


def predict(*words: str) -> int:
    return main(["predict", *words, "--device", "cpu"])


def rows_of(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert predict(*words, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_a_row_and_an_object_say_what_the_task_says(tmp_path: Path, path: str, capsys: Capture) -> None:
    names = folder_of(tmp_path / "p", 3)
    asker: Predictor[Colour] = vitrail.Predictor(path, device="cpu")
    expected = asker(names)
    assert predict(path, *names) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"{name}: {each}" for name, each in zip(names, expected, strict=True)]
    assert "3 outputs" in said.err
    assert "classes" not in said.err
    assert rows_of(capsys, path, *names) == [
        {"path": name, **each.to_dict()} for name, each in zip(names, expected, strict=True)
    ]
    Path(names[1]).write_bytes(b"")
    assert predict(path, *names, "--csv") == 1
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["prediction"] for row in table] == [str(expected[0]), "", str(expected[2])]
    assert [bool(row["error"]) for row in table] == [False, True, False]


def test_a_terminal_gets_the_text(tmp_path: Path, path: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asker: Predictor[Colour] = vitrail.Predictor(path, device="cpu")
    monkeypatch.setattr(predict_output, "LineWriter", lambda file: predict_output.TerminalWriter(file, asker.task))
    name = folder_of(tmp_path / "p", 1)[0]
    assert predict(path, name) == 0
    assert capsys.readouterr().out.splitlines() == [name, f"  {asker(name)}"]


def test_files_lie_in_the_tree_of_the_images(tmp_path: Path, path: str, capsys: Capture) -> None:
    names = [*folder_of(tmp_path / "p", 2), *folder_of(tmp_path / "p" / "more" / "日本", 1, "webp")]
    before = {name: Path(name).read_bytes() for name in names}
    out = tmp_path / "out"
    rows = rows_of(capsys, path, str(tmp_path / "p"), "--out", str(out))
    inside = ["00", "01", os.path.join("more", "日本", "00")]
    assert [row["file"] for row in rows] == [str(out / f"{name}.png") for name in inside]
    assert [row["overlay"] for row in rows] == [str(out / f"{name}.overlay.png") for name in inside]
    asker: Predictor[Colour] = vitrail.Predictor(path, device="cpu")
    for row, name in zip(rows, names, strict=True):
        image, expected = read(name), asker(name)
        file, overlay = read(row["file"]), read(row["overlay"])
        assert file.size == overlay.size == image.size
        assert (np.abs(np.asarray(file).astype(int) - expected.rgb) <= 1).all()
        assert np.array_equal(np.asarray(overlay), np.asarray(asker.task.draw(expected, image)))
    assert {name: Path(name).read_bytes() for name in names} == before
    assert len(list(out.rglob("*.png"))) == 6
    again = rows_of(capsys, path, str(tmp_path / "p"), "--out", str(out))  # replaces its own files
    assert [row["file"] for row in again] == [row["file"] for row in rows]
    assert len(list(out.rglob("*.*"))) == 6


def test_a_line_names_the_files(tmp_path: Path, path: str, capsys: Capture) -> None:
    name = folder_of(tmp_path / "p", 1)[0]
    assert predict(path, name, "--out", str(tmp_path / "out")) == 0
    line = capsys.readouterr().out.strip()
    assert line.endswith(f"-> {tmp_path / 'out' / '00.png'}, {tmp_path / 'out' / '00.overlay.png'}")


def test_two_images_of_one_name_have_two_files(tmp_path: Path, path: str, capsys: Capture) -> None:
    (tmp_path / "p").mkdir()
    drawn(1)[0].save(tmp_path / "p" / "a.png")
    drawn(2)[1].save(tmp_path / "p" / "A.jpg")
    drawn(1)[0].save(tmp_path / "p" / "a.overlay.webp")
    rows = rows_of(capsys, path, str(tmp_path / "p"), str(tmp_path / "p" / "a.png"), "--out", str(tmp_path / "out"))
    files = [row[kind] for row in rows for kind in ("file", "overlay")]
    assert len({file.casefold() for file in files}) == len(files) == 8
    for row in rows:
        assert read(row["file"]).size == read(row["path"]).size


def test_an_image_is_never_replaced(tmp_path: Path, path: str, capsys: Capture) -> None:
    names = folder_of(tmp_path / "p", 2)
    folder_of(tmp_path / "q" / "p", 1)
    before = [Path(name).read_bytes() for name in names]
    (tmp_path / "link").symlink_to(tmp_path / "p")
    for words in (
        [str(tmp_path / "p"), "--out", str(tmp_path / "p")],
        [*names, "--out", str(tmp_path / "p")],
        [names[0], "--out", str(tmp_path / "link")],
        [str(tmp_path / "q"), *names, "--out", str(tmp_path)],  # q/p/00.png would become p/00.png
    ):
        assert predict(path, *words) == 2
        assert "--out" in capsys.readouterr().err
    assert [Path(name).read_bytes() for name in names] == before
    assert len(list((tmp_path / "p").iterdir())) == 2


def test_what_was_written_below_is_not_read_again(tmp_path: Path, path: str, capsys: Capture) -> None:
    folder_of(tmp_path / "p", 2)
    words = [
        path,
        str(tmp_path / "p"),
        "--out",
        str(tmp_path / "p" / "out"),
        "--attention",
        str(tmp_path / "p" / "lit"),
    ]
    assert len(rows_of(capsys, *words)) == 2
    rows = rows_of(capsys, *words)
    assert len(rows) == 2
    assert all(Path(row[kind]).exists() for row in rows for kind in ("file", "overlay", "attention"))


def test_names_that_are_too_long_are_shortened(tmp_path: Path, path: str, capsys: Capture) -> None:
    (tmp_path / "p").mkdir()
    drawn(1)[0].save(tmp_path / "p" / f"{'ä' * 122}.png")
    (row,) = rows_of(capsys, path, str(tmp_path / "p"), "--out", str(tmp_path / "out"))
    assert Path(row["overlay"]).exists()


def test_large_images_are_drawn_smaller(tmp_path: Path, path: str, capsys: Capture) -> None:
    drawn(1)[0].resize((3200, 40)).save(tmp_path / "long.png")
    (row,) = rows_of(capsys, path, str(tmp_path / "long.png"), "--out", str(tmp_path / "out"))
    assert read(row["file"]).size == (3200, 40)
    assert max(read(row["overlay"]).size) == 1536


@pytest.mark.parametrize("option", [["--topk", "5"], ["--threshold", "0.5"]])
def test_options_of_classifiers_are_refused(tmp_path: Path, path: str, capsys: Capture, option: list[str]) -> None:
    assert predict(path, folder_of(tmp_path / "p", 1)[0], *option) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert option[0] in said.err
    assert "colour" in said.err


def test_a_classifier_has_no_files(tmp_path: Path, capsys: Capture) -> None:
    name = folder_of(tmp_path / "p", 1)[0]
    assert predict(weights(tmp_path), name, "--out", str(tmp_path / "out")) == 2
    assert "--json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(tmp_path: Path, path: str, capsys: Capture) -> None:
    name = folder_of(tmp_path / "p", 1)[0]
    (tmp_path / "taken").write_text("x")
    assert predict(path, name, "--out", str(tmp_path / "taken")) == 2
    assert "is a file" in capsys.readouterr().err
