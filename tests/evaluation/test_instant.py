"""A network whose last layer is the closed form: the same answers, in every kind of network, with a scale that means
something and a file like any other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import vitrail
from tests.models.tiny import FAMILIES, HYBRID, RESNET, VARIANTS, VIT, awake
from vitrail.checkpoint.bundle import Card
from vitrail.core.errors import BadLabels, ConfigError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ArrayDataset, Encoded, ImageDataset, Labels
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.frozen.closed_form_classifier import FittedClassifier, draw_shots, fit, sample_stratified
from vitrail.evaluation.frozen.features import compute_features
from vitrail.evaluation.frozen.fewshot import PENALTY, decompose, fit_ridge
from vitrail.evaluation.frozen.ridge_head import SCALES, find_scale, fit_head, fold_head, scaled_loss, split_by_class
from vitrail.models.build import Model
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import query_config

NETWORKS: dict[str, ModelConfig] = {
    "class token": VIT,
    "mean pool": replace(VIT, pool="mean", class_token=False),
    "norm behind the mean": replace(VIT, pool="mean", class_token=False, norm_after_pool=True),
    "pre-logits": replace(VIT, head="tanh"),
    "pre-logits alone": replace(VIT, head="tanh", classes=0),
    "no head": replace(VIT, head="none", classes=0),
    "hybrid": HYBRID,
    "BiT": RESNET,
    "BiT without a head": replace(RESNET, classes=0),
    **{name: VARIANTS[name] for name in FAMILIES},
}

QUICK = ("class token", "pre-logits", "dinov2, registers", "clip", "siglip", "deit, distilled")


def network(config: ModelConfig, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = awake(config, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=config.image), provenance={"run": "before"})
    return model


def pictures(config: ModelConfig, counts: tuple[int, ...] = (9, 9, 9), seed: int = 0) -> ArrayDataset:
    """A class is a tint."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    tint = np.eye(3)[labels % 3] * 60 + 60 * (labels[:, None] // 3)
    pixels = rng.normal(90, 40, (len(labels), *config.image, 3)) + tint[:, None, None, :]
    return ArrayDataset(
        pixels.clip(0, 255).astype(np.uint8), Labels(labels), tuple("abcdef"[: len(counts)]), called="set"
    )


def collection(**splits: ImageDataset) -> Collection:
    return Collection(name="set", kind="arrays", path=None, splits=splits)


def small(config: ModelConfig = VIT, **options: object) -> FittedClassifier:
    both = collection(train=pictures(config), test=pictures(config, seed=1))
    return fit(network(config), both, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, config in NETWORKS.items()
    ],
)
def test_logits_are_the_closed_form_s_answer(config: ModelConfig, tmp_path: Path) -> None:
    source = pictures(config)
    made = fit(network(config), collection(train=source), name="start")
    vitrail.save(made.model, tmp_path / "w.safetensors")
    loaded = vitrail.load(tmp_path / "w.safetensors")
    assert loaded.card is not None
    prepared = loaded.card.preprocessing
    images = torch.stack([prepared(source.open_image(at).rgb()) for at in range(len(source))])
    with torch.no_grad():
        features = compute_features(network(config), images)
        logits = loaded(images)
    closed = fit_ridge(features, torch.from_numpy(source.labels.values).long(), 3, made.head.penalty)
    expected = made.head.scale * closed.scores(features)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert loaded.card.labels == ("a", "b", "c")
    assert loaded.card.provenance["from"]["run"] == "before"
    assert loaded.card.provenance["from"]["weights"] == "start"
    assert loaded.card.provenance["l2"] == made.head.penalty


