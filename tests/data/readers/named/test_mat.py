"""MATLAB files, against scipy; and what is damaged is refused, never misread."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from vitrail.core.errors import DataError
from vitrail.data.datasets.matlab import read_mat

ARRAYS = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "row": np.arange(9, dtype=np.uint16)[None],
    "column": np.arange(5, dtype=np.int32)[:, None],
    "doubles": np.array([[1.5, -2.0], [3.0, 1e300]]),
    "small_doubles": np.array([[1.0, 2.0, 3.0]]),
    "long": np.array([[2**40, -5]]),
    "singles": np.array([[0.25]], np.float32),
    "nothing": np.zeros((0, 3)),
}


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_come_out_as_scipy_reads_them(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "a.mat"
    savemat(path, ARRAYS, do_compression=compressed)
    ours, theirs = read_mat(path, *ARRAYS), loadmat(path)
    for name in ARRAYS:
        np.testing.assert_array_equal(ours[name], theirs[name])
        assert ours[name].dtype.newbyteorder("=") == theirs[name].dtype.newbyteorder("=")
        assert ours[name].shape == theirs[name].shape


@pytest.mark.parametrize("compressed", [False, True])
def test_structures_and_text(tmp_path: Path, compressed: bool) -> None:
    rows = np.array(
        [(1, "n02119789", "kit fox, Vulpes macrotis", 0), (2, "n02100735", "English setter é", 3)],
        dtype=[("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)],
    )
    path = tmp_path / "meta.mat"
    savemat(path, {"synsets": rows, "other": "unread"}, do_compression=compressed)
    held = read_mat(path, "synsets")["synsets"]
    assert [(int(one["ILSVRC2012_ID"][0, 0]), one["WNID"], one["words"]) for one in held] == [
        (1, "n02119789", "kit fox, Vulpes macrotis"),
        (2, "n02100735", "English setter é"),
    ]


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    savemat(path, {"y": np.ones((1, 3)), "strange": np.array([[1 + 2j]])})
    assert list(read_mat(path, "y")) == ["y"]
    with pytest.raises(DataError, match="no variable 'X'; it holds y"):
        read_mat(path, "y", "X")
    with pytest.raises(DataError, match="a variable of class 6"):
        read_mat(path, "strange")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"MATLAB", bytes(128), b"\x89HDF\r\n\x1a\n" + bytes(200)):
        path = tmp_path / "a.mat"
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"no .mat file of version 5"):
            read_mat(path, "X")
    with pytest.raises(DataError, match="No such file"):
        read_mat(tmp_path / "none.mat", "X")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, bytes]:
    path = tmp_path_factory.mktemp("mat") / "a.mat"
    out: dict[bool, bytes] = {}
    for compressed in (False, True):
        savemat(path, {"X": ARRAYS["bytes"], "y": ARRAYS["small_doubles"]}, do_compression=compressed)
        out[compressed] = path.read_bytes()
    return out


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, whole: dict[bool, bytes]) -> None:
    path = tmp_path / "a.mat"
    for data in whole.values():
        for length in range(0, len(data) - 8, 3):
            path.write_bytes(data[:length])
            with pytest.raises(DataError, match=r"a.mat"):
                read_mat(path, "X", "y")


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(124, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: dict[bool, bytes], compressed: bool, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(whole[compressed])
    for at, value in changes:
        data[at % len(data)] = value
    path = tmp_path_factory.mktemp("damaged") / "a.mat"
    path.write_bytes(data)
    with contextlib.suppress(DataError):
        assert read_mat(path, "X", "y")["X"].size <= 1000
