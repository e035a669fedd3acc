"""Training on two real processes against one: the same weights, whatever is sharded, and resumes across world sizes."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.distributed.pair import attempt, together
from tests.train.tiny import tiny_run
from vitrail.distributed.process_group import World
from vitrail.optim.config import Optim
from vitrail.train.config import Keep, Run, Scoring
from vitrail.train.loop import train

ALONE = World(device=torch.device("cpu"))


def plain_run(sharding: str = "auto", steps: int = 10) -> Run:
    """Without dropout, with SGD: Adam amplifies the rounding of the key bias, whose true gradient is zero."""
    model = tiny_run().model
    assert model is not None
    return tiny_run(
        model=replace(model, dropout=0.0, stochastic_depth=0.0),
        optim=Optim(kind="sgd", lr=0.1, momentum=0.9, clip=1.0),
        steps=steps,
        micro=4,
        sharding=sharding,
        keep=Keep(steps=5),
    )


def work(world: World, run: Run, out: str) -> str:
    torch.set_num_threads(1)
    return train(run, out=Path(out), world=world).state


class Stopping:
    """Sends this process a signal when a step is scored."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, text: str) -> None: ...

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] == "watch" and row["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(world: World, run: Run, out: str, rank: int, step: int) -> tuple[str, int]:
    """Only one of the processes hears the signal."""
    torch.set_num_threads(1)
    result = train(run, out=Path(out), world=world, observer=Stopping(step) if world.rank == rank else None)
    return result.state, result.step


def weights(out: Path) -> dict[str, Tensor]:
    return vitrail.load(out / "last.safetensors").state_dict()


def close(one: Path, other: Path) -> None:
    expected = weights(other)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(plain_run(), out=out, world=ALONE)
    torch.set_num_threads(threads)
    return out


@pytest.mark.parametrize(
    "sharding", ["ddp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fsdp", "hsdp"))]
)
def test_two_processes_end_where_one_does(tmp_path: Path, one: Path, sharding: str) -> None:
    out = tmp_path / sharding
    assert together(work, plain_run(sharding), str(out)) == ["done", "done"]
    close(out, one)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.slow
def test_a_run_goes_on_in_another_number_of_processes(tmp_path: Path, one: Path, sharding: str) -> None:
    out = tmp_path / "run"
    together(work, plain_run(sharding, steps=10), str(out))
    for newest in sorted((out / "checkpoints").iterdir())[1:]:  # as if it had been killed after the first
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
    (out / "last.safetensors").unlink()
    assert train(plain_run("none"), out=out, world=ALONE).state == "done"
    close(out, one)


@pytest.mark.slow
def test_one_process_hands_over_to_two(tmp_path: Path, one: Path) -> None:
    out = tmp_path / "run"
    train(plain_run(), out=out, world=ALONE)
    newest = max((out / "checkpoints").iterdir())
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    (out / "last.safetensors").unlink()
    assert together(work, plain_run("fsdp"), str(out)) == ["done", "done"]
    close(out, one)


@pytest.mark.parametrize(("sharding", "rank", "step"), [("ddp", 0, 4), ("fsdp", 1, 5)])
@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step_soon(
    tmp_path: Path, one: Path, sharding: str, rank: int, step: int
) -> None:
    """However seldom metrics are read."""
    out = tmp_path / "run"
    run = replace(plain_run(sharding), log=1000, evaluation=Scoring(every=step), keep=Keep(steps=10))
    ends = together(stopped, run, str(out), rank, step)
    assert ends[0] == ends[1]
    assert ends[0][0] == "interrupted"
    assert step < ends[0][1] < step + 4
    assert together(work, run, str(out)) == ["done", "done"]
    close(out, one)


@pytest.mark.slow
def test_the_first_process_s_clock_says_when_all_save(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = replace(plain_run("ddp"), log=1000, evaluation=Scoring(every=10), keep=Keep(minutes=1e-6, last=9))
    assert together(work, run, str(out)) == ["done", "done"]
    assert sorted(int(place.name) for place in (out / "checkpoints").iterdir()) == [4, 8, 10]


@pytest.mark.slow
def test_a_folder_that_is_refused_is_refused_to_all(tmp_path: Path) -> None:
    out = tmp_path / "run"
    together(work, plain_run("ddp", steps=7), str(out))
    for end in attempt(work, plain_run("ddp", steps=9), str(out)):
        assert end.status != 0
        assert "steps: 7 -> 9" in end.error
