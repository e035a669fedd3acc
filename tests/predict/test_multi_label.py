"""Multi-label weights say so, and are answered class by class: in Python, on the command line and over HTTP."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.models.tiny import VIT
from tests.predict.pictures import CLASSES, drawn, network
from tests.serve.in_process_server import inside, picture
from vitrail.checkpoint.bundle import Card, describe, parse_description
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import to_bundle
from vitrail.cli.app import main
from vitrail.core.errors import ConfigError
from vitrail.models.build import Model
from vitrail.predict.predictor import Predictor
from vitrail.recipes.run_request import RunCommand, build_plan
from vitrail.tasks.classification.objective import Classification


def several() -> Model:
    model = network(VIT)
    assert isinstance(model.card, Card)
    model.card = replace(model.card, multi_label=True)
    return model


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "several.safetensors"
    vitrail.save(several(), path)
    return str(path)


def test_weights_know_that_they_are_multi_label(weights: str, tmp_path: Path) -> None:
    assert read_bundle(Path(weights)).card.multi_label
    card = vitrail.load(weights, classes=3).card
    assert isinstance(card, Card)
    assert not card.multi_label


@pytest.mark.slow
def test_other_formats_keep_it(weights: str, tmp_path: Path) -> None:
    for target in ("theirs", "theirs.pth", "theirs.npz"):
        convert(weights, tmp_path / target, "timm" if target.endswith("pth") else None)
        assert read_bundle(tmp_path / target).card.multi_label, target
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    assert not (tmp_path / "theirs" / "model.safetensors.vitrail.json").exists()


def test_files_that_do_not_say_are_single_label() -> None:
    bundle = to_bundle(network(VIT))
    data = describe(bundle.config, bundle.card)
    assert "multi_label" not in data
    assert not parse_description(data)[1].multi_label
    with pytest.raises(ConfigError):
        parse_description({**data, "multi_label": "yes"})


def test_each_class_is_answered_by_itself() -> None:
    asker, alone = Predictor(several(), device="cpu"), Predictor(network(VIT), device="cpu")
    batch = torch.stack([asker.prepare(one) for one in drawn(4)])
    torch.testing.assert_close(asker.probabilities(batch), asker.logits(batch).sigmoid())
    torch.testing.assert_close(alone.probabilities(batch).sum(-1), torch.ones(4))
    rows = torch.tensor([[0.9, 0.2, 0.5, 0.7, 0.1], [0.1, 0.2, 0.3, 0.4, 0.49]])
    many, none = asker.rank_classes(rows, topk=1)
    assert (len(many.top), many.labels) == (1, (CLASSES[0], CLASSES[3], CLASSES[2]))
    assert (none.labels, none.label) == ((), CLASSES[4])
    assert [one.labels for one in asker.rank_classes(rows, threshold=0.3)] == [
        (CLASSES[0], CLASSES[3], CLASSES[2]),
        (CLASSES[4], CLASSES[3], CLASSES[2]),
    ]
    assert alone.rank_classes(rows)[0].chosen is None
    assert alone.rank_classes(rows)[0].labels == (CLASSES[0],)
    with pytest.raises(ConfigError, match="threshold"):
        Predictor(several(), threshold=2.0)


def test_predict_chooses_from_a_threshold(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn(1)[0].save(tmp_path / "a.png")
    words = ["predict", weights, str(tmp_path / "a.png"), "--device", "cpu", "--topk", "2"]
    assert main([*words, "--json", "--threshold", "0"]) == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (len(row["top"]), len(row["chosen"])) == (2, len(CLASSES))
    asker = Predictor(several(), device="cpu")
    expected = asker.logits(torch.stack([asker.prepare(drawn(1)[0])])).sigmoid()[0]
    for answer in row["chosen"]:
        assert answer["probability"] == pytest.approx(float(expected[answer["index"]]), abs=1e-6)
    assert main([*words, "--csv", "--threshold", "1"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["rank"], line["chosen"]) for line in table] == [("1", "0"), ("2", "0")]
    assert main([*words, "--threshold", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'a.png'}: none; nearest: ")


def test_a_threshold_for_single_label_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitrail.save(network(VIT), tmp_path / "one.safetensors")
    drawn(1)[0].save(tmp_path / "a.png")
    assert main(["predict", str(tmp_path / "one.safetensors"), str(tmp_path / "a.png"), "--threshold", "0.3"]) == 2
    assert "--topk" in capsys.readouterr().err


def test_the_server_answers_class_by_class() -> None:
    asker = Predictor(several(), device="cpu")
    with inside(given=asker) as here:
        about = here.client.get("/model").json()
        assert (about["multi_label"], about["threshold"]) == (True, 0.5)
        (told,) = here.post(data=picture(1), params={"threshold": 0}).json()["predictions"]
        assert len(told["chosen"]) == len(CLASSES)
        right = asker.logits(torch.stack([asker.prepare(picture(1))])).sigmoid()[0]
        for answer in told["chosen"]:
            assert answer["probability"] == pytest.approx(float(right[answer["index"]]), abs=1e-6)
        assert here.post(data=picture(1), params={"threshold": 1, "topk": 1}).json()["predictions"][0]["chosen"] == []
        for bad in ("2", "-1", "nan", "x", "1" * 5000):
            assert here.post(data=picture(1), params={"threshold": bad}).status_code == 400
        asked = here.client.get("/openapi.json").json()["paths"]["/predict"]["post"]
        assert [each["name"] for each in asked["parameters"]] == ["topk", "threshold", "show"]
    with inside() as here:
        assert here.post(data=picture(1), params={"threshold": 0.5}).status_code == 400
        assert here.client.get("/model").json()["multi_label"] is False


def test_fine_tuning_on_several_labels_takes_the_sigmoid_loss(weights: str, tmp_path: Path) -> None:
    for at, image in enumerate(drawn(4)):
        image.save(tmp_path / f"{at}.png")
    (tmp_path / "list.csv").write_text("path,labels\n0.png,cat|dog\n1.png,cat\n2.png,dog\n3.png,\n")
    asked = RunCommand(verb="finetune", weights=weights, data=str(tmp_path / "list.csv"))
    objective = build_plan(asked).run.objective
    assert isinstance(objective, Classification)
    assert objective.loss == "sigmoid"
    chosen = build_plan(replace(asked, settings=("objective.loss=softmax",))).run.objective
    assert isinstance(chosen, Classification)
    assert chosen.loss == "softmax"
