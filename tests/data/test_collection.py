"""The grammar of --data: what a text stands for, and what is refused before anything starts."""

import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data import collection
from vitrail.data.collection import Collection, open_collection, unify_classes
from vitrail.data.dataset import ArrayDataset, ImageDataset, Labels


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name)


def source(values: list[int], classes: str, *, several: bool = False) -> ArrayDataset:
    labels = Labels.several([value] for value in values) if several else Labels(np.array(values))
    return ArrayDataset(np.zeros((len(values), 2, 2), np.uint8), labels, tuple(classes))


def test_names_that_come_with_the_package() -> None:
    digits = open_collection("digits")
    assert (digits.name, digits.kind, digits.path) == ("digits", "in the package", None)
    assert {name: len(split) for name, split in digits.splits.items()} == {"train": 1437, "test": 360}
    assert digits.classes == tuple("0123456789")
    assert open_collection("shapes/colour").classes[0] == "red"
    with pytest.raises(DataError, match="the set digits is in the package and has no folder"):
        open_collection("digits:somewhere")


def test_split_by_its_name_or_another_word_for_it(here: Path) -> None:
    tree(here, "set/train/a/1.png", "set/train/b/1.png", "set/valid/b/1.png", "set/test/a/1.png")
    whole = open_collection("set")
    assert list(whole.splits) == ["train", "val", "test"]
    assert whole.split("validation") is whole.split("val") is whole.splits["val"]
    part = open_collection("set@valid")
    assert list(part.splits) == ["val"]
    assert part.classes == ("a", "b")  # those of train, and numbered as there
    assert part.splits["val"].labels[0] == (1,)
    with pytest.raises(DataError, match="set has no split 'dev2'; it has train, val, test"):
        open_collection("set@dev2")
    with pytest.raises(DataError, match="digits has no split 'val'; it has train, test"):
        open_collection("digits@val")


def test_paths_of_every_kind(here: Path) -> None:
    tree(here, "classes/a/1.png", "classes/b/1.png", "flat/1.png", "nested/x/y/1.png", "nested/2.png")
    (here / "list.csv").write_text("path,label\nflat/1.png,cat\n")
    assert open_collection("classes").kind == "class folders"
    assert open_collection("classes").path == Path("classes")
    assert open_collection(str(here / "classes")).classes == ("a", "b")
    assert open_collection(here / "flat").kind == "flat folder"
    assert open_collection("flat/").classes == ()
    assert open_collection("list.csv").classes == ("cat",)
    assert open_collection("list.csv").kind == "manifest"
    assert len(open_collection("flat:nested").split("train")) == 2
    assert len(open_collection("flat:nested@train").split("train")) == 2
    assert open_collection("classes:nested").classes == ("x",)
    assert open_collection("manifest:list.csv").classes == ("cat",)
    with pytest.raises(SourceNotFound, match="nowhere: no such file or folder"):
        open_collection("flat:nowhere")
    with pytest.raises(DataError, match=r"flat/1.png: a file that is a source ends in .tar"):
        open_collection("flat/1.png")


