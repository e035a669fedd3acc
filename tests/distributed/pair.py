"""A function in several real processes that talk by gloo, as under torchrun.

    def work(world: World, factor: int) -> float:      # at the top of a test module, so that a process can find it
        return world.sum_(torch.tensor(float(world.rank * factor))).item()

    assert together(work, 10) == [10.0, 10.0]

Processes are forked from a server that has imported torch once, not from the one that tests, whose threads they would
miss. A process that raises fails the call with its traceback; `attempt` tells how each ended instead.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from vitrail.distributed.process_group import join_world

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "vitrail.distributed.parallel",
    "tests.distributed.small",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one process ended: its exit status (None where it had to be killed for taking too long), what it returned,
    the traceback of what it raised, what it wrote on stderr, and when, in seconds from the start."""

    status: int | None
    value: Any
    error: str
    said: str
    seconds: float


def together(
    work: Callable[..., Any], *args: Any, size: int = 2, nodes: int = 1, patience_s: float = 60.0
) -> list[Any]:
    """What `work(world, *args)` returns in each of the processes, by rank."""
    ends = attempt(work, *args, size=size, nodes=nodes, patience_s=patience_s, timeout_s=patience_s / 2)
    for rank, end in enumerate(ends):
        assert end.status == 0, f"rank {rank} ended with {end.status}\n{end.error}\n{end.said}"
    return [end.value for end in ends]


def attempt(
    work: Callable[..., Any],
    *args: Any,
    size: int = 2,
    nodes: int = 1,
    patience_s: float = 60.0,
    timeout_s: float = 60.0,
) -> list[Ended]:
    """How each process ended. `timeout_s` is the world's, `patience_s` this function's own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    port = _free_port()
    start = monotonic()
    processes: list[Any] = []
    ears: list[Connection] = []
    ends: dict[int, Ended] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                place = _place(rank, size, size // nodes, port)
                ear, mouth = context.Pipe(duplex=False)
                said = f"{folder}/{rank}"
                # Not a daemon, for those may have no loader processes of their own.
                process = context.Process(target=_process, args=(mouth, said, place, timeout_s, work, args))
                process.start()
                mouth.close()
                processes.append(process)
                ears.append(ear)
            while len(ends) < size:
                left = patience_s - (monotonic() - start)
                waiting = {ears[rank]: rank for rank in range(size) if rank not in ends}
                ready = wait(list(waiting), max(left, 0.0))
                for rank in [waiting[ear] for ear in ready if isinstance(ear, Connection)] or list(waiting.values()):
                    ends[rank] = _end(processes[rank], ears[rank], Path(folder, str(rank)), start)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [ends[rank] for rank in range(size)]


def _place(rank: int, size: int, local: int, port: int) -> dict[str, Any]:
    """What torchrun would put into the environment."""
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _end(process: Any, ear: Connection, said: Path, start: float) -> Ended:
    """The end of a process that has reported or died, or that is now killed."""
    value, error, reported = None, "", False
    if ear.poll():
        try:
            value, error = pickle.loads(ear.recv_bytes())
            reported = True
        except EOFError:
            error = "it ended without a word"
        process.join(5 if reported else 30)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    text = said.read_text("utf-8", "replace") if said.exists() else ""
    status = None if late else process.exitcode
    return Ended(status=status, value=value, error=error, said=text, seconds=monotonic() - start)


def _process(
    mouth: Connection, said: str, place: dict[str, Any], timeout_s: float, work: Callable[..., Any], args: Any
) -> None:
    import torch

    errors = os.open(said, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(errors, stream)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.update({name: str(value) for name, value in place.items()})
    status, report = 0, b""
    try:
        with join_world("cpu", timeout_s=timeout_s) as world:
            value = work(world, *args)
        report = pickle.dumps((value, ""))
    except BaseException:
        status, report = 1, pickle.dumps((None, traceback.format_exc()))
    mouth.send_bytes(report)
    mouth.close()
    os._exit(status)  # no finalisers of a group that may have lost a member


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
