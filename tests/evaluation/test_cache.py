"""Kept features are the features, once: another input makes another file, and a damaged file is made again."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.tiny import VIT
from vitrail.checkpoint.weights import build_fresh
from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ArrayDataset, Encoded, ImageDataset, Labels, RelabelledDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.frozen.features import FrozenFeatures, extract_features, hash_images, load_or_extract
from vitrail.models.build import Model

PLAIN = Preprocessing(image=VIT.image)


def network(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return build_fresh(VIT)


def pictures(labels: Labels | None = None, seed: int = 0, count: int = 11) -> ArrayDataset:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *VIT.image, 3), dtype=np.uint8)
    return ArrayDataset(pixels, labels or Labels(np.arange(count) % 5), tuple("abcde"), called="set")


class Counting:
    """Batches, and how often they were asked for."""

    def __init__(self, preprocessing: Preprocessing = PLAIN) -> None:
        self.asked, self.preprocessing = 0, preprocessing

    def __call__(self, source: ImageDataset) -> Iterator[Batch]:
        self.asked += 1
        return eval_batches(source, self.preprocessing, batch=4)


def kept(
    folder: Path | None, source: ImageDataset | None = None, model: Model | None = None, **more: object
) -> FrozenFeatures:
    batches = Counting()
    found = load_or_extract(
        model or network(), source or pictures(), PLAIN, "cpu", batches=batches, folder=folder, **more
    )  # type: ignore[arg-type]
    assert batches.asked == (not found.reused)
    return found


def test_the_second_time_they_are_there_to_the_last_bit(tmp_path: Path) -> None:
    first, second = kept(tmp_path / "deep" / "cache"), kept(tmp_path / "deep" / "cache")
    assert (first.reused, second.reused, first.warning, second.warning) == (False, True, "", "")
    exact = extract_features(network(), eval_batches(pictures(), PLAIN, batch=4), PLAIN, "cpu")
    for found in (first, second):
        assert torch.equal(found.features, exact.features)
        assert torch.equal(found.labels, exact.labels)
        assert found.samples.tolist() == list(range(11))


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not kept(None).reused
    assert not kept(None).reused
    assert not list(tmp_path.rglob("*"))


CHANGES: dict[str, Callable[[Path], FrozenFeatures]] = {
    "weights": lambda folder: kept(folder, model=network(1)),
    "pictures": lambda folder: kept(folder, pictures(seed=1)),
    "fewer images": lambda folder: kept(folder, pictures(count=10)),
    "precision": lambda folder: kept(folder, precision="autocast"),
    "view": lambda folder: kept(folder, view="squared"),
    "preprocessing": lambda folder: load_or_extract(
        network(), pictures(), replace(PLAIN, std=(0.2, 0.2, 0.2)), "cpu", batches=Counting(), folder=folder
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_they_depend_on_makes_others(change: str, tmp_path: Path) -> None:
    kept(tmp_path)
    assert not CHANGES[change](tmp_path).reused
    assert CHANGES[change](tmp_path).reused
    assert kept(tmp_path).reused
    assert len(list(tmp_path.iterdir())) == 2


def test_other_labels_share_the_file_and_keep_their_own(tmp_path: Path) -> None:
    kept(tmp_path)
    several = [[0], [1, 2], [], *([[3]] * 8)]
    other = kept(tmp_path, RelabelledDataset(pictures(), Labels.several(several), "abcd"))
    assert other.reused
    assert other.labels.tolist() == [[0, -1], [1, 2], [-1, -1], *([[3, -1]] * 8)]


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "foreign", "another's"])
def test_a_damaged_file_is_noticed_and_made_anew(damage: str, tmp_path: Path) -> None:
    exact = kept(tmp_path).features
    (path,) = tmp_path.iterdir()
    body = bytearray(path.read_bytes())
    if damage == "flipped":
        body[-20] ^= 1
    elif damage == "another's":
        kept(tmp_path / "other", model=network(1))
        body = bytearray(next((tmp_path / "other").iterdir()).read_bytes())
    else:
        body = {"cut": body[:-7], "emptied": bytearray(), "foreign": bytearray(b"hello")}[damage]
    path.write_bytes(body)
    again = kept(tmp_path)
    assert not again.reused
    assert "damaged" in again.warning
    assert torch.equal(again.features, exact)
    assert kept(tmp_path).reused


def test_a_place_that_cannot_be_written_costs_the_cache_and_not_the_features(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = kept(tmp_path / "file")
    assert "could not be cached" in found.warning
    assert len(found.features) == 11


class Torn(ArrayDataset):
    """One of its images cannot be read, for now."""

    torn = True

    def read(self, index: int) -> Encoded:
        if index == 3 and self.torn:
            raise BadImage("torn")
        return super().read(index)


def test_an_unreadable_picture_is_out_until_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.evaluation.frozen.features.LOOKED_AT", 1)  # so that the key is the same
    whole = pictures()
    torn = Torn(whole.pictures, whole.labels, whole.classes, called="set")
    assert not kept(tmp_path, torn).reused
    again = kept(tmp_path, torn)
    assert again.reused
    assert again.samples.tolist() == [0, 1, 2, *range(4, 11)]
    assert again.labels.tolist() == [at % 5 for at in again.samples.tolist()]
    torn.torn = False
    mended = kept(tmp_path, torn)
    assert not mended.reused
    assert len(mended.samples) == 11


class Named(ImageDataset):
    """Files of one size, known by their names: nothing but their bytes tells two such sets apart."""

    def __init__(self, shade: int) -> None:
        self.shade, self.labels, self.classes = shade, Labels(np.zeros(300, np.int64)), ("a",)

    def read(self, index: int) -> Encoded:
        return np.full((4, 4, 3), self.shade + index % 2, np.uint8)

    def name(self, index: int) -> str:
        return f"{index}.bmp"


def test_sets_that_differ_in_their_bytes_alone_are_told_apart() -> None:
    assert Named(1).fingerprint == Named(2).fingerprint
    assert hash_images(Named(1)) == hash_images(Named(1)) != hash_images(Named(2))


@pytest.mark.slow
def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    for seed in range(3):
        kept(tmp_path, pictures(seed=seed))
    for at, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (at, at))
    (size,) = {path.stat().st_size for path in tmp_path.iterdir()}
    assert kept(tmp_path, pictures(seed=0)).reused  # now it is the newest
    kept(tmp_path, pictures(seed=3), limit=3 * size)
    assert [kept(tmp_path, pictures(seed=seed), limit=9 * size).reused for seed in (0, 2, 3, 1)] == [True] * 3 + [False]
    kept(tmp_path, pictures(seed=4), limit=1)
    assert len(list(tmp_path.iterdir())) == 1
    assert kept(tmp_path, pictures(seed=4)).reused


def test_a_network_that_overflows_is_refused_by_name(tmp_path: Path) -> None:
    broken = network()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(DataError):
        load_or_extract(broken, pictures(), PLAIN, "cpu", batches=Counting(), folder=tmp_path)
    assert not list(tmp_path.iterdir())
