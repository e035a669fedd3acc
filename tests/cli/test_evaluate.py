"""`vitrail evaluate` as a person types it: what is counted, what is written, what is refused."""

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.distributed.pair import together
from vitrail.checkpoint import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import build_fresh, load, save
from vitrail.cli.app import main
from vitrail.data.collection import open_collection
from vitrail.data.splits import Selection
from vitrail.distributed.process_group import World
from vitrail.evaluation.metrics import score_batches
from vitrail.models.vit_config import ViTConfig

SHAPE = ViTConfig(width=64, depth=1, mlp_width=64, heads=1, image=(16, 16), patch=(4, 4), classes=7)
SLOW = pytest.mark.slow
NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
COUNT = 23


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with names, and 23 images of noise in a folder for each of seven classes."""
    path = tmp_path_factory.mktemp("evaluate")
    torch.manual_seed(0)
    network = build_fresh(SHAPE)
    torch.nn.init.normal_(network.head.classifier.weight, std=0.5)  # type: ignore[union-attr]
    save(network, path / "net.safetensors", labels=list(NAMES))
    rng = np.random.default_rng(0)
    for at in range(COUNT):
        folder = path / "photos" / NAMES[at % 7]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{at}.png")
    return path


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def evaluated(*words: str, weights: str = "net.safetensors", data: str = "photos") -> dict[str, Any]:
    """What the result says."""
    out = Path("result.json")
    command = ["evaluate", weights, "--data", data, "--device", "cpu", "--workers", "0", "--out", str(out), *words]
    assert main(command) == 0
    return json.loads(out.read_text("utf-8"))


@pytest.fixture(scope="module")
def baseline(place: Path) -> dict[str, Any]:
    """The result without any option."""
    with contextlib.chdir(place):
        return evaluated()


def values(result: dict[str, Any]) -> dict[str, float]:
    return {measure["name"]: measure["value"] for measure in result["measures"]}


def slow_count(weights: str | Path, data: str = "photos") -> list[tuple[int, list[int]]]:
    """The label of each image and all classes from the likeliest on, one image at a time."""
    model, source = load(weights), next(iter(open_collection(data).splits.values()))
    with torch.inference_mode():
        logits = [model(model.card.preprocessing(source.open_image(at).rgb())[None])[0] for at in range(len(source))]
    return [(source.labels[at][0], row.argsort(descending=True).tolist()) for at, row in enumerate(logits)]


@pytest.mark.parametrize(
    "batch", [pytest.param(1, marks=SLOW), 4, pytest.param(23, marks=SLOW), pytest.param(100, marks=SLOW)]
)
def test_every_picture_counts_once(here: Path, batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    found, wanted = evaluated("--batch", str(batch)), slow_count("net.safetensors")
    assert values(found)["top-1"] == sum(row[0] == label for label, row in wanted) / COUNT
    assert values(found)["top-5"] == sum(label in row[:5] for label, row in wanted) / COUNT
    assert {measure["count"] for measure in found["measures"]} == {COUNT}
    assert sum(count for *_, count in found["details"]["confusion"]) == COUNT
    said = capsys.readouterr().out
    assert "23 images" in said
    assert "result: result.json" in said


def test_the_result_says_what_it_is_of(here: Path, baseline: dict[str, Any]) -> None:
    found = baseline
    source = open_collection("photos").split("train")
    assert found["data"] == {
        "name": "photos",
        "split": "train",
        "pictures": COUNT,
        "fingerprint": source.fingerprint,
        "deduplicated": None,
        "seen": {"given": COUNT, "seen": None, "seen_are_scored": False, "unrecorded": ["the weights"]},
    }
    assert found["weights"]["name"] == "net.safetensors"
    assert len(found["weights"]["hash"]) == 64
    assert found["config"]["image"] == [16, 16]
    assert found["config"]["precision"] == "float32"
    assert "batch" not in found["config"]
    assert found["environment"]["torch"] == torch.__version__


def test_one_picture(here: Path, tmp_path: Path) -> None:
    (tmp_path / "one" / "cat").mkdir(parents=True)
    shutil.copy("photos/cat/2.png", tmp_path / "one" / "cat")
    found = evaluated(data=str(tmp_path / "one"))
    right = slow_count("net.safetensors")[[*open_collection("photos").split("train").labels.values].index(2)][1][0] == 2
    assert (values(found)["top-1"], found["measures"][0]["count"]) == (float(right), 1)
    assert 0 < found["measures"][0]["high"] - found["measures"][0]["low"] < 1


def test_an_unreadable_picture_is_said_and_counts_for_nothing(
    here: Path, tmp_path: Path, baseline: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("photos", tmp_path / "photos")
    (tmp_path / "photos" / "dog" / "torn.png").write_bytes(b"no image")
    torn = evaluated(data=str(tmp_path / "photos"))
    assert values(torn) == pytest.approx(values(baseline), rel=1e-5)
    assert torn["data"]["pictures"] == COUNT + 1
    assert torn["measures"][0]["count"] == COUNT
    assert "dog/torn.png" in torn["details"]["unreadable"][0]
    assert "note: skipped 1 unreadable image: dog/torn.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("to", "target"),
    [
        ("timm", "timm.safetensors"),
        pytest.param("npz", "net.npz", marks=SLOW),
        pytest.param("huggingface", "folder", marks=SLOW),
        pytest.param("torchvision", "net.pth", marks=SLOW),
    ],
)
def test_weights_of_every_format_give_the_same_numbers(
    here: Path, tmp_path: Path, baseline: dict[str, Any], to: str, target: str
) -> None:
    convert.export(read_bundle("net.safetensors"), tmp_path / target, to)
    theirs = evaluated(weights=str(tmp_path / target))
    assert theirs["measures"] == baseline["measures"]
    assert theirs["weights"]["hash"] == baseline["weights"]["hash"]


def test_a_folder_of_a_run_stands_for_its_weights(here: Path, tmp_path: Path, baseline: dict[str, Any]) -> None:
    (tmp_path / "status.json").write_text("{}")
    shutil.copy("net.safetensors", tmp_path / "last.safetensors")
    assert evaluated(weights=str(tmp_path))["measures"] == baseline["measures"]


def test_each_of_several_sizes_is_a_row_and_a_file(
    here: Path, tmp_path: Path, baseline: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "net.safetensors", "--data", "photos", "--device", "cpu", "--workers", "0"]
    sizes = ["--image-size", "12", "16"]
    assert main([*command, *sizes, "--out", str(tmp_path / "r.json")]) == 0
    said = capsys.readouterr().out
    rows = [line.split()[0] for line in said.splitlines() if line.strip().startswith(("12x", "16x"))]
    assert rows == ["12x12", "16x16"]
    results = {size: json.loads((tmp_path / f"r-{size}.json").read_text()) for size in (12, 16)}
    assert values(results[16]) == values(baseline)
    assert values(results[12])["loss"] != values(results[16])["loss"]
    for size, result in results.items():
        assert {measure["count"] for measure in result["measures"]} == {COUNT}
        assert result["config"]["image"] == [size, size]
        assert result["weights"]["hash"] == results[16]["weights"]["hash"]
    assert main([*command, "--image-size", "16", "16"]) == 2
    assert "names a size twice" in capsys.readouterr().err


def test_classes_in_another_order_are_found_by_name(here: Path, tmp_path: Path, baseline: dict[str, Any]) -> None:
    turned = [3, 0, 6, 1, 5, 2, 4]
    network = load("net.safetensors")
    head: Any = network.head
    with torch.no_grad():
        for part in head.classifier.parameters():
            part.copy_(part[turned].clone())
    save(network, tmp_path / "turned.safetensors", labels=[NAMES[at] for at in turned])
    found = evaluated(weights=str(tmp_path / "turned.safetensors"))
    assert values(found) == pytest.approx(values(baseline), rel=1e-5)
    assert found["config"]["classes"] == "by name"


def test_what_contradicts_itself_is_refused(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cats" / "lion").mkdir(parents=True)
    (tmp_path / "cats" / "lynx").mkdir()
    for folder in ("lion", "lynx"):
        shutil.copy("photos/cat/2.png", tmp_path / "cats" / folder)
    command = ["evaluate", "net.safetensors", "--device", "cpu", "--workers", "0", "--data"]
    save(build_fresh(SHAPE), tmp_path / "nameless.safetensors")
    bare = ["evaluate", str(tmp_path / "nameless.safetensors"), "--device", "cpu", "--data"]
    names = tmp_path / "names.txt"
    names.write_text("lion\nlynx\n")
    for words, why in (
        ([*command, str(tmp_path / "cats")], "lion and lynx"),
        ([*bare, str(tmp_path / "cats")], "2 classes"),
        ([*bare, str(tmp_path / "cats"), "--labels", str(names)], "names.txt"),
        ([*command, "photos/cat"], "no labels"),
        ([*command, "nowhere"], "'nowhere'"),
        ([*command, "photos", "--real", "nothing.json"], "nothing.json"),
        ([*command, "photos", "--image-size", "15"], "15"),
    ):
        assert main(words) == 2, words
        assert why in capsys.readouterr().err
    assert main([*command, str(tmp_path / "cats"), "--by-number"]) == 0
    assert "note: the data have 2 of the network's 7 classes" in capsys.readouterr().out


def test_what_was_left_out_of_training(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = open_collection("photos").split("train")
    rule = {"name": "dedup", "against": {"photos@train": source.fingerprint}, "method": {"exact": True}}
    made = Selection(source="0", rule=rule, indices=np.array([1]), drop=True)
    made.save(tmp_path / "drop.json")
    data = evaluated("--deduplicated-by", str(tmp_path / "drop.json"))["data"]
    assert (data["deduplicated"], data["deduplicated_by"]) == (True, made.hash)
    Selection(source="0", rule={**rule, "against": {"x": "0"}}, indices=np.array([1])).save(tmp_path / "other.json")
    words = ["--deduplicated-by", str(tmp_path / "other.json")]
    assert main(["evaluate", "net.safetensors", "--data", "photos", "--device", "cpu", "--workers", "0", *words]) == 2
    assert f"{tmp_path / 'other.json'}: that selection was made against x" in capsys.readouterr().err


def test_answers_and_page(here: Path, tmp_path: Path) -> None:
    evaluated("--answers", str(tmp_path / "a.csv"), "--page", str(tmp_path / "p.html"))
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    wanted = slow_count("net.safetensors")
    assert [(row["true"], row["said"]) for row in rows] == [(NAMES[label], NAMES[order[0]]) for label, order in wanted]
    text = (tmp_path / "p.html").read_text("utf-8")
    for word in ("Confusion matrix", "Right answers by confidence", "Worst", "data:image/jpeg", "top-5"):
        assert word in text
    assert "<script" not in text
    assert "://" not in text


@pytest.fixture
def imagenet(here: Path, tmp_path: Path) -> Path:
    """Images with the names of ImageNet's, and ReaL labels: several, one, none."""
    real: list[list[int]] = [[] for _ in range(40)]
    for at in range(COUNT):
        label = at % 7
        folder = tmp_path / "val" / f"n{label}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(Path("photos", NAMES[label]).glob(f"{at}.png")), folder / f"ILSVRC2012_val_{at + 11:08}.png")
        real[at + 10] = [[label], [(label + 1) % 7, label], [(label + 2) % 7], []][at % 4]
    (tmp_path / "real.json").write_text(json.dumps(real))
    return tmp_path


