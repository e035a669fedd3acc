"""What is built of sources: parts, joins, other labels; and the fingerprint that tells them apart."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import Listed, encoded, listed, noise
from vitrail.core.errors import BadImage, DataError
from vitrail.data import dataset as source_module
from vitrail.data.dataset import ArrayDataset, ConcatDataset, Labels, RelabelledDataset, SubsetDataset
from vitrail.data.readers.folder import read_flat


def test_a_subset_keeps_names_labels_and_pictures() -> None:
    whole = listed(7)
    part = SubsetDataset(whole, [5, 0])
    assert [part.name(i) for i in range(len(part))] == ["image-5.png", "image-0.png"]
    assert part.labels.values.tolist() == [2, 0]
    assert part.read(0) == whole.read(5)
    assert SubsetDataset(part, [1]).name(0) == "image-0.png"
    for wrong in ([7], [-1]):
        with pytest.raises(DataError, match="dataset of 7"):
            SubsetDataset(whole, wrong)


def test_sources_end_to_end() -> None:
    both = ConcatDataset([listed(2), listed(3)])
    assert [both.name(i) for i in range(5)] == [f"image-{i}.png" for i in (0, 1, 0, 1, 2)]
    assert both.labels.values.tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(DataError, match="different classes"):
        ConcatDataset([listed(2), listed(2, classes=2)])
    mixed = ConcatDataset([listed(1), RelabelledDataset(listed(1), Labels.several([[1, 2]]), listed(1).classes)])
    assert [mixed.labels[i] for i in range(2)] == [(0,), (1, 2)]


def test_other_labels_must_be_as_many() -> None:
    with pytest.raises(DataError, match="2 labels for 3"):
        RelabelledDataset(listed(3), Labels(np.zeros(2, np.int64)), ["a"])
    with pytest.raises(DataError, match="1 labels for 2"):
        ArrayDataset(np.zeros((2, 4, 4), np.uint8), Labels(np.zeros(1, np.int64)))


def test_pictures_of_arrays() -> None:
    grey = ArrayDataset(np.stack([np.full((4, 6), 9, np.uint8)]))
    assert grey.open_image(0).size == (4, 6)
    assert np.asarray(grey.open_image(0).rgb()).tolist() == [[[9, 9, 9]] * 6] * 4
    assert grey.name(0) == "array[0]"


def test_what_cannot_be_read_is_named() -> None:
    source = Listed([b"", FileNotFoundError(2, "No such file")])
    with pytest.raises(BadImage, match=r"^image-0\.png: "):
        source.open_image(0)
    with pytest.raises(BadImage, match=r"^image-1\.png: No such file$"):
        source.open_image(1)


def test_fingerprints_tell_what_matters() -> None:
    base = listed(4)
    same, fewer, swapped = listed(4), SubsetDataset(listed(4), [0, 1, 2]), SubsetDataset(listed(4), [1, 0, 2, 3])
    relabelled = RelabelledDataset(listed(4), Labels(np.array([0, 1, 2, 1])), base.classes)
    renamed = RelabelledDataset(listed(4), base.labels, ["a", "b", "c"])
    several = RelabelledDataset(listed(4), Labels.several([[0], [1], [2], [0]]), base.classes)
    assert base.fingerprint == same.fingerprint == SubsetDataset(base, [0, 1, 2, 3]).fingerprint
    prints = [base, fewer, swapped, relabelled, renamed, several]
    assert len({source.fingerprint for source in prints}) == len(prints)


def test_pixels_in_memory_are_part_of_the_fingerprint() -> None:
    one, other = ArrayDataset(np.zeros((2, 4, 4), np.uint8)), ArrayDataset(np.ones((2, 4, 4), np.uint8))
    assert (
        len(
            {
                s.fingerprint
                for s in (one, other, SubsetDataset(one, [0]), SubsetDataset(other, [0]), ConcatDataset([one, other]))
            }
        )
        == 5
    )


def test_a_subset_of_a_subset_is_one_of_the_whole() -> None:
    inner = SubsetDataset(SubsetDataset(listed(7), [6, 4, 2]), [2, 0])
    assert inner.indices.tolist() == [2, 6]
    assert inner.labels.values.tolist() == [2, 0]
    assert inner.fingerprint == SubsetDataset(listed(7), [2, 6]).fingerprint


def test_sizes_are_part_of_the_fingerprint() -> None:
    class Sized(Listed):
        def sizes(self) -> "np.ndarray":
            return np.array([len(self.read(i)) for i in range(len(self))])

    one, other = Sized([encoded(noise(0))]), Sized([encoded(noise(0)) + b"x"])
    assert one.fingerprint != other.fingerprint
    assert SubsetDataset(one, [0]).fingerprint == one.fingerprint


def test_the_digest_of_contents_sees_other_bytes_of_the_same_size(tmp_path: Path) -> None:
    for at in range(8):
        (tmp_path / f"{at}.bmp").write_bytes(bytes([at]) * 100)
    before = read_flat(tmp_path)
    os.utime(tmp_path / "3.bmp", (1, 1))
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    for same in (read_flat(tmp_path), read_flat(tmp_path.with_name("copy"))):
        assert same.content_digest == before.content_digest
    (tmp_path / "3.bmp").write_bytes(b"x" * 100)
    assert read_flat(tmp_path).fingerprint == before.fingerprint
    assert read_flat(tmp_path).content_digest != before.content_digest


def test_the_digest_of_large_contents_reads_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "DIGESTED_BYTES", 1000)
    monkeypatch.setattr(source_module, "DIGESTED_IMAGES", (5, 50))
    pictures = np.random.default_rng(0).integers(0, 256, (200, 10, 10), dtype=np.uint8)
    read = source_module.sample_indices(ArrayDataset(pictures)).tolist()
    assert len(read) == 10
    assert (
        source_module.sample_indices(ArrayDataset(pictures[:, :1, :1])).tolist()
        == np.linspace(0, 199, 50).astype(int).tolist()
    )
    assert source_module.sample_indices(ArrayDataset(np.zeros((7, 90, 90), np.uint8))).tolist() == [0, 1, 3, 4, 6]
    assert source_module.sample_indices(ArrayDataset(pictures[:3])).tolist() == [0, 1, 2]
    assert (read[0], read[-1]) == (0, 199)
    digests = set[str]()
    for at in (None, read[4], next(at for at in range(200) if at not in read)):
        changed = pictures.copy()
        if at is not None:
            changed[at] ^= 1
        digests.add(ArrayDataset(changed).content_digest)
    assert len(digests) == 2  # what lies between two that are read goes unnoticed
