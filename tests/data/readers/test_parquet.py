"""Parquet, saved Hugging Face datasets and tables, written by the libraries themselves; and numpy files."""

import io
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import BadImage, BadLabels, DataError, SourceNotFound
from vitrail.data.dataset import ImageDataset
from vitrail.data.readers import arrays, parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (shade, 255 - shade, 7)).save(file, "PNG")
    return file.getvalue()


def table(count: int, first: int = 0, **more: Any) -> Any:
    cells = [{"bytes": picture(i), "path": f"{i}.png"} for i in range(first, first + count)]
    return pa.table({"image": cells, "label": [i % 3 for i in range(first, first + count)], **more})


def shades(source: ImageDataset) -> list[int]:
    return [int(np.asarray(source.open_image(i).rgb())[0, 0, 0]) for i in range(len(source))]


def test_files_as_the_hub_lays_them_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(table(7), tmp_path / "data/train-00000-of-00002.parquet", row_group_size=3)
    pq.write_table(table(5, 7), tmp_path / "data/train-00001-of-00002.parquet", row_group_size=2)
    pq.write_table(table(4, 100), tmp_path / "data/validation-00000-of-00001.parquet")
    for path in (tmp_path, tmp_path / "data"):
        splits = parquet.read(path)
        assert list(splits) == ["train", "val"]
        assert shades(splits["train"]) == list(range(12))
        assert shades(splits["val"]) == list(range(100, 104))
        assert splits["train"].labels.values.tolist() == [i % 3 for i in range(12)]
        assert splits["val"].classes == ("0", "1", "2")
    assert splits["train"].name(8) == "train-00001-of-00002.parquet:1"
    one = parquet.read(tmp_path / "data/validation-00000-of-00001.parquet")
    assert shades(one["val"]) == list(range(100, 104))
    with pytest.raises(IndexError):
        one["val"].read(4)


def test_random_access_keeps_little_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table(60), tmp_path / "x.parquet", row_group_size=5)
    source = parquet.read(tmp_path / "x.parquet")["train"]
    assert isinstance(source, parquet.TableDataset)
    monkeypatch.setattr(parquet, "BUDGET", 3 * source.blocks.load(0).nbytes)
    for i in np.random.default_rng(0).permutation(60):
        assert source.read(int(i)) == picture(int(i))
        assert len(source.blocks.cache) <= 3


@pytest.mark.parametrize(
    ("values", "classes", "rows"),
    [
        (pa.array([1, None, 0]), ("0", "1"), [(1,), (), (0,)]),
        (pa.array([1, 0, 1], pa.uint8()), ("0", "1"), [(1,), (0,), (1,)]),
        (pa.array(["dog", "cat", None]), ("cat", "dog"), [(1,), (0,), ()]),
        (pa.array(["dog", "cat", "dog"]).dictionary_encode(), ("cat", "dog"), [(1,), (0,), (1,)]),
        (pa.array([[2, 0], [], None]), ("0", "1", "2"), [(2, 0), (), ()]),
        (pa.array([["b"], ["a", "b"], []]), ("a", "b"), [(1,), (0, 1), ()]),
        (pa.array([True, False, True]), ("0", "1"), [(1,), (0,), (1,)]),
    ],
)
def test_labels_of_every_kind(tmp_path: Path, values: Any, classes: tuple[str, ...], rows: list[Any]) -> None:
    pq.write_table(pa.table({"png": [picture(i) for i in range(3)], "label": values}), tmp_path / "x.parquet")
    source = parquet.read(tmp_path / "x.parquet")["train"]
    assert source.classes == classes
    assert [source.labels[i] for i in range(3)] == rows


def test_names_are_the_same_in_all_splits(tmp_path: Path) -> None:
    for split, names in (("train", ["b", "c"]), ("test", ["a", "c"])):
        pq.write_table(pa.table({"img": [picture(0), picture(1)], "label": names}), tmp_path / f"{split}-0.parquet")
    splits = parquet.read(tmp_path)
    assert splits["train"].classes == splits["test"].classes == ("a", "b", "c")
    assert splits["test"].labels.values.tolist() == [0, 2]


