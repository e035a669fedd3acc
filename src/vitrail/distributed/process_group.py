"""The processes of a job, as torchrun starts them; one process alone is a world of one and needs no group.

    with join_world() as world:
        world.sum_(counts)        # does nothing in a world of one

A rank that dies or hangs ends the job, and the message names it (watchdog.py).

Devices: which one a process computes on, and what differs between them.

Exchanges between processes: flags that all act upon at the same step, and tensors that a loss needs from all.

Every second step `FlagSync` sums the flags on the CPU in the background; they are read two steps later. All processes
therefore see a flag (a signal arrived, it is time to save) within three steps, and no step waits for a device.

`gather_rows` and `sum_across` are part of a forward pass, which the caller counts as one collective; with one process
they do nothing. Gradients are those of the sum of all processes' losses.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.rendezvous import rendezvous

from vitrail.core.errors import ConfigError, RankLost
from vitrail.distributed.watchdog import RankWatchdog


def find_device(name: str, local_rank: int = 0, world_size: int = 1) -> torch.device:
    """The device of this process: its own GPU on a node with several processes. "auto" is a CUDA GPU, else Apple's
    (mps), else the CPU. Several processes cannot communicate on mps, so with them "auto" is the CPU instead."""
    mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps and world_size == 1 else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known to torch; use auto, cpu, cuda or mps") from None
    if device.type == "mps" and not mps:
        raise ConfigError(f"device {name!r}: torch sees no Apple GPU here; use device cpu")
    if device.type == "mps" and world_size > 1:
        raise ConfigError(f"device {name!r} is for one process, and there are {world_size}; use device cpu")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(f"device {name!r}: torch sees no GPU here; use device cpu")
    index = local_rank if device.index is None else device.index
    if index >= count:
        remedy = f"start one process for each GPU (--nproc-per-node {count}), or use device cpu"
        raise ConfigError(f"device {name!r} is for GPU {index}, but there are {count} GPUs here; {remedy}")
    return torch.device("cuda", index)


def name_device(device: torch.device) -> str:
    """The device's name for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU (mps)" if device.type == "mps" else "CPU"


def widest_float(device: torch.device) -> torch.dtype:
    """float64; on Apple's GPUs, which have none, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronise(device: torch.device) -> None:
    """Waits until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


T = TypeVar("T")

TIMEOUT_S = 900.0  # the longest that one rank may keep the others waiting
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's rank and the collectives, which all processes must call in the same order from one thread."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device
    backend: str = ""  # none in a world of one
    watch: RankWatchdog | None = None

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes shared files and prints."""
        return self.rank == 0

    def count_collective(self) -> None:
        """Counts a collective call, so that the watchdog can name a rank that falls behind."""
        if self.watch is not None:
            self.watch.moves += 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums over processes, in place and on the tensor's device."""
        self.count_collective()
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Waits for all processes. On the CPU, so that the accelerator's queue keeps running."""
        self.sum_(torch.zeros(1))

    def broadcast(self, value: T) -> T:
        """The main process's value, in every process: small plain data."""
        self.count_collective()
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast_from_main(self, value: T | None) -> T:
        """As `broadcast`, if only the main process has a value."""
        shared = self.broadcast(value)
        assert shared is not None
        return shared

    def gather(self, value: T) -> list[T]:
        """Every process's value in the order of ranks, in every process: small plain data."""
        self.count_collective()
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes


