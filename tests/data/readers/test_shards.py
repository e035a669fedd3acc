"""Tar shards: which samples they have, what is refused, and an index that is made once and never lies."""

import io
import multiprocessing
import os
import pickle
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import BadImage, BadLabels, DataError, SourceNotFound
from vitrail.data.randomness import EpochOrder
from vitrail.data.readers import shard_index as index
from vitrail.data.readers import shards
from vitrail.data.readers.detect_format import expand_braces, group_by_split
from vitrail.data.readers.shard_index import ShardIndex
from vitrail.data.readers.tar import TarReader

DATA = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(shade: int, form: str = "PNG", size: tuple[int, int] = (8, 6)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, 255 - shade, 7)).save(file, form)
    return file.getvalue()


def tar(path: Path, members: Mapping[str, bytes], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def numbered(count: int, first: int = 0) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for i in range(first, first + count):
        members |= {f"{i:04d}.png": picture(i % 256), f"{i:04d}.cls": str(i % 3).encode()}
    return members


def test_members_of_one_key_are_one_sample(tmp_path: Path) -> None:
    members = {
        "./a.jpg": picture(1, "JPEG"),
        "a.cls": b" 2\n",
        "a.trimap.png": picture(9),
        "a.txt": b"a cat",
        "cats/b.c.png": b"not a sample",
        "cats/b.PNG": picture(2),
        "cats/b.json": b'{"label": 0, "width": 8}',
        "c.webp": picture(3, "WEBP"),
        "._a.jpg": b"left by macOS",
        "README": b"read me",
    }
    [(split, source)] = shards.read(tar(tmp_path / "set.tar", members)).items()
    assert split == "train"
    assert [source.name(i) for i in range(3)] == ["set.tar:./a.jpg", "set.tar:cats/b.PNG", "set.tar:c.webp"]
    assert [source.labels[i] for i in range(3)] == [(2,), (0,), ()]
    assert source.classes == ("0", "1", "2")
    assert source.read(1) == members["cats/b.PNG"]
    assert source.open_image(2).size == (6, 8)
    assert np.asarray(source.sizes()).tolist() == [len(members[n]) for n in ("./a.jpg", "cats/b.PNG", "c.webp")]
    with pytest.raises(IndexError):
        source.read(3)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names(tmp_path: Path, form: int) -> None:
    folder = "/".join(["a" * 40] * 3)
    names = [f"{folder}/{'b' * 50}.png", "é ü.png"]
    if form != tarfile.USTAR_FORMAT:
        names.append(f"{folder}/{'c' * 180}.png")
    source = shards.read(tar(tmp_path / "x.tar", {name: picture(i) for i, name in enumerate(names)}, form))["train"]
    assert [source.name(i) for i in range(len(names))] == [f"x.tar:{name}" for name in names]
    assert [source.read(i) for i in range(len(names))] == [picture(i) for i in range(len(names))]


def test_what_the_tar_command_writes(tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/a.png").write_bytes(picture(1))
    (tmp_path / "in/deep/a.cls").write_text("1")
    for form in ("gnu", "ustar", "posix"):
        subprocess.run(
            ["tar", "-C", tmp_path / "in", f"--format={form}", "-cf", tmp_path / f"{form}.tar", "."], check=True
        )
        source = shards.read(tmp_path / f"{form}.tar")["train"]
        assert (len(source), source.read(0), source.labels[0]) == (1, picture(1), (1,))


def test_sizes_beyond_eight_gigabytes_in_both_notations(tmp_path: Path) -> None:
    # A sparse file: the big member takes no room, and is never read.
    big = 9 * 2**30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info, after = tarfile.TarInfo("big.bin"), tarfile.TarInfo("a.png")
        info.size, after.size = big, len(picture(5))
        with open(tmp_path / "big.tar", "wb") as file:
            file.write(info.tobuf(form))
            file.seek(big, os.SEEK_CUR)
            file.write(after.tobuf(form) + picture(5).ljust(1024, b"\0") + bytes(1024))
        assert len(picture(5)) <= 1024
        if len(picture(5)) <= 512:
            with open(tmp_path / "big.tar", "r+b") as file:
                file.truncate(file.seek(0, os.SEEK_END) // 512 * 512)
        source = shards.read(tmp_path / "big.tar")["train"]
        assert source.read(0) == picture(5)


def mask(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 6), value).save(file, "PNG")
    return file.getvalue()


def test_masks_are_read_where_their_classes_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = numbered(3)
    for i, end in enumerate(("seg.png", "mask.png", "seg.png")):
        members[f"{i:04d}.{end}"] = mask(i)
    tar(tmp_path / "set/train-0.tar", members)
    tar(tmp_path / "set/test-0.tar", numbered(2))
    made_by_fill = index.write_columns

    def without_masks(*args: Any) -> list[index.ShardFile]:
        return [shard._replace(masks=-1) for shard in made_by_fill(*args)]  # as 0.1.0 wrote its index

    with monkeypatch.context() as patch:
        patch.setattr(index, "write_columns", without_masks)
        before = shards.read(tmp_path / "set")["train"]
    assert before.pixel_classes == ()
    with pytest.raises(DataError):
        before.mask(0)
    (tmp_path / "set/pixel_classes.txt").write_text("wall\ndoor\nwindow\n")
    splits = shards.read(tmp_path / "set")
    train = splits["train"]
    assert train.pixel_classes == ("wall", "door", "window")
    assert splits["test"].pixel_classes == ()  # not one has a mask there
    assert [train.mask(i) for i in range(3)] == [mask(i) for i in range(3)]
    assert pickle.loads(pickle.dumps(train)).mask(1) == mask(1)
    assert [train.labels[i] for i in range(3)] == [before.labels[i] for i in range(3)]
    with pytest.raises(IndexError):
        train.mask(3)
    tar(tmp_path / "set/train-1.tar", numbered(1, 3))
    with pytest.raises(DataError, match=r"train-1\.tar: 0003\.png"):
        shards.read(tmp_path / "set")


def test_several_labels(tmp_path: Path) -> None:
    members = {
        "a.png": picture(1),
        "a.json": b'{"labels": [4, 1]}',
        "b.png": picture(2),
        "b.json": b'{"labels": []}',
        "c.png": picture(3),
        "c.cls": b"2",
    }
    tar(tmp_path / "set/val-0.tar", members)
    tar(tmp_path / "set/train-0.tar", {"d.png": picture(4), "d.json": b'{"labels": [0]}', "e.png": picture(1)})
    splits = shards.read(tmp_path / "set")
    assert [splits["val"].labels[i] for i in range(3)] == [(4, 1), (), (2,)]
    assert [splits["train"].labels[i] for i in range(2)] == [(0,), ()]
    assert splits["val"].labels.multiple
    assert splits["val"].labels.counts(5).tolist() == [0, 1, 1, 0, 1]
    assert len(splits["train"].classes) == 5


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-00001.tar", "train-00000.tar", "val-00000.tar"], ["train", "val"]),
        (["imagenet-validation-0.tar", "imagenet-train-0.tar"], ["train", "val"]),
        (["pets_trainval.tar", "pets_test.tar"], ["train", "test"]),
        (["x_train.tar", "x_trainval.tar"], ["train", "trainval"]),
        (["00000.tar", "00001.tar", "part-7.tar"], ["train"]),
        (["test-00000-of-00005.parquet"], ["test"]),
    ],
)
def test_splits_by_file_name(names: list[str], splits: list[str]) -> None:
    found = group_by_split("here", names)
    assert list(found) == splits
    assert sorted(name for part in found.values() for name in part) == sorted(names)
    assert all(part == sorted(part) for part in found.values())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["pets_train.tar", "imagenet_val.tar"], "two sets"),
        (["train-0.tar", "extra-0.tar"], "does not"),
        (["train-test-0.tar"], "two splits"),
    ],
)
def test_doubtful_splits_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        group_by_split("here", names)