def test_columns_that_are_not_plain(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(3, thumbnail=[{"bytes": b"", "path": ""}] * 3), path)
    with pytest.raises(DataError):
        parquet.read(path)
    assert shades(parquet.read(path, {"image": "image"})["train"]) == [0, 1, 2]
    pq.write_table(table(3, target=[5, 5, 5]), path)
    with pytest.raises(DataError):
        parquet.read(path)
    assert parquet.read(path, {"label": "target"})["train"].labels[0] == (5,)
    with pytest.raises(DataError):
        parquet.read(path, {"label": "breed"})
    pq.write_table(pa.table({"width": [1]}), path)
    with pytest.raises(DataError):
        parquet.read(path)
    pq.write_table(pa.table({"image": [b""], "width": [1]}), path)
    assert parquet.read(path)["train"].labels[0] == ()
    pq.write_table(pa.table({"image": [b""], "label": [0.5]}), path)
    with pytest.raises(BadLabels):
        parquet.read(path)
    pq.write_table(pa.table({"image": [b""], "label": [-2]}), path)
    with pytest.raises(BadLabels, match="label -2"):
        parquet.read(path)
    pq.write_table(pa.table({"image": [b"", b""], "label": [-1, -1]}), path)  # how unlabelled rows are often marked
    assert parquet.read(path)["train"].labels[1] == ()


def test_rows_without_a_picture_are_named(tmp_path: Path) -> None:
    cells = [{"bytes": None, "path": "/etc/passwd"}, None, {"bytes": b"x", "path": None}]
    pq.write_table(pa.table({"image": cells}), tmp_path / "x.parquet")
    source = parquet.read(tmp_path / "x.parquet")["train"]
    for i, words in enumerate((r"x\.parquet:0: .*path '/etc/passwd' and not the bytes", ":1: .*no image", ":2: ")):
        with pytest.raises(BadImage, match=words):
            source.open_image(i)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError):
        parquet.read(tmp_path / "x.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceNotFound):
        parquet.read(tmp_path / "empty")
    with pytest.raises(SourceNotFound, match=r"state\.json"):
        parquet.read_saved(tmp_path / "empty")


def all_shades(source: ImageDataset, queue: "multiprocessing.Queue[list[int]]") -> None:
    queue.put(shades(source))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_read_the_same(tmp_path: Path, method: str) -> None:
    pq.write_table(table(9), tmp_path / "x.parquet", row_group_size=2)
    source = parquet.read(tmp_path / "x.parquet")["train"]
    source.read(0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=all_shades, args=(source, queue))
    process.start()
    assert queue.get(timeout=60) == list(range(9))
    process.join()
    assert shades(source) == list(range(9))


def test_another_set_another_fingerprint(tmp_path: Path) -> None:
    prints = set[str]()
    for name, content in {"a": table(4), "b": table(5), "c": table(4, 1)}.items():
        pq.write_table(content, tmp_path / f"{name}.parquet")
        prints.add(parquet.read(tmp_path / f"{name}.parquet")["train"].fingerprint)
    assert len(prints) == 3
    assert parquet.read(tmp_path / "a.parquet")["train"].fingerprint in prints


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets


def made(datasets: Any, count: int, first: int = 0, several: bool = False) -> Any:
    one = datasets.ClassLabel(names=["cat", "dog: é", "fish"])
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Sequence(one) if several else one})
    rows = range(first, first + count)
    labels = [[i % 3, (i + 1) % 3] if several else i % 3 for i in rows]
    pictures = [{"bytes": picture(i), "path": None} for i in rows]
    return datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_what_the_datasets_library_writes(tmp_path: Path, hugging_face: Any, several: bool) -> None:
    both = hugging_face.DatasetDict(
        {"train": made(hugging_face, 10, 0, several), "validation": made(hugging_face, 4, 50, several)}
    )
    both.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 3, "validation": 1})
    (tmp_path / "data").mkdir()
    for name, part in both.items():
        part.to_parquet(str(tmp_path / f"data/{name}-00000-of-00001.parquet"))
    for splits in (
        parquet.read_saved(tmp_path / "saved"),
        parquet.read(tmp_path / "data"),
    ):
        assert list(splits) == ["train", "val"]
        assert shades(splits["train"]) == list(range(10))
        assert shades(splits["val"]) == list(range(50, 54))
        assert splits["val"].classes == ("cat", "dog: é", "fish")
        want = [(i % 3, (i + 1) % 3) if several else (i % 3,) for i in range(10)]
        assert [splits["train"].labels[i] for i in range(10)] == want
    saved = parquet.read_saved(tmp_path / "saved/train")["train"]
    assert shades(pickle.loads(pickle.dumps(saved))) == list(range(10))
    assert saved.name(5).startswith("data-00001-of-00003.arrow:")
    assert len(pickle.dumps(saved)) < 3000


