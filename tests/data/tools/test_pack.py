"""Packing: the same bytes whatever the number of processes, a stopped pack goes on, nothing is lost without a word."""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import BadImage, BadLabels, ConfigError, DataError, WorkerDied
from vitrail.data.dataset import ArrayDataset, Encoded, ImageDataset, Labels, SubsetDataset
from vitrail.data.decode.image import read_mask
from vitrail.data.readers import shards
from vitrail.data.tools import pack as packing
from vitrail.data.tools import shard_writer as write
from vitrail.data.tools.pack import PackReport, pack
from vitrail.data.tools.shard_writer import make_key

DATA = Path(__file__).parents[3].parent / "shared" / "data"
SHARD = 20_480


def encoded(shade: int, form: str, size: tuple[int, int], **options: Any) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(shade).integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), np.uint8)
    Image.fromarray(noise).resize(size).save(file, form, **options)
    return file.getvalue()


def smooth(width: int, height: int) -> bytes:
    file = io.BytesIO()
    corners = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
    Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95)
    return file.getvalue()


class Listed(ImageDataset):
    """Samples from a list of bytes or pixels; an OSError or a crash where the list says so."""

    def __init__(self, items: list[Any], labels: Labels | None = None, classes: tuple[str, ...] = ()) -> None:
        self.items, self.classes = items, classes
        self.labels = Labels.none(len(items)) if labels is None else labels

    def read(self, index: int) -> Encoded:
        item = self.items[index]
        if isinstance(item, str) and item == "missing":
            raise FileNotFoundError(2, "No such file or directory")
        if isinstance(item, str) and item == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    def name(self, index: int) -> str:
        return f"/somewhere/photos/cat/{index}.jpg"


def photos(count: int = 40) -> Listed:
    """JPEGs of some kilobytes."""
    items = [encoded(i, "JPEG", (120 + i, 90)) for i in range(count)]
    return Listed(items, Labels(np.arange(count) % 3), ("cat", "dog: *big*", "fish\nand chips é"))


def contents(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.suffix != ".index"
    }


def test_a_pack_reads_back_as_it_was(tmp_path: Path) -> None:
    source, held_out = photos(), photos(7)
    heard: list[tuple[int, int]] = []
    report = pack(
        {"train": source, "val": held_out},
        tmp_path / "out",
        shard_size=SHARD,
        workers=1,
        progress=lambda done, of: heard.append((done, of)),
    )
    assert report.splits == {"train": 40, "val": 7}
    assert (report.unreadable, report.reencoded, report.kept) == (0, 0, 0)
    assert heard == [(i + 1, 47) for i in range(47)]
    tars = sorted((tmp_path / "out").glob("*.tar"))
    assert len(tars) == report.shards > 4
    assert sum(path.stat().st_size for path in tars) == report.bytes
    assert all(path.stat().st_size <= SHARD for path in tars)
    again = shards.read(tmp_path / "out")
    assert list(again) == ["train", "val"]
    assert again["train"].classes == source.classes
    for i in range(40):
        assert again["train"].read(i) == source.read(i)
        assert again["train"].labels[i] == source.labels[i]
    assert again["train"].name(12).endswith(".tar:000000012-cat_12.jpg")
    assert not (tmp_path / "out/unreadable.jsonl").exists()


