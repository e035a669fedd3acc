"""`vitrail data`: what is printed, what is written, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.cli import data
from vitrail.cli.app import main
from vitrail.cli.options.look import parse_bytes
from vitrail.core.errors import ConfigError
from vitrail.data.collection import open_collection


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    for name in ("photos/cat/1.png", "photos/cat/2.png", "photos/dog/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 30), 60).convert("RGB").save(tmp_path / name)
    return tmp_path


def test_folder_is_summed_up_and_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "photos/dog/bad.jpg").write_text("no image")
    (here / "photos/dog/Thumbs.db").touch()
    assert main(["data", "photos"]) == 0
    said = capsys.readouterr().out
    for words in (
        "photos: class folders at photos",
        "classes: cat, dog",
        "train: headers of all 4: 3 PNG RGB",
        "note: train: 1 file that is not an image ignored (dog/Thumbs.db)",
        "unreadable in train: dog/bad.jpg: ",
        "contact sheet: contact-sheet-photos.png\n",
    ):
        assert words in said
    row = next(line.split() for line in said.splitlines() if line.split()[:1] == ["train"])
    assert row[1:] == ["4", "2", "2", "2", "30x40", "30x40", "30x40", *row[8:10], "1"]
    with Image.open(here / "contact-sheet-photos.png") as sheet:
        assert sheet.size[0] > 1000


def test_masks_are_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("street/images/1.png", "street/masks/1.png"):
        (here / name).parent.mkdir(parents=True)
        Image.effect_noise((40, 30), 60).point(lambda value: value % 2).save(here / name)
    (here / "street/classes.txt").write_text("road\nsky\n")
    assert main(["data", "street", "--no-sheet"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "images with a mask: 1 in train" in said
    assert "pixel classes: road, sky" in said
    assert main(["data", "street", "--json", "--no-sheet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pixel_classes"], found["splits"]["train"]["masks"]) == (["road", "sky"], 1)
    assert main(["data", "pack", "street", "--out", "packed"]) == 0
    assert open_collection("packed").pixel_classes == ("road", "sky")


@pytest.mark.slow
def test_sheet_never_replaces_what_is_not_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "digits"]) == 0
    assert main(["data", "digits", "--sheet", "contact-sheet-digits.png"]) == 0
    assert capsys.readouterr().out.endswith("contact-sheet-digits.png (replaced)\n")
    photo = here / "photos/cat/1.png"
    before = photo.read_bytes()
    assert main(["data", "digits", "--sheet", str(photo)]) == 2
    assert "is not a contact sheet" in capsys.readouterr().err
    assert photo.read_bytes() == before
    (here / "contact-sheet-digits.png").write_text("mine")
    assert main(["data", "digits"]) == 2
    assert (here / "contact-sheet-digits.png").read_text() == "mine"


def test_sheet_that_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "digits", "--sheet", "nowhere/x.png"]) == 2
    assert "nowhere/x.png: No such file or directory" in capsys.readouterr().err
    assert main(["data", "digits", "--sheet", "x.jpg"]) == 2
    assert "ends in .png" in capsys.readouterr().err
    assert main(["data", "digits", "--no-sheet"]) == 0
    assert not list(here.glob("*.png"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("digits", "digits"),
        ("digits:", "digits"),
        ("shapes/size@test", "shapes-size-test"),
        ("photos/", "photos"),
        ("photos@train", "photos-train"),
        ("flat:photos", "photos"),
    ],
)
@pytest.mark.usefixtures("here")
def test_name_of_a_sheet(text: str, name: str) -> None:
    assert data.sheet_name(open_collection(text), text) == name


def test_check_and_strict_have_their_status(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "photos", "--check", "--no-sheet"]) == 0
    assert "decoded all 3" in capsys.readouterr().out
    whole = (here / "photos/cat/1.png").read_bytes()
    (here / "photos/cat/1.png").write_bytes(whole[:-40])
    assert main(["data", "photos", "--check", "--no-sheet"]) == 1
    assert "unreadable in train: cat/1.png: " in capsys.readouterr().out
    assert main(["data", "photos", "--check", "--strict", "--no-sheet"]) == 2
    assert capsys.readouterr().err.startswith("vitrail: error: cat/1.png: ")


def test_json_is_one_object_and_draws_only_when_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "digits@test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["kind"], found["path"]) == ("digits", "in the package", None)
    assert found["splits"]["test"]["images"] == 360
    assert sum(found["splits"]["test"]["classes"].values()) == 360
    assert not list(here.glob("*.png"))
    assert main(["data", "digits@test", "--json", "--sheet", "a.png"]) == 0
    json.loads(capsys.readouterr().out)
    assert (here / "a.png").exists()


def test_names_that_are_not_utf8_are_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "photos" / "caf\udce9"
    folder.mkdir()
    (folder / "\udcff.jpg").write_text("no image")
    assert main(["data", "photos"]) == 0
    said = capsys.readouterr().out
    assert "caf�" in said
    assert main(["data", "photos", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"][0] == "caf\udce9"


def test_many_unreadable_files_are_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(30):
        (here / f"photos/dog/bad{i}.jpg").touch()
    assert main(["data", "photos", "--no-sheet"]) == 0
    assert "unreadable in train: and 10 more; --json lists all" in capsys.readouterr().out


def test_imbalance_and_several_labels_are_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "list.csv").write_text(
        "path,labels\nphotos/cat/1.png,cat|indoors\nphotos/cat/2.png,cat\nphotos/dog/1.png,\n"
    )
    assert main(["data", "list.csv", "--no-sheet"]) == 0
    said = capsys.readouterr().out
    assert "train: 3 labels on 2 images, 1.50 each; 1 have none" in said
    assert "train: class sizes differ 2.0-fold, from 1 (indoors) to 2 (cat)" in said


def test_without_a_source_the_names_are_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    said = capsys.readouterr().out
    for word in ("digits", "shapes/colour", "cifar10", "imagenet21k", "vtab/dtd", "package", "--download"):
        assert word in said
    assert main(["data", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == {
        "name": "digits",
        "what": "handwritten digits, 8x8",
        "classes": 10,
        "images": 1797,
        "files": "in the package",
    }
    assert sum(row["name"].startswith("vtab/") for row in rows) == 19


def test_files_of_a_set_that_are_here_are_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sets" / "cifar10").mkdir(parents=True)
    monkeypatch.setenv("VITRAIL_DATA", str(here / "sets"))
    assert data.locate_files("cifar10") == "--download"
    (here / "sets" / "cifar10" / "x").touch()
    assert data.locate_files("cifar10") == str(here / "sets" / "cifar10")
    assert data.locate_files("imagenet") == "by hand"


def test_mistakes_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["data", "photo"], ["data", "digits@val"], ["data", "cifar10"]):
        assert main(words) == 2
        said = capsys.readouterr()
        assert not said.out
        assert said.err.count("\n") == 1


def test_pack_and_what_it_packed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "pack", "photos", "packed", "--max-side", "20", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "train: 3 images\n1 shard, " in said
    assert "3 images shrunk" in said
    assert main(["data", "packed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "tar shards"
    assert found["splits"]["train"]["classes"] == {"cat": 2, "dog": 1}
    assert found["splits"]["train"]["size"]["largest"] == [15, 20]


def test_folder_called_pack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "photos").rename(here / "pack")
    assert main(["data", "./pack", "--no-sheet"]) == 0
    assert "class folders at pack" in capsys.readouterr().out
    assert main(["data", "pack"]) == 2
    assert "see vitrail data pack --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("256MB", 256_000_000), ("1GiB", 2**30), ("1.5 kB", 1500), ("77", 77), ("2g", 2 * 10**9), ("3MiB", 3 * 2**20)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "3XB", "3 M B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_dedup(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    (here / "test" / "cat").mkdir(parents=True)
    (here / "test" / "cat" / "same.png").write_bytes((here / "photos/cat/2.png").read_bytes())
    assert main(["data", "dedup", "photos", "--against", "test", "--out", "out", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "photos@train" in said
    assert "1 of 3 images of photos@train are duplicates: out/drop.json" in said
    assert (here / "out" / "pairs.html").is_file()
    drop = json.loads((here / "out" / "drop.json").read_text())
    assert (drop["drop"], drop["indices"]) == (True, [1])
    assert "To train without them: --set data.without=out/drop.json" in said
    short = ["--set", "epochs=0", "--set", "steps=2", "--set", "schedule.warmup=0", "--set", "batch=2"]
    scored = ["--set", "evaluation.every=2", "--set", "data.workers=0"]
    trained = ["pretrain", "quick-cifar10", "--data", "photos", "--set", "data.without=out/drop.json", "--out", "run"]
    assert main([*trained, *short, *scored]) == 0
    assert "photos: 2 images" in capsys.readouterr().out
    told = vitrail.load(here / "run" / "last.safetensors").card.provenance["deduplicated"]
    assert (told["selection"], list(told["against"])) == (drop["hash"], ["test@train"])


def test_dedup_asks_for_something_to_compare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "dedup", "photos"]) == 2
    assert "nothing to compare with" in capsys.readouterr().err
    assert main(["data", "dedup", "photos", "--against", "digits", "digits@test"]) == 2
    assert "names digits@test twice" in capsys.readouterr().err


def test_numbers_of_a_row() -> None:
    from vitrail.data.tools.overview import SplitSummary

    empty = SplitSummary(
        images=3,
        classes=(),
        counts=np.zeros(0, np.int64),
        labelled=0,
        labels=0,
        multiple=False,
        looked=3,
        decoded=False,
        sizes=np.zeros((0, 2), np.int64),
        formats={},
        bytes=0,
        unreadable=(("a", "b"),) * 3,
    )
    assert data.summary_row("train", empty) == ["train", "3", "-", "-", "-", "-", "-", "-", "0 bytes", "3"]
    assert data.describe_split("train", empty) == ["train: headers of all 3: none readable"]


def test_dedup_by_the_representations_of_a_network(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitrail.save(vitrail.create_model("ViT-Nano/4", classes=10), here / "nano.safetensors")
    found = ["data", "dedup", "photos", "--within", "--embed", "nano.safetensors", "--cosine", "0.9999", "--out", "d"]
    assert main([*found, "--workers", "1"]) == 0
    assert "nano.safetensors" in (here / "d" / "dedup.json").read_text()
    capsys.readouterr()
    assert main(["data", "dedup", "photos", "--within", "--embed", "none.safetensors"]) == 2
    assert "none.safetensors: No such file or directory; --embed takes a file of weights" in capsys.readouterr().err
