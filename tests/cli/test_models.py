"""`vitrail models`: rows, exact numbers, patterns."""

import json
import subprocess
import sys

import pytest

from vitrail.checkpoint.known_weights import PUBLIC
from vitrail.cli.app import main
from vitrail.models.zoo import ZOO, model_config, slug


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["models", *argv]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def rows(text: str) -> dict[str, list[str]]:
    """Cells of every network's line."""
    found = (line.split() for line in text.splitlines())
    return {cells[0]: cells[1:] for cells in found if cells and cells[0] in ZOO}


def records(text: str) -> dict[str, dict[str, object]]:
    return {record["network"]: record for record in map(json.loads, text.splitlines())}


def test_every_network_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys)
    assert set(rows(text)) == set(ZOO)
    assert all(cells[0] == slug(name) for name, cells in rows(text).items())
    assert f"{len(ZOO)} networks; parameters with 1000 classes at the smaller size." in text
    assert "Patch 14 does not divide 384: those columns are at 378." in text


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("ViT-B/16", ["vit_b_16", "86.57M", "197", "17.56", "577", "55.48"]),
        ("ViT-L/16", ["vit_l_16", "304.33M", "197", "61.55", "577", "191.07"]),
        ("ViT-H/14", ["vit_h_14", "632.05M", "257", "167.30", "730", "503.48"]),
        ("ViT-b/32", ["vit_slim_b_32", "22.88M", "50", "1.14", "145", "3.44"]),
        ("R50+ViT-B/16", ["r50_vit_b_16", "98.66M", "197", "21.54", "577", "67.16"]),
        ("BiT-R50x1", ["bit_r50x1", "25.55M", "-", "4.09", "-", "12.01"]),
        ("ViT-Nano/4", ["vit_nano_4", "0.56M", "65", "0.03", "257", "0.19"]),
    ],
)
def test_row(name: str, cells: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(said(capsys, slug(name)))[name] == cells


def test_header_names_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    large = said(capsys, "vit-b/16")
    assert [word in large for word in ("tokens 224", "GMACs 224", "tokens 384", "GMACs 384")] == [True] * 4
    assert "Patch 14" not in large
    small = said(capsys, "nano")
    assert [word in small for word in ("tokens 32", "GMACs 32", "tokens 64", "GMACs 64")] == [True] * 4
    assert "224" not in small


def test_json_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    found = records(said(capsys, "--json"))
    assert list(found) == list(ZOO)
    assert found["ViT-B/16"] == {
        "network": "ViT-B/16",
        "name": "vit_b_16",
        "224": {"image": [224, 224], "parameters": 86_567_656, "tokens": 197, "macs": 17_563_828_224},
        "384": {"image": [384, 384], "parameters": 86_859_496, "tokens": 577, "macs": 55_484_350_464},
    }
    for name, record in found.items():
        sizes = [key for key in record if key.isdigit()]
        papers = ["32", "64"] if ZOO[name].image == (32, 32) else ["224", "384"]
        assert sizes == ([str(ZOO[name].image[0])] if "family" in record else papers)
        for size in sizes:
            numbers = record[size]
            assert isinstance(numbers, dict)
            config = model_config(name, image_size=tuple(numbers["image"]))
            assert (numbers["parameters"], numbers["macs"]) == (config.parameters, config.macs)
            assert numbers["tokens"] == getattr(config, "tokens", None)


def test_patch_14_is_taken_at_the_next_size_below(capsys: pytest.CaptureFixture[str]) -> None:
    record = records(said(capsys, "vit_h_14", "--json"))["ViT-H/14"]
    assert record["384"] == {
        "image": [378, 378],
        "parameters": 632_651_240,
        "tokens": 730,
        "macs": 503_481_410_560,
    }


@pytest.mark.parametrize(("classes", "count"), [("21843", 102_595_923), ("0", 85_798_656)])
def test_classes(classes: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    record = records(said(capsys, "vit_b_16", "--json", "--classes", classes))["ViT-B/16"]
    assert isinstance(record["224"], dict)
    assert record["224"]["parameters"] == count
    assert f"parameters with {classes} classes" in said(capsys, "vit_b_16", "--classes", classes)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("vit-*/16", ["ViT-Ti/16", "ViT-S/16", "ViT-B/16", "ViT-L/16", "ViT-H/16", "ViT-g/16", "ViT-G/16"]),
        ("r152", ["BiT-R152x1", "BiT-R152x2", "BiT-R152x4"]),
        ("AxialResNet50", ["AxialResNet50"]),
    ],
)
def test_pattern(pattern: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, pattern)
    assert list(rows(text)) == names
    assert f"{len(names)} networks" in text


