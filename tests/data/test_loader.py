"""Batches are a function of the step: nothing lost, nothing twice, the same whatever reads them."""

import os
import pickle
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.pictures import Listed, Shifted, encoded, listed, noise
from vitrail.core.errors import BadImage, ConfigError, DataError, WorkerDied
from vitrail.data.dataset import Labels, RelabelledDataset
from vitrail.data.loader import Batch, BatchStream, eval_batches, train_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.unreadable_log import UnreadableLog

SOURCES = {count: listed(count) for count in (1, 2, 3, 5, 7, 11, 16, 30)}
COUNTS = st.sampled_from(sorted(SOURCES))


def joined(parts: Iterable[Batch]) -> tuple[torch.Tensor, ...]:
    """Samples, epochs, labels and pixels of several batches, end to end."""
    batches = list(parts)
    return (
        torch.cat([b.sample for b in batches]),
        torch.cat([b.epoch for b in batches]),
        torch.cat([b.target for b in batches]),
        *(torch.cat(views) for views in zip(*(b.views for b in batches), strict=True)),
    )


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(deadline=None, max_examples=15)
@given(count=COUNTS, batch=st.integers(1, 12), seed=st.integers(0, 10**6), steps=st.integers(1, 9), data=st.data())
def test_going_on_after_any_step_is_the_same_as_not_stopping(
    count: int, batch: int, seed: int, steps: int, data: st.DataObject
) -> None:
    stopped = data.draw(st.integers(0, steps - 1))
    whole = list(train_batches(SOURCES[count], Shifted(), BatchStream(batch=batch, seed=seed, stop=steps)))
    rest = list(
        train_batches(SOURCES[count], Shifted(), BatchStream(batch=batch, seed=seed, start=stopped, stop=steps))
    )
    assert [b.step for b in whole] == list(range(steps))
    assert same(joined(whole[stopped:]), joined(rest))


@settings(deadline=None, max_examples=15)
@given(count=COUNTS, local=st.integers(1, 4), world=st.sampled_from([1, 2, 3, 4, 8]), seed=st.integers(0, 10**6))
def test_a_global_batch_is_the_same_on_any_number_of_processes(count: int, local: int, world: int, seed: int) -> None:
    batch = local * world
    alone = list(train_batches(SOURCES[count], Shifted(), BatchStream(batch=batch, seed=seed, stop=3)))
    ranks = [
        list(
            train_batches(
                SOURCES[count], Shifted(), BatchStream(batch=batch, seed=seed, stop=3, rank=rank, world=world)
            )
        )
        for rank in range(world)
    ]
    for step in range(3):
        assert same(joined([alone[step]]), joined(rank[step] for rank in ranks))


@settings(deadline=None, max_examples=15)
@given(count=COUNTS, batch=st.integers(1, 12), seed=st.integers(0, 10**6), repeats=st.integers(1, 3))
def test_every_sample_exactly_once_an_epoch(count: int, batch: int, seed: int, repeats: int) -> None:
    """Also where the batch does not divide the set: batches run across the border."""
    epochs = 3
    steps = -(-epochs * count * repeats // batch)
    batches = list(
        train_batches(SOURCES[count], Shifted(), BatchStream(batch=batch, seed=seed, stop=steps, repeats=repeats))
    )
    assert all(len(b) == batch for b in batches)
    sample, epoch, *_ = joined(batches)
    for number in range(epochs):
        counts = torch.bincount(sample[epoch == number], minlength=count)
        assert torch.equal(counts, torch.full((count,), repeats))


@pytest.mark.parametrize("workers", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))])
def test_loader_processes_change_nothing(workers: int) -> None:
    here = train_batches(SOURCES[11], Shifted(), BatchStream(batch=4, seed=5, stop=9))
    there = train_batches(SOURCES[11], Shifted(), BatchStream(batch=4, seed=5, stop=9), workers=workers)
    assert same(joined(here), joined(there))


def test_augmentation_differs_between_epochs_samples_and_repeats() -> None:
    source = Listed([encoded(noise(0))] * 3)
    batch = next(train_batches(source, Shifted(), BatchStream(batch=12, repeats=2)))
    assert len({pixels.numpy().tobytes() for pixels in batch.pixels}) == 12


def test_several_views_have_draws_of_their_own() -> None:
    batch = next(train_batches(SOURCES[5], Shifted(2), BatchStream(batch=5)))
    first, second = batch.views
    assert first.shape == second.shape == (5, 3, 4, 4)
    assert not torch.equal(first, second)
    assert torch.equal(first, next(train_batches(SOURCES[5], Shifted(), BatchStream(batch=5))).pixels)


