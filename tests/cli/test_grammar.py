"""One grammar for all commands, the older forms, and what is said to a misspelt word."""

from pathlib import Path
from typing import Any

import pytest

from vitrail.cli.app import ALIASES, COMMANDS, main, parse_options
from vitrail.cli.train import training
from vitrail.cli.train import training as finetune
from vitrail.cli.use import inspect
from vitrail.core.errors import VitrailError

Told = pytest.CaptureFixture[str]


def parsed(text: str) -> Any:
    command, *words = text.split()
    return parse_options(command, words)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("evaluate W D", "evaluate W --data D"),
        ("evaluate W D", "evaluate --data D W"),
        ("fewshot W D E --shots 1", "fewshot W --data D --data E --shots 1"),
        ("probe W D", "probe W --data D"),
        ("knn W D -k 5", "knn W --data D -k 5"),
        ("pretrain R D", "pretrain R --data D"),
        ("fit W D --out F", "fit W --data D --out F"),
        ("embed W D --out F", "embed W D F"),
        ("convert W --out F", "convert W F"),
        ("export W D --to onnx", "export W --data D --to onnx"),
        ("study S D", "study S --data D"),
    ],
)
def test_both_forms_mean_the_same(new: str, old: str) -> None:
    assert parsed(new) == parsed(old)


@pytest.mark.parametrize("text", ["W D", "--from W --data D", "--from W D", "D --from W", "W --data D"])
def test_finetune_takes_weights_and_data_in_any_form(text: str) -> None:
    options = finetune.merge_weight_words(parsed(f"finetune {text} --out R"))
    assert (options.weights, options.data, options.out) == ("W", "D", Path("R"))


def test_inspect_tells_images_from_data() -> None:
    options = inspect.sort_words(parsed("inspect W folder a.jpg b.PNG --out look"))
    assert (options.weights, options.data, options.images) == ("W", "folder", ("a.jpg", "b.PNG"))
    options = inspect.sort_words(parsed("inspect a.jpg"))
    assert (options.weights, options.data, options.images) == ("vitrail-cifar10", None, ("a.jpg",))


@pytest.mark.parametrize(
    "text",
    [
        "evaluate W",
        "evaluate W D --data E",
        "embed W D",
        "embed W D F --out G",
        "convert W",
        "finetune W D E",
        "finetune V D --from W",
        "finetune",
        "finetune W",
        "inspect W folder another",
    ],
)
def test_what_is_missing_or_twice_is_refused(text: str, capsys: Told) -> None:
    assert main(text.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("finetune W D --epoch 3", "--epochs"),
        ("finetune W D --learning-rate 3", "--lr"),
        ("finetune W D --batch-size=3", "--batch"),
        ("pretrain digits --step 3", "--steps"),
        ("evaluate W D --worker 3", "--workers"),
        ("predict a.jpg --top 3", "--topk"),
        ("train", "finetune"),
        ("classify", "predict"),
        ("test", "evaluate"),
        ("evalute", "evaluate"),
        ("recipes digts", "digits"),
        ("trace ViT-B/61", "ViT-B/16"),
        ("evaluate vitrail-cifar1 digits", "vitrail-cifar10"),
        ("evaluate wieghts.safetensors digits", "weights.safetensors"),
        ("predict wieghts.safetensor", "weights.safetensors"),
        ("data poto", "photos"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(
    text: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "photos").mkdir()
    assert main(text.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{meant}" in said.partition("did you mean")[2]


def test_suggested_commands_are_commands() -> None:
    assert {name for names in ALIASES.values() for name in names} <= set(COMMANDS)
    assert not set(ALIASES) & set(COMMANDS)


def test_short_options_are_settings() -> None:
    options = parsed("finetune W D --epochs 3 --lr 0.003 --batch 8 --set log=2")
    assert training.short_options(options) == ["epochs=3.0", "batch=8", "optim.lr=0.003"]
    asked = training.build_request(options, "finetune")
    assert asked.settings == ("log=2", "epochs=3.0", "batch=8", "optim.lr=0.003")
    assert training.short_options(parsed("pretrain R --steps 7")) == ["steps=7"]


@pytest.mark.parametrize(
    "text",
    [
        "--epochs 3 --steps 3",
        "--lr 0.1 --set optim.lr=0.2",
        "--steps 3 --set epochs=2",
        "--batch 0",
        "--lr nan",
        "--epochs -1",
    ],
)
def test_contradictions_are_refused(text: str) -> None:
    with pytest.raises(VitrailError):
        training.short_options(parsed(f"finetune W D {text}"))