def test_pictures_saved_by_path(tmp_path: Path, hugging_face: Any) -> None:
    (tmp_path / "a.png").write_bytes(picture(9))
    features = hugging_face.Features({"image": hugging_face.Image()})
    data = hugging_face.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}, features=features)
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "x.parquet"))
    (tmp_path / "a.png").unlink()
    assert shades(parquet.read_saved(tmp_path / "saved")["train"]) == [9]  # the library embeds them
    with pytest.raises(BadImage):
        parquet.read(tmp_path / "x.parquet")["train"].open_image(0)  # here it does not


def test_arrays_of_an_npz_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (6, 5, 4, 3), np.uint8), np.array([0, 2, 1, 0, 2, 1])
    for names in (
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
    ):
        np.savez(tmp_path / "set.npz", **dict(zip(names, (x, y, x[:2], y[:2, None]), strict=True)))
        splits = arrays.read(tmp_path / "set.npz")
        assert list(splits) == ["train", "test"]
        assert splits["test"].labels.values.tolist() == [0, 2]
        assert splits["test"].classes == ("0", "1", "2")
        assert np.array_equal(splits["train"].read(3), x[3])
        assert splits["train"].name(3) == f"set.npz:{names[0]}[3]"
    np.savez(tmp_path / "set.npz", images=x, labels=y, classes=np.array(["a", "b", "c"]))
    assert arrays.read(tmp_path / "set.npz")["train"].classes == ("a", "b", "c")
    np.savez(tmp_path / "set.npz", x, y)
    assert arrays.read(tmp_path / "set.npz")["train"].labels[1] == (2,)
    np.savez_compressed(tmp_path / "set.npz", images=x, labels=np.eye(6, 3, dtype=np.uint8))
    assert [arrays.read(tmp_path / "set.npz")["train"].labels[i] for i in (1, 4)] == [(1,), ()]


def test_layouts_of_pixels(tmp_path: Path) -> None:
    grey = np.arange(120, dtype=np.uint8).reshape(2, 6, 10)
    colour = np.arange(360, dtype=np.uint16).astype(np.uint8).reshape(2, 6, 10, 3)
    for stored in (grey, grey[..., None], colour, colour.transpose(0, 3, 1, 2)):
        np.save(tmp_path / "x.npy", stored)
        read = arrays.read(tmp_path / "x.npy")["train"].read(1)
        assert np.array_equal(read, (grey if grey.size == stored.size else colour)[1])


def test_npy_files_are_mapped_and_find_their_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, 6, 5), np.uint8)
    for split in ("train", "test"):
        np.save(tmp_path / f"images_{split}.npy", x)
        np.save(tmp_path / f"labels_{split}.npy", np.arange(4))
    splits = arrays.read(tmp_path)
    assert list(splits) == ["train", "test"]
    one = arrays.read(tmp_path / "images_test.npy")["test"]
    assert one.labels.values.tolist() == [0, 1, 2, 3]
    again = pickle.loads(pickle.dumps(one))
    assert np.array_equal(again.read(2), x[2])
    assert len(pickle.dumps(one)) < 1500
    assert one.fingerprint == again.fingerprint
    np.save(tmp_path / "images_test.npy", 255 - x)
    assert arrays.read(tmp_path / "images_test.npy")["test"].fingerprint != one.fingerprint


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


def test_arrays_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.zeros((2, 4, 4, 3), np.uint8)
    cases: dict[str, tuple[type[DataError], dict[str, Any]]] = {
        "images are uint8": (DataError, {"x": x.astype(np.float32)}),
        r"shape \[2, 4\]": (DataError, {"x": x[:, :, 0, 0]}),
        "images are called images": (DataError, {"foo": x, "bar": x}),
        "both look like x of train": (DataError, {"x": x, "images": x}),
        "labels for 2 images": (DataError, {"x": x, "y": np.zeros(3, int)}),
        "label -7": (BadLabels, {"x": x, "y": np.array([0, -7])}),
        "float64": (BadLabels, {"x": x, "y": np.array([0.5, 1])}),
        "other values than 0 and 1": (BadLabels, {"x": x, "y": np.full((2, 2), 3)}),
        "cannot be read": (DataError, {"x": np.array([Trap()], object), "y": np.zeros(1, int)}),
    }
    for words, (kind, content) in cases.items():
        np.savez(tmp_path / "set.npz", **content)
        with pytest.raises(kind, match=words):
            arrays.read(tmp_path / "set.npz")
    for name in ("bad.npz", "bad.npy"):
        (tmp_path / name).write_bytes(b"\x93NUMPY no array")
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            arrays.read(tmp_path / name)
    assert not (tmp_path / "sprung").exists()
