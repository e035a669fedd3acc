"""Metrics that never block the host, the throughput between two readings, and the cost of a run.

Sums accumulate on the device, and a copy is read once it has arrived. Every process adds the same global sums in the
same steps and reads each copy at the same step, so whatever is decided from a snapshot is decided alike everywhere.

A training step costs 6 FLOPs per multiply-accumulate and image, forward and backward: this gives Table 6's exaFLOPs.
The network's nominal MACs count, whatever shortcuts are taken. The paper's "core-days" are devices times days; to
compare a run with Table 2, `tpuv3_core_days` is the time its exaFLOPs would take on a TPUv3 core (evaluation/speed.py).
"""

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.distributed.process_group import synchronise, widest_float
from vitrail.evaluation.speed import tpuv3_core_days, training_flops

PRODUCTS = 8  # timed at least, however busy the machine is; the fastest counts

# Dense bfloat16 peaks, as published by the makers.
SERVER_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "V100": 125e12}
OTHER_PEAKS = {"L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "T4": 65e12}
PEAKS = SERVER_PEAKS | OTHER_PEAKS  # by a part of the device's name; the first that fits counts


def peak_flops(device: torch.device) -> float:
    """The rate that utilisation is measured against: the published one if known, else that of a matrix product."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None) or measure_flops(device)


def measure_flops(device: torch.device, seconds: float = 0.05) -> float:
    """The rate that a large matrix product reaches here, in the type that training uses."""
    side, kind = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    with torch.random.fork_rng(devices=[]):
        a = torch.randn(side, side).to(device, kind)
    torch.mm(a, a)  # a library's first product takes far longer than any other
    best, count, end = 0.0, 0, time.perf_counter() + seconds
    while time.perf_counter() < end or count < PRODUCTS:
        count += 1
        start = time.perf_counter()
        torch.mm(a, a)
        synchronise(device)
        best = max(best, 2 * side**3 / (time.perf_counter() - start))
    return best


@dataclass(slots=True)
class RunCost:
    """The cost of a run over all its starts. `macs` are those of one image; `devices` and `peak` are of this start."""

    macs: float
    samples: int  # in an epoch
    devices: int
    peak: float  # FLOP/s of one device
    images: int = 0
    device_seconds: float = 0.0
    flops: float = 0.0

    def add(self, images: int, seconds: float) -> None:
        self.images += images
        self.flops += training_flops(self.macs, images)
        self.device_seconds += seconds * self.devices

    def utilisation(self, images_per_s: float) -> float:
        """Model FLOP/s over peak FLOP/s. A peak that was measured on a busy machine is too low; a run that exceeds it
        raises it."""
        reached = training_flops(self.macs, images_per_s) / self.devices
        self.peak = max(self.peak, reached)
        return reached / self.peak

    def row(self) -> dict[str, float | int]:
        """The columns for the metrics, the report and the weights' provenance."""
        hours, days = self.device_seconds / 3600, self.device_seconds / 86400
        row = {"images": self.images, "epochs": self.images / self.samples, "exaflops": self.flops / 1e18}
        return row | {"device_hours": hours, "core_days": days, "tpuv3_core_days": tpuv3_core_days(self.flops)}

    def state(self) -> dict[str, float | int]:
        return {"images": self.images, "device_seconds": self.device_seconds, "flops": self.flops}

    def restore(self, state: dict[str, float | int]) -> None:
        self.images = int(state["images"])
        self.device_seconds, self.flops = float(state["device_seconds"]), float(state["flops"])


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The sums of the steps up to `step`, since the previous snapshot."""

    step: int
    steps: int  # number of these steps since the run was started or resumed
    values: dict[str, float]
    norm: float  # of the last step's gradient
    skipped: int  # updates skipped since this start
    first_bad: int  # the step of the first of them, -1 for none

    def mean(self, name: str) -> float:
        """Over the samples of the steps that were not skipped; NaN if all were."""
        return self.values[name] / self.values["count"] if self.values["count"] else math.nan


class Meter:
    """Sums by name, in the order of the first step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: tuple[str, ...] = ()
        self.exact = widest_float(device)
        self.sums = torch.zeros(0, device=device, dtype=self.exact)
        self.skipped = torch.zeros((), device=device, dtype=self.exact)
        self.first_bad = torch.full((), -1.0, device=device, dtype=self.exact)
        self.steps = 0
        self.sent: tuple[int, int, Tensor, torch.cuda.Event | None] | None = None

    def add(self, step: int, names: tuple[str, ...], sums: Tensor, norm: Tensor, ok: Tensor) -> None:
        """One step's global sums [len(names)], its gradient norm, and whether it updated the weights."""
        if names != self.names:
            assert not self.steps
            self.names = names
            self.sums = torch.zeros(len(names), device=self.device, dtype=self.exact)
        # The loss of a skipped step may be NaN, and must not reach the sums.
        self.sums += torch.where(ok, sums.to(self.exact), 0.0)
        self.first_bad = torch.where((self.first_bad < 0) & ~ok, float(step), self.first_bad)
        self.skipped += (~ok).to(self.exact)
        self.norm = norm
        self.steps += 1

    def state(self) -> dict[str, float]:
        """The sums that have not been sent, for a checkpoint: the next snapshot includes these steps."""
        return dict(zip(self.names, self.sums.tolist(), strict=True))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Restores the sums of an earlier start, if it saved some."""
        if sums:
            self.names = tuple(sums)
            self.sums = torch.tensor(list(sums.values()), device=self.device, dtype=self.exact)

    def send(self, step: int) -> None:
        """Starts copying the sums to the host, and resets them."""
        assert self.sent is None
        packed = torch.cat([self.sums, torch.stack([self.norm.to(self.exact), self.skipped, self.first_bad])])
        event = None
        if self.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed = host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.sent = (step, self.steps, packed, event)
        self.sums.zero_()
        self.steps = 0

    def read(self) -> MetricsSnapshot | None:
        """The snapshot that was sent last; it has long arrived when the next one is sent."""
        if self.sent is None:
            return None
        step, steps, packed, event = self.sent
        if event is not None:
            event.synchronize()
        *sums, norm, skipped, first_bad = packed.tolist()
        self.sent = None
        values = dict(zip(self.names, sums, strict=True))
        return MetricsSnapshot(step, steps, values, norm, int(skipped), int(first_bad))


class Throughput:
    """Counts steps and the seconds they took. A snapshot arrives when the device has finished its steps, so between two
    of them the host's clock measures the device."""

    def __init__(self, cost: RunCost, batch: int) -> None:
        self.cost, self.batch = cost, batch
        self.steps, self.unread = 0, 0
        self.images_per_s = float("nan")
        self.start()

    def start(self) -> None:
        self.since, self.away = time.monotonic(), 0.0
        self.building, self.is_timed = 0.0, False

    def count_step(self, building_s: float | None = None) -> None:
        """Counts a step. The time of one that was compiled or recorded first is part of the cost, but does not count
        for the speed, unless there are only such steps."""
        self.steps += 1
        self.unread += 1
        self.building += building_s or 0.0
        self.is_timed |= building_s is None

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """Excludes the time inside from training time. First waits until the device has finished its queued work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif torch.backends.mps.is_available():
            torch.mps.synchronize()
        before = time.monotonic()
        try:
            yield
        finally:
            self.away += time.monotonic() - before

    def cost_so_far(self) -> RunCost:
        """The cost including the steps that no snapshot covers yet: what a checkpoint must store."""
        cost = replace(self.cost)
        cost.add(self.unread * self.batch, time.monotonic() - self.since)
        return cost

    def update(self, steps: int, *, last: bool = False) -> dict[str, Any]:
        """The columns of a snapshot of `steps` steps. The `last` one of a run is read right after the one before, so
        its time means nothing and the speed stays."""
        now, images = time.monotonic(), steps * self.batch
        self.unread -= steps
        seconds = max(now - self.since - self.away - (self.building if self.is_timed else 0.0), 1e-9)
        self.cost.add(images, now - self.since)
        self.start()
        if not last:
            self.images_per_s = images / seconds
        row = {"images_per_s": self.images_per_s, "mfu": self.cost.utilisation(self.images_per_s)}
        if torch.cuda.is_available():
            row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return row
