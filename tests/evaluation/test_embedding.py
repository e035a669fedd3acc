"""Embeddings of a collection: the features, once each, in one file that no kill, restart or number of processes
changes."""

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.distributed.pair import together
from tests.models.tiny import VIT, awake
from vitrail.checkpoint.bundle import Card
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.locks import FileLock
from vitrail.data.dataset import ArrayDataset, Encoded, ImageDataset, Labels
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen import embed as embedding
from vitrail.evaluation.frozen.embed import EmbeddingJob, EmbeddingSummary, embed
from vitrail.evaluation.frozen.embedding_file import read_description
from vitrail.evaluation.frozen.features import extract_features
from vitrail.models.build import Model

PLAIN = Preprocessing(image=VIT.image)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(seed: int = 0) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = awake(VIT, torch.float32)
    model.card = Card(preprocessing=PLAIN)
    return model


class Torn(ArrayDataset):
    """Every 13th image cannot be read."""

    def read(self, index: int) -> Encoded:
        if index % 13 == 5:
            raise OSError(5, "Input/output error")
        return super().read(index)


def pictures(
    count: int = 90, seed: int = 0, labels: bool = True, kind: type[ArrayDataset] = ArrayDataset
) -> ArrayDataset:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *VIT.image, 3), dtype=np.uint8)
    given = Labels(np.where(np.arange(count) % 7 == 6, -1, np.arange(count) % 3)) if labels else None
    return kind(pixels, given, tuple("abc") if labels else (), called=f"set{seed}")


def both() -> dict[str, ImageDataset]:
    return {"train": pictures(), "test": pictures(40, 1, labels=False)}


def made(out: Path, splits: dict[str, ImageDataset] | None = None, **options: Any) -> EmbeddingSummary:
    return embed(network(), splits or both(), out, batch=4, **options)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_picture_has_its_row(tmp_path: Path) -> None:
    out = tmp_path / "e.parquet"
    done = made(out, origin={"name": "w", "source": "s"})
    assert (done.pictures, done.width, done.unreadable, done.found) == (130, VIT.width, 0, 0)
    table = pq.read_table(out)
    rows = table.to_pylist()
    assert [(row["split"], row["sample"]) for row in rows] == [
        *(("train", at) for at in range(90)),
        *(("test", at) for at in range(40)),
    ]
    assert rows[4]["name"] == "set0[4]"
    assert [row["label"] for row in rows[:8]] == ["a", "b", "c", "a", "b", "c", None, "b"]
    assert {row["label"] for row in rows[90:]} == {None}
    expected = torch.cat(
        [
            extract_features(network(), eval_batches(part, PLAIN, batch=4), PLAIN, "cpu").features
            for part in both().values()
        ]
    )
    found = np.array([row["feature"] for row in rows], np.float32)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-6, atol=1e-6)
    told = json.loads(table.schema.metadata[b"vitrail"])
    assert told["facts"]["preprocessing"]["image"] == list(VIT.image)
    assert (told["name"], told["source"], told["splits"]) == ("w", "s", {"train": 90, "test": 40})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet"]


def test_an_npz_holds_the_same(tmp_path: Path) -> None:
    made(tmp_path / "e.parquet")
    made(tmp_path / "e.npz")
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    with np.load(tmp_path / "e.npz", allow_pickle=False) as found:
        assert np.array_equal(found["features"], np.array([row["feature"] for row in rows], np.float32))
        assert found["names"].tolist() == [row["name"] for row in rows]
        assert found["labels"].tolist() == [row["label"] or "" for row in rows]
        assert found["samples"].tolist() == [row["sample"] for row in rows]
        assert found["splits"].tolist() == [row["split"] for row in rows]
    assert read_description(tmp_path / "e.npz")["facts"] == read_description(tmp_path / "e.parquet")["facts"]


@pytest.mark.slow
def test_half_precision_is_half_as_large_and_rounded_once(tmp_path: Path) -> None:
    made(tmp_path / "e.parquet")
    made(tmp_path / "h.parquet", dtype="float16")
    full, half = (pq.read_table(tmp_path / f"{name}.parquet")["feature"].to_pylist() for name in "eh")
    assert np.array_equal(np.array(full, np.float32).astype(np.float16), np.array(half, np.float16))
    large = network()
    with torch.no_grad():
        large.norm.weight.mul_(1e6)  # type: ignore[union-attr]
    with pytest.raises(DataError):
        embed(large, both(), tmp_path / "l.parquet", batch=4, dtype="float16")


def test_what_cannot_be_read_is_left_out_and_listed(tmp_path: Path) -> None:
    out = tmp_path / "e.parquet"
    done = made(out, {"train": pictures(kind=Torn)})
    assert (done.pictures, done.unreadable) == (83, 7)
    assert str(done.first[0]) == "set0[5]: Input/output error"
    assert not set(range(5, 90, 13)) & set(pq.read_table(out)["sample"].to_pylist())
    listed = (tmp_path / "e.parquet.unreadable.txt").read_text().splitlines()
    assert listed == [f"set0[{at}]: Input/output error" for at in range(5, 90, 13)]
    made(out, {"train": pictures()}, force=True)
    assert not (tmp_path / "e.parquet.unreadable.txt").exists()


