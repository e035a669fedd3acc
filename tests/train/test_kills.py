"""SIGKILL, by the clock and inside a save: what comes out of a training does not change by a bit.

The long version is bench/kill_and_resume.py; its figure is in docs/reliability.md.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.checkpoint.store.crash_points import CRASH_POINTS
from tests.train.killed import digest_of, start, trial
from tests.train.tiny import tiny_run

RUN = tiny_run(steps=16)


def ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert ended(start(RUN, out)) == 0
    return digest_of(out)


POINTS = [name for name in CRASH_POINTS if name.startswith(("manifest", "checkpoint"))]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_inside_the_second_save(tmp_path: Path, undisturbed: str, point: str) -> None:
    assert ended(start(RUN, tmp_path / "run", point, times=2)) == -signal.SIGKILL
    assert ended(start(RUN, tmp_path / "run")) == 0
    assert digest_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
@pytest.mark.slow
def test_killed_at_random(tmp_path: Path, undisturbed: str, seed: int) -> None:
    done = trial(RUN, tmp_path / "run", seed=seed, usual_s=1.0)
    assert done.digest == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_killed_at_random_many_times(tmp_path: Path, undisturbed: str, seed: int) -> None:
    done = trial(RUN, tmp_path / "run", seed=seed, usual_s=1.0)
    assert done.digest == undisturbed
