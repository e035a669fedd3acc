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
"""

import os
import time
from dataclasses import dataclass
from math import prod

import torch

from vitrail.distributed.process_group import synchronise
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


def fitting(local: int, each: int, room: int, most: int) -> int:
    """The micro-batch of a process's batch that fits into the room, at most `most`."""
    return portion(local, max(1, min(most, int(room * USED) // max(each, 1))))


def portion(local: int, most: int) -> int:
    """How many of `local` samples to take at once, `most` or fewer: a divisor, so that all parts have one shape, unless
    that is less than half of it; then so many that the parts are as even as can be."""
    divisor = next(size for size in range(min(local, most), 0, -1) if local % size == 0)
    return divisor if 2 * divisor > min(local, most) else -(-local // parts(local, most))


def parts(local: int, micro: int) -> int:
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
    return measured_flops(device)


def measured_flops(device: torch.device, seconds: float = 0.05) -> float:
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
class Cost:
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
