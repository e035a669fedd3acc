import os
import platform
import signal
import subprocess
import sys
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


ASKING = """
import resource, sys
import numpy
from vitrail.core.processes import keep_freed_memory
kept = keep_freed_memory()
def ask(): numpy.ones(1 << 26, numpy.uint8); numpy.ones(1 << 25, numpy.uint8)
def count(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ask(); ask()
before = count()
for _ in range(20): ask()
print(kept, count() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept() -> None:
    """20 times 96 MiB again without a page from the system; by itself each is asked for again."""

    def asked(**env: str) -> tuple[str, int]:
        plain = {name: value for name, value in os.environ.items() if name not in processes.MALLOC_SETTINGS}
        command = [sys.executable, "-c", ASKING]
        done = subprocess.run(command, env=plain | env, capture_output=True, text=True, check=True)
        kept, faults = done.stdout.split()
        return kept, int(faults)

    kept, faults = asked()
    if platform.libc_ver()[0] == "glibc":
        assert kept == "True"
        assert faults < 20
    assert asked(MALLOC_MMAP_THRESHOLD_="1000000")[0] == "False"


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_order_and_errors_come_through(workers: int) -> None:
    results = processes.map_in_processes(add, 10, range(5), workers=workers, describe_loss=name_tasks, ahead=1)
    assert list(results) == [10, 11, 12, 13, 14]
    if workers:
        with pytest.raises(KeyError):
            list(processes.map_in_processes(add, 10, [1, 9], workers=1, describe_loss=name_tasks))
        with pytest.raises(WorkerDied, match="7"):
            list(processes.map_in_processes(add, 10, [1, 7, 2], workers=1, describe_loss=name_tasks))