def test_real_labels_beside_the_original_ones(
    imagenet: Path, baseline: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    save(load("net.safetensors"), imagenet / "net.safetensors", labels=[f"n{at}" for at in range(7)])
    weights, data = str(imagenet / "net.safetensors"), str(imagenet / "val")
    found = evaluated("--real", str(imagenet / "real.json"), weights=weights, data=data)
    source, real = open_collection(data).split("train"), json.loads((imagenet / "real.json").read_text())
    said = [order[0] for _, order in slow_count(weights, data)]
    rows = [real[int(source.name(at)[-12:-4]) - 1] for at in range(COUNT)]
    judged = [one in row for one, row in zip(said, rows, strict=True) if row]
    by_name = {measure["name"]: measure for measure in found["measures"]}
    assert by_name["ReaL"]["count"] == len(judged) == COUNT - sum(not row for row in rows) < COUNT
    assert by_name["ReaL"]["value"] == sum(judged) / len(judged)
    assert by_name["top-1"]["count"] == COUNT
    assert values(found)["top-1"] == values(baseline)["top-1"]
    assert "note: 5 images have no ReaL label and are left out of that score" in capsys.readouterr().out


@pytest.mark.slow
def test_real_labels_alone(imagenet: Path) -> None:
    """Images that have no labels of their own."""
    (imagenet / "flat").mkdir()
    for path in (imagenet / "val").glob("*/*.png"):
        shutil.copy(path, imagenet / "flat")
    save(build_fresh(SHAPE), imagenet / "nameless.safetensors")
    both = evaluated(
        "--real",
        str(imagenet / "real.json"),
        weights=str(imagenet / "nameless.safetensors"),
        data=str(imagenet / "val"),
    )
    alone = evaluated(
        "--real",
        str(imagenet / "real.json"),
        weights=str(imagenet / "nameless.safetensors"),
        data=str(imagenet / "flat"),
    )
    assert alone["config"]["labels"] == "ReaL"
    assert values(alone)["top-1"] == values(both)["ReaL"]


def in_a_world(world: World, folder: str, words: list[str]) -> int:
    from vitrail.cli.evaluate import evaluate

    os.chdir(folder)

    @contextlib.contextmanager
    def join_world(device: str) -> Generator[World]:
        yield world

    evaluate.join_world = join_world  # type: ignore[assignment]
    return main(words)


@pytest.mark.slow
def test_two_processes_write_the_numbers_of_one(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    shutil.copytree("photos", tmp_path / "photos")
    (tmp_path / "photos" / "dog" / "torn.png").write_bytes(b"no image")
    data = str(tmp_path / "photos")
    for batch in ("4", "64"):
        alone = evaluated("--batch", batch, data=data)
        out = tmp_path / f"{batch}.json"
        words = ["evaluate", "net.safetensors", "--data", data, "--device", "cpu", "--workers", "0", "--batch", batch]
        assert together(in_a_world, str(place), [*words, "--out", str(out)]) == [0, 0]
        both = json.loads(out.read_text("utf-8"))
        assert both["measures"] == alone["measures"]
        assert both["details"] == alone["details"]


@pytest.mark.slow
def test_it_runs_under_torchrun(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    out = tmp_path / "two.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitrail"]
    words = ["evaluate", "net.safetensors", "--data", "photos", "--device", "cpu", "--workers", "0", "--out", str(out)]
    where = {**os.environ, "PYTHONPATH": str(Path(vitrail.__file__).parents[1])}
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=120, env=where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1") == 1  # one of them speaks
    assert json.loads(out.read_text("utf-8"))["measures"] == evaluated()["measures"]


DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "imagenet_val_1000.tar").is_file(), reason="no trained weights and images next to the checkout"
)
def test_trained_weights_have_the_accuracy_that_their_authors_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = evaluated(
        "--real",
        str(DATA / "real.json"),
        "--labels",
        str(DATA / "imagenet_classes.txt"),
        weights=str(DATA / "deit_tiny_patch16_224.safetensors"),
        data=str(DATA / "imagenet_val_1000.tar"),
    )
    by_name = {measure["name"]: measure for measure in found["measures"]}
    assert (by_name["top-1"]["value"], by_name["top-5"]["value"]) == (0.701, 0.907)
    assert (by_name["ReaL"]["value"], by_name["ReaL"]["count"]) == (765 / 946, 946)
    said = capsys.readouterr().out
    assert "765 of 946" in said
    assert "note: 54 images have no ReaL label and are left out of that score" in said


