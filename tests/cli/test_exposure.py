"""Images that the weights have seen: every command that scores leaves them out, and says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.checkpoint import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import build_fresh, save
from vitrail.cli.app import main
from vitrail.data.collection import open_collection
from vitrail.data.dataset import SubsetDataset
from vitrail.data.splits import Selection, dev_split
from vitrail.data.training_record import KEY, record_training
from vitrail.models.vit_config import ViTConfig

SHAPE = ViTConfig(width=16, depth=1, mlp_width=16, heads=1, image=(8, 8), patch=(4, 4), classes=3)
NAMES = ("ant", "bee", "cat")
COUNT, HELD = 30, 6


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """30 images, and weights that were trained on 24 of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for at in range(COUNT):
        folder = tmp_path / "photos" / NAMES[at % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{at}.png")
    whole = open_collection("photos").split("train")
    rest, _ = dev_split(whole, HELD / COUNT)
    write_weights("net.safetensors", rest.apply(whole))
    return tmp_path


def write_weights(path: str, *trained: SubsetDataset, **more: Any) -> None:
    records = [record_training(part, out_of=COUNT, selection={}, others={}) for part in trained]
    torch.manual_seed(0)
    network = build_fresh(SHAPE)
    torch.nn.init.normal_(network.head.classifier.weight, std=0.5)  # type: ignore[union-attr]
    save(network, path, labels=list(NAMES), provenance={**({KEY: records} if records else {}), **more})


def run(command: str, weights: str = "net.safetensors", *words: str, data: str = "photos", status: int = 0) -> Any:
    """What the result says."""
    Path("result.json").unlink(missing_ok=True)
    options = ["--device", "cpu", "--workers", "0", "--out", "result.json", *words]
    assert main([command, weights, "--data", data, *options]) == status
    return None if status else json.loads(Path("result.json").read_text("utf-8"))


def top1(result: dict[str, Any]) -> tuple[float, int]:
    (found,) = (measure for measure in result["measures"] if measure["name"] == "top-1")
    return found["value"], found["count"]


def test_the_folder_that_was_trained_on_is_scored_by_what_was_held_out(capsys: pytest.CaptureFixture[str]) -> None:
    result = run("evaluate", "net.safetensors", "--page", "page.html", "--answers", "answers.csv")
    said = capsys.readouterr().out
    assert top1(result)[1] == result["data"]["pictures"] == HELD
    assert result["data"]["seen"] == {"given": 30, "seen": 24, "seen_are_scored": False, "unrecorded": []}
    sentence = "24 of 30 images were used in training; scoring the 6 held out"
    assert sentence in said
    assert sentence in Path("page.html").read_text("utf-8")
    assert len(Path("answers.csv").read_text("utf-8").splitlines()) == HELD + 1
    whole = open_collection("photos").split("train")
    held = dev_split(whole, HELD / COUNT)[1].apply(whole)
    for at in range(len(held)):
        path = Path("held") / held.name(at)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path("photos") / held.name(at), path)
    assert top1(run("evaluate", data="held")) == top1(result)


@pytest.mark.slow
def test_all_images_are_scored_where_that_is_asked_for_and_the_number_is_labelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = run("evaluate", "net.safetensors", "--include-seen", "--page", "page.html")
    assert top1(result)[1] == COUNT
    assert result["data"]["seen"]["seen_are_scored"]
    said = capsys.readouterr().out
    assert "WARNING: 24 of the 30 images scored here were used in training" in said
    assert "of 30, 24 seen" in said
    assert "24 of the 30 images" in Path("page.html").read_text("utf-8")
    Path("all.json").write_text(Path("result.json").read_text())
    run("evaluate")
    capsys.readouterr()
    assert main(["compare", "all.json", "result.json", "--measures", "top-1"]) == 0
    assert "photos@train, seen in training" in capsys.readouterr().out


def test_where_nothing_was_held_out_there_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    write_weights("all.safetensors", SubsetDataset(open_collection("photos").split("train"), np.arange(COUNT)))
    run("evaluate", "all.safetensors", status=2)
    assert "all 30 images" in capsys.readouterr().err
    assert run("evaluate", "all.safetensors", "--include-seen")["data"]["seen"]["seen"] == COUNT