@pytest.mark.parametrize(("count", "batch", "world"), [(10, 4, 1), (10, 4, 2), (3, 8, 4), (8, 8, 2), (1, 6, 3)])
def test_a_sweep_sees_every_sample_once_in_one_shape(count: int, batch: int, world: int) -> None:
    source = listed(count)
    ranks = [
        list(eval_batches(source, Preprocessing(image=(8, 8)), batch=batch, rank=rank, world=world))
        for rank in range(world)
    ]
    assert {len(b) for rank in ranks for b in rank} == {batch // world}
    assert {len(rank) for rank in ranks} == {-(-count // batch)}
    batches = [b for parts in zip(*ranks, strict=True) for b in parts]
    sample, valid = torch.cat([b.sample for b in batches]), torch.cat([b.valid for b in batches])
    assert sample[valid].tolist() == list(range(count))
    assert torch.equal(valid, sample >= 0)


def test_a_sweep_gives_the_pixels_of_the_preprocessing() -> None:
    preprocessing = Preprocessing(image=(8, 8), resize=9)
    source = listed(3)
    batch = next(eval_batches(source, preprocessing, batch=3))
    for i in range(3):
        wanted = preprocessing(source.open_image(i).rgb())
        assert torch.equal(preprocessing.normalise(batch.pixels[i]), wanted)


def test_a_batch_that_does_not_divide_is_refused_with_the_next_that_does() -> None:
    with pytest.raises(ConfigError, match="over 4 processes; use 8 or"):
        train_batches(SOURCES[5], Shifted(), BatchStream(batch=10, world=4))
    with pytest.raises(ConfigError, match="rank=4"):
        train_batches(SOURCES[5], Shifted(), BatchStream(batch=8, rank=4, world=4))
    with pytest.raises(DataError, match="without images"):
        train_batches(Listed([]), Shifted(), BatchStream(batch=8))
    with pytest.raises(ConfigError, match="repeats=0"):
        train_batches(SOURCES[5], Shifted(), BatchStream(batch=8, repeats=0))


def test_several_labels_travel_filled_up() -> None:
    source = RelabelledDataset(listed(3), Labels.several([[0, 2], [], [1]]), ["a", "b", "c"])
    batch = next(eval_batches(source, Preprocessing(image=(8, 8)), batch=4))
    assert batch.target[:3].tolist() == [[0, 2], [-1, -1], [1, -1]]


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(train_batches(SOURCES[5], Shifted(), BatchStream(batch=4, stop=2), workers=1))
    assert torch.equal(before, torch.get_rng_state())


class TestBadFiles:
    """The epoch goes on; the place is kept, marked and empty; the file is named once."""

    def source(self) -> Listed:
        good = [encoded(noise(i)) for i in range(6)]
        half = encoded(noise(9, 60, 60))
        return Listed(
            [good[0], b"", good[1], b"<!DOCTYPE html>", half[: len(half) // 2], PermissionError(13, "denied")]
        )

    @pytest.mark.parametrize("workers", [0, 2])
    def test_they_are_named_once_and_their_places_stay(self, workers: int, tmp_path: Path) -> None:
        told: list[str] = []
        ledger = UnreadableLog(tmp_path, tell=lambda entry: told.append(str(entry)))
        batches = list(
            train_batches(self.source(), Shifted(), BatchStream(batch=3, stop=6), workers=workers, ledger=ledger)
        )
        sample, valid = (torch.cat([getattr(b, name) for b in batches]) for name in ("sample", "valid"))
        assert sorted(sample.tolist()) == sorted(list(range(6)) * 3)
        assert set(sample[~valid].tolist()) == {1, 3, 4, 5}
        for batch in batches:
            assert not batch.pixels[~batch.valid].any()
            assert batch.pixels[batch.valid].flatten(1).any(dim=1).all()
        assert sorted(line.split(":")[0] for line in told) == [f"image-{i}.png" for i in (1, 3, 4, 5)]
        assert len(ledger) == 4
        assert any("denied" in line for line in told)

    def test_a_later_run_goes_on_with_the_list(self, tmp_path: Path) -> None:
        list(train_batches(self.source(), Shifted(), BatchStream(batch=6, stop=1), ledger=UnreadableLog(tmp_path)))
        told: list[object] = []
        again = UnreadableLog(tmp_path, tell=told.append)
        list(train_batches(self.source(), Shifted(), BatchStream(batch=6, start=1, stop=2), ledger=again))
        assert (told, len(again)) == ([], 4)
        assert len((tmp_path / "unreadable.jsonl").read_text().splitlines()) == 4

    @pytest.mark.parametrize("workers", [0, 1])
    def test_strict_stops_at_the_first_with_its_name(self, workers: int) -> None:
        with pytest.raises(BadImage, match=r"^image-1\.png: .*empty"):
            list(
                eval_batches(
                    self.source(),
                    Preprocessing(image=(4, 4)),
                    batch=2,
                    workers=workers,
                    ledger=UnreadableLog(strict=True),
                )
            )


class Deadly(Listed):
    """Sample 3 ends the process that reads it, or never comes back."""

    way = "kill"

    def read(self, index: int) -> bytes:
        if index == 3 and self.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif index == 3:
            time.sleep(60)
        return super().read(index)


def test_a_loader_process_that_dies_is_reported_with_its_sample() -> None:
    source = Deadly([encoded(noise(i)) for i in range(6)])
    with pytest.raises(WorkerDied, match=r"while reading image-3\.png"):  # long before its patience is at an end
        list(eval_batches(source, Preprocessing(image=(4, 4)), batch=2, workers=2))


@pytest.mark.slow
def test_a_loader_process_that_hangs_is_reported_with_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.loader.PATIENCE_S", 1.0)
    source = Deadly([encoded(noise(i)) for i in range(6)])
    source.way = "hang"
    with pytest.raises(WorkerDied, match=r"while reading image-3\.png"):
        list(eval_batches(source, Preprocessing(image=(4, 4)), batch=2, workers=1))


def test_a_bug_in_a_view_comes_through_as_it_is() -> None:
    class Broken(Shifted):
        def shifted(self, pixels: object, draws: object) -> torch.Tensor:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug") as caught:
        list(train_batches(SOURCES[3], Broken(), BatchStream(batch=2, stop=1), workers=1))
    assert not isinstance(caught.value, DataError)


@pytest.mark.slow
def test_a_batch_survives_pickling_and_moves() -> None:
    batch = next(train_batches(SOURCES[5], Shifted(), BatchStream(batch=4)))
    again = pickle.loads(pickle.dumps(batch))
    assert same(joined([batch]), joined([again.to("cpu")]))
