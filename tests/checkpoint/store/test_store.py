"""Saving: a snapshot of the moment, written next to the run, by one process or several, and read by any number."""

import hashlib
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.store.states import closed, collected, no_message, same, saved_once, shared, state, whole
from vitrail.checkpoint.store import layout as points
from vitrail.checkpoint.store.layout import MANIFEST, TensorPiece, list_checkpoints
from vitrail.checkpoint.store.reader import latest, open_saved, verify
from vitrail.checkpoint.store.writer import CheckpointWriter
from vitrail.core.errors import ConfigError, CorruptWeights, MismatchedWeights


def one(folder: Path, **changed: Any) -> CheckpointWriter:
    return CheckpointWriter(folder, **{"token": "a1", "keep": 2, "tell": no_message} | changed)


def found(folder: Path) -> Any:
    saved = latest(folder, no_message)
    assert saved is not None
    return saved


class TestOneProcess:
    def test_everything_comes_back(self, tmp_path: Path) -> None:
        facts = {"best": -math.inf, "epoch": 3, "nested": {"a": [1.5, None, "é"]}, "rate": 0.1 + 0.2, "last": math.nan}
        saved_once(tmp_path, 1000, facts=facts)
        saved = found(tmp_path)
        assert (saved.step, saved.world) == (1000, 1)
        assert math.isnan(saved.facts.pop("last"))
        facts.pop("last")
        assert saved.facts == facts
        assert same(saved, state(1000))
        assert saved.names["optim/first"] == ((37, 61), torch.bfloat16)

    def test_the_folder_is_what_it_is_documented_to_be(self, tmp_path: Path) -> None:
        saved_once(tmp_path, 7)
        assert [entry.name for entry in tmp_path.iterdir()] == ["00000007"]
        shard = tmp_path / "00000007" / "shard-00000-of-00001.safetensors"
        assert {entry.name for entry in shard.parent.iterdir()} == {MANIFEST, shard.name}
        raw = (shard.parent / MANIFEST).read_bytes()
        content = json.loads(raw)
        assert content["checksum"] == hashlib.sha256(raw.replace(content["checksum"].encode(), b"0" * 64)).hexdigest()
        length = int.from_bytes(shard.read_bytes()[:8], "little")
        header = hashlib.sha256(shard.read_bytes()[: 8 + length]).hexdigest()
        assert content["shards"] == [{"file": shard.name, "size": shard.stat().st_size, "header": header}]

    def test_nothing_is_there(self, tmp_path: Path) -> None:
        assert latest(tmp_path, no_message) is None
        assert latest(tmp_path / "no such folder", no_message) is None

    def test_the_moment_is_kept(self, tmp_path: Path) -> None:
        """What training does to its tensors after `save` does not reach the disk, however late they are written."""
        tensors, gate = state(1), threading.Event()
        points.reached = lambda point: gate.wait(20) and None
        try:
            store = one(tmp_path)
            store.save(1, whole(tensors), {})
            for tensor in tensors.values():
                tensor.zero_()
            assert not list_checkpoints(tmp_path)
            assert not store.retry_due()
        finally:
            gate.set()
            points.reached = points.ignore_point
        assert store.wait()
        assert same(found(tmp_path), state(1))

    def test_a_save_waits_for_the_one_before(self, tmp_path: Path) -> None:
        seen: list[str] = []

        def slow(point: str) -> None:
            if point in ("saving: before make", "checkpoint: after folder sync"):
                seen.append(point.split(":")[0])
                time.sleep(0.02)

        points.reached = slow
        try:
            store = one(tmp_path)
            for step in range(4):
                store.save(step, whole(state(step)), {})
            assert store.close()
        finally:
            points.reached = points.ignore_point
        assert seen == ["saving", "checkpoint"] * 4
        assert list(list_checkpoints(tmp_path)) == [3, 2]

    def test_the_run_goes_on_meanwhile(self, tmp_path: Path) -> None:
        """`save` returns while the bytes are still to be written."""
        gate = threading.Event()
        points.reached = lambda point: gate.wait(20) and None
        try:
            store = one(tmp_path)
            before = time.monotonic()
            store.save(1, whole(state(1)), {})
            assert time.monotonic() - before < 5
        finally:
            gate.set()
            points.reached = points.ignore_point
        assert store.close()

    def test_turned_tensors_and_parameters(self, tmp_path: Path) -> None:
        base = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        store = one(tmp_path)
        store.save(1, whole({"p": base, "turned": base.t(), "some": base[:, 1:3]}), {})
        assert store.close()
        assert same(found(tmp_path), {"p": base.detach(), "turned": base.detach().t(), "some": base.detach()[:, 1:3]})

    def test_steps_past_eight_digits(self, tmp_path: Path) -> None:
        store = one(tmp_path)
        for step in (99_999_999, 100_000_000, 1_234_567_890):
            store.save(step, whole(state(1)), {})
        assert store.close()
        assert list(list_checkpoints(tmp_path)) == [1_234_567_890, 100_000_000]
        assert found(tmp_path).step == 1_234_567_890

    @pytest.mark.parametrize(
        "piece",
        [
            TensorPiece(torch.zeros(3, 4), (6, 5), 0),
            TensorPiece(torch.zeros(3, 4), (6, 4), 4),
            TensorPiece(torch.zeros(3, 4), (6, 4), -1),
            TensorPiece(torch.zeros(()), (1,), 0),
            TensorPiece(torch.zeros(()), (), 1),
            TensorPiece(torch.zeros(2), (), 0),
        ],
    )
    def test_a_piece_that_does_not_fit(self, piece: TensorPiece, tmp_path: Path) -> None:
        with pytest.raises(MismatchedWeights, match="does not lie in"):
            one(tmp_path).save(1, {"a": piece}, {})

    def test_facts_that_are_not_plain(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="plain values"):
            one(tmp_path).save(1, whole(state(1)), {"a": object()})

    def test_a_token_that_is_a_path(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="letters and digits"):
            one(tmp_path, token="../up")


