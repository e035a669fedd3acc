import os
import signal
from collections.abc import Sequence

import pytest

from vitrail.core import processes
from vitrail.core.errors import WorkerDied


def add(shared: int, task: int) -> int:
    if task == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == 9:
        raise KeyError(task)
    return shared + task


def name_tasks(tasks: Sequence[int]) -> str:
    return f"lost {list(tasks)}"


def test_cores_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    for quota, cores in ((None, 8), (2.5, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(processes, "cpu_quota", lambda quota=quota: quota)
        assert processes.available_cores() == cores


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_order_and_errors_come_through(workers: int) -> None:
    results = processes.map_in_processes(add, 10, range(5), workers=workers, describe_loss=name_tasks, ahead=1)
    assert list(results) == [10, 11, 12, 13, 14]
    if workers:
        with pytest.raises(KeyError):
            list(processes.map_in_processes(add, 10, [1, 9], workers=1, describe_loss=name_tasks))
        with pytest.raises(WorkerDied, match="7"):
            list(processes.map_in_processes(add, 10, [1, 7, 2], workers=1, describe_loss=name_tasks))
