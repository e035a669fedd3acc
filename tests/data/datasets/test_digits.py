"""The digits inside the package."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.datasets import builtin_sets as digits

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "figures" / "digits.py"
ASSET = ROOT / "src" / "vitrail" / "assets" / "digits.npz"


def test_splits_are_stratified_and_disjoint() -> None:
    splits = digits.read_digits()
    train, test = splits["train"], splits["test"]
    assert (len(train), len(test)) == (1437, 360)
    assert train.classes == test.classes == tuple("0123456789")
    assert test.labels.counts(10).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]
    pixels = [source.read(i).tobytes() for source in splits.values() for i in range(len(source))]
    pictures, _ = digits.load_digit_scans()
    assert sorted(pixels) == sorted(picture.tobytes() for picture in pictures)


def test_ink_fills_the_range_and_a_sample_is_a_picture() -> None:
    pictures, labels = digits.load_digit_scans()
    assert (pictures.shape, pictures.dtype, labels.shape) == ((1797, 8, 8), np.uint8, (1797,))
    assert (pictures.min(), pictures.max()) == (0, 255)
    source = digits.read_digits()["test"]
    assert source.open_image(3).size == (8, 8)
    assert source.open_image(3).rgb().mode == "RGB"
    assert source.name(3) == "digits/test[3]"


@pytest.mark.slow
def test_they_are_those_of_scikit_learn(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    theirs = datasets.load_digits()
    pictures, labels = digits.load_digit_scans()
    assert np.array_equal(np.rint(theirs.images * 255 / 16), pictures)
    assert np.array_equal(theirs.target, labels)
    runpy.run_path(str(SCRIPT))["write"](tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as again, np.load(ASSET) as kept:  # deflate may differ, not what it holds
        assert sorted(again.files) == sorted(kept.files)
        assert all(np.array_equal(again[key], kept[key]) for key in kept.files)


def test_asset_is_small() -> None:
    assert ASSET.stat().st_size < 60_000
