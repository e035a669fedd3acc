"""What a run costs: images, FLOPs, device-hours, utilisation, and the paper's core-days.

A training step costs 6 FLOPs a multiply-accumulate and image, forward and backward: this gives Table 6's exaFLOPs. The
network's nominal MACs count, whatever shortcuts are taken. The paper's "core-days" are devices times days; to set a run
beside Table 2, `tpuv3_core_days` says how long its exaFLOPs would have taken a TPUv3 core (evaluation/compute.py).
"""

import time
from dataclasses import dataclass

import torch

from vitrail.distributed.device import synchronise
from vitrail.evaluation.compute import tpuv3_core_days, training_flops

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