@pytest.mark.slow
def test_what_fit_made_has_seen_all_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("photos", "others")
    for at, path in enumerate(sorted(Path("others").rglob("*.png"))):
        if at % 2:
            Image.fromarray(np.full((8, 8, 3), at, np.uint8)).save(path)
    write_weights("bare.safetensors")
    words = ["--device", "cpu", "--workers", "0"]
    assert main(["fit", "bare.safetensors", "photos", "--test", "others", "--out", "fit.safetensors", *words]) == 0
    said = capsys.readouterr().out
    assert "15 of the 30 images of others@train were used in training" in said
    assert read_bundle("fit.safetensors").card.provenance["score"]["count"] == 15
    run("evaluate", "fit.safetensors", status=2)
    assert top1(run("evaluate", "fit.safetensors", data="others"))[1] == 15
    assert main(["fit", "bare.safetensors", "photos", "--test", "photos", "--out", "fit.safetensors", *words]) == 0
    assert "they are not scored" in capsys.readouterr().out


def test_weights_without_a_record_get_their_number_with_a_word_of_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    write_weights("old.safetensors", run="of 0.1.0")
    result = run("evaluate", "old.safetensors")
    assert top1(result)[1] == COUNT
    assert (result["data"]["seen"]["seen"], result["data"]["seen"]["unrecorded"]) == (None, ["the weights"])
    assert "unknown whether the weights have seen these images" in capsys.readouterr().out


@pytest.mark.parametrize(("to", "target"), [("vitrail", "o.safetensors"), ("timm", "t.safetensors"), ("npz", "n.npz")])
@pytest.mark.slow
def test_converted_weights_know_it_too(to: str, target: str) -> None:
    convert.export(read_bundle("net.safetensors"), Path(target), to)
    assert run("evaluate", target)["data"]["seen"]["seen"] == 24


def test_a_run_stands_for_its_weights(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "status.json").write_text("{}")
    shutil.copy("net.safetensors", here / "run" / "best.safetensors")
    assert run("evaluate", "run")["data"]["seen"]["seen"] == 24


def test_copies_that_dedup_found_are_left_out_of_the_score(capsys: pytest.CaptureFixture[str]) -> None:
    source = open_collection("photos").split("train")
    rule = {"name": "dedup", "against": {"other": "0"}, "method": {"exact": True}}
    drop = Selection(source=source.fingerprint, rule=rule, indices=np.arange(10), drop=True)
    drop.save(Path("drop.json"))
    write_weights("old.safetensors")
    result = run("evaluate", "old.safetensors", "--without", "drop.json")
    assert top1(result)[1] == COUNT - 10
    assert (result["data"]["seen"]["dropped"], result["data"]["seen"]["without"]) == (10, drop.hash)
    assert "10 images skipped as copies" in capsys.readouterr().out
    shutil.rmtree("photos/bee")
    run("evaluate", "old.safetensors", "--without", "drop.json", status=2)
    assert "--without drop.json: " in capsys.readouterr().err


def test_a_word_on_copies_that_the_record_contradicts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    source = open_collection("photos").split("train")
    rule = {"name": "dedup", "against": {"photos@train": source.fingerprint}, "method": {"exact": True}}
    Selection(source="0", rule=rule, indices=np.arange(1), drop=True).save(Path("drop.json"))
    run("evaluate", "net.safetensors", "--deduplicated-by", "drop.json", status=2)
    assert "drop.json: the weights record" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fewshot", "probe", "knn"])
def test_frozen_features_are_scored_on_images_that_the_weights_have_not_seen(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--shots", "1"] if command == "fewshot" else []
    result = run(command, "net.safetensors", "--held-out", "0.5", *more)
    seen = result["data"]["seen"]
    assert 0 < seen["seen"] < seen["given"] == 15
    assert {measure["count"] for measure in result["measures"]} == {15 - seen["seen"]}
    assert result["data"]["train"]["pictures"] == 15
    assert f"scoring the {15 - seen['seen']} held out" in capsys.readouterr().out
    every = run(command, "net.safetensors", "--held-out", "0.5", "--include-seen", *more)
    assert {measure["count"] for measure in every["measures"]} == {15}


def test_images_to_score_are_not_among_those_to_learn_from(capsys: pytest.CaptureFixture[str]) -> None:
    write_weights("old.safetensors")
    run("knn", "old.safetensors", "--test", "photos", status=2)
    assert "all 30 images to train on are also scored" in capsys.readouterr().err
    for at in range(3):
        path = Path("test") / NAMES[at] / "copied.png"
        path.parent.mkdir(parents=True)
        shutil.copy(Path("photos") / NAMES[at] / f"{at}.png", path)
    result = run("knn", "old.safetensors", "--test", "test", "-k", "1")
    assert (result["data"]["pictures"], result["data"]["train"]["pictures"]) == (3, COUNT - 3)
    assert "3 images of train are also scored" in capsys.readouterr().out
