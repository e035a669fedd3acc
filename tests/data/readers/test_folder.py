"""Folders of images: what is found, what is passed over, what is refused."""

import os
import pickle
from pathlib import Path

import pytest
from PIL import Image

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.readers import detect_format as recognise
from vitrail.data.readers import folder
from vitrail.data.readers.folder import FileDataset


def picture(path: Path, colour: int = 90) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (colour, 0, 0)).save(path)
    return path


def tree(root: Path, *names: str) -> Path:
    for at, name in enumerate(names):
        picture(root / name, at)
    return root


def opened(root: Path, split: str = "train") -> FileDataset:
    source = recognise.read_folder(root)[1][split]
    assert isinstance(source, FileDataset)
    return source


def test_class_folders_by_name_and_depth(tmp_path: Path) -> None:
    tree(tmp_path, "dog/b.png", "dog/a.JPG", "cat/deep/er/1.webp", "cat/2.jpeg")
    source = opened(tmp_path)
    assert source.classes == ("cat", "dog")
    assert [source.name(i) for i in range(len(source))] == [
        "cat/2.jpeg",
        "cat/deep/er/1.webp",
        "dog/a.JPG",
        "dog/b.png",
    ]
    assert source.labels.values.tolist() == [0, 0, 1, 1]
    assert source.open_image(3).size == (4, 5)
    assert source.sizes().tolist() == [os.path.getsize(tmp_path / source.name(i)) for i in range(4)]


def test_order_and_classes_are_those_of_torchvision(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    tree(tmp_path, "B/2.png", "B/10.png", "a/z.png", "Ä/1.png", "a/Z.PNG", "0/x.bmp")
    theirs = ImageFolder(str(tmp_path))
    ours = opened(tmp_path)
    assert list(ours.classes) == theirs.classes
    assert [ours.path(i) for i in range(len(ours))] == [path for path, _ in theirs.samples]
    assert ours.labels.values.tolist() == theirs.targets


def test_splits_by_their_usual_words(tmp_path: Path) -> None:
    tree(tmp_path, "train/a/1.png", "train/b/1.png", "Validation/a/1.png", "test/1.png", "test/2.png")
    splits = recognise.read_folder(tmp_path)[1]
    assert {name: len(source) for name, source in splits.items()} == {"val": 1, "test": 2, "train": 2}
    assert splits["train"].name(0) == "train/a/1.png"
    assert splits["test"].classes == ()
    assert splits["test"].labels[0] == ()


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    tree(tmp_path, "2.png", "1.png")
    source = opened(tmp_path)
    assert (source.classes, source.labels[0], source.name(0)) == ((), (), "1.png")


def test_other_files_are_counted_and_hidden_ones_are_not_there(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png", "b/1.png", "a/.hidden.png", ".git/x.png", "__MACOSX/a/1.png")
    for name in ("a/Thumbs.db", "a/notes.txt"):
        (tmp_path / name).write_text("x")
    source = opened(tmp_path)
    assert len(source) == 2
    assert source.classes == ("a", "b")
    assert source.ignored == (2, ("a/Thumbs.db", "a/notes.txt"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["1.png", "cats/1.png"], ["1 folder (cats)", "1 image (1.png)", "classes:", "flat:"]),
        (["cats/1.png", "x.tar"], ["1 tar file (x.tar)", "shards:"]),
        (["1.png", "x.parquet"], ["1 Parquet file", "parquet:"]),
        (["train/a/1.png", "cats/1.png"], ["1 split (train)", "1 other folder (cats)", "classes:"]),
        (["val/a/1.png", "valid/a/1.png"], ["val, valid", "two names for one split"]),
        (["data/train/a/1.png"], ["one folder, data", "1 folder (train)", "one level down"]),
        (["train/1.png", "train/a/1.png"], ["train holds 1 folder (a) and 1 image (1.png)"]),
        (["notes.txt"], ["no images here", "1 other file (notes.txt)"]),
        ([], ["no images here"]),
    ],
)
def test_what_is_mixed_or_empty_is_refused_with_what_was_found(names, words, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(tmp_path / name) if name.endswith("png") else (tmp_path / name).write_text("x")
    with pytest.raises(DataError) as refusal:
        recognise.read_folder(tmp_path)[1]
    for word in [str(tmp_path), *words]:
        assert word in str(refusal.value)


def test_list_beside_folders_is_refused_and_another_table_is_not(tmp_path: Path) -> None:
    tree(tmp_path, "images/1.png", "more/2.png")
    (tmp_path / "prices.csv").write_text("day,price\n1,2\n")
    assert len(opened(tmp_path)) == 2
    (tmp_path / "labels.csv").write_text("path,label\nimages/1.png,cat\n")
    with pytest.raises(DataError):
        recognise.read_folder(tmp_path)[1]


def test_empty_class_folder_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "c" / "deep").mkdir(parents=True)
    with pytest.raises(BadLabels):
        recognise.read_folder(tmp_path)[1]


def test_links_are_followed_and_loops_survived(tmp_path: Path) -> None:
    tree(tmp_path / "store", "x/1.png", "x/2.png")
    tree(tmp_path / "set", "a/1.png")
    (tmp_path / "set" / "b").symlink_to(tmp_path / "store" / "x")
    (tmp_path / "set" / "a" / "round").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "a" / "self").symlink_to("self")
    (tmp_path / "set" / "a" / "self.png").symlink_to("self.png")
    source = opened(tmp_path / "set")
    assert source.classes == ("a", "b")
    assert source.labels.counts(2).tolist() == [4, 2]  # a also sees b through the link, once
    bad = [i for i in range(len(source)) if source.name(i).endswith("self.png")]
    with pytest.raises(BadImage, match=r"a/self.png: "):
        source.open_image(bad[0])


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    with open(os.fsencode(tmp_path) + b"/caf\xe9/\xff.png", "wb") as file:
        Image.new("L", (3, 3)).save(file, "PNG")
    tree(tmp_path, "b/1.png")
    source = opened(tmp_path)
    assert source.open_image(1).size == (3, 3)
    assert os.fsencode(source.name(1)) == b"caf\xe9/\xff.png"
    assert len(source.fingerprint) == 64