def test_splits_by_folder_class_names_and_patterns(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("validation", 50)):
        for part in range(2):
            tar(tmp_path / f"set/{split}/{part:03d}.tar", numbered(5, first + 5 * part))
    (tmp_path / "set/classes.txt").write_text("cat\ndög\nfish, gold\nnever seen\n")
    splits = shards.read(tmp_path / "set")
    assert {name: len(source) for name, source in splits.items()} == {"train": 10, "val": 10}
    assert splits["val"].classes == ("cat", "dög", "fish, gold", "never seen")
    assert splits["val"].name(5) == "validation/001.tar:0055.png"
    assert splits["val"].read(5) == picture(55)
    assert shards.read(tmp_path / "set/train")["train"].classes == splits["train"].classes  # names one level up
    one = shards.read(tmp_path / "set/train/{000..001}.tar")["train"]
    assert [one.name(i) for i in (0, 9)] == ["000.tar:0000.png", "001.tar:0009.png"]
    assert len(shards.read(str(tmp_path / "set/train/*1.tar"))["train"]) == 5
    assert expand_braces("{a,b}-{08..10}.tar")[1:4] == ["a-09.tar", "a-10.tar", "b-08.tar"]
    (tmp_path / "set/classes.txt").write_text("cat\ndog\n")
    with pytest.raises(BadLabels):
        shards.read(tmp_path / "set")