def test_a_file_that_is_done_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "e.parquet")
    before = digest(tmp_path / "e.parquet")
    (tmp_path / "e.parquet.parts").mkdir()  # as a kill after the last step leaves it
    (tmp_path / "e.parquet.parts" / "part-00000.safetensors").write_bytes(b"")
    monkeypatch.setattr(embedding, "iterate_features", None)
    done = made(tmp_path / "e.parquet")
    assert done.found == done.parts
    assert digest(tmp_path / "e.parquet") == before
    assert not (tmp_path / "e.parquet.parts").exists()


def stopped(out: Path, monkeypatch: pytest.MonkeyPatch, parts: int = 3) -> None:
    """Leaves some parts behind."""
    left = [parts]
    write = EmbeddingJob.write

    def writing(self: EmbeddingJob, *args: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingJob, "write", writing)
        with pytest.raises(KeyboardInterrupt):
            made(out)


def test_a_restart_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "whole.parquet")
    out = tmp_path / "e.parquet"
    stopped(out, monkeypatch)
    assert not out.exists()
    first = tmp_path / "e.parquet.parts" / "part-00000.safetensors"
    second = tmp_path / "e.parquet.parts" / "part-00001.safetensors"
    before = first.stat().st_mtime_ns
    content = bytearray(second.read_bytes())
    content[-1] ^= 1  # a flipped bit: made again
    second.write_bytes(content)
    computed: list[int] = []
    write = EmbeddingJob.write
    monkeypatch.setattr(EmbeddingJob, "write", lambda self, *args: (computed.append(args[0]), write(self, *args)))
    done = made(out)
    assert computed == [1, *range(3, done.parts)]
    assert done.found == 2
    assert before  # the first part was left alone
    assert digest(out) == digest(tmp_path / "whole.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet", "whole.parquet"]


def test_parts_of_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "e.parquet"
    stopped(out, monkeypatch)
    with pytest.raises(ConfigError):
        embed(network(), both(), out, batch=8)
    with pytest.raises(ConfigError):
        embed(network(1), both(), out, batch=4)
    with pytest.raises(ConfigError):
        made(out, {"train": pictures(90, 2), "test": pictures(40, 1, labels=False)})
    assert embed(network(1), both(), out, batch=4, force=True).found == 0
    with pytest.raises(ConfigError):
        made(out)
    foreign = tmp_path / "f.npz"
    np.savez(foreign, x=np.zeros(2))
    with pytest.raises(ConfigError):
        made(foreign)


@pytest.mark.slow
def test_two_at_once_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "e.parquet"
    (tmp_path / "e.parquet.parts").mkdir()
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        held = FileLock(tmp_path / "e.parquet.parts" / "lock")
        os.write(go, b"x")
        time.sleep(30)
        held.release()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.raises(ConfigError):
            made(out)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert made(out).pictures == 130


def test_nothing_and_nonsense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        embed(network(), {}, tmp_path / "e.parquet")
    with pytest.raises(ConfigError):
        made(tmp_path / "e.csv")
    with pytest.raises(ConfigError, match="batch=0"):
        embed(network(), both(), tmp_path / "e.parquet", batch=0)


def shared(world: World, out: str) -> tuple[int, int]:
    torch.set_num_threads(1)
    done = embed(network(), both(), Path(out), batch=4, world=world)
    return done.pictures, done.parts


def refused(world: World, out: str) -> str:
    try:
        embed(network(1), both(), Path(out), batch=4, world=world)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_two_processes_write_the_same_file(tmp_path: Path) -> None:
    alone, pair = tmp_path / "1.parquet", tmp_path / "2.parquet"
    made(alone)
    assert together(shared, str(pair)) == [(130, 11), (130, 11)]
    assert digest(pair) == digest(alone)
    for error in together(refused, str(pair)):
        assert "weights: " in error


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(tmp_path: Path) -> None:
    """SIGKILL by the clock, again and again, until a start comes through."""
    made(tmp_path / "whole.parquet", {"train": pictures(400, kind=Torn)})
    began = time.monotonic()  # the first one is slower
    made(tmp_path / "again.parquet", {"train": pictures(400, kind=Torn)})
    usual = time.monotonic() - began
    draw, kills = Random(0), 0
    for trial in range(4):
        out = tmp_path / f"{trial}.parquet"
        while True:
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    made(out, {"train": pictures(400, kind=Torn)})
                    status = 0
                os._exit(status)
            time.sleep(draw.uniform(0, 0.6 * usual))  # parts are kept, so it comes through in the end
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                assert os.waitstatus_to_exitcode(status) == 0
                break
            kills += 1
        assert made(out, {"train": pictures(400, kind=Torn)}).pictures == 400 - 31
        assert digest(out) == digest(tmp_path / "whole.parquet")
    assert kills >= 4
    assert not list(tmp_path.glob("*.parts"))
    assert not list(tmp_path.glob("*.tmp"))