def test_home_is_understood(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(here, "flat/1.png")
    monkeypatch.setenv("HOME", str(here))
    assert open_collection("~/flat").path == here / "flat"
    assert open_collection("flat:~/flat").path == here / "flat"


def test_name_that_is_also_a_path_is_not_guessed(here: Path) -> None:
    tree(here, "digits/1.png")
    for text in ("digits", "digits@train"):
        with pytest.raises(DataError, match=r"write ./digits for the path, digits: for the set"):
            open_collection(text)
    assert open_collection("./digits").kind == "flat folder"
    assert open_collection(Path("digits")).kind == "flat folder"
    assert open_collection("digits:").kind == "in the package"
    assert len(open_collection("digits:@test").split("test")) == 360


def test_at_sign_in_a_path(here: Path) -> None:
    tree(here, "me@home/1.png")
    assert open_collection("me@home").kind == "flat folder"
    assert open_collection("me@home@train").kind == "flat folder"
    tree(here, "me/1.png")
    with pytest.raises(DataError, match="is a path here, and a split of 'me'; write me@home/"):
        open_collection("me@home")
    assert open_collection("me@home/").kind == "flat folder"


@pytest.mark.parametrize(
    "text", ["digts", "digts@train", "photos2", "nothing/at/all", "", "@train", "x:y", "\0\0\0", "x" * 5000]
)
def test_neither_path_nor_name(text: str, here: Path) -> None:
    tree(here, "photos/1.png")
    with pytest.raises(SourceNotFound) as refusal:
        open_collection(text)
    hints = {"digts": "did you mean digits", "photos2": "did you mean photos"}
    assert hints.get(text.removesuffix("@train"), "`vitrail data` lists the names") in str(refusal.value)
    assert "is neither a path nor a known set" in str(refusal.value)


def test_named_sets_are_asked_with_their_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.data.datasets import open_by_name as opening

    asked: list[object] = []

    def named(name: str, root: Path | None = None, *, download: bool, progress: object) -> dict[str, ImageDataset]:
        asked.append((name, root, download))
        return {"test": source([0], "a"), "train": source([0], "a")}

    def task(name: str, root: Path | None = None, *, download: bool, progress: object) -> dict[str, ImageDataset]:
        asked.append((name, root, download))
        return {"train": source([0], "a")}

    monkeypatch.setattr(opening, "open_named", named)
    monkeypatch.setattr(opening, "open_vtab", task)
    cifar = open_collection("cifar10", download=True)
    assert list(cifar.splits) == ["train", "test"]
    assert cifar.kind == "CIFAR-10"
    assert cifar.notes[0] == "not as published: train: 1 of 50,000 samples"
    part = open_collection("cifar10:~/x y@test", root=Path("unused"))
    assert list(part.splits) == ["test"]
    home = Path("~/x y").expanduser()
    assert part.path == home
    open_collection("cifar10", root=here)
    assert open_collection("vtab/dtd:here").kind == "task of VTAB: DTD"
    assert asked == [
        ("cifar10", None, True),
        ("cifar10", home, False),
        ("cifar10", here, False),
        ("vtab/dtd", Path("here"), False),
    ]


def test_missing_files_of_a_named_set_are_named(here: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"(?s)CIFAR-10: .*--download fetches"):
        open_collection(f"cifar10:{here}")


def test_files_of_the_other_readers(here: Path) -> None:
    np.savez(here / "a.npz", images=np.zeros((3, 4, 4, 3), np.uint8), labels=np.array([0, 1, 0]))
    assert open_collection("a.npz").kind == "arrays"
    for split in ("train", "val"):
        (here / "shards" / split).mkdir(parents=True)
        with tarfile.open(here / "shards" / split / "0.tar", "w") as tar:
            tree(here, "tmp/x.png")
            tar.add(here / "tmp/x.png", "x.png")
            (here / "x.cls").write_text("0")
            tar.add(here / "x.cls", "x.cls")
    for text in ("shards", "shards:shards"):
        opened = open_collection(text)
        assert opened.kind == "tar shards"
        assert {name: len(split) for name, split in opened.splits.items()} == {"train": 1, "val": 1}
    assert len(open_collection("shards/val/0.tar").splits) == 1
    assert open_collection("shards/train/{0..0}.tar").kind == "tar shards"
    assert open_collection("shards/train/*.tar@train").kind == "tar shards"


def test_tables_of_the_other_readers(here: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tree(here, "x.png")
    table = pyarrow.table({"image": [(here / "x.png").read_bytes()], "label": [0]})
    (here / "hub" / "data").mkdir(parents=True)
    parquet.write_table(table, here / "hub" / "data" / "train-00000-of-00001.parquet")
    for text in ("hub", "hub/data", "hub/data/train-00000-of-00001.parquet", "parquet:hub"):
        assert open_collection(text).kind == "Parquet"


def test_a_set_without_labels_is_refused_with_the_way_its_kind_gives_them(here: Path) -> None:
    tree(here, "photos/cat/1.png", "photos/dog/2.png")
    open_collection("photos").need_labels()
    with tarfile.open(here / "photos.tar", "w") as tar:
        tar.add(here / "photos", ".")
    np.savez(here / "a.npz", images=np.zeros((3, 4, 4, 3), np.uint8))
    (here / "list.csv").write_text("path\nphotos/cat/1.png\n")
    for text, remedy in (
        ("photos.tar", r"KEY\.cls, or as \"label\" in KEY\.json; .* Unpack it .* `vitrail data pack`"),
        ("flat:photos", "a folder of its own, named after it"),
        ("list.csv", 'a column "label"'),
        ("a.npz", "an array called labels"),
    ):
        with pytest.raises(BadLabels, match=f"^{text} has no labels: .*{remedy}"):
            open_collection(text).need_labels()


def test_class_that_train_lacks_is_refused_with_the_difference(here: Path) -> None:
    tree(here, "set/train/a/1.png", "set/train/b/1.png", "set/val/b/1.png", "set/val/c/1.png")
    with pytest.raises(BadLabels) as refusal:
        open_collection("set")
    assert "set: val has classes that train lacks: c; val lacks a (2 classes in val, 2 in train)" in str(refusal.value)


def test_class_that_only_train_has_is_noted(here: Path) -> None:
    tree(here, "set/train/a/1.png", "set/train/b/1.png", "set/val/b/1.png", "set/test/1.png")
    opened = open_collection("set")
    assert opened.notes == ("val has no images of 1 of 2 classes (a)", "test has no labels")
    val = opened.split("val")
    assert val.classes == ("a", "b")
    assert pickle.loads(pickle.dumps(val)).name(0) == "val/b/1.png"


def test_files_that_are_no_pictures_are_noted(here: Path) -> None:
    tree(here, "set/train/a/1.png", "set/test/a/1.png")
    (here / "set" / "train" / "a" / "x.txt").write_text("x")
    notes = open_collection("set").notes
    assert notes == ("train: 1 file that is not an image ignored (train/a/x.txt)",)


@pytest.mark.parametrize("several", [False, True])
def test_labels_outside_the_range_are_refused(several: bool) -> None:
    with pytest.raises(BadLabels, match="x, train: sample 1 has label 2, but there are 2 classes"):
        unify_classes("x", {"train": source([0, 2], "ab", several=several)})
    with pytest.raises(BadLabels, match="0 classes"):
        unify_classes("x", {"train": source([0, 2], "", several=several)})


def test_split_without_images_is_refused() -> None:
    with pytest.raises(DataError, match="x: no images in val"):
        unify_classes("x", {"train": source([0], "a"), "val": source([], "a")})


@pytest.mark.parametrize("several", [False, True])
def test_classes_of_all_splits_are_numbered_alike(several: bool) -> None:
    splits = {"train": source([0, 1, 2], "abc", several=several), "val": source([0, 1, 0], "cb", several=several)}
    agreed, _ = unify_classes("x", splits)
    assert [agreed["val"].labels[i] for i in range(3)] == [(2,), (1,), (2,)]
    unlabelled, _ = unify_classes("x", {"train": source([0], "a"), "val": source([-1, -1], "")})
    assert unlabelled["val"].classes == ()


def test_known_names_are_lower_case_and_have_a_kind() -> None:
    known = collection.known_names()
    assert known["digits"] == "embedded"
    assert all(name == name.lower() for name in known)
    assert set(known.values()) == {"embedded", "named", "vtab"}
    assert sum(kind == "vtab" for kind in known.values()) == 19


def test_collection_is_frozen() -> None:
    opened = open_collection("digits")
    assert isinstance(opened, Collection)
    with pytest.raises(AttributeError):
        opened.name = "other"  # type: ignore[misc]
