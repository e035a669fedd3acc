"""`evaluate` of weights for segmentation, from files: the numbers of a loop over pixels, and what does not count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.weights import build_fresh
from vitrail.cli.app import main
from vitrail.core.errors import DataError
from vitrail.data.dataset import SubsetDataset
from vitrail.data.training_record import KEY, record_training
from vitrail.evaluation.intervals import correct_bias
from vitrail.evaluation.result import Result
from vitrail.models.vit_config import ViTConfig

SHAPE = ViTConfig(width=32, depth=1, mlp_width=32, heads=2, image=(64, 64), patch=(8, 8), classes=9, head="patches")
COUNT, BAD = 12, 2


def network(labels: Sequence[str], **facts: Any) -> Any:
    torch.manual_seed(0)
    made = build_fresh(SHAPE)
    torch.nn.init.normal_(made.head.classifier.weight, std=0.5)  # type: ignore[union-attr]
    made.card = replace(get_card(made), task="segmentation", labels=tuple(labels), **facts)
    return made.eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, and drawn shapes with masks as files. One mask has the size of another image, one a class too many; in
    the first, half the pixels do not count."""
    path = tmp_path_factory.mktemp("segmentation")
    shapes = vitrail.open_collection("shapes")
    source = shapes.split("test")
    vitrail.save(network(shapes.pixel_classes), path / "net.safetensors")
    for folder in ("images", "masks"):
        (path / "drawn" / "test" / folder).mkdir(parents=True)
    for at in range(COUNT):
        mask = np.array(source.mask(at))
        if at == 0:
            mask[: len(mask) // 2] = 255
        if at == 3:
            mask = mask[1:]
        if at == 4:
            mask[0, 0] = 77
        source.open_image(at).rgb().save(path / "drawn" / "test" / "images" / f"{at:02}.png")
        Image.fromarray(mask).save(path / "drawn" / "test" / "masks" / f"{at:02}.png")
    (path / "drawn" / "classes.txt").write_text("\n".join(shapes.pixel_classes))
    return path


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def slow_pixels(path: Path, at: int) -> tuple[np.ndarray, np.ndarray]:
    """The true and the predicted classes of the pixels of one image that count."""
    model = vitrail.load(path / "net.safetensors")
    image = model.card.preprocessing(Image.open(path / "drawn" / "test" / "images" / f"{at:02}.png"))
    with torch.inference_mode():
        predicted = model(image[None])[0].argmax(0).numpy()
    truth = np.asarray(Image.open(path / "drawn" / "test" / "masks" / f"{at:02}.png"))
    assert truth.shape == predicted.shape  # shapes have the size of the network's images
    return truth[truth != 255], predicted[truth != 255]


def slow_counts(path: Path, *, without: Sequence[int] = ()) -> tuple[float, float]:
    """mIoU and pixel accuracy, one image and one class at a time, from the files."""
    parts = [slow_pixels(path, at) for at in range(COUNT) if at not in (3, 4, *without)]
    truths, said = zip(*parts, strict=True)
    truth, predicted = np.concatenate(truths), np.concatenate(said)
    ious = [
        ((truth == kind) & (predicted == kind)).sum() / ((truth == kind) | (predicted == kind)).sum()
        for kind in range(9)
        if ((truth == kind) | (predicted == kind)).any()
    ]
    return float(np.mean(ious)), float((truth == predicted).mean())


@pytest.mark.parametrize("batch", [5, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (1, 64))])
def test_the_numbers_are_those_of_a_slow_loop(here: Path, batch: int) -> None:
    found = vitrail.evaluate("net.safetensors", "drawn", batch=batch, device="cpu")
    miou, accuracy = slow_counts(here)
    assert found.measures["mIoU"].value == pytest.approx(miou, rel=1e-12)
    assert found.measures["pixel accuracy"].value == pytest.approx(accuracy, rel=1e-12)
    assert found.measures["mIoU"].unit == "share"
    assert found.measures["mIoU"].count == COUNT - BAD