def test_features_far_from_zero_are_folded_as_well() -> None:
    """A mean of a thousand standard deviations would swamp a careless bias."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.randn(60, 8, generator=generator) + 1000 + torch.nn.functional.one_hot(labels, 8)
    closed = decompose(features, labels, 3).classifier(1.0)
    head = fold_head(closed, 5.0, 1.0, None)
    exact = features.double() @ head.weight.double().T + head.bias.double()
    torch.testing.assert_close(exact, 5.0 * closed.scores(features), rtol=0, atol=2e-3)  # the bias' own rounding
    assert torch.equal(exact.argmax(1), closed.predict(features))


def test_the_answer_scores_as_the_closed_form_does() -> None:
    made = small()
    assert made.scored is not None
    train, test = pictures(VIT), pictures(VIT, seed=1)
    prepared = Preprocessing(image=VIT.image)
    with torch.no_grad():
        x, y = (
            compute_features(
                network(VIT), torch.stack([prepared(part.open_image(at).rgb()) for at in range(len(part))])
            )
            for part in (train, test)
        )
    labels = torch.from_numpy(train.labels.values).long()
    expected = fit_ridge(x, labels, 3, made.head.penalty).accuracy(y, labels)
    assert made.scored.top1.value == expected
    assert made.scored.top1.count == 27
    assert made.scored.top1.value > 0.7


def noisy(count: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    return torch.nn.functional.one_hot(labels, 12) + noise * torch.randn(count, 12, generator=generator), labels


def test_sureness_means_something() -> None:
    """Confidence is near accuracy, whether the task is easy or hard; raw scores are far from it."""
    for noise in (0.4, 1.0):
        head = fit_head(*noisy(800, noise), 4)
        features, labels = noisy(2000, noise, seed=1)
        said, sure = head.predict(features)
        right = float((said == labels).double().mean())
        assert abs(float(sure.mean()) - right) < 0.05
        raw = (head.logits(features) / head.scale).softmax(-1).amax(1)
        assert abs(float(raw.mean()) - right) > 0.1


def test_the_scale_is_the_most_likely_one_and_never_infinite() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(50) % 5
    scores = torch.nn.functional.one_hot(labels, 5).double() + 0.7 * torch.randn(50, 5, generator=generator).double()
    best = find_scale(scores, labels)
    for factor in (0.9, 1.1):
        assert scaled_loss(best, scores, labels) < scaled_loss(best * factor, scores, labels)
    sure = 2.0 * torch.nn.functional.one_hot(labels, 5).double() - 1  # all right
    scale = find_scale(sure, labels)
    assert 1 < scale < 10
    assert find_scale(sure.repeat(100, 1), labels.repeat(100)) > scale  # more evidence, more sureness
    assert find_scale(-sure, labels) == pytest.approx(SCALES[0], rel=1e-6)  # all wrong: hardly sure


def test_the_penalty_is_the_best_on_what_is_held_out() -> None:
    head = fit_head(*noisy(400, 1.0), 4)
    assert head.held is not None
    assert head.held.count >= 200
    given = fit_head(*noisy(400, 1.0), 4, penalty=7.0)
    assert given.penalty == 7.0
    assert given.held is not None


def test_what_is_held_out_is_of_every_class_and_drawn_anew() -> None:
    labels = torch.arange(40) % 4
    found = split_by_class(labels, 4, 0.1)
    assert len(found) > 1
    for held, rest in found:
        assert labels[held].bincount(minlength=4).tolist() == [1, 1, 1, 1]
        assert sorted([*held.tolist(), *rest.tolist()]) == list(range(40))
    assert found[0][0].tolist() != found[1][0].tolist()
    assert len(split_by_class(torch.arange(40_000) % 4, 4, 0.3)[0][0]) == 5000
    assert len(split_by_class(torch.arange(4000) % 4, 4, 0.6)[0][0]) == 2400  # as asked for


def test_one_picture_a_class_is_enough() -> None:
    made = fit(network(VIT), collection(train=pictures(VIT, (1, 1, 1))))
    assert made.head.held is None
    assert made.head.penalty == PENALTY
    assert any("nothing was held out" in note for note in made.notes)
    assert made.scored is None
    clear = (made.head.scale * torch.tensor([1.0, -1.0, -1.0])).softmax(0)
    assert float(clear[0]) == pytest.approx(0.9)
    assert fit(network(VIT), collection(train=pictures(VIT, (1, 2, 1)))).head.held is not None


def test_uneven_and_empty_classes_are_told_of() -> None:
    made = fit(network(VIT), collection(train=pictures(VIT, (42, 2, 2))))
    assert any("'a' has 42 images and 'b' 2" in note for note in made.notes)
    whole = pictures(VIT, (6, 6))
    source = ArrayDataset(whole.pictures, whole.labels, ("a", "b", "c"), called="set")
    made = fit(network(VIT), collection(train=source))
    assert any("1 of 3 classes have no training image and are never predicted: c" in note for note in made.notes)
    assert made.model.config.classes == 3


def test_shots_are_at_most_so_many_of_each_class() -> None:
    labels = Labels(np.array([0, 1, 0, 0, 2, 0, 1, -1]))
    drawn = draw_shots(labels, 3, 2)
    assert labels.values[drawn].tolist().count(0) == 2
    assert sorted(labels.values[drawn].tolist()) == [0, 0, 1, 1, 2]
    assert small(shots=2).pictures == 6
    with pytest.raises(ConfigError):
        draw_shots(labels, 3, 0)
    source = pictures(VIT, (30, 30, 30))
    assert sample_stratified(source, 90) is source
    assert sample_stratified(source, 30).labels.counts(3).tolist() == [10, 10, 10]


class Torn(ArrayDataset):
    """Two of its images cannot be read."""

    def read(self, index: int) -> Encoded:
        if index in (3, 11):
            raise OSError(5, "Input/output error")
        return super().read(index)


def test_pictures_that_cannot_be_read_are_left_out_by_name() -> None:
    whole = pictures(VIT)
    made = fit(network(VIT), collection(train=Torn(whole.pictures, whole.labels, whole.classes, called="set")))
    assert made.pictures == 25
    assert "skipped 2 unreadable images of train: set[3] and set[11]" in made.notes
    assert made.unreadable == ("train: set[3]", "train: set[11]")


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(BadLabels):
        fit(network(VIT), collection(train=pictures(VIT, (5,))))
    bare = ArrayDataset(pictures(VIT).pictures, called="set")
    with pytest.raises(BadLabels):
        fit(network(VIT), collection(train=bare))
    with pytest.raises(ConfigError, match="penalty=-1"):
        small(penalty=-1.0)
    with pytest.raises(ConfigError):
        small(held_out=1.0)


def test_queries_do_not_become_a_classifier() -> None:
    with pytest.raises(ConfigError, match="queries"):
        small(query_config(VIT, "eomt", 5))


def test_the_classes_of_other_pictures_are_found_by_name() -> None:
    test = pictures(VIT, (4, 4, 4), seed=1)
    turned = ArrayDataset(test.pictures, Labels(2 - np.asarray(test.labels.values)), ("c", "b", "a"), called="set")
    other = Collection(name="other", kind="arrays", path=Path("other"), splits={"val": turned})
    made = fit(network(VIT), collection(train=pictures(VIT)), test=other)
    plain = fit(network(VIT), collection(train=pictures(VIT), val=test))
    assert made.scored is not None
    assert plain.scored is not None
    assert made.scored.split == "other@val"
    assert made.scored.top1.value == plain.scored.top1.value


def test_features_are_kept_and_found(tmp_path: Path) -> None:
    first, again = (small(folder=tmp_path) for _ in range(2))
    assert (first.found, first.kept) == (False, True)
    assert (again.found, again.kept) == (True, True)
    assert torch.equal(first.head.weight, again.head.weight)
