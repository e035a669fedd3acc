"""`vitrail trace`: one image's way through a network, and its totals."""

import pytest

from vitrail.cli.app import main
from vitrail.cli.networks import fold_blocks
from vitrail.models.family import sum_steps
from vitrail.models.zoo import ZOO, model_config


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["trace", *argv]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def cells(text: str) -> dict[str, list[str]]:
    """Shape, parameters and MACs by step; steps and numbers are two spaces or more apart."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("  ") if part.strip()]
        if len(parts) > 1:
            found[parts[0]] = parts[1:]
    return found


def test_vit_l32_at_256(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ViT-L/32", "--image-size", "256")
    config = model_config("ViT-L/32", image_size=256)
    lines = cells(text)
    assert text.startswith("ViT-L/32 at 256x256\n")
    assert lines["image"] == ["256x256x3"]
    assert lines["patches 32x32"] == ["64x3072"]
    assert lines["embeddings E"] == ["64x1024", "3,146,752", "201,326,592"]
    assert lines["class token"] == ["65x1024", "1,024"]
    assert lines["positions (learned)"] == ["65x1024", "66,560"]
    assert lines["head: logits"] == ["1000", "1,025,000", "1,024,000"]
    assert lines["total"] == ["1000", f"{config.parameters:,}", f"{config.macs:,}"]


def test_blocks_alike_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    lines = cells(said(capsys, "vit_l_32"))
    config = ZOO["ViT-L/32"]
    block = sum_steps(step for step in config.walk() if step.name.startswith("block 1:"))
    assert lines["blocks 2-24: the same"] == ["50x1024", f"{23 * block.params:,}", f"{23 * block.macs:,}"]
    assert "block 1: attention" in lines
    assert "block 2: attention" not in lines


def test_all_shows_every_block_and_the_same_total(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = cells(said(capsys, "vit_l_32")), cells(said(capsys, "vit_l_32", "--all"))
    assert [name for name in long if name.endswith(": attention")] == [f"block {i}: attention" for i in range(1, 25)]
    assert "blocks 2-24: the same" not in long
    assert long["total"] == short["total"]


@pytest.mark.parametrize("name", ZOO)
def test_folding_loses_nothing(name: str) -> None:
    steps = list(ZOO[name].walk())
    short = fold_blocks(steps)
    assert sum_steps(short) == sum_steps(steps)
    assert len(short) < 100
    assert short[-1] == steps[-1]


@pytest.mark.parametrize(
    ("argv", "title", "expected"),
    [
        (["vit_b_16", "--image-size", "224x448"], "ViT-B/16 at 224x448", {"patches 16x16": ["392x768"]}),
        (["ViT-B/16", "--image-size", "224X448"], "ViT-B/16 at 224x448", {"embeddings E": ["392x768"]}),
        (["bit_r50x1", "--image-size", "100"], "BiT-R50x1 at 100x100", {"max-pool 3x3": ["25x25x64"]}),
        (["axial-vit-b/16"], "Axial-ViT-B/16 at 224x224", {"block 1: row attention": ["12x196x64"]}),
        (["r50_vit_l_32"], "R50+ViT-L/32 at 224x224", {"patches 1x1": ["49x2048"]}),
        (["vit-b/16", "--classes", "10"], "ViT-B/16 at 224x224", {"head: logits": ["10", "7,690", "7,680"]}),
    ],
)
def test_other_networks_and_sizes(
    argv: list[str], title: str, expected: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, *argv)
    assert text.splitlines()[0].strip() == title
    lines = cells(text)
    for name, start in expected.items():
        assert lines[name][: len(start)] == start


def test_no_classes_is_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    lines = cells(said(capsys, "vit_b_16", "--classes", "0"))
    assert "head: logits" not in lines
    assert lines["total"][1] == "85,798,656"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["ViT-B/15"], "unknown model 'ViT-B/15'; did you mean ViT-B/16"),
        (["ViT-B/16", "--image-size", "230"], "image 230x230 leaves 6 pixels over at patch 16x16; use 224 or 240"),
        (["ViT-B/16", "--image-size", "0"], "image=(0, 0) must be (height, width), both at least 1"),
        (["ViT-B/16", "--image-size", "big"], "argument --image-size: 'big'"),
        (["ViT-B/16", "--image-size", "1x2x3"], "argument --image-size: '1x2x3'"),
        (["ViT-B/16", "--image-size", "224x"], "argument --image-size: '224x'"),
        (["ViT-B/16", "--classes", "-1"], "head='linear' does not take classes=-1"),
        ([], "the following arguments are required: model"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *argv]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith(f"vitrail: error: {complaint}")
    assert captured.err.count("\n") == 1
