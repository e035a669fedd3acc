"""Sets in formats of their own: CIFAR, idx, SVHN, PatchCamelyon, dSprites, smallNORB, DMLab."""

import contextlib
import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.datasets import writers
from tests.data.datasets.writers import put, shade
from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.dataset import ArrayDataset, ImageDataset
from vitrail.data.datasets import cifar_mnist as cifar
from vitrail.data.datasets import natural_sets, open_by_name, structured_sets
from vitrail.data.datasets.file_formats import masked_crc, parse_example
from vitrail.data.readers import parquet


def labels(source: ImageDataset) -> list[int]:
    return source.labels.values.tolist()


def pixels(source: ImageDataset, index: int) -> np.ndarray:
    data = source.read(index)
    assert isinstance(data, np.ndarray)
    return data


@pytest.mark.parametrize("binary", [False, True], ids=["python", "binary"])
@pytest.mark.parametrize("unpack", [False, True], ids=["archive", "folder"])
def test_cifar10_in_all_its_forms(tmp_path: Path, binary: bool, unpack: bool) -> None:
    members = writers.cifar10_binary_members() if binary else writers.cifar10_members()
    archive = writers.tar(tmp_path / f"cifar-10-{'binary' if binary else 'python'}.tar.gz", members)
    if unpack:
        open_by_name.extract(archive, tmp_path)
        archive.unlink()
    splits = cifar.read_cifar10(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 20, "test": 4}
    assert splits["train"].classes == tuple(f"class{i}" for i in range(10))
    assert labels(splits["train"]) == [i % 10 for i in range(20)]
    assert labels(splits["test"]) == [0, 1, 2, 3]
    first = pixels(splits["train"], 13)
    assert first.shape == (32, 32, 3)
    assert first[5, 7].tolist() == first[1, 0].tolist() == [shade(13), shade(13) + 1, shade(13) + 2]
    assert first[0, 1].tolist() == [200, shade(13) + 1, shade(13) + 2]


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    writers.cifar100(tmp_path)
    splits = cifar.read_cifar100(tmp_path)
    assert labels(splits["test"]) == [40, 41, 42, 43, 44, 45]
    fine = bytes([3, 77]) + writers.planes(1).tobytes()
    folder = tmp_path / "bin" / "cifar-100-binary"
    for name in ("train.bin", "test.bin"):
        put(folder / name, fine)
    put(folder / "fine_label_names.txt", "".join(f"class{i}\n" for i in range(100)))
    assert labels(cifar.read_cifar100(tmp_path / "bin")["train"]) == [77]


class Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("harm done",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = writers.cifar10_members()
    members["cifar-10-batches-py/data_batch_3"] = pickle.dumps({"data": Harm(), "labels": [0]}, protocol=2)
    writers.tar(tmp_path / "cifar-10-python.tar.gz", members)
    with pytest.raises(DataError, match=r"\.print"):
        cifar.read_cifar10(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_pickle_with_a_wrong_array_is_refused() -> None:
    for array in (np.zeros((2, 3071), np.uint8), np.zeros((2, 3072), np.float32), np.zeros((2, 3072), object)):
        data = pickle.dumps({"data": array, "labels": [0, 1]}, protocol=2)
        with pytest.raises(DataError, match="here"):
            cifar.read_batch(data, cifar.CIFAR10[0], "here")
    data = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, protocol=2)
    with pytest.raises(DataError):
        cifar.read_batch(data, cifar.CIFAR10[0], "here")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_damaged_batch_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(writers.cifar10_members(2)["cifar-10-batches-py/test_batch"])
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        cifar.read_batch(bytes(whole[: data.draw(st.integers(0, len(whole)))]), cifar.CIFAR10[0], "here")


def test_cifar_with_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    members = writers.cifar10_binary_members()
    name = "cifar-10-batches-bin/data_batch_2.bin"
    members[name] = b"\x0a" + members[name][1:]
    writers.tar(tmp_path / "cifar-10-binary.tar.gz", members)
    with pytest.raises(BadLabels):
        cifar.read_cifar10(tmp_path)
    members[name] = members[name][:-1]
    writers.tar(tmp_path / "cifar-10-binary.tar.gz", members)
    with pytest.raises(DataError):
        cifar.read_cifar10(tmp_path)


def test_idx_files_packed_and_plain(tmp_path: Path) -> None:
    writers.mnist(tmp_path)
    packed = cifar.read_fashion_mnist(tmp_path)
    for path in list(tmp_path.iterdir()):
        put(path.with_suffix(""), gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = cifar.read_mnist(tmp_path)
    assert packed["train"].classes[9] == "Ankle boot"
    assert plain["train"].classes[9] == "9"
    for splits in (packed, plain):
        assert {split: len(source) for split, source in splits.items()} == {"train": 12, "test": 5}
        assert labels(splits["train"])[8:] == [8, 9, 0, 1]
        assert pixels(splits["test"], 3).tolist() == [[shade(3)] * 28] * 28


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", b"\0\0\x08\x01\0\0\0\x05abc", b"\0\0\x08\x03" + b"\xff" * 12],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DataError, match="train-images"):
        cifar.read_idx(put(tmp_path / "train-images-idx3-ubyte", data))


def test_svhn_keeps_rows_columns_and_colours_apart(tmp_path: Path) -> None:
    writers.svhn(tmp_path)
    splits = natural_sets.read_svhn(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 40, "test": 6}
    assert labels(splits["train"])[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    picture = pixels(splits["train"], 7)
    assert picture[0, 1].tolist() == [shade(7), shade(7), 200]
    assert picture[1, 0].tolist() == [shade(7)] * 3
    assert isinstance(splits["train"], ArrayDataset)
    assert splits["train"].pictures.flags["C_CONTIGUOUS"]


def test_pcam_reads_single_pictures_in_any_process(tmp_path: Path) -> None:
    writers.pcam(tmp_path)
    splits = natural_sets.read_pcam(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 20, "val": 6, "test": 5}
    assert labels(splits["val"]) == [0, 1, 0, 1, 0, 1]
    assert (pixels(splits["train"], 9) == shade(9)).all()
    again = pickle.loads(pickle.dumps(splits["train"]))
    assert (pixels(again, 9) == shade(9)).all()
    again.handle = (-1, None)  # as a forked process finds what its parent had opened
    assert (pixels(again, 9) == shade(9)).all()
    assert again.name(9) == "camelyonpatch_level_2_split_train_x.h5[9]"


def test_pcam_without_h5py_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers.pcam(tmp_path)

    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr(parquet, "import_module", missing)
    with pytest.raises(DataError):
        natural_sets.read_pcam(tmp_path)


def test_a_damaged_file_of_pcam_is_named(tmp_path: Path) -> None:
    writers.pcam(tmp_path)
    put(tmp_path / "camelyonpatch_level_2_split_valid_y.h5", b"no such thing")
    with pytest.raises(DataError):
        natural_sets.read_pcam(tmp_path)
    put(tmp_path / "camelyonpatch_level_2_split_train_x.h5.gz", b"no such thing")
    (tmp_path / "camelyonpatch_level_2_split_train_x.h5").unlink()
    with pytest.raises(DataError):
        natural_sets.read_pcam(tmp_path)


def test_sprites_are_kept_as_bits_and_come_out_black_and_white(tmp_path: Path) -> None:
    writers.dsprites(tmp_path)
    across, turned = (
        structured_sets.read_dsprites_location(tmp_path)["train"],
        structured_sets.read_dsprites_orientation(tmp_path)["train"],
    )
    assert len(across) == len(turned) == 80
    assert labels(across) == [i * 5 % 32 // 2 for i in range(80)]
    assert labels(turned) == [int(i % 40 // 2.5) for i in range(80)]
    for i in (0, 1, 63, 79):
        expected = np.zeros((64, 64), np.uint8)
        expected[i % 64, : i % 64 + 1] = 255
        np.testing.assert_array_equal(pixels(across, i), expected)
    kept = list((tmp_path / "cache" / "data" / "dsprites").iterdir())
    assert [path.stat().st_size for path in kept] == [80 * 512]


def test_sprites_cut_short_are_refused(tmp_path: Path) -> None:
    writers.dsprites(tmp_path)
    path = next(tmp_path.glob("*.npz"))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError):
        structured_sets.read_dsprites_location(tmp_path)


def test_norb_has_three_questions_for_one_camera(tmp_path: Path) -> None:
    writers.smallnorb(tmp_path)
    kinds, sides, heights = (
        structured_sets.read_smallnorb(tmp_path),
        structured_sets.read_smallnorb_azimuth(tmp_path),
        structured_sets.read_smallnorb_elevation(tmp_path),
    )
    assert {split: len(source) for split, source in kinds.items()} == {"train": 30, "test": 20}
    assert labels(kinds["test"]) == [i % 5 for i in range(20)]
    assert labels(sides["test"]) == [i % 18 for i in range(20)]
    assert labels(heights["test"]) == [i % 9 for i in range(20)]
    picture = pixels(sides["train"], 11)
    assert picture.shape == (96, 96)
    assert (picture == shade(11)).all()
    assert (len(sides["train"].classes), len(heights["train"].classes)) == (18, 9)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Ii3i", 0x1E3D4C00, 1, 1, 1, 1),
        struct.pack("<Ii2i", 0x1E3D4C55, 3, 1, 1),
        struct.pack("<Ii3i", 0x1E3D4C55, 1, 9, 1, 1) + b"12345678",
        struct.pack("<Ii3i", 0x1E3D4C55, 1, -9, 1, 1) + b"12345678",
    ],
)
def test_a_damaged_file_of_norb_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.mat"):
        structured_sets.read_norb_header(put(tmp_path / "a.mat", data))


def test_dmlab_from_record_files(tmp_path: Path) -> None:
    writers.dmlab(tmp_path)
    splits = structured_sets.read_dmlab(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 20, "val": 6, "test": 5}
    assert labels(splits["val"]) == [20 % 6, 21 % 6, 22 % 6, 23 % 6, 24 % 6, 25 % 6]
    assert splits["train"].name(13) == "00013.jpg"
    assert splits["train"].read(13) == writers.jpeg(13)
    again = structured_sets.read_dmlab(tmp_path / "dmlab")  # unpacked, and by the index that was kept
    assert again["train"].read(19) == writers.jpeg(19)


def test_an_index_is_made_anew_when_a_file_has_changed(tmp_path: Path) -> None:
    for name, data in writers.dmlab_members().items():
        put(tmp_path / name, data)
    assert len(structured_sets.read_dmlab(tmp_path)["test"]) == 5
    path = tmp_path / "dmlab-test.tfrecord-00000-of-00001"
    path.write_bytes(path.read_bytes() * 2)
    assert len(structured_sets.read_dmlab(tmp_path)["test"]) == 10
    for kept in (tmp_path / "cache" / "index").iterdir():
        kept.write_bytes(b"damaged")
    assert len(structured_sets.read_dmlab(tmp_path)["test"]) == 10


def test_the_checksum_is_the_published_one() -> None:
    assert writers.crc32c(b"123456789") == 0xE3069283
    assert struct.pack("<I", masked_crc(b"123456789")) == writers.masked(b"123456789")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:7],
        lambda data: data[:-1],
        lambda data: b"\1" + data[1:],
        lambda data: writers.tf_record(b"\x0a\xff\x01"),
        lambda data: writers.tf_record(writers.tf_example({"image": b"", "filename": b""})),
        lambda data: writers.tf_record(writers.tf_example({"image": b"", "filename": b"", "label": 6})),
        lambda data: writers.tf_record(writers.tf_example({"image": 1, "filename": b"", "label": 1})),
    ],
)
def test_a_damaged_record_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = put(tmp_path / "a", change(writers.dmlab_members()["dmlab-test.tfrecord-00000-of-00001"]))
    with pytest.raises(DataError):
        structured_sets.index_dmlab([path])


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda tail: writers.tf_example({"label": 3})[:-2] + tail))
def test_any_bytes_are_an_example_or_are_not(data: bytes) -> None:
    try:
        found = parse_example(data)
    except (ValueError, IndexError):
        return
    for value in found.values():
        assert isinstance(value, int) or 0 <= value[0] <= value[1] <= len(data)


def test_a_file_that_shrinks_after_opening_gives_a_bad_picture(tmp_path: Path) -> None:
    for name, data in writers.dmlab_members().items():
        put(tmp_path / name, data)
    source = structured_sets.read_dmlab(tmp_path)["test"]
    put(tmp_path / "dmlab-test.tfrecord-00000-of-00001", b"")
    with pytest.raises(BadImage, match="cut short"):
        source.open_image(4)