def test_unreadable_folder_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "a/1.png", "b/1.png")
    scandir = os.scandir

    def guarded(path: str):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(DataError):
        recognise.read_folder(tmp_path)[1]


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_a_bad_picture_and_never_waited_for(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "a" / "gone.png").symlink_to("nowhere")
    source = folder.read_classes(tmp_path)
    reasons = {}
    for i in range(len(source)):
        try:
            source.open_image(i)
        except BadImage as error:
            reasons[Path(source.name(i)).name] = str(error)
    assert reasons.keys() == {"pipe.png", "zero.png", "gone.png"}
    assert "a/pipe.png: is not a regular file" in reasons["pipe.png"]
    assert "not a regular file" in reasons["zero.png"]
    assert "No such file" in reasons["gone.png"]
    assert source.sizes().min() == -1  # the link to nowhere; fingerprints do not fall over it


def test_file_beyond_all_measure_is_refused_unread(tmp_path: Path) -> None:
    tree(tmp_path, "a.png")
    os.truncate(tmp_path / "a.png", folder.MAX_BYTES + 1)
    with pytest.raises(BadImage, match="536,870,913 bytes"):
        opened(tmp_path).open_image(0)


def test_fingerprint_moves_with_the_folder_and_sees_changes(tmp_path: Path) -> None:
    tree(tmp_path / "one", "a/1.png", "b/1.png")
    before = opened(tmp_path / "one").fingerprint
    os.rename(tmp_path / "one", tmp_path / "two")
    assert opened(tmp_path / "two").fingerprint == before
    os.truncate(tmp_path / "two" / "a" / "1.png", 10)
    assert opened(tmp_path / "two").fingerprint != before


def test_source_is_light_to_send_to_a_loader_process(tmp_path: Path) -> None:
    source = FileDataset(str(tmp_path), (f"class {i % 10}/{i:08d}.jpg" for i in range(100_000)))
    sent = pickle.dumps(source)
    assert len(sent) < 100_000 * 40
    assert pickle.loads(sent).name(99_999) == "class 9/00099999.jpg"