@pytest.mark.slow
def test_intervals_are_of_other_draws_of_the_images(here: Path) -> None:
    """Drawn again by hand, from the confusion of each image, with the same correction of the percentiles."""
    found = vitrail.evaluate("net.safetensors", "drawn", seed=3, device="cpu")
    each = [slow_confusion(here, at) for at in range(COUNT) if at not in (3, 4)]
    rng = np.random.default_rng(3)
    draws = [np.bincount(rng.integers(0, len(each), len(each)), minlength=len(each)) for _ in range(1000)]
    drawn = np.array([miou_of(sum(times * one for times, one in zip(draw, each, strict=True))) for draw in draws])
    expected = correct_bias(drawn, miou_of(sum(each)))
    measure = found.measures["mIoU"]
    assert expected is not None
    assert (measure.low, measure.high) == pytest.approx(expected, rel=1e-9)
    assert found.measures["loss"].low is not None
    assert found.result.config["seed"] == 3
    other = vitrail.evaluate("net.safetensors", "drawn", seed=3, batch=5, device="cpu")
    assert other.measures["mIoU"] == measure


def slow_confusion(path: Path, at: int) -> np.ndarray:
    truth, predicted = slow_pixels(path, at)
    return np.array([[((truth == one) & (predicted == other)).sum() for other in range(9)] for one in range(9)])


def miou_of(confusion: np.ndarray) -> float:
    both, either = confusion.diagonal(), confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    return float(np.mean([some / of for some, of in zip(both, either, strict=True) if of]))


def test_masks_that_cannot_be_used_are_counted_and_named(here: Path, tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.html"), "--device", "cpu", "--workers", "0"]
    assert main(["evaluate", "net.safetensors", "drawn", *words]) == 0
    result = Result.read(tmp_path / "r.json")
    assert [Path(line.split(":")[0]).name for line in result.details["unreadable"]] == ["03.png", "04.png"]
    assert result.config["task"] == "segmentation"
    assert np.array(result.details["confusion"]).shape == (9, 9)
    ious = result.details["iou"]
    (miou,) = (measure.value for measure in result.measures if measure.name == "mIoU")
    assert sum(ious.values()) / len(ious) == pytest.approx(miou)
    page = (tmp_path / "p.html").read_text("utf-8")
    assert "triangle" in page
    assert ".strips {" in page  # images and masks side by side


def test_images_seen_in_training_are_left_out(here: Path) -> None:
    data = vitrail.open_collection("drawn")
    source, seen = data.split("test"), [0, 1, 2, 7]
    record = record_training(SubsetDataset(source, np.array(seen)), out_of=COUNT, selection={}, others={})
    known = network(data.pixel_classes, provenance={KEY: [record]})
    found = vitrail.evaluate(known, data, device="cpu")
    assert (found.count, found.left_out) == (COUNT - 4, 4)
    assert found.measures["mIoU"].value == pytest.approx(slow_counts(here, without=seen)[0], rel=1e-12)


def test_classes_in_another_order_are_refused(here: Path) -> None:
    names = vitrail.open_collection("drawn").pixel_classes
    with pytest.raises(DataError, match=names[-1]):
        vitrail.evaluate(network(names[::-1]), "drawn", device="cpu")


def test_data_without_masks_are_refused(here: Path) -> None:
    with pytest.raises(DataError, match="mask"):
        vitrail.evaluate("net.safetensors", "digits", device="cpu")


def test_where_no_mask_can_be_used_the_error_names_one(tmp_path: Path) -> None:
    shapes = vitrail.open_collection("shapes")
    for folder, image in (("images", np.zeros((8, 8, 3), np.uint8)), ("masks", np.zeros((8, 9), np.uint8))):
        (tmp_path / folder).mkdir()
        Image.fromarray(image).save(tmp_path / folder / "only.png")
    (tmp_path / "classes.txt").write_text("\n".join(shapes.pixel_classes))
    with pytest.raises(DataError, match=r"only\.png"):
        vitrail.evaluate(network(shapes.pixel_classes), tmp_path, device="cpu")