def test_other_tools_read_it(tmp_path: Path) -> None:
    pack({"train": photos(5)}, tmp_path / "out", workers=1)
    with tarfile.open(tmp_path / "out/train-00000.tar") as file:
        members = file.getmembers()
        assert [m.name for m in members[:2]] == ["000000000-cat_0.jpg", "000000000-cat_0.cls"]
        assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in members} == {(0, 0, 0, 0o644, "")}
    digest, name = (tmp_path / "out/SHA256SUMS").read_text().split()
    assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    assert json.loads((tmp_path / "out/classes.json").read_text("utf-8"))[2] == "fish\nand chips é"


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    source = photos()
    source.items[3], source.items[25] = b"no image", "missing"
    for workers in (1, 3):
        pack({"train": source}, tmp_path / str(workers), shard_size=SHARD, max_side=100, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert len(contents(tmp_path / "1")) > 5


def test_large_pictures_are_made_smaller_and_others_left_alone(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    items: list[Any] = [
        smooth(400, 300),
        encoded(2, "JPEG", (400, 200), exif=exif),
        encoded(3, "PNG", (300, 30)),
        encoded(4, "JPEG", (100, 50), exif=exif),
        encoded(5, "WEBP", (200, 100), lossless=True),
        encoded(6, "WEBP", (200, 100)),
        encoded(7, "GIF", (64, 64)),
        np.full((20, 30, 3), 7, np.uint8),
        np.full((400, 200), 9, np.uint8),
        encoded(8, "JPEG", (3000, 2)),
    ]
    report = pack({"train": Listed(items)}, tmp_path / "out", max_side=100, workers=1)
    assert report.reencoded == 7
    source = shards.read(tmp_path / "out")["train"]
    sizes = [source.open_image(i).size for i in range(len(items))]
    assert sizes == [
        *((75, 100), (100, 50), (10, 100), (100, 50), (50, 100), (50, 100), (64, 64), (20, 30), (100, 50), (1, 100)),
    ]
    suffixes = [source.name(i).rpartition(".")[2] for i in range(len(items))]
    assert suffixes == ["jpg", "jpg", "png", "jpg", "png", "jpg", "gif", "png", "png", "jpg"]
    assert source.read(3) == items[3]
    assert source.read(6) == items[6]
    assert np.asarray(source.open_image(7).rgb()).tolist() == items[7].tolist()
    assert not Image.open(io.BytesIO(bytes(source.read(1)))).getexif()
    want = Image.open(io.BytesIO(items[0])).resize((100, 75), Image.Resampling.LANCZOS)
    difference = np.abs(np.asarray(want, np.int16) - np.asarray(source.open_image(0).rgb(), np.int16))
    assert difference.mean() < 4  # JPEG's doing


class Masked(Listed):
    """The same with masks."""

    def __init__(self, items: list[Any], masks: list[Any]) -> None:
        super().__init__(items)
        self.masks, self.pixel_classes = masks, ("wall", "door: *big*", "fenêtre")

    def mask(self, index: int) -> Encoded:
        return self.masks[index]


def palette(values: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(values)
    image.putpalette([9, 8, 7] * 256)
    image.save(file, "PNG")
    return file.getvalue()


def test_masks_are_packed(tmp_path: Path) -> None:
    """As they are, or made smaller with the image; samples whose mask is of no use are left out."""
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    values = np.repeat(np.repeat(np.arange(60, dtype=np.uint8).reshape(6, 10) % 3, 10, 0), 10, 1)
    items = [encoded(1, "JPEG", (100, 60)), encoded(2, "PNG", (100, 60)), encoded(3, "JPEG", (60, 100), exif=exif)]
    masks = [palette(values), values, palette(values)]
    source = Masked([*items, *items], [*masks, values[:9], b"no mask", values + 1])
    report = pack({"train": source, "test": Listed(items)}, tmp_path / "out", workers=1)
    assert (report.splits, report.unreadable) == ({"train": 3, "test": 3}, 3)
    splits = shards.read(tmp_path / "out")
    train = splits["train"]
    assert (train.pixel_classes, splits["test"].pixel_classes) == (source.pixel_classes, ())
    assert train.mask(0) == masks[0]
    assert all(np.array_equal(read_mask(train.mask(i)), values) for i in range(3))
    pack({"train": train}, tmp_path / "small", max_side=50, workers=1)
    small = shards.read(tmp_path / "small")["train"]
    assert [small.open_image(i).size for i in range(3)] == [(30, 50)] * 3
    assert all(np.array_equal(read_mask(small.mask(i)), values[::2, ::2]) for i in range(3))
    assert small.pixel_classes == source.pixel_classes


def test_a_pack_without_masks_is_what_it_was(tmp_path: Path) -> None:
    """So that a pack of an earlier version is complete, or is finished, as it was begun."""
    pack({"train": photos(4)}, tmp_path / "out", workers=1)
    assert "pixel_classes" not in json.loads((tmp_path / "out/pack.json").read_text())
    assert not (tmp_path / "out/pixel_classes.json").exists()


def test_unreadable_pictures_are_left_out_and_listed(tmp_path: Path) -> None:
    source = photos(20)
    source.items[0] = b""
    source.items[7] = source.items[7][:-600]  # truncated
    source.items[19] = "missing"
    report = pack({"train": source}, tmp_path / "out", shard_size=SHARD, workers=1)
    assert (report.splits, report.unreadable) == ({"train": 17}, 3)
    rows = [json.loads(line) for line in (tmp_path / "out/unreadable.jsonl").read_text().splitlines()]
    assert [(row["split"], row["index"]) for row in rows] == [("train", 0), ("train", 7), ("train", 19)]
    assert rows[2]["reason"] == "No such file or directory"
    assert rows[1]["name"] == "/somewhere/photos/cat/7.jpg"
    again = shards.read(tmp_path / "out")["train"]
    assert again.read(0) == source.items[1]
    assert again.labels[6] == source.labels[8]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_strict_stops_at_the_first(tmp_path: Path, workers: int) -> None:
    source = photos(30)
    source.items[17] = b"<html>"
    with pytest.raises(BadImage, match=r"cat/17\.jpg"):
        pack({"train": source}, tmp_path / "out", strict=True, workers=workers)


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        pack({"val": Listed([b"x", b"y"])}, tmp_path / "out", workers=1)


def test_several_labels_and_none(tmp_path: Path) -> None:
    pictures = np.zeros((3, 4, 4, 3), np.uint8)
    several = Labels.several([[2, 0], [], [1]])
    pack({"train": ArrayDataset(pictures, several, "abc"), "test": ArrayDataset(pictures)}, tmp_path / "out", workers=1)
    again = shards.read(tmp_path / "out")
    assert [again["train"].labels[i] for i in range(3)] == [(2, 0), (), (1,)]
    assert [again["test"].labels[i] for i in range(3)] == [(), (), ()]
    assert again["train"].classes == ("a", "b", "c")
    pack({"train": ArrayDataset(pictures)}, tmp_path / "plain", workers=1)
    assert shards.read(tmp_path / "plain")["train"].classes == ()


class Killed(BaseException):
    """Stands for the end of the process."""


def stopped(tmp_path: Path, source: ImageDataset, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs, and is stopped in the middle of the shard `after`."""
    real, count = write.TarWriter.finish, 0

    def finish(self: write.TarWriter) -> str:
        nonlocal count
        count += 1
        if count > after:
            raise Killed
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(write.TarWriter, "finish", finish)
        with pytest.raises(Killed):
            pack({"train": source, "val": photos(12)}, tmp_path / "out", shard_size=SHARD, workers=1)


def finished(tmp_path: Path, source: ImageDataset) -> PackReport:
    return pack({"train": source, "val": photos(12)}, tmp_path / "out", shard_size=SHARD, workers=1)


@pytest.mark.parametrize(
    "after", [0, pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)]
)
def test_a_stopped_pack_goes_on(tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = photos()
    source.items[9] = b"no image"
    whole = pack({"train": source, "val": photos(12)}, tmp_path / "whole", shard_size=SHARD, workers=1)
    assert whole.shards > 7
    stopped(tmp_path, source, after, monkeypatch)
    with pytest.raises(DataError, match="not finished"):
        shards.read(tmp_path / "out")
    (tmp_path / "out/.vitrail-0123.tmp").write_bytes(b"left by the one that was killed")
    with open(tmp_path / "out/pack.journal", "ab") as file:
        file.write(b'{"split": "tr')  # a line that was cut short
    report = finished(tmp_path, source)
    assert (report.kept, report.shards, report.unreadable) == (after, whole.shards, 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("late", [False, True])  # late: shards of val are kept, and those of train come after
@pytest.mark.slow
def test_what_is_damaged_since_is_written_again(tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = photos()
    whole = pack({"train": source, "val": photos(12)}, tmp_path / "whole", shard_size=SHARD, workers=1)
    stopped(tmp_path, source, whole.shards - 1 if late else 4, monkeypatch)
    second = tmp_path / "out/train-00001.tar"
    data = bytearray(second.read_bytes())
    data[5000] ^= 1
    second.write_bytes(data)
    kept = finished(tmp_path, source).kept
    assert kept > 1 if late else kept == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def pack_in_child(out: Path) -> None:
    pack(
        {"train": photos()},
        out,
        shard_size=SHARD,
        workers=1,
        progress=lambda done, of: os.kill(os.getpid(), 9) if done == 30 else None,
    )


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_process_leaves_what_it_finished(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=pack_in_child, args=(tmp_path / "out",))
    process.start()
    process.join()
    assert process.exitcode == -9
    report = pack({"train": photos()}, tmp_path / "out", shard_size=SHARD, workers=1)
    assert report.kept > 2
    pack({"train": photos()}, tmp_path / "whole", shard_size=SHARD, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_finished_pack_is_not_made_twice(tmp_path: Path) -> None:
    source = photos(12)
    first = pack({"train": source}, tmp_path / "out", shard_size=SHARD, workers=1)
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    again = pack({"train": source}, tmp_path / "out", shard_size=SHARD, workers=1)
    assert again.kept == again.shards == first.shards
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == times
    with pytest.raises(DataError, match="other options"):
        pack({"train": source}, tmp_path / "out", shard_size=SHARD, max_side=10, workers=1)
    with pytest.raises(DataError, match="another source"):
        pack({"train": photos(13)}, tmp_path / "out", shard_size=SHARD, workers=1)


def test_a_begun_pack_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path, photos(), 2, monkeypatch)
    before = contents(tmp_path / "out")
    with pytest.raises(DataError):
        finished(tmp_path, photos(39))
    assert contents(tmp_path / "out") == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError):
        pack({"train": photos(3)}, tmp_path, workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_packs_into_one_folder(tmp_path: Path) -> None:
    plan = {"kind": "x"}
    with (
        packing.open_journal(tmp_path / "out", plan),
        pytest.raises(DataError, match="another process"),
        packing.open_journal(tmp_path / "out", plan),
    ):
        pass


def test_a_full_disk_is_said_and_the_pack_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = photos(), write.TarWriter.write

    def full(self: write.TarWriter, data: bytes) -> None:
        if len(list((tmp_path / "out").glob("*.tar"))) == 2:
            raise OSError(28, "No space left on device")
        real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(write.TarWriter, "write", full)
        with pytest.raises(DataError):
            finished(tmp_path, source)
    assert not list((tmp_path / "out").glob(".vitrail*"))
    assert finished(tmp_path, source).kept == 2


def test_what_is_read_back_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "hash_file", lambda path: "0" * 64)
    with pytest.raises(DataError):
        pack({"train": photos(3)}, tmp_path / "out", workers=1)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_picture_that_kills_a_process_is_reported(tmp_path: Path) -> None:
    source = photos(30)
    source.items[21] = "crash"
    with pytest.raises(WorkerDied, match=r"cat/"):
        pack({"train": source}, tmp_path / "out", workers=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shard_size": 100}, "shard_size=100"), ({"max_side": 0}, "max_side=0"), ({"quality": 101}, "quality=101")],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pack({"train": photos(2)}, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_splits_that_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split 'a/b'"):
        pack({"a/b": photos(2)}, tmp_path / "out")
    with pytest.raises(BadLabels, match="different classes"):
        pack({"train": photos(2), "val": Listed([b""], Labels(np.array([0])), ("x",))}, tmp_path / "out")
    with pytest.raises(BadLabels, match="label 3"):
        pack({"train": Listed([b""], Labels(np.array([3])), ("x",))}, tmp_path / "out")
    with pytest.raises(DataError, match="no samples"):
        pack({"train": Listed([])}, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("/a/b/cat/12.jpg", "000000007-cat_12"),
        ("x-000.tar:000000003-cat_12.jpg", "000000007-cat_12"),
        ("digits[3]", "000000007-digits_3"),
        ("..", "000000007"),
        ("f/\udc80.v2.png", "000000007-f___v2"),
        ("日本/猫.jpg", "000000007-日本_猫"),
    ],
)
def test_keys_say_what_a_person_knows(name: str, want: str) -> None:
    assert make_key(7, name) == want
    assert len(make_key(7, "é" * 200).encode()) <= 70


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the real shards are not next to the checkout")
def test_real_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    source = shards.read(DATA / "imagenet_val_1000.tar")["val"]
    some = SubsetDataset(source, np.arange(0, 1000, 20))
    report = pack({"val": some}, tmp_path / "out", max_side=256, workers=1)
    assert (report.splits, report.unreadable) == ({"val": 50}, 0)
    again = shards.read(tmp_path / "out")["val"]
    for i in range(50):
        height, width = some.open_image(i).size
        assert max(again.open_image(i).size) == min(256, max(height, width))
        assert again.labels[i] == some.labels[i]
