"""One label far off the others is refused by every reader, in one line and in little memory."""

import io
import json
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import DataError
from vitrail.data.collection import open_collection
from vitrail.data.datasets.imagenet import read_real

LIMIT = 32 << 20  # bytes
NUMBERS = (60_000_000, 2**31, 2**40, 2**63, 10**30, -1, -7, 0.5, float("nan"), float("inf"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3)).save(file, "PNG")
    return file.getvalue()


def csv(path: Path, labels: list[Any]) -> Path:
    (path / "1.png").write_bytes(png())
    (path / "list.csv").write_text("path,label\n" + "".join(f"1.png,{label}\n" for label in labels))
    return path / "list.csv"


def jsonl(path: Path, labels: list[Any]) -> Path:
    (path / "1.png").write_bytes(png())
    (path / "list.jsonl").write_text("".join(f'{{"path": "1.png", "label": {json.dumps(x)}}}\n' for x in labels))
    return path / "list.jsonl"


def npz(path: Path, labels: list[Any]) -> Path:
    if any(isinstance(label, int) and label >= 2**64 for label in labels):
        labels = [min(label, 2**64 - 1) for label in labels]
    high = any(label >= 2**63 for label in labels)
    values = np.array(labels, np.uint64) if high and isinstance(labels[-1], int) else np.array(labels)
    np.savez(path / "set.npz", images=np.zeros((len(labels), 4, 3), np.uint8), labels=values)
    return path / "set.npz"


def tar(path: Path, labels: list[Any], member: str = "cls") -> Path:
    with tarfile.open(path / "set.tar", "w") as file:
        for number, label in enumerate(labels):
            text = str(label) if member == "cls" else json.dumps({"label": label})
            for name, data in ((f"{number}.png", png()), (f"{number}.{member}", text.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return path / "set.tar"


def tar_json(path: Path, labels: list[Any]) -> Path:
    return tar(path, labels, "json")


def parquet(path: Path, labels: list[Any]) -> Path:
    pa = pytest.importorskip("pyarrow")
    kind = pa.uint64() if any(label >= 2**63 for label in labels) and isinstance(labels[-1], int) else None
    labels = [min(label, 2**64 - 1) if isinstance(label, int) else label for label in labels]
    table = pa.table({"image": [png()] * len(labels), "label": pa.array(labels, kind)})
    pytest.importorskip("pyarrow.parquet").write_table(table, path / "set.parquet")
    return path / "set.parquet"


READERS = (csv, jsonl, npz, tar, tar_json, parquet)


@pytest.mark.parametrize("write", READERS)
@pytest.mark.parametrize("label", NUMBERS)
def test_one_absurd_label_is_refused(write: Callable[[Path, list[Any]], Path], label: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [0, 1, 2, label])
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as refusal:
            open_collection(path)
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("write", READERS)
def test_gaps_are_no_mistake(write: Callable[[Path, list[Any]], Path], tmp_path: Path) -> None:
    assert len(open_collection(write(tmp_path, [0, 1, 999])).classes) == 1000


@pytest.mark.parametrize("write", [csv, tar])
def test_numbers_longer_than_python_reads(write: Callable[[Path, list[Any]], Path], tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        open_collection(write(tmp_path, [0, 1, "9" * 5000]))
    assert len(str(refusal.value)) < 600


def test_whole_numbers_written_as_floats(tmp_path: Path) -> None:
    opened = open_collection(csv(tmp_path, ["0.0", "10.0", "2.0"]))
    assert (len(opened.classes), opened.split("train").labels.values.tolist()) == (11, [0, 10, 2])


def test_a_split_of_which_all_labels_are_minus_one_has_none(tmp_path: Path) -> None:
    x = np.zeros((3, 4, 3), np.uint8)
    np.savez(tmp_path / "set.npz", x_train=x, y_train=np.arange(3), x_test=x, y_test=np.full(3, -1))
    opened = open_collection(tmp_path / "set.npz")
    assert [opened.split("test").labels[i] for i in range(3)] == [(), (), ()]


def test_columns_of_zeros_and_ones(tmp_path: Path) -> None:
    x, y = np.zeros((2, 4, 3), np.uint8), np.zeros((2, 5), np.uint8)
    y[0, 1] = 1
    np.savez(tmp_path / "set.npz", images=x, labels=y)
    assert len(open_collection(tmp_path / "set.npz").classes) == 5
    np.savez_compressed(tmp_path / "set.npz", images=x, labels=np.zeros((2, 100_000), np.uint8))
    with pytest.raises(DataError, match="highest label"):
        open_collection(tmp_path / "set.npz")


@pytest.mark.parametrize("label", ["1e400", "0.5", "NaN", str(2**70)])
def test_labels_of_real_are_whole_numbers(label: str, tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(f"[[0], [{label}]]")
    with pytest.raises(DataError):
        read_real(tmp_path / "real.json")
