"""How much memory a run takes, in closed form: what a parameter needs, and what an image needs.

A parameter takes 4 bytes for itself, 4 for its gradient, and the optimiser's moments; its bfloat16 copy another 2, an
average another 4. An image takes what the backward pass reads again. For a ViT block that is, a token: the inputs of
both norms and their outputs (4D), q, k and v (3D), what attention gives (D), and the MLP's inside before and after GELU
(2M): docs/scale.md holds this against measurements. With recomputation only the inputs of the blocks stay, and what
one block needs at its peak (10D + 3M). For a ResNet it is about four times what each unit gives.

What a run costs: images, FLOPs, device-hours, utilisation, and the paper's core-days.

A training step costs 6 FLOPs a multiply-accumulate and image, forward and backward: this gives Table 6's exaFLOPs. The
network's nominal MACs count, whatever shortcuts are taken. The paper's "core-days" are devices times days; to set a run
next to Table 2, `tpuv3_core_days` says how long its exaFLOPs would have taken a TPUv3 core (evaluation/speed.py).

Metrics that never make the host wait: sums grow on the device, and a copy is read when it has arrived.

Every process adds the same global sums in the same steps and reads each copy at the same step, so what is decided from
a reading is decided alike everywhere: that too many updates were left out.

How fast a run goes: images a second between two readings, with the time for scoring left out.
"""

import contextlib
import math
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from vitrail.distributed.process_group import synchronise, widest_float
from vitrail.evaluation.speed import tpuv3_core_days, training_flops
from vitrail.models.family import ModelConfig
from vitrail.optim.config import Optim

CUDA_OWN = 1 << 30  # context, libraries, workspaces
USED = 0.85  # of what is free; the allocator leaves gaps


def state_bytes(config: ModelConfig, optim: Optim, *, low: bool, average: bool, shards: int = 1) -> int:
    """Parameters, gradients, moments; `shards` processes hold a part each."""
    return weights_bytes(config.parameters, 0, optim, low=low, average=average) // shards


def weights_bytes(trained: int, kept: int, optim: Optim, *, low: bool, average: bool) -> int:
    """Of so many numbers that are trained, and so many that are not: a teacher's, which has no gradient or moments."""
    first = 2 if optim.momentum_type == "bfloat16" else 4
    moments = first + (4 if optim.kind == "adamw" else 0)
    always = 4 + (2 if low else 0) + (4 if average else 0)
    return trained * (always + 4 + moments) + kept * always


def image_bytes(config: ModelConfig, *, low: bool, recompute: bool) -> int:
    """What one image adds while a step runs."""
    width = 2 if low else 4
    pixels = prod(config.image) * config.channels * 5  # as bytes and as floats
    return pixels + config.activation_bytes(width, recompute=recompute)


