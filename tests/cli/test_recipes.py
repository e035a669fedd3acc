"""`vitrail recipes`: the list, and one recipe whole."""

import json

import pytest

from vitrail.cli.app import main
from vitrail.core.config_overrides import list_fields, to_plain
from vitrail.recipes.registry import GROUPS, list_recipes, load_recipe


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["recipes", *argv]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def test_the_list_has_every_recipe_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys)
    lines = [line.strip() for line in text.splitlines()]
    for name, entry in list_recipes().items():
        assert any(line.startswith(f"{name} ") and line.endswith(entry.help) for line in lines), name
    assert [line for line in lines if line in GROUPS] == list(GROUPS)


@pytest.mark.parametrize("name", ["vit-b16-imagenet21k", "r50-vit-l16-jft", "bit-finetune-pets", "cifar10", "digits"])
def test_one_recipe_whole(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, name)
    assert text.startswith(f"{name}: {list_recipes()[name].text}")
    rows = [line.split() for line in text.splitlines()]
    for line in list_fields(load_recipe(name)):
        value = [line.text] if line.text else []
        assert [line.name, *value, *([] if line.default else ["*"])] in rows


def test_with_changes(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "cifar10", "--set", "model=ViT-Nano/4", "--set", "optim.lr=0.5")
    rows = [line.split() for line in text.splitlines()]
    assert ["optim.lr", "0.5", "*"] in rows
    assert ["model.width", "96", "*"] in rows


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, "cifar10", "--json")) == to_plain(load_recipe("cifar10"))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["cifra10"], "unknown recipe 'cifra10'; did you mean cifar10"),
        (["cifar10", "--set", "optim.lrr=1"], "unknown setting 'optim.lrr'; did you mean optim.lr"),
        (["cifar10", "--set", "optim.lr=big"], "optim.lr=big must be a number"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"vitrail: error: {told}")
    assert captured.err.count("\n") == 1