def test_networks_of_weight_families_stand_at_their_own_size(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "dinov3")
    assert list(rows(text)) == [name for name in ZOO if name.startswith("DINOv3")]
    assert rows(text)["DINOv3-S+/16"] == ["dinov3_s_plus_16", "29.45M", "256", "261", "8.09"]
    assert "Patch 14" not in said(capsys, "dinov2")
    assert records(said(capsys, "dinov3_b_16", "--json"))["DINOv3-B/16"]["family"] == "DINOv3"


@pytest.mark.parametrize("argv", [["models"], ["models", "--weights"]])
def test_no_line_is_wider_than_a_terminal(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(argv) == 0
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert all("://" in line or ": for " in line for line in wide)


def test_weights_are_listed_by_family_and_licence(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "mae", "--weights")
    assert [line.split()[0] for line in text.splitlines() if ":mae" in line] == [
        *("vit_b_16:mae", "vit_l_16:mae", "vit_h_14:mae")
    ]
    assert "cc-by-nc-4.0: non-commercial" in text
    assert "https://creativecommons.org" in text
    clip = said(capsys, "clip_b_16:*", "--weights")
    assert {"clip_b_16:openai", "clip_b_16:metaclip_400m"} <= set(clip.split())
    assert "unsure" in clip
    assert "unsure" not in said(capsys, "sam_b_16", "--weights")


def test_weights_as_json_say_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["weights"]: row for row in map(json.loads, said(capsys, "--weights", "--json").splitlines())}
    assert len(found) == len(PUBLIC)
    row = found["dinov3_l_16:sat493m"]
    assert (row["licence"], row["access"], row["image"], row["classes"]) == ("dinov3-license", "gated", 256, 0)
    assert row["also"] == "facebook/dinov3-vitl16-pretrain-sat493m"
    assert row["parameters"] == 303_079_424


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["vitdet", "--weights"], "vitrail: error: there are no public weights of ViTDet-B/16"),
        (["dinov9", "--weights"], "vitrail: error: unknown network or family 'dinov9'; did you mean "),
        (["vit_b16"], "vitrail: error: unknown model 'vit_b16'; did you mean vit_b_16"),
        (["vit-x*"], "vitrail: error: unknown model 'vit-x*'; did you mean "),
        (["vit_b_16", "--classes", "-3"], "vitrail: error: head='linear' does not take classes=-3"),
        (["bit_r50x1", "--classes", "-3"], "vitrail: error: classes=-3 must be 0"),
        (["--classes", "ten"], "vitrail: error: argument --classes: invalid int value: 'ten'"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *argv]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith(complaint)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["models"],
        pytest.param(["models", "--json"], marks=pytest.mark.slow),
        ["trace", "R50+ViT-B/16"],
        pytest.param(["models", "zebra"], marks=pytest.mark.slow),
    ],
)
def test_torch_is_not_loaded(argv: list[str]) -> None:
    code = f"import sys; from vitrail.cli.app import main; main({argv!r}); print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "vitrail.models.family" in loaded
    assert not {"torch", "torchvision", "numpy"}.intersection(loaded)