def test_weights_keep_their_hash_in_half_precision(here: Path, baseline: dict[str, Any]) -> None:
    assert evaluated("--precision", "bfloat16")["weights"] == baseline["weights"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deduplicated-by", "net.safetensors"], "net.safetensors"),
        (["--out", "photos"], "photos is a folder"),
        (["--page", "net.safetensors/page.html"], "net.safetensors is not a folder"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_once(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scored(*_: object, **__: object) -> None:
        raise AssertionError("images were looked at")

    monkeypatch.setattr("vitrail.evaluation.scoring.score_batches", scored)
    assert main(["evaluate", "net.safetensors", "--data", "photos", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [["--precision", "bfloat16"], pytest.param(["--image-size", "8"], marks=SLOW)])
def test_the_hash_is_that_of_the_weights_that_were_scored(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a run that is training replaces its file meanwhile."""
    kept = tmp_path / "kept.safetensors"
    shutil.copy("net.safetensors", kept)
    before = evaluated(weights=str(kept))["weights"]["hash"]

    def scored(*arguments: Any, **options: Any) -> Any:
        save(build_fresh(SHAPE), kept, labels=list(NAMES))
        return score_batches(*arguments, **options)

    monkeypatch.setattr("vitrail.evaluation.scoring.score_batches", scored)
    assert evaluated(*words, weights=str(kept))["weights"]["hash"] == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--batch", "-3"], "--batch -3 must be at least 1"),
        (["--out", "x.json", "--page", "./x.json"], "--out and --page are both x.json"),
    ],
)
def test_what_would_end_badly_is_refused_at_once(
    here: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["evaluate", "net.safetensors", "--data", "photos", "--workers", "0", *more]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not (here / "x.json").exists()
