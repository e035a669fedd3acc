"""Weights that come with the package are there by name, small, and say what they are."""

from pathlib import Path

import pytest
import torch

import vitrail
from tests.models.tiny import VIT
from tests.predict.pictures import network, weights
from vitrail.checkpoint.find_weights import find_weights, read_bundle
from vitrail.checkpoint.known_weights import BUNDLED, DEFAULT_WEIGHTS, bundled_file, is_bundled
from vitrail.checkpoint.weights import save
from vitrail.core.errors import WeightsNotFound

FILE = Path(vitrail.__file__).parent / "assets" / BUNDLED[DEFAULT_WEIGHTS]
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
there = pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE.name} is not in this copy of the package yet")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny network in the place of the shipped one."""
    path = tmp_path / "inside" / "stand-in.safetensors"
    path.parent.mkdir()
    save(network(VIT), path)
    monkeypatch.setitem(BUNDLED, DEFAULT_WEIGHTS, str(path))  # an absolute path stays what it is when joined
    return path


def test_the_name_stands_for_the_file_wherever_one_is(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = vitrail.load(stand_in).state_dict()
    (tmp_path / DEFAULT_WEIGHTS).mkdir()  # somebody's folder of that name is ./vitrail-cifar10
    weights(tmp_path / DEFAULT_WEIGHTS, VIT, "best.safetensors", labels=None)
    for name in (DEFAULT_WEIGHTS, Path(DEFAULT_WEIGHTS)):
        model = vitrail.load(name)
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in expected.items())
    assert (
        find_weights(DEFAULT_WEIGHTS).card.labels
        == read_bundle(DEFAULT_WEIGHTS).card.labels
        == vitrail.predictor().labels
    )
    assert vitrail.from_pretrained(DEFAULT_WEIGHTS).card.labels is not None
    assert vitrail.load(f"./{DEFAULT_WEIGHTS}/best.safetensors").card.labels is None


def test_surgery_works_on_it_as_on_any(stand_in: Path) -> None:
    assert vitrail.load(DEFAULT_WEIGHTS, classes=3, image_size=(12, 12)).config.classes == 3


def test_a_copy_without_the_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED, DEFAULT_WEIGHTS, str(tmp_path / "gone.safetensors"))
    with pytest.raises(WeightsNotFound, match=r"vitrail-cifar10: .*gone.safetensors is missing, .*install it again"):
        vitrail.load(DEFAULT_WEIGHTS)
    with pytest.raises(WeightsNotFound, match="name weights of your own"):
        vitrail.predictor()


def test_only_its_own_name_counts() -> None:
    assert is_bundled(DEFAULT_WEIGHTS)
    assert not is_bundled(f"./{DEFAULT_WEIGHTS}")
    assert not is_bundled(f"{DEFAULT_WEIGHTS}.safetensors")
    assert DEFAULT_WEIGHTS in BUNDLED


@there
def test_it_is_small_and_names_its_classes() -> None:
    assert bundled_file(DEFAULT_WEIGHTS).stat().st_size < 8_000_000
    bundle = read_bundle(DEFAULT_WEIGHTS)
    assert tuple(sorted(bundle.card.labels or ())) == CIFAR10
    assert bundle.config.classes == 10
    assert {tensor.dtype for tensor in bundle.tensors.values()} == {torch.float16}


@there
def test_it_says_where_it_comes_from() -> None:
    provenance = read_bundle(DEFAULT_WEIGHTS).card.provenance
    assert {"data", "score", "cost", "command"} <= set(provenance)
    assert 0.92 <= provenance["score"]["accuracy"] <= 1


@there
def test_it_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    picture = FILE.with_name("window.png")
    answers = vitrail.predictor(device="cpu")(picture, topk=10)
    assert {answer.label for answer in answers.top} == set(CIFAR10)
    assert sum(answer.probability for answer in answers.top) == pytest.approx(1)