@pytest.mark.parametrize(
    ("members", "kind", "words"),
    [
        ({"a.png": b"", "a.cls": b"cat"}, BadLabels, r"a\.cls has the label 'cat'.*classes\.txt"),
        ({"a.png": b"", "a.cls": b"-1"}, BadLabels, "'-1'"),
        ({"a.png": b"", "a.json": b"{"}, DataError, r"a\.json is not JSON"),
        ({"a.png": b"", "a.json": b'{"label": true}'}, BadLabels, "True"),
        ({"a.png": b"", "a.cls": b"1", "a.json": b'{"label": 2}'}, BadLabels, "says"),
        ({"a.png": b"", "a.jpg": b""}, DataError, r"second image next to a\.png"),
        ({"a.jxl": b"", "a.cls": b"1"}, DataError, r"a has a label and no image, only \.jxl"),
        ({"a.txt": b""}, DataError, "no images in 1 tar files"),
    ],
)
def test_samples_that_make_no_sense(tmp_path: Path, members: dict[str, bytes], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        shards.read(tar(tmp_path / "set.tar", members))
    assert "set.tar" in str(caught.value)


def test_the_same_member_twice_is_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "set.tar", numbered(1))
    with tarfile.open(path, "a") as file:
        info = tarfile.TarInfo("0000.png")
        file.addfile(info, io.BytesIO())
    with pytest.raises(DataError, match="second image"):
        shards.read(path)


def test_damage_is_refused_with_its_place(tmp_path: Path) -> None:
    whole = tar(tmp_path / "set.tar", numbered(4)).read_bytes()
    with TarReader(tmp_path / "set.tar") as file:
        members = list(file.members())
    third = members[4].offset
    damaged = {
        rf"byte {third:,}: cut short": whole[: third + 20],
        rf"byte {third - 512:,}: ends without": whole[: third - 512],
        rf"byte {third - 512:,}: damaged header": whole[: third - 500] + b"\xff" + whole[third - 499 :],
        "continues after": whole + whole,
        "not a tar file": b"\x89PNG" + whole[4:],
        "is empty": b"",
        "is compressed": b"\x1f\x8b" + whole,
    }
    for words, data in damaged.items():
        (tmp_path / "bad.tar").write_bytes(data)
        with pytest.raises(DataError, match=words) as caught:
            shards.read(tmp_path / "bad.tar")
        assert "bad.tar" in str(caught.value)


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_every_truncation_and_every_flipped_header_byte_is_noticed(tmp_path: Path, every: int) -> None:
    path = tar(tmp_path / "set.tar", {"a.png": picture(1), "a.cls": b"1", "b.png": picture(2)})
    whole = path.read_bytes()
    with TarReader(path) as file:
        end = (list(file.members())[-1].offset + 1023) // 512 * 512
    for size in range(0, end + 1023, 97 * every):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            shards.read(path)
    for at in {*range(0, 512, every)} - {154, 155}:  # what ends the checksum is not part of it
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with pytest.raises(DataError):
            shards.read(path)