class TestKeeping:
    def test_the_newest_stay(self, tmp_path: Path) -> None:
        for step in (1, 2, 3, 4):
            saved_once(tmp_path, step, keep=2)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["00000003", "00000004"]

    def test_the_one_just_written_always_stays(self, tmp_path: Path) -> None:
        """Sent back to step 5, a run that keeps one checkpoint does not lose the new one to those of its old course."""
        saved_once(tmp_path, 10)
        said, tell = collected()
        store = one(tmp_path, keep=1, tell=tell)
        store.save(5, whole(state(5)), {})
        assert store.close()
        assert list(list_checkpoints(tmp_path)) == [5]
        assert said == ["checkpoint of step 10 belongs to an abandoned course of this run; it is removed"]

    def test_the_same_step_again(self, tmp_path: Path) -> None:
        """An equal checkpoint is left as it is; another one takes its place."""
        saved_once(tmp_path, 3)
        inode = (tmp_path / "00000003").stat().st_ino
        saved_once(tmp_path, 3)
        assert (tmp_path / "00000003").stat().st_ino == inode
        saved_once(tmp_path, 3, facts={"other": True})
        assert (tmp_path / "00000003").stat().st_ino != inode
        assert found(tmp_path).facts == {"other": True}
        assert [entry.name for entry in tmp_path.iterdir()] == ["00000003"]

    def test_a_damaged_one_of_the_same_step_is_replaced(self, tmp_path: Path) -> None:
        saved_once(tmp_path, 3)
        shard = next((tmp_path / "00000003").glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        saved_once(tmp_path, 3)
        assert same(found(tmp_path), state(3))

    def test_what_crashes_left_is_cleared(self, tmp_path: Path) -> None:
        saved_once(tmp_path, 3)
        for name in (".saving-00000004-old", ".removing-00000001-x", ".saving-00000005-b2", ".replaced-00000003-old"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "shard-00000-of-00001.safetensors").write_bytes(b"half")
        os.rename(
            tmp_path / "00000003", tmp_path / ".replaced-00000002-old"
        )  # made room for a successor that never came
        one(tmp_path, token="b2")
        names = sorted(entry.name for entry in tmp_path.iterdir())
        assert names == [".saving-00000005-b2", "00000002", "00000003"]

    def test_only_the_first_process_clears(self, tmp_path: Path) -> None:
        (tmp_path / ".saving-00000004-old").mkdir()
        one(tmp_path, rank=1, world=2)
        assert (tmp_path / ".saving-00000004-old").exists()


class TestSeveralProcesses:
    @pytest.mark.parametrize("world", [2, 3, 5])
    def test_read_as_one(self, world: int, tmp_path: Path) -> None:
        saved_once(tmp_path, 4, world=world)
        saved = found(tmp_path)
        assert (saved.world, len(saved.shards)) == (world, world)
        assert same(saved, state(4))
        assert not list((tmp_path / "00000004").glob("part-*"))

    @pytest.mark.parametrize(("wrote", "read"), [(1, 3), (2, 3), (3, 2), (5, 4)])
    def test_read_as_another_number(self, wrote: int, read: int, tmp_path: Path) -> None:
        saved_once(tmp_path, 4, world=wrote)
        saved = found(tmp_path)
        for rank in range(read):
            for name, piece in shared(state(4), rank, read).items():
                rows = len(piece.tensor) if piece.shape else None
                assert torch.equal(saved.read(name, piece.start, rows), piece.tensor), name

    @pytest.mark.parametrize("seed", range(20))
    def test_any_rows(self, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        draw = torch.Generator().manual_seed(seed)
        rows, cuts = int(torch.randint(1, 12, (), generator=draw)), torch.randint(0, 12, (3,), generator=draw).tolist()
        tensor = torch.arange(rows * 2.0).reshape(rows, 2)
        edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
        folder = tmp_path_factory.mktemp("rows")
        stores = [one(folder, rank=rank, world=4) for rank in range(4)]
        for store, start, stop in zip(stores, edges, edges[1:], strict=False):
            store.save(0, {"a": TensorPiece(tensor[start:stop], (rows, 2), start)}, {})
        assert closed(stores)
        saved = found(folder)
        for start in range(rows + 1):
            for length in range(rows - start + 1):
                assert torch.equal(saved.read("a", start, length), tensor[start : start + length])

    def test_a_process_with_nothing_to_give(self, tmp_path: Path) -> None:
        stores = [one(tmp_path, rank=rank, world=3) for rank in range(3)]
        for store in stores:
            store.save(1, whole(state(1)) if store.rank == 0 else {}, {})
        assert closed(stores)
        assert [shard.path.name for shard in found(tmp_path).shards] == ["shard-00000-of-00003.safetensors"]
        assert same(found(tmp_path), state(1))

    def test_one_that_comes_late_is_waited_for(self, tmp_path: Path) -> None:
        first, second = (one(tmp_path, rank=rank, world=2) for rank in range(2))
        first.save(1, shared(state(1), 0, 2), {})
        time.sleep(0.3)
        assert not list_checkpoints(tmp_path)
        second.save(1, shared(state(1), 1, 2), {})
        assert first.close()
        assert second.close()
        assert same(found(tmp_path), state(1))

    def test_one_that_never_comes(self, tmp_path: Path) -> None:
        said, tell = collected()
        store = one(tmp_path, world=3, patience=0.2, tell=tell)
        store.save(1, shared(state(1), 0, 3), {})
        assert not store.wait()
        assert len(said) == 1
        assert "the shards of these processes are missing: 1, 2; there is none before it" in said[0]
        assert not list(tmp_path.iterdir())

    def test_close_does_not_wait_long_for_the_dead(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vitrail.checkpoint.store.writer.GRACE", 0.2)
        _, tell = collected()
        store = one(tmp_path, world=2, patience=600, tell=tell)
        store.save(1, shared(state(1), 0, 2), {})
        before = time.monotonic()
        assert not store.close()
        assert time.monotonic() - before < 10

    def test_a_failure_elsewhere_is_heard_of_at_once(self, tmp_path: Path) -> None:
        said, tell = collected()
        first, second = (one(tmp_path, rank=rank, world=2, tell=tell, patience=30) for rank in range(2))
        broken = {"a": TensorPiece(torch.tensor([math.nan]), (2,), 1)}
        first.save(1, {"a": TensorPiece(torch.ones(1), (2,), 0)}, {})
        second.save(1, broken, {})
        before = time.monotonic()
        assert not first.wait()
        assert not second.wait()
        assert time.monotonic() - before < 10
        assert any("process 1:" in line and "holds NaN" in line and "the next try is in 30 s" in line for line in said)
        for store in (first, second):  # the same step again, now sound
            store.save(1, {"a": TensorPiece(torch.ones(1), (2,), store.rank)}, {})
        assert first.close()
        assert second.close()
        assert same(found(tmp_path), {"a": torch.ones(2)})

    def test_a_note_of_an_earlier_try_does_not_count(self, tmp_path: Path) -> None:
        """The folder of a save that failed may still lie there when the same step is tried again."""
        first, second = (one(tmp_path, rank=rank, world=2) for rank in range(2))
        (tmp_path / ".saving-00000001-a1").mkdir()
        (tmp_path / ".saving-00000001-a1" / "part-00001.json").write_text('{"attempt": 0, "failed": "no room"}')
        first.save(1, shared(state(1), 0, 2), {})
        time.sleep(0.05)
        second.save(1, shared(state(1), 1, 2), {})
        assert closed([first, second])
        assert same(found(tmp_path), state(1))

    def test_rows_that_nobody_gave(self, tmp_path: Path) -> None:
        """Not even its own mistake makes the store give a name to what could not be read back."""
        said, tell = collected()
        store = one(tmp_path, tell=tell)
        store.save(1, {"a": TensorPiece(torch.ones(2), (5,), 0)}, {})
        assert not store.wait()
        assert "row 2 of tensor 'a' is in none of its shards" in said[0]
        assert not list(tmp_path.iterdir())

    def test_checking_is_shared(self, tmp_path: Path) -> None:
        """Each byte is checked by one of the processes, whichever tensor is damaged."""
        saved_once(tmp_path, 4, world=2)
        saved = found(tmp_path)
        for shard in saved.shards:
            for entry in shard.entries:
                if entry.start == entry.stop:
                    continue
                content = bytearray(shard.path.read_bytes())
                content[shard.data + entry.start] ^= 0x10
                good = shard.path.read_bytes()
                shard.path.write_bytes(content)
                verdicts = []
                for part in range(3):
                    try:
                        verify(saved, part, 3)
                        verdicts.append(True)
                    except CorruptWeights:
                        verdicts.append(False)
                shard.path.write_bytes(good)
                assert sorted(verdicts) == [False, True, True]


class TestReading:
    def test_a_tensor_that_is_not_there(self, tmp_path: Path) -> None:
        saved_once(tmp_path, 1)
        with pytest.raises(MismatchedWeights, match="holds no tensor 'other'"):
            found(tmp_path).read("other")

    @pytest.mark.parametrize(("start", "length"), [(-1, 2), (30, 8), (38, 0), (3, -1)])
    def test_rows_that_are_not_there(self, start: int, length: int, tmp_path: Path) -> None:
        saved_once(tmp_path, 1)
        with pytest.raises(MismatchedWeights, match="has 37 rows"):
            found(tmp_path).read("model/blocks.0.weight", start, length)

    def test_damage_after_the_check_is_still_seen(self, tmp_path: Path) -> None:
        saved_once(tmp_path, 1)
        saved = open_saved(tmp_path / "00000001")
        path = saved.shards[0].path
        content = bytearray(path.read_bytes())
        content[saved.shards[0].data + 5] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptWeights, match="does not match its checksum"):
            _ = [saved.read(name) for name in saved.names]


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(tmp_path: Path) -> None:
    """`save` returns before the device has done what was asked of it earlier, and what comes later is not saved."""
    pinned = torch.randn(1 << 20, device="cuda")
    store = one(tmp_path)
    store.save(0, whole({"a": pinned}), {})  # the host memory is made, once
    assert store.wait()
    expected = pinned.clone().mul_(2).cpu()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    pinned.mul_(2)
    busy.record()
    store.save(1, whole({"a": pinned}), {})
    assert not busy.query()
    pinned.zero_()
    assert store.close()
    assert same(found(tmp_path), {"a": expected})
