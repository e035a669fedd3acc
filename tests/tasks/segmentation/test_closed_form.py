"""A segmenter in closed form: a network like any other, which has learned drawn shapes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.models.tiny import RESNET, VIT, awake
from tests.tasks.segmentation.drawn import CLASSES, COUNTS, draw_folder
from vitrail.checkpoint.bundle import Card, get_card
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.collection import open_collection
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import MaskTargets
from vitrail.models.build import Model
from vitrail.models.zoo import adapt_config
from vitrail.tasks.segmentation.closed_form import draw_held_out, fit_segmenter, load_masks, score_patches

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("shapes") / "shapes")


def network() -> Model:
    torch.manual_seed(0)
    config = adapt_config(VIT, image_size=(16, 18))
    model = awake(config, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=(16, 18), resize=20), provenance={"run": "before"})
    return model


def test_it_learns_shapes_and_is_a_network_like_any_other(shapes: Path, tmp_path: Path) -> None:
    made = fit_segmenter(network(), shapes, name="start")
    assert made.scored is not None
    assert made.scored.split == "test"
    assert (made.pictures, made.scored.score.count) == (COUNTS["train"], COUNTS["test"])
    zero = made.scored.score.confusion.sum(1).max() / made.scored.score.confusion.sum()
    assert made.scored.score.pixel_accuracy > zero + 0.02
    assert made.scored.intervals["miou"] is not None
    vitrail.save(made.model, tmp_path / "w.safetensors")
    loaded = vitrail.load(tmp_path / "w.safetensors")
    card = get_card(loaded)
    assert (card.task, card.labels, card.preprocessing.resize) == ("segmentation", CLASSES, None)
    assert card.provenance["from"]["run"] == "before"
    assert card.provenance["l2"] == made.head.penalty
    assert loaded.config.has_patch_head
    test = open_collection(shapes).splits["test"]
    again = score_patches(loaded, load_masks(test, card.preprocessing), CPU)
    assert np.array_equal(again.confusion, made.scored.score.confusion)
    predictor: vitrail.Predictor[vitrail.PredictedMask] = vitrail.Predictor(loaded, device="cpu")
    assert predictor(shapes / "test" / "images" / "00.png").mask.shape == (16, 20)


def test_nothing_random_is_drawn_and_batches_do_not_matter(shapes: Path) -> None:
    start, state = network(), torch.get_rng_state()
    first = fit_segmenter(start, shapes)
    assert torch.equal(torch.get_rng_state(), state)
    collection = open_collection(shapes)
    one_by_one = fit_segmenter(
        start,
        collection,
        batches=lambda source, prepared: eval_batches(source, prepared, batch=5, targets=MaskTargets()),
    )
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(first.head.weight, one_by_one.head.weight, rtol=1e-3, atol=1e-3)


def test_what_is_used_and_left_out(shapes: Path, tmp_path: Path) -> None:
    folder = draw_folder(tmp_path / "torn")
    (folder / "train" / "images" / "03.png").write_bytes(b"no image")
    Image.fromarray(np.full((16, 20), 255, np.uint8)).save(folder / "train" / "masks" / "04.png")
    made = fit_segmenter(network(), folder, held_out=0.0)
    assert made.pictures == COUNTS["train"] - 1
    assert made.head.held is None
    assert any("03.png" in note for note in made.notes)
    assert any("nothing was held out" in note for note in made.notes)
    both = fit_segmenter(network(), open_collection(f"{shapes}@train"), test=open_collection(f"{shapes}@train"))
    assert both.scored is None
    assert any("24 of the 24 images" in note for note in both.notes)


def test_what_cannot_be_fitted_is_refused(shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(BadLabels, match="no masks"):
        fit_segmenter(network(), "digits")
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="no patch tokens"):
        fit_segmenter(awake(RESNET, torch.float32), shapes)
    with pytest.raises(ConfigError, match="held-out share"):
        fit_segmenter(network(), shapes, held_out=1.0)
    other = draw_folder(tmp_path / "other")
    (other / "classes.txt").write_text("ground\nbar\ndisc")
    with pytest.raises(DataError, match="same order"):
        fit_segmenter(network(), shapes, test=other)


def test_held_out_samples_are_a_share_and_always_the_same() -> None:
    assert len(draw_held_out(100, 0.1)) == 10
    assert draw_held_out(100, 0.1) == draw_held_out(100, 0.1)
    assert len(draw_held_out(2, 0.1)) == 1
    assert draw_held_out(1, 0.1) == set()
    assert draw_held_out(100, 0.0) == set()


def test_it_is_a_call_from_a_file_of_weights(shapes: Path, tmp_path: Path) -> None:
    start = network()
    vitrail.save(start, tmp_path / "start.safetensors")
    made = vitrail.fit_segmenter(tmp_path / "start.safetensors", shapes, device="cpu")
    plain = fit_segmenter(start, shapes)
    torch.testing.assert_close(made.head.weight, plain.head.weight, rtol=1e-3, atol=1e-3)
    assert get_card(made.model).provenance["from"]["weights"] == str(tmp_path / "start.safetensors")
    with pytest.raises(BadLabels, match="no masks"):
        vitrail.fit_segmenter(start, "digits", device="cpu")
