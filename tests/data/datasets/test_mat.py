"""MATLAB files: what is read, and what is refused."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from vitrail.core.errors import DataError
from vitrail.data.datasets.file_formats import read_mat
from vitrail.data.readers import parquet

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
LABELS = np.array([[1.0, 2.0, 3.0]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, bytes]:
    path = tmp_path_factory.mktemp("mat") / "a.mat"
    out: dict[bool, bytes] = {}
    for compressed in (False, True):
        savemat(path, {"X": IMAGES, "y": LABELS, "other": "unread"}, do_compression=compressed)
        out[compressed] = path.read_bytes()
    return out


def test_variables_are_read_by_name(whole: dict[bool, bytes]) -> None:
    for data in whole.values():
        held = read_mat(data, "a.mat", "X", "y")
        np.testing.assert_array_equal(held["X"], IMAGES)
        np.testing.assert_array_equal(held["y"], LABELS)
        assert "other" not in held
    with pytest.raises(DataError, match="'Z'"):
        read_mat(whole[True], "a.mat", "y", "Z")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"MATLAB", bytes(128), b"\x89HDF\r\n\x1a\n" + bytes(200)):
        with pytest.raises(DataError, match=r"a\.mat"):
            read_mat(data, "a.mat", "X")
    with pytest.raises(DataError):
        read_mat(tmp_path / "none.mat", "none.mat", "X")


def test_a_file_cut_anywhere_is_refused(whole: dict[bool, bytes]) -> None:
    for data in whole.values():
        last = len(data) // 2
        for length in range(0, last, 23):
            with pytest.raises(DataError):
                read_mat(data[:length], "a.mat", "X", "y")


@settings(max_examples=25, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(124, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused(
    whole: dict[bool, bytes], compressed: bool, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(whole[compressed])
    for at, value in changes:
        data[at % len(data)] = value
    with contextlib.suppress(DataError):
        assert read_mat(bytes(data), "a.mat", "X", "y")["X"].size <= 1000


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, whole: dict[bool, bytes]) -> None:
    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr(parquet, "import_module", missing)
    with pytest.raises(DataError):
        read_mat(whole[False], "a.mat", "X")
