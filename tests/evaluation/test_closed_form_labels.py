"""The closed form for several labels: least squares for each, meaningful probabilities, a file that says so."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.models.tiny import VIT, awake
from vitrail.checkpoint.bundle import Card
from vitrail.cli.app import main
from vitrail.core.errors import BadLabels
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.frozen.closed_form_classifier import measure_labels
from vitrail.evaluation.frozen.fewshot import CONSTANT, EPS
from vitrail.evaluation.frozen.ridge_head import fit_multi_label_head, fit_platt
from vitrail.evaluation.multi_label import encode_labels


def drawn(count: int, classes: int = 4, width: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and labels that follow from them but for some noise; some samples have none."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, width, generator=generator)
    weight = torch.randn(width, classes, generator=generator)
    scores = features @ weight + 0.5 * torch.randn(count, classes, generator=generator)
    return features, scores > torch.linspace(-1, 1.5, classes)


def test_each_label_is_ridge_regression_by_itself() -> None:
    features, truth = drawn(60)
    head, _, _ = fit_multi_label_head(features, truth, penalty=3.0)
    x = features.double().numpy()
    white = (x - x.mean(0)) / (x.std(0) + EPS)
    x = np.concatenate([white, np.full((60, 1), CONSTANT)], 1)
    for label in range(4):
        y = 2.0 * truth[:, label].numpy() - 1
        scores = x @ np.linalg.solve(x.T @ x + 3.0 * np.eye(11), x.T @ y)
        logits = head.logits(features)[:, label].numpy()
        slope, offset = np.polyfit(scores, logits, 1)
        np.testing.assert_allclose(logits, slope * scores + offset, atol=1e-4)
        assert slope == pytest.approx(head.scale, rel=1e-4)


def test_the_penalty_and_the_scale_are_chosen_by_what_was_held_out() -> None:
    features, truth = drawn(400)
    head, scores, known = fit_multi_label_head(features[:300], truth[:300])
    assert scores.shape == known.shape
    assert len(known) >= 200
    values = {one.name: one.value for one in measure_labels(scores, known, tuple("abcd"))}
    assert values["mAP"] > 0.9
    said = head.logits(features[300:]).sigmoid()
    assert float((said - truth[300:].float()).square().mean()) < 0.08
    assert abs(float(said.mean()) - float(truth[300:].float().mean())) < 0.05


def test_platt_finds_the_logistic_curve() -> None:
    scores = torch.linspace(-3, 3, 4001, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(1)
    truth = torch.rand(scores.shape, generator=generator, dtype=torch.float64) < (2 * scores - 1).sigmoid()
    slope, offset, _ = fit_platt(scores, truth)
    assert (slope, offset) == (pytest.approx(2, abs=0.2), pytest.approx(-1, abs=0.2))
    sure, _, loss = fit_platt(scores, scores > 0)  # no mistake, and no infinite sureness
    assert sure < 1000
    assert loss < 0.05


def test_few_samples_and_none() -> None:
    features, truth = drawn(3)
    truth[0, 0] = True
    assert not len(fit_multi_label_head(features, truth)[2])
    with pytest.raises(BadLabels):
        fit_multi_label_head(features, torch.zeros(3, 4, dtype=torch.bool))


def test_truth_from_labels() -> None:
    rows = torch.tensor([[2, 0], [-1, -1], [1, -1]])
    assert encode_labels(rows, 3).int().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert encode_labels(torch.tensor([1, -1]), 2).int().tolist() == [[0, 1], [0, 0]]


@pytest.mark.slow
def test_fit_writes_multi_label_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = awake(VIT, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=VIT.image))
    vitrail.save(model, "weights.safetensors")
    rng = np.random.default_rng(0)
    rows = ["path,labels,split"]
    for at in range(48):
        pixels = rng.integers(0, 60, (6, 12, 3), dtype=np.uint8)
        pixels[:, :, 0] += 190 * (at % 2)
        pixels[:, :, 2] += 190 * (at // 2 % 2)
        Image.fromarray(pixels).save(f"{at}.png")
        labels = "|".join(name for name, there in (("red", at % 2), ("blue", at // 2 % 2)) if there)
        rows.append(f"{at}.png,{labels},{'train' if at < 32 else 'test'}")
    Path("list.csv").write_text("\n".join(rows))
    words = ["fit", "weights.safetensors", "list.csv", "--out", "out.safetensors", "--device", "cpu", "--workers", "0"]
    assert main(words) == 0
    card = vitrail.load("out.safetensors").card
    assert isinstance(card, Card)
    assert (card.multi_label, card.labels) == (True, ("blue", "red"))
    assert card.provenance["score"]["mAP"] > 0.9
    capsys.readouterr()
    assert main(["predict", "out.safetensors", "44.png", "45.png", "46.png", "47.png", "--json"]) == 0
    chosen = [{one["label"] for one in json.loads(line)["chosen"]} for line in capsys.readouterr().out.splitlines()]
    assert chosen == [set(), {"red"}, {"blue"}, {"red", "blue"}]
