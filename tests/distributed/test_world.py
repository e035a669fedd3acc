"""A world of one asks for nothing; a world of two sums, agrees, and names the one that is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.pair import attempt, together
from vitrail.core.errors import ConfigError, RankLost
from vitrail.distributed.process_group import VARIABLES, World, join_world

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_group() -> None:
    with join_world("cpu") as world:
        assert not torch.distributed.is_initialized()
        assert (world.rank, world.size, world.nodes, world.is_main, world.backend) == (0, 1, 1, True, "")
        tensor = torch.tensor([2.0])
        assert world.sum_(tensor) is tensor
        assert tensor.item() == 2
        world.barrier()
        assert world.gather("a") == ["a"]
        assert world.broadcast(3) == world.broadcast_from_main(3) == 3


def test_one_process_under_torchrun_needs_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("0", "1", "0", "1", "localhost", "1")
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    with join_world("cpu") as world:
        assert world.size == 1


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        (dict(zip(VARIABLES, ("0", "two", "0", "1", "localhost", "1"), strict=True)), "WORLD_SIZE='two'"),
        (dict(zip(VARIABLES, ("2", "2", "0", "1", "localhost", "1"), strict=True)), "RANK=2 of WORLD_SIZE=2"),
    ],
)
def test_half_an_environment_is_refused(
    environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says), join_world("cpu"):
        pass


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="'abacus' is not known to torch"), join_world("abacus"):
        pass


def talk(world: World) -> dict[str, object]:
    total = world.sum_(torch.tensor([1.0, float(world.rank)]))
    world.barrier()
    return {
        "who": (world.rank, world.size, world.local_size, world.nodes, world.backend),
        "sum": total.tolist(),
        "agree": world.broadcast({"seed": 10 + world.rank}),
        "broadcast": world.broadcast_from_main("plan" if world.is_main else None),
        "gather": world.gather(world.rank * 2),
    }


def test_two_processes_sum_and_agree() -> None:
    first, second = together(talk)
    assert (first.pop("who"), second.pop("who")) == ((0, 2, 2, 1, "gloo"), (1, 2, 2, 1, "gloo"))
    assert first == second
    assert first == {
        "sum": [2.0, 1.0],
        "agree": {"seed": 10},
        "broadcast": "plan",
        "gather": [0, 2],
    }


def test_two_nodes_of_one_process() -> None:
    first, second = together(talk, nodes=2)
    assert (first["who"], second["who"]) == ((0, 2, 1, 2, "gloo"), (1, 2, 1, 2, "gloo"))


def fail(world: World, way: str) -> None:
    world.barrier()
    if world.rank == 1:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if way == "hangs":
            time.sleep(1000)
        if way == "raises":
            raise KeyError("no such image")
    world.sum_(torch.ones(1))


def test_a_killed_process_is_named() -> None:
    first, second = attempt(fail, "killed", timeout_s=4)
    assert second.status == -signal.SIGKILL
    assert first.status == 1
    assert "RankLost: rank 1 of 2 (" in first.error
    assert "has ended" in first.error


@pytest.mark.slow
def test_the_reason_of_one_process_reaches_the_others() -> None:
    first, second = attempt(fail, "raises", timeout_s=4)
    assert "KeyError: 'no such image'" in second.error
    assert "has ended with KeyError: 'no such image'" in first.error


@pytest.mark.slow
def test_a_hanging_process_is_named_and_says_where_it_hangs() -> None:
    first, second = attempt(fail, "hangs", timeout_s=2)
    assert (first.status, second.status) == (1, 1)
    for end in (first, second):
        assert "rank 1 of 2 (" in end.said
        assert "hangs: others waited 2 s for it" in end.said
    assert "in fail" in second.said
    assert "in fail" not in first.said


@pytest.mark.slow
def test_a_stopped_process_is_named() -> None:
    first, second = attempt(fail, "stopped", timeout_s=2, patience_s=15)
    assert first.status == 1
    assert "rank 1 of 2 (" in first.said
    assert "gave no sign of life for 2 s" in first.said
    assert second.status is None  # it takes a SIGKILL, which torchrun sends


SCRIPT = """
import os, signal, sys, time
import torch
from vitrail.distributed.process_group import join_world

with join_world("cpu", timeout_s=2) as world:
    world.barrier()
    if world.rank == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    world.sum_(torch.ones(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "hangs"])
def test_torchrun_ends_the_job_and_names_the_rank(way: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script), way], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    if way == "killed":
        assert "exitcode  : -9" in done.stderr
        assert "rank      : 1 (local_rank: 1)" in done.stderr
    else:
        assert "rank 1 of 2 (" in done.stderr
        assert "hangs: others waited 2 s for it" in done.stderr


def test_lost_is_an_error_of_ours() -> None:
    from vitrail.core.errors import VitrailError

    assert issubclass(RankLost, VitrailError)