def test_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "set.tar", "w") as file:
        info = tarfile.TarInfo("a.png")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(info)
    with pytest.raises(DataError):
        shards.read(tmp_path / "set.tar")


def test_compressed_missing_and_unfinished_sets(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(SourceNotFound):
        shards.read(tmp_path / "set")
    with pytest.raises(SourceNotFound):
        shards.read(tmp_path / "nowhere.tar")
    with pytest.raises(SourceNotFound):
        shards.read(tmp_path / "nowhere-*.tar")
    (tmp_path / "set/a.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match="is compressed"):
        shards.read(tmp_path / "set")
    (tmp_path / "set/pack.journal").touch()
    with pytest.raises(DataError, match="not finished"):
        shards.read(tmp_path / "set")


def test_the_index_is_made_once_and_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(3):
        tar(tmp_path / f"set/{part}.tar", numbered(4, 4 * part))
    scanned: list[str] = []
    real = index.scan_shard
    monkeypatch.setattr(index, "scan_shard", lambda path: (scanned.append(path.name), real(path))[1])
    heard: list[tuple[int, int]] = []
    first = shards.read(tmp_path / "set", progress=lambda done, of: heard.append((done, of)))["train"]
    assert sorted(scanned) == ["0.tar", "1.tar", "2.tar"]
    assert heard == [(1, 3), (2, 3), (3, 3)]
    scanned.clear()
    again = shards.read(tmp_path / "set")["train"]
    assert scanned == []
    assert again.fingerprint == first.fingerprint
    tar(tmp_path / "set/1.tar", numbered(9, 100))
    (tmp_path / "set/0.tar").unlink()
    tar(tmp_path / "set/3.tar", numbered(1, 200))
    changed = shards.read(tmp_path / "set")["train"]
    assert sorted(scanned) == ["1.tar", "3.tar"]  # 2.tar is known
    assert [changed.read(i) for i in (0, 9, 13)] == [picture(100), picture(8), picture(200)]
    assert [changed.labels[i] for i in (0, 9, 13)] == [(1,), (2,), (2,)]
    assert changed.fingerprint != first.fingerprint
    with pytest.raises(DataError):
        first.read(5)
    size = (tmp_path / "set/3.tar").stat().st_size
    tar(tmp_path / "set/3.tar", {"z200.png": picture(200), "z200.cls": b"1"})
    assert (tmp_path / "set/3.tar").stat().st_size == size
    assert shards.read(tmp_path / "set")["train"].labels[13] == (1,)


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    path = tar(tmp_path / "set.tar", numbered(20))
    place = tmp_path / "set.tar.index"
    want = shards.read(path)["train"].fingerprint
    whole = place.read_bytes()
    for at in range(0, len(whole), 101):
        place.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert shards.read(path)["train"].fingerprint == want
    for size in (0, 10, 100, len(whole) - 1):
        place.write_bytes(whole[:size])
        assert shards.read(path)["train"].fingerprint == want
    assert place.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["set.tar", "set.tar.index"]


def test_where_one_may_not_write_the_index_goes_to_the_cache(tmp_path: Path, cache: Path) -> None:
    tar(tmp_path / "set/0.tar", numbered(3))
    (tmp_path / "set").chmod(0o555)
    assert len(shards.read(tmp_path / "set")["train"]) == 3
    assert [file.name for file in (tmp_path / "set").iterdir()] == ["0.tar"]
    assert len(list((cache / "shards").iterdir())) == 1
    before = next((cache / "shards").iterdir()).stat().st_mtime_ns
    shards.read(tmp_path / "set")
    assert next((cache / "shards").iterdir()).stat().st_mtime_ns == before
    (tmp_path / "set").chmod(0o755)


def read_all(source: shards.ShardDataset, queue: "multiprocessing.Queue[list[bytes]]") -> None:
    queue.put([source.read(i) for i in range(len(source))])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_read_the_same(tmp_path: Path, method: str) -> None:
    tar(tmp_path / "set/0.tar", numbered(5))
    source = shards.read(tmp_path / "set")["train"]
    source.read(0)  # a file is open
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=read_all, args=(source, queue))
    process.start()
    assert queue.get(timeout=60) == [picture(i) for i in range(5)]
    process.join()
    assert len(pickle.dumps(source)) < 2000  # by path, not by content


def build_again(path: Path, times: int) -> None:
    for _ in range(times):
        path.with_name(path.name + ".index").unlink(missing_ok=True)
        assert len(shards.read(path)["train"]) == 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_index_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    path = tar(tmp_path / "set.tar", numbered(50))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_again, args=(path, 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    ShardIndex(tmp_path / "set.tar.index")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["set.tar", "set.tar.index"]


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "OPEN_FILES", 3)
    for part in range(8):
        tar(tmp_path / f"set/{part}.tar", numbered(2, 2 * part))
    source = shards.read(tmp_path / "set")["train"]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for i in np.random.default_rng(0).permutation(16):
        assert source.read(int(i)) == picture(int(i))
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_shard_that_shrinks_under_us_is_named(tmp_path: Path) -> None:
    path = tar(tmp_path / "set.tar", numbered(3))
    source = shards.read(path)["train"]
    source.read(0)
    with open(path, "r+b") as file:
        file.truncate(1500)
    with pytest.raises(BadImage):
        source.open_image(2)


@pytest.mark.skipif(not DATA.is_dir(), reason="the real shards are not next to the checkout")
@pytest.mark.parametrize(
    ("name", "split", "samples", "classes"),
    [
        ("imagenet_val_1000.tar", "val", 1000, 1000),
        pytest.param("pets_trainval.tar", "train", 3680, 37, marks=pytest.mark.slow),
        pytest.param("pets_test.tar", "test", 3669, 37, marks=pytest.mark.slow),
    ],
)
def test_real_shards(name: str, split: str, samples: int, classes: int) -> None:
    [(found, source)] = shards.read(DATA / name).items()
    assert (found, len(source), len(source.classes)) == (split, samples, classes)
    assert source.labels.counts(classes).min() >= 1
    with tarfile.open(DATA / name) as file:
        members = {member.name: member for member in file}
        for i in range(0, samples, 97):
            picture_name = source.name(i).partition(":")[2]
            content = file.extractfile(members[picture_name])
            label = file.extractfile(members[picture_name.replace(".webp", ".cls")])
            assert content is not None
            assert label is not None
            assert (content.read(), int(label.read())) == (source.read(i), source.labels[i][0])


@pytest.mark.skipif(not DATA.is_dir(), reason="the real shards are not next to the checkout")
def test_a_folder_with_two_sets_is_refused() -> None:
    with pytest.raises(DataError, match="two sets"):
        shards.read(DATA)


def anonymous_memory() -> int:
    """Bytes of memory that are this process's own, not the page cache's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc to read memory from")
def test_a_shuffled_pass_over_100k_samples_takes_no_memory(tmp_path: Path) -> None:
    kinds = [picture(shade, "PNG", (16, 16)).ljust(1024, b"\0") for shade in range(10)]
    for part in range(10):
        tar(tmp_path / f"set/{part:03d}.tar", {f"{i:05d}.png": kinds[i % 10] for i in range(10_000)})
    source = shards.read(tmp_path / "set")["train"]
    order = EpochOrder(len(source), seed=0)
    seen = 0
    before = 0
    for start in range(0, len(source), 1000):
        for i in order(0, np.arange(start, start + 1000)):
            seen += source.read(int(i)) == kinds[int(i) % 10]
        if start == 10_000:
            before = anonymous_memory()
    assert seen == 100_000
    assert anonymous_memory() - before < 2 << 20
