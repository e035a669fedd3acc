"""Class names: ImageNet's for weights that have none, --labels and --rename in every command that names classes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitrail
from tests.cli.test_frozen import folder, picture
from tests.models.tiny import VIT, awake
from vitrail.checkpoint.bundle import Bundle, Card, list_other_names, name_imagenet, rename_classes, sidecar_path
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import save, to_bundle
from vitrail.cli import serve
from vitrail.cli.app import main, parse_options
from vitrail.data.class_names import BUNDLED_SETS, read_class_names, read_imagenet_ids
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.result import Result
from vitrail.tasks.classification.metrics import match_classes

NAMES = ("kingfisher", "tree frog", "ladybird")
CPU = ("--device", "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    write("weights.safetensors", VIT.classes, tuple("abcde"))
    folder(tmp_path / "photos", {"train": 6, "test": 3})
    Path("names.txt").write_text("\n".join(NAMES) + "\n")
    Path("renames.csv").write_text('blue,kingfisher\n"red","bug, red"\n')
    return tmp_path


def write(path: str, classes: int, labels: tuple[str, ...] | None) -> None:
    torch.manual_seed(0)
    model = awake(replace(VIT, classes=classes), torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=VIT.image), labels=labels)
    save(model, path)


def labels_of(path: str) -> tuple[str, ...] | None:
    return find_weights(path).card.labels


def test_the_bundled_names_are_complete() -> None:
    assert [len(read_class_names(name)) for name in BUNDLED_SETS] == [1000, 10, 100]
    for name in BUNDLED_SETS:
        names = read_class_names(name)
        assert len(set(names)) == len(names)
        assert all(each.strip() == each and each for each in names)
    ids = read_imagenet_ids()
    assert list(ids) == sorted(set(ids))  # the order of Google's npz, of timm, torchvision and Hugging Face
    spot = {0: "tench", 207: "golden retriever", 281: "tabby", 340: "zebra", 600: "hook", 817: "sports car"}
    assert {at: read_class_names("imagenet")[at] for at in spot} == spot


@pytest.mark.slow
def test_foreign_weights_with_a_thousand_classes_have_imagenets_names(here: Path) -> None:
    write("thousand.safetensors", 1000, None)
    assert labels_of("thousand.safetensors") is None  # a file of our own says what it knows
    convert("thousand.safetensors", "theirs.pth", "timm")
    sidecar_path(Path("theirs.pth")).unlink()  # without it nobody knows where the file is from
    convert("theirs.pth", "ours.safetensors", image=VIT.image, heads=VIT.heads)
    assert labels_of("ours.safetensors") == read_class_names("imagenet")
    convert("weights.safetensors", "five.pth", "timm")
    assert labels_of("five.pth") == tuple("abcde")  # in its sidecar


def test_own_names_stay(here: Path) -> None:
    card = Card(preprocessing=Preprocessing(image=(8, 8)), labels=tuple(f"mine {i}" for i in range(1000)))
    assert name_imagenet(card, 1000) is card
    bare = replace(card, labels=None)
    assert name_imagenet(bare, 999) is bare
    assert name_imagenet(bare, 1000).labels == read_class_names("imagenet")


def test_folders_of_wordnet_ids_are_matched() -> None:
    card = name_imagenet(Card(preprocessing=Preprocessing(image=(8, 8))), 1000)
    ids = read_imagenet_ids()
    found = match_classes(1000, card.labels, [ids[340], ids[9]], "imagenette", also=list_other_names(card))
    assert found.table.tolist() == [340, 9]
    assert found.names[340] == "zebra"
    strange = [f"{name}, and so on" for name in read_class_names("imagenet")]
    assert match_classes(1000, card.labels, strange, "val", also=list_other_names(card)).table.tolist() == list(
        range(1000)
    )


def test_convert_takes_names(here: Path) -> None:
    assert main(["convert", "weights.safetensors", "a.safetensors", "--rename", "a=aardvark", "--rename", "c=cat"]) == 0
    assert labels_of("a.safetensors") == ("aardvark", "b", "cat", "d", "e")
    Path("five.txt").write_text("v\nw\nx\ny\nz\n")
    words = ["convert", "a.safetensors", "b.safetensors", "--labels", "five.txt", "--rename", "x=ex"]
    assert main(words) == 0
    assert labels_of("b.safetensors") == ("v", "w", "ex", "y", "z")
    bundle = find_weights("a.safetensors")
    assert list_other_names(bundle.card) == [tuple("abcde")]


@pytest.mark.slow
def test_fit_takes_names_and_evaluate_still_finds_the_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["fit", "weights.safetensors", "photos", "--workers", "0", *CPU]
    assert main([*made, "--out", "named.safetensors", "--labels", "names.txt"]) == 0
    assert labels_of("named.safetensors") == NAMES
    assert main([*made, "--out", "renamed.safetensors", "--rename", "renames.csv"]) == 0
    assert labels_of("renamed.safetensors") == ("kingfisher", "green", "bug, red")
    assert main([*made, "--out", "plain.safetensors"]) == 0
    scores: list[float] = []
    for name in ("plain", "renamed", "named"):
        words = ["evaluate", f"{name}.safetensors", "--data", "photos@test", "--workers", "0", *CPU]
        assert main([*words, "--out", f"{name}.json"]) == 0
        scores.append(Result.read(Path(f"{name}.json")).measures[0].value)
    assert scores[0] == scores[1] == scores[2]


@pytest.mark.slow
def test_a_run_has_the_new_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "--from", "weights.safetensors", "--data", "photos", "--out", "run", *CPU]
    quick = ["--set", "steps=2", "--set", "batch=4", "--set", "data.workers=0", "--set", "baseline=off"]
    assert main([*words, *quick, "--rename", "renames.csv"]) == 0
    assert labels_of("run") == ("kingfisher", "green", "bug, red")
    assert main(["finetune", "--resume", "run", *CPU]) == 0
    assert main(["evaluate", "run", "--data", "photos@test", "--workers", "0", *CPU]) == 0
    assert "kingfisher" in Path("run/report.html").read_text()


def test_predict_serve_and_export_take_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture("red", 0).save("one.png")
    assert main(["predict", "weights.safetensors", "one.png", "--topk", "5", "--rename", "a=aardvark", *CPU]) == 0
    assert "aardvark" in capsys.readouterr().out
    served = serve.load_served(
        parse_options("serve", ["weights.safetensors", "--rename", "a=aardvark", *CPU]), True, None
    )
    assert served.describe()["labels"][0] == "aardvark"
    assert (
        main(["export", "weights.safetensors", "--to", "timm", "--out", "t.safetensors", "--rename", "a=aardvark"]) == 0
    )
    assert labels_of("t.safetensors") == ("aardvark", "b", "c", "d", "e")


@pytest.mark.parametrize(
    "words",
    [
        ["--labels", "four.txt"],
        ["--labels", "missing.txt"],
        ["--labels", "cifar10"],
        ["--rename", "nobody=somebody"],
        ["--rename", "a=b"],
        ["--rename", "a="],
        ["--rename", "a=x", "--rename", "a=y"],
        ["--rename", "three.csv"],
        ["--rename", "missing.csv"],
    ],
)
def test_mistakes_are_one_line(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("four.txt").write_text("a\nb\nc\nd\n")
    Path("three.csv").write_text("a,b,c\n")
    assert main(["convert", "weights.safetensors", "out.safetensors", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not Path("out.safetensors").exists()


def test_names_of_another_number_are_refused() -> None:
    torch.manual_seed(0)
    bundle: Bundle = to_bundle(awake(VIT, torch.float32))
    with pytest.raises(vitrail.VitrailError):
        rename_classes(bundle, ["one"])