def free_bytes(device: torch.device) -> int:
    """What this process may take."""
    if device.type == "cuda":
        return max(torch.cuda.mem_get_info(device)[0] - CUDA_OWN, 0)
    known = getattr(os, "sysconf_names", {})  # Windows has none, and macOS does not say what is free
    if "SC_AVPHYS_PAGES" in known:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if "SC_PHYS_PAGES" in known:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def fit_micro_batch(local: int, each: int, room: int, most: int) -> int:
    """The micro-batch of a process's batch that fits into the room, at most `most`."""
    return balance_micro_batch(local, max(1, min(most, int(room * USED) // max(each, 1))))


def balance_micro_batch(local: int, most: int) -> int:
    """How many of `local` samples to take at once, `most` or fewer: a divisor, so that all parts have one shape, unless
    that is less than half of it; then so many that the parts are as even as can be."""
    divisor = next(size for size in range(min(local, most), 0, -1) if local % size == 0)
    return divisor if 2 * divisor > min(local, most) else -(-local // count_micro_batches(local, most))


def count_micro_batches(local: int, micro: int) -> int:
    """How many micro-batches there are; the last may be smaller."""
    return -(-local // micro)


PRODUCTS = 8  # that are timed at least, however busy the machine; the quickest counts

# Dense bfloat16 peaks, as the makers print them.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def peak_flops(device: torch.device) -> float:
    """The rate that utilisation is measured against: the maker's where it is known, else that of a matrix product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak
    return measure_flops(device)


def measure_flops(device: torch.device, seconds: float = 0.05) -> float:
    """What a large matrix product reaches here, in the type that training uses."""
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
    """The ledger of a run, over all its starts. `macs` is the work of one image; `devices` and `peak` of this start."""

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
        """Model FLOP/s over peak FLOP/s. A peak that was measured while the machine was busy with something else is too
        low; what the run itself reaches raises it."""
        reached = training_flops(self.macs, images_per_s) / self.devices
        self.peak = max(self.peak, reached)
        return reached / self.peak

    def row(self) -> dict[str, float | int]:
        """As it stands in the metrics, the report and the weights' provenance."""
        return {
            "images": self.images,
            "epochs": self.images / self.samples,
            "exaflops": self.flops / 1e18,
            "device_hours": self.device_seconds / 3600,
            "core_days": self.device_seconds / 86400,
            "tpuv3_core_days": tpuv3_core_days(self.flops),
        }

    def state(self) -> dict[str, float | int]:
        return {"images": self.images, "device_seconds": self.device_seconds, "flops": self.flops}

    def restore(self, state: dict[str, float | int]) -> None:
        self.images = int(state["images"])
        self.device_seconds, self.flops = float(state["device_seconds"]), float(state["flops"])


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSnapshot:
    """The sums of the steps up to `step`, since the reading before."""

    step: int
    steps: int  # how many of them since the run was started or resumed
    values: dict[str, float]
    norm: float  # of the last step's gradient
    skipped: int  # updates left out since the run began here
    first_bad: int  # the step of the first of them, -1 for none

    @property
    def loss(self) -> float:
        return self.mean("total")

    def mean(self, name: str) -> float:
        """Over the samples of the steps that were not left out; no number where all of them were."""
        return self.values[name] / self.values["count"] if self.values["count"] else math.nan


class Meter:
    """Sums by name, in the order that the first step gives them."""

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
        """One step's global sums [len(names)], its gradient norm, and whether its update was done."""
        if names != self.names:
            assert not self.steps
            self.names = names
            self.sums = torch.zeros(len(names), device=self.device, dtype=self.exact)
        # A step that was left out has a loss that is not a number; the sums shall stay numbers.
        self.sums += torch.where(ok, sums.to(self.exact), 0.0)
        bad = (~ok).to(self.exact)
        self.first_bad = torch.where((self.first_bad < 0) & ~ok, float(step), self.first_bad)
        self.skipped += bad
        self.norm = norm
        self.steps += 1

    def state(self) -> dict[str, float]:
        """The sums that have not been sent, for a checkpoint: the next reading is of these steps too."""
        return dict(zip(self.names, self.sums.tolist(), strict=True))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Puts the sums of an earlier start in place, where it saved some."""
        if sums:
            self.names = tuple(sums)
            self.sums = torch.tensor(list(sums.values()), device=self.device, dtype=self.exact)

    def send(self, step: int) -> None:
        """Puts what has been summed on its way to the host, and starts again."""
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
        """What was sent last; it has long arrived when the next is sent."""
        if self.sent is None:
            return None
        step, steps, packed, event = self.sent
        if event is not None:
            event.synchronize()
        *values, norm, skipped, first_bad = packed.tolist()
        self.sent = None
        return MetricsSnapshot(
            step=step,
            steps=steps,
            values=dict(zip(self.names, values, strict=True)),
            norm=norm,
            skipped=int(skipped),
            first_bad=int(first_bad),
        )


class Throughput:
    """Counts steps and the seconds that they took. A reading comes when the device is done with its steps, so between
    two of them the host's clock tells the device's speed."""

    def __init__(self, cost: RunCost, batch: int) -> None:
        self.cost, self.batch = cost, batch
        self.steps, self.unread = 0, 0
        self.away = 0.0
        self.speed = float("nan")
        self.since = time.monotonic()

    def start(self) -> None:
        self.since, self.away = time.monotonic(), 0.0

    def stepped(self) -> None:
        self.steps += 1
        self.unread += 1

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Time in here is not training. What the device still has to do of it is waited for first."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif torch.backends.mps.is_available():
            torch.mps.synchronize()
        before = time.monotonic()
        try:
            yield
        finally:
            self.away += time.monotonic() - before

    def so_far(self) -> RunCost:
        """The ledger with the steps in it that no reading has told of yet: what a checkpoint must know."""
        cost = replace(self.cost)
        cost.add(self.unread * self.batch, time.monotonic() - self.since)
        return cost

    def drawn(self, steps: int, *, last: bool = False) -> dict[str, Any]:
        """What went through since the last reading. The `last` one of a run is fetched right behind the one before it,
        so its time says nothing and the speed stays as it was."""
        now, images = time.monotonic(), steps * self.batch
        self.unread -= steps
        seconds = max(now - self.since - self.away, 1e-9)
        self.cost.add(images, now - self.since)
        self.start()
        if not last:
            self.speed = images / seconds
        row = {"images_per_s": self.speed, "mfu": self.cost.utilisation(self.speed)}
        if torch.cuda.is_available():
            row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return row