@contextmanager
def join_world(device: str = "auto", *, timeout_s: float = TIMEOUT_S) -> Generator[World]:
    """Joins the world that torchrun's environment describes, and leaves it in an orderly way at the end. A
    communication error caused by a lost process becomes RankLost, which names the rank."""
    rank, size, local_rank, local_size = _read_environment(os.environ)
    chosen = find_device(device, local_rank, size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(device=chosen)
        return
    if ":" in device:
        raise ConfigError(f"device {device!r} would be shared by several processes; use {chosen.type}")
    # With NCCL, tensors on the CPU (flags, plain data) still use gloo and do not wait for kernels.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    watch = _join_group(rank, size, backend, chosen, timeout_s)
    world = World(rank=rank, size=size, local_size=local_size, device=chosen, backend=backend, watch=watch)
    try:
        yield world
        world.barrier()  # no process leaves while another still needs it
    except BaseException as error:
        lost = watch.find_missing() if isinstance(error, RuntimeError) else ""
        watch.leave_reason(error)
        watch.stop()
        if lost:
            raise RankLost(lost) from error
        raise
    # After an error the group is not destroyed: that would wait for lost processes. The process ends anyway.
    watch.stop()
    dist.destroy_process_group()


def _join_group(rank: int, size: int, backend: str, device: torch.device, timeout_s: float) -> RankWatchdog:
    """Joins the group. The backend's own timeout is longer than the watchdog's, for cases that the watchdog cannot
    judge."""
    limit = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=limit))
        own, patience = device if device.type == "cuda" else None, limit * 1.5 + timedelta(seconds=30)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience, device_id=own)
    except RuntimeError as error:
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        fact = f"rank {rank} of {size}: not all processes reached {meeting} within {timeout_s:.0f} s"
        remedy = "are they all started, and can their machines reach that address?"
        raise RankLost(f"{fact}; {remedy} ({error})") from error
    board: Any = store  # torch's stub leaves `clone` out
    watch = RankWatchdog(board.clone(), rank, size, timeout_s)
    dist.barrier()  # every process has registered before any can be reported missing
    watch.start()
    return watch


def _read_environment(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size from torchrun's environment; without it, a world of one."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return 0, 1, 0, 1
    if absent := [name for name in VARIABLES if name not in environment]:
        raise ConfigError(f"{', '.join(absent)} not set next to RANK or WORLD_SIZE; start the processes with torchrun")
    for name in VARIABLES:
        if name != "MASTER_ADDR" and not environment[name].isdecimal():
            raise ConfigError(f"{name}={environment[name]!r} must be a whole number; start the processes with torchrun")
    rank, size, local_rank, local_size = (int(environment[name]) for name in VARIABLES[:4])
    if rank >= size or local_rank >= local_size:
        places = f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
        raise ConfigError(f"{places}: a rank must be below the size of its world; start the processes with torchrun")
    return rank, size, local_rank, local_size


EVERY = 2  # steps between two rounds


class FlagSync:
    """Shares flags between all processes, step by step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: tuple[Tensor, dist.Work] | None = None

    def __call__(self, step: int, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        """The flags that any process had raised, identical in all processes; with one process, immediately. All
        processes call this after the same steps. A flag that is reported now is not sent again."""
        if self.world.size == 1:
            return flags
        seen = (False,) * len(flags)
        if step % EVERY:
            return seen
        if self.sent is not None:
            count, work = self.sent
            work.wait()
            seen = tuple(number > 0 for number in count.tolist())
        count = torch.tensor([mine and not known for mine, known in zip(flags, seen, strict=True)], dtype=torch.int32)
        self.world.count_collective()
        work = dist.all_reduce(count, async_op=True)  # on the CPU: the accelerator's queue keeps running
        assert work is not None
        self.sent = count, work
        return seen


def gather_rows(tensor: Tensor, world: World) -> Tensor:
    """Every process's rows in the order of ranks, without gradient: [B, ...] -> [processes · B, ...]."""
    rows = tensor.detach()
    if world.size == 1:
        return rows
    # Not every backend supports bool.
    sent = rows.contiguous().view(torch.uint8 if rows.dtype == torch.bool else rows.dtype)
    out = sent.new_empty(world.size * sent.shape[0], *sent.shape[1:])
    dist.all_gather_into_tensor(out, sent)
    return out.view(rows.dtype)


def sum_across(tensor: Tensor, world: World) -> Tensor:
    """The sum over processes, in every process. All losses depend on this process's input, so the gradient is summed
    over processes too."""
    return tensor if world.size == 1 else cast(Tensor, _Sum.apply(tensor))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        return _all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return _all_reduce(grads[0])


def _all_reduce(tensor: Tensor) -> Tensor:
    # Not dist.all_reduce on a clone: compiled by torch 2.11, the gradient of that is zero.
    return wait_tensor(all_reduce(tensor.contiguous(), "sum", cast("dist.ProcessGroup", dist.group.WORLD)))
