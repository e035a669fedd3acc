"""`vitrail inspect` makes a page and figures of any network, says what it leaves out, and names what is wrong."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models.tiny import HYBRID, RESNET, VIT, awake
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.cli.use import inspect
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection import page
from vitrail.inspection.sections import KINDS
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import query_config
from vitrail.report import figure_style as style

CLASSES = ("a", "b", "c", "d", "wood pigeon")


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick to draw."""
    monkeypatch.setattr(style, "DPI", 24)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not rendered."""
    for module in (page, style):
        monkeypatch.setattr(module, "encode_figure", lambda *_: b"drawn")


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for at in range(18):
        Image.fromarray(draw.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / f"{at:02d}.png")
    return [str(folder / f"{at:02d}.png") for at in range(2)]


def weights(tmp_path: Path, config: ModelConfig, name: str = "w.safetensors") -> str:
    labels = CLASSES if config.classes else None
    save(awake(config), tmp_path / name, preprocessing=Preprocessing(image=config.image), labels=labels)
    return str(tmp_path / name)


@pytest.mark.slow
def test_a_page_with_every_kind_and_its_figures(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = tmp_path / "out", str(tmp_path / "pictures")
    arguments = ["--images", *pictures, "--data", data, "--workers", "0", "--out", str(out)]
    assert main(["inspect", weights(tmp_path, VIT), *arguments]) == 0
    said = capsys.readouterr().out
    assert "skipped" not in said
    assert "Every layer and head, to click through" in said
    text = (out / "report.html").read_text("utf-8")
    kinds = [name for name, kind in KINDS.items() if kind.is_common]
    assert re.findall(r'<section id="(\w+)">', text) == ["rollout", "explorer", *kinds[1:]]
    names = [*kinds, "norm-maps"]
    assert {path.name for path in (out / "figures").iterdir()} == {f"{n}.{e}" for n in names for e in ("png", "svg")}
    assert "00.png" in text
    assert "over 18 images" in text
    assert set(re.findall(r"<span>([a-z ]+)</span>", text)) <= set(CLASSES)
    result = json.loads((out / "inspect.json").read_text("utf-8"))
    assert result["kind"] == "inspect"
    assert {"row-column score", "deletion, rollout"} <= {row["name"] for row in result["measures"]}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "config",
    [
        HYBRID,
        pytest.param(replace(VIT, registers=2), marks=pytest.mark.slow),
        pytest.param(replace(VIT, pool="mean", class_token=False), marks=pytest.mark.slow),
        replace(VIT, pool="mean", class_token=False, attention="axial"),
        replace(VIT, head="none", classes=0),
        pytest.param(replace(VIT, position="relative"), marks=pytest.mark.slow),
    ],
    ids=["hybrid", "registers", "mean", "axial", "no head", "relative"],
)
@pytest.mark.slow
def test_other_transformers(tmp_path: Path, pictures: list[str], config: ModelConfig) -> None:
    out = tmp_path / "out"
    assert main(["inspect", weights(tmp_path, config), "--images", *pictures, "--out", str(out)]) == 0
    shown = re.findall(r'<section id="(\w+)">', (out / "report.html").read_text("utf-8"))
    missing = {"gradcam", "queries", "cka"}  # for ResNets; for queries; for more images than two
    if not config.classes:
        missing |= {"gradient", "faithfulness"}
    if getattr(config, "position", "") == "relative":
        missing.add("positions")
    assert set(shown) == {"explorer", *KINDS} - missing


@pytest.mark.usefixtures("undrawn")
def test_a_network_with_queries_shows_them_and_says_what_it_has_none_of(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "out", weights(tmp_path, query_config(VIT, "eomt", len(CLASSES), queries=5))
    arguments = ["--images", *pictures, "--only", "queries,gradient,faithfulness", "--out", str(out)]
    assert main(["inspect", path, *arguments]) == 0
    text = (out / "report.html").read_text("utf-8")
    assert re.findall(r'<section id="(\w+)">', text) == ["queries"]
    assert "skipped: gradient, faithfulness: " in capsys.readouterr().out
    assert main(["inspect", weights(tmp_path, VIT), "--images", *pictures, "--only", "queries", "--out", str(out)]) == 2


@pytest.mark.usefixtures("undrawn")
def test_a_resnet_has_what_it_has_and_the_page_says_why_not_more(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["inspect", weights(tmp_path, RESNET), "--images", pictures[0], "--out", str(out)]) == 0
    text = (out / "report.html").read_text("utf-8")
    assert re.findall(r'<section id="(\w+)">', text) == ["gradcam", "faithfulness", "filters"]
    said = capsys.readouterr().out
    for found in (text, said):
        assert re.search(r"rollout, layers, .*, explorer: a ResNet has no tokens and no attention between them", found)
    assert "click through" not in said
    assert "<script" not in text


@pytest.mark.usefixtures("undrawn")
def test_some_kinds_of_some_layers_for_a_class(tmp_path: Path, pictures: list[str]) -> None:
    out = tmp_path / "out"
    chosen = ["--only", "gradient,similarity,layers", "--layers", "2", "--class", "Wood_Pigeon", "--patch", "3,4"]
    assert main(["inspect", weights(tmp_path, VIT), "--images", pictures[0], *chosen, "--out", str(out)]) == 0
    text = (out / "report.html").read_text("utf-8")
    assert re.findall(r'<section id="(\w+)">', text) == ["layers", "gradient", "similarity"]
    assert "The map is for the requested class" in text
    assert "the patch in row 3, column 4" in text


@pytest.mark.usefixtures("undrawn")
def test_what_needs_no_pictures_needs_none(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["inspect", weights(tmp_path, VIT), "--only", "filters,positions", "--out", str(out)]) == 0
    assert (out / "figures" / "filters.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_pictures_of_a_set_are_shown_where_none_are_named(tmp_path: Path, pictures: list[str]) -> None:
    out, data = tmp_path / "out", str(Path(pictures[0]).parent)
    chosen = ["--data", data, "--count", "7", "--workers", "0", "--only", "rollout,distance"]
    assert main(["inspect", weights(tmp_path, VIT), *chosen, "--out", str(out)]) == 0
    text = (out / "report.html").read_text("utf-8")
    assert text.count("<article>") == 4
    assert "over 7 images" in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_is_training_stands_for_its_weights_so_far(tmp_path: Path, pictures: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text('{"state": "running"}')
    weights(run, VIT, "last.safetensors")
    out = tmp_path / "out"
    assert main(["inspect", str(run), "--images", *pictures, "--only", "rollout", "--out", str(out)]) == 0
    assert "Inside run" in (out / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("undrawn")
def test_names_of_classes_from_a_file(tmp_path: Path, pictures: list[str]) -> None:
    names, out = tmp_path / "names.txt", tmp_path / "out"
    names.write_text("".join(f"n0000000{at} great_tit_{at}\n" for at in range(5)))
    chosen = ["--labels", str(names), "--only", "rollout", "--out", str(out)]
    assert main(["inspect", weights(tmp_path, VIT), "--images", *pictures, *chosen]) == 0
    text = (out / "report.html").read_text("utf-8")
    assert re.search(r"<span>great tit \d</span>", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no images to look at"),
        (["--only", "rolout"], "did you mean rollout"),
        (["--images", "0.png", "--only", " , "], "--only names no kind"),
        (["--data", "broken"], "none of the 1 images of broken@train can be read"),
        (["--images", "absent.png"], "absent.png: No such file"),
        (["--images", "."], "is a folder"),
        (["--images", "noise.png"], "noise.png"),
        (["--images", "0.png", "--class", "wood pidgeon"], "did you mean wood pigeon"),
        (["--images", "0.png", "--class", "5"], "classes 0 to 4"),
        (["--images", "0.png", "--patch", "3"], "a row and a column"),
        (["--images", "0.png", "--patch", "9,9"], "--patch 9,9: this network has 3 rows and 4 columns, from 1,1"),
        (["--images", "0.png", "--patch", "0,1"], "from 1,1"),
        (["--images", "0.png", "--class", "\u00b2"], "unknown class"),
        (["--images", "0.png", "--class", "crane", "--labels", "cranes.txt"], "classes 1 and 3"),
        (["--images", "0.png", "--out", "0.png/x"], "0.png is not a folder"),
        (["--images", "0.png", "--layers", "3", "--only", "layers"], "layers 1 to 2"),
        (["--images", "0.png", "--labels", "noise.png"], "noise.png"),
        (["--images", "0.png", "--device", "abacus"], "abacus"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("0.png")
    Path("cranes.txt").write_text("a\ncrane\nb\nCrane\nc\n")
    Path("noise.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing\xff")
    Path("broken/a").mkdir(parents=True)
    Path("broken/a/0.png").write_bytes(b"nothing")
    assert main(["inspect", weights(tmp_path, VIT), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("inspection").exists()


def test_without_matplotlib_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["inspect", weights(tmp_path, VIT), "--only", "filters", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'vitrail[figures]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_a_blank_line_at_the_end_of_the_names_is_none_of_them(tmp_path: Path, pictures: list[str]) -> None:
    names, out = tmp_path / "names.txt", tmp_path / "out"
    names.write_text("".join(f"tit {at}\n" for at in range(5)) + "\n")
    chosen = ["--labels", str(names), "--only", "rollout", "--out", str(out)]
    assert main(["inspect", weights(tmp_path, VIT), "--images", *pictures, *chosen]) == 0


@pytest.mark.usefixtures("undrawn")
def test_a_picture_that_cannot_be_read_is_not_the_one_that_is_shown(tmp_path: Path, pictures: list[str]) -> None:
    Path(pictures[0]).write_bytes(b"nothing")  # the first, which would be shown
    out, data = tmp_path / "out", str(Path(pictures[0]).parent)
    chosen = ["--data", data, "--workers", "0", "--only", "rollout", "--out", str(out)]
    assert main(["inspect", weights(tmp_path, VIT), *chosen]) == 0
    text = (out / "report.html").read_text("utf-8")
    assert text.count("<article>") == 4
    assert "00.png" not in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_every_number_says_how_many_pictures_it_is_of(tmp_path: Path, pictures: list[str]) -> None:
    out, data = tmp_path / "out", str(Path(pictures[0]).parent)
    chosen = ["--images", *pictures, "--data", data, "--workers", "0", "--only", "positions,norms,distance,cka"]
    assert main(["inspect", weights(tmp_path, VIT), *chosen, "--out", str(out)]) == 0
    result = json.loads((out / "inspect.json").read_text("utf-8"))
    counts = {row["name"]: row["count"] for row in result["measures"]}
    assert counts["row-column score"] is None
    assert counts["longest patch over median"] == 2
    assert counts["mean attention distance, last layer"] == counts["CKA of first and last"] == 18
    assert result["config"]["image"] == list(VIT.image)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_an_axial_network_has_two_layers_a_block_in_every_figure(tmp_path: Path, pictures: list[str]) -> None:
    config = replace(VIT, pool="mean", class_token=False, attention="axial")
    chosen = ["--images", *pictures, "--only", "features,norms,layers", "--layers", "4", "--out", str(tmp_path / "out")]
    assert main(["inspect", weights(tmp_path, config), *chosen]) == 0


@pytest.mark.usefixtures("undrawn")
def test_heads_are_those_of_what_the_network_reads(tmp_path: Path, pictures: list[str]) -> None:
    out = tmp_path / "out"
    chosen = ["--images", *pictures, "--only", "heads", "--out", str(out)]
    assert main(["inspect", weights(tmp_path, replace(VIT, pool="mean")), *chosen]) == 0
    assert "patches look, on average" in (out / "report.html").read_text("utf-8")


def test_it_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["inspect", weights(tmp_path, VIT), "--only", "filters", "--out", str(tmp_path / "out")]) == 2
    assert "start it without torchrun" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_what_cannot_be_read_is_named_and_not_counted(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(pictures[0]).parent
    before = sum(1 for path in folder.rglob("*") if path.is_file())
    (folder / "zz.png").write_bytes(b"nothing")
    chosen = ["--data", str(folder), "--workers", "0", "--only", "distance", "--out", str(tmp_path / "out")]
    assert main(["inspect", weights(tmp_path, VIT), *chosen]) == 0
    assert "note: skipped 1 unreadable image: zz.png" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "inspect.json").read_text("utf-8"))
    assert {row["count"] for row in result["measures"]} == {before}
    assert result["data"]["pictures"] == before


@pytest.mark.usefixtures("undrawn")
def test_grad_cam_that_was_asked_of_a_transformer_is_missed(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--images", pictures[0], "--out", str(tmp_path / "out"), "--only"]
    assert main(["inspect", weights(tmp_path, VIT), *chosen, "gradcam,norms"]) == 0
    assert "skipped: gradcam" in capsys.readouterr().out
    assert main(["inspect", weights(tmp_path, VIT), *chosen, "gradcam"]) == 2
    assert "gradcam" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_pictures_may_stand_behind_the_weights(tmp_path: Path, pictures: list[str]) -> None:
    file, out = weights(tmp_path, VIT), tmp_path / "out"
    for typed in ([file, *pictures[:2]], [file, pictures[0], "--images", pictures[1]]):
        assert main(["inspect", *typed, "--only", "rollout", "--out", str(out)]) == 0
        text = (out / "report.html").read_text("utf-8")
        assert all(Path(name).name in text for name in pictures[:2])


@pytest.mark.slow
def test_without_weights_the_shipped_network_is_looked_at(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An image in the place of WEIGHTS is an image."""
    assert main(["inspect", pictures[0], "--only", "rollout", "--out", str(tmp_path / "a")]) == 0
    assert main(["inspect", "--images", pictures[0], "--only", "rollout", "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.count("rollout") >= 2
    for name in ("a", "b"):
        assert json.loads((tmp_path / name / "inspect.json").read_text())["weights"]["name"] == "vitrail-cifar10"


class Bars:
    """Hears every sign of life."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, int, int | None]] = []

    @contextlib.contextmanager
    def __call__(self, **_: object) -> Iterator[Any]:
        yield lambda what, done, total: self.moves.append((what, done, total))


@pytest.mark.usefixtures("undrawn")
def test_the_bar_moves_within_a_part(tmp_path: Path, pictures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bars = Bars()
    monkeypatch.setattr(inspect, "bars", bars)
    args = ["inspect", weights(tmp_path, VIT), "--images", *pictures, "--only", "rollout,distance", "--out"]
    assert main([*args, str(tmp_path / "out")]) == 0
    for kind in ("rollout", "distance"):
        within = [done for what, done, _ in bars.moves if what.startswith(kind)]
        assert len(within) >= VIT.depth
        assert within == sorted(set(within))


@pytest.mark.usefixtures("undrawn")
def test_an_interrupt_leaves_the_figures_that_are_made(
    tmp_path: Path, pictures: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(given: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setitem(KINDS, "distance", replace(KINDS["distance"], make=interrupted))
    args = ["inspect", weights(tmp_path, VIT), "--images", *pictures, "--out", str(tmp_path / "out"), "--only"]
    assert main([*args, "rollout,distance,entropy,explorer"]) == 130
    told = capsys.readouterr().err
    assert "--only distance,entropy,explorer" in told
    assert "Traceback" not in told
    text = (tmp_path / "out" / "report.html").read_text()
    assert 'id="rollout"' in text
    assert 'id="distance"' not in text
    assert main([*args, "distance"]) == 130


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_a_network_with_classes_of_pixels_is_explained_by_their_means(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = awake(replace(VIT, head="patches"))
    model.card = Card(preprocessing=Preprocessing(image=VIT.image), labels=CLASSES, task="segmentation")
    save(model, tmp_path / "w.safetensors")
    arguments = ["--data", str(tmp_path / "pictures"), "--workers", "0", "--out", str(tmp_path / "out")]
    assert main(["inspect", str(tmp_path / "w.safetensors"), *pictures, *arguments]) == 0
    assert "skipped" not in capsys.readouterr().out
    text = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert set(re.findall(r'<section id="(\w+)">', text)) == {*KINDS, "explorer"} - {"gradcam", "queries"}
    assert "read from the mean of all patches" in text


@pytest.mark.usefixtures("undrawn")
def test_a_network_whose_output_is_a_number_has_no_probabilities(
    tmp_path: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = awake(replace(VIT, classes=1))
    model.card = Card(preprocessing=Preprocessing(image=VIT.image), labels=("height",), task="a task of elsewhere")
    save(model, tmp_path / "w.safetensors")
    arguments = ["--only", "rollout,gradient,faithfulness", "--out", str(tmp_path / "out")]
    assert main(["inspect", str(tmp_path / "w.safetensors"), *pictures, *arguments]) == 0
    assert "skipped: faithfulness" in capsys.readouterr().out
    text = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert re.findall(r'<section id="(\w+)">', text) == ["rollout", "gradient"]
    assert "For one output" in text
    assert "100 %" not in text
    assert "likeliest" not in text
