"""Inference speed and peak memory over batch sizes (D.5, Figure 12), and the compute of training (4.4, Table 6).

    found = speed(Passes(network, device, "bfloat16"), Limits(seconds=20, room=free))
    found.best.images_per_s, found.largest

Batches double until speed stops growing, or time or memory runs out. A point is the median of several passes after a
warm-up. The largest batch that fits is extrapolated from the memory per image; on a GPU it is tried.

Training takes 6 FLOPs per multiply-accumulate, image and epoch: 2 for the operation, times 3 for forward and backward.
Table 6 does not count convolution taps that fall on padding: without them the formula matches every row within 3 %,
with them the ResNets come out up to 5 % too high. For a ViT they make no difference.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.core.precision import HALF, Precision
from vitrail.distributed.process_group import synchronise
from vitrail.models.family import ModelConfig
from vitrail.models.inference import set_precision

LEAST, MOST = 3, 30  # timed passes per point
POINT_S: Final = 0.5  # time per point, if its passes are short
GAIN: Final = 1.02  # factor from which a larger batch counts as faster
PATIENCE: Final = 3  # doublings without a gain
BACK_OFF, TRIES = 0.95, 8  # if the largest batch does not fit after all
TRIED: Final = 1 << 15  # images at most


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedLimits:
    """Batches (empty: doubling from 1), total time, and available bytes (0: unlimited)."""

    batches: tuple[int, ...] = ()
    seconds: float = 20.0
    room: int = 0

    def __post_init__(self) -> None:
        if any(batch < 1 for batch in self.batches) or self.seconds <= 0 or self.room < 0:
            given = f"batches {self.batches} must be 1 or more, seconds={self.seconds:g} above 0"
            raise ConfigError(f"{given}, room={self.room} not below 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPoint:
    """One batch size: median seconds per pass, the number of passes, and peak bytes."""

    batch: int
    seconds: float
    passes: int
    memory: int | None = None

    @property
    def images_per_s(self) -> float:
        return self.batch / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """All points of one image size, why there are no more, and the largest batch that fits, None if unknown; `tried` is
    whether it was run."""

    points: tuple[SpeedPoint, ...]
    stopped: str
    largest: int | None = None
    tried: bool = False

    @property
    def best(self) -> SpeedPoint:
        """The fastest per image."""
        return max(self.points, key=lambda point: point.images_per_s)


def measure_speed(
    bench: "TimedNetwork",
    limits: SpeedLimits,
    *,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[int], None] = lambda batch: None,
) -> Speed:
    """Times batch after batch; `tell` is called with each. There is at least one point; ConfigError if not even the
    first batch fits."""
    start, points, stopped, flat = clock(), list[SpeedPoint](), "", 0
    for batch in limits.batches or (1 << power for power in itertools.count()):
        if points and (stopped := find_limit(points, batch, limits, clock() - start)):
            break
        tell(batch)
        best = max((one.images_per_s for one in points), default=0.0)
        try:
            points.append(time_batch(bench, batch, limits.seconds / 4, clock))
        except torch.OutOfMemoryError:
            stopped = "memory"
            break
        flat = 0 if points[-1].images_per_s > GAIN * best else flat + 1
        if not limits.batches and flat == PATIENCE:
            stopped = "no faster"
            break
    stopped = stopped or "all requested"
    if not points:
        raise ConfigError("the first batch does not fit into memory; give a smaller --batch or --image-size")
    largest, tried = estimate_largest(bench, points, limits.room), False
    if largest is not None and bench.tries:
        largest, tried = try_largest(bench, points[-1], largest, limits)
    return Speed(points=tuple(points), stopped=stopped, largest=largest, tried=tried)


def find_limit(points: list[SpeedPoint], batch: int, limits: SpeedLimits, spent: float) -> str:
    """Why the next batch is not tried; empty if it is."""
    last, each = points[-1], estimate_growth(points)
    if spent + (LEAST + 1) * last.seconds * batch / last.batch > limits.seconds:
        return "time"
    if not limits.room or each is None or last.memory is None:
        return ""
    return "memory" if last.memory + each * (batch - last.batch) > limits.room else ""


def time_batch(bench: "TimedNetwork", batch: int, limit: float, clock: Callable[[], float]) -> SpeedPoint:
    """Times passes after a warm-up. A pass that takes longer than the limit is timed once."""
    end = clock() + min(POINT_S, limit)
    warm = bench.seconds(batch)
    if warm > 4 * limit:
        return SpeedPoint(batch=batch, seconds=warm, passes=1, memory=bench.memory(batch))
    passes: list[float] = []
    while len(passes) < LEAST or (clock() < end and len(passes) < MOST):
        passes.append(bench.seconds(batch))
    return SpeedPoint(batch=batch, seconds=median(passes), passes=len(passes), memory=bench.memory(batch))


def estimate_growth(points: list[SpeedPoint]) -> float | None:
    """Bytes per additional image, from the two largest batches; small ones are dominated by fixed costs."""
    known = sorted({point.batch: point.memory for point in points if point.memory is not None}.items())
    if len(known) < 2:
        return None
    (small, before), (large, after) = known[-2:]
    return (after - before) / (large - small)


def estimate_largest(bench: "TimedNetwork", points: list[SpeedPoint], room: int) -> int | None:
    """The largest batch that should fit. A single point cannot show the memory per image, so it gets a second one."""
    only = points[0]
    if len(points) == 1 and room and only.memory is not None and 2 * only.memory <= room:
        with contextlib.suppress(torch.OutOfMemoryError):
            twice = 2 * only.batch
            points = [only, replace(only, batch=twice, passes=0, memory=bench.memory(twice))]
    each, last = estimate_growth(points), max(points, key=lambda point: point.batch)
    if not room or each is None or each <= 0 or last.memory is None:
        return None
    return max(int(last.batch + (room - last.memory) / each), last.batch)


def try_largest(bench: "TimedNetwork", last: SpeedPoint, largest: int, limits: SpeedLimits) -> tuple[int, bool]:
    """Runs the largest batch once, or a slightly smaller one; keeps the estimate if a pass would take too long, or if
    the batch is so large that kernels may fail for other reasons than memory. Also whether one was run."""
    if last.seconds * largest / last.batch > limits.seconds or largest > TRIED:
        return largest, False
    for _ in range(TRIES):
        try:
            bench.seconds(largest)
            return largest, True
        except torch.OutOfMemoryError:
            largest = max(int(largest * BACK_OFF), last.batch)
    return last.batch, True


@dataclass(kw_only=True, slots=True)
class TimedNetwork:
    """A network on its device with random images; its weights are bfloat16 if the precision asks for it."""

    network: nn.Module
    device: torch.device
    precision: Precision = "float32"
    _images: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.network = self.network.to(self.device).eval()
        set_precision(self.network, self.precision, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision in HALF else torch.float32

    @property
    def tries(self) -> bool:
        """Whether running out of memory is harmless, so the largest batch can be tried."""
        return self.device.type == "cuda"

    def seconds(self, batch: int) -> float:
        """The seconds of one pass; torch.OutOfMemoryError if the batch does not fit."""
        try:
            images = self.images(batch)
            synchronise(self.device)
            start = time.perf_counter()
            self.forward(images)
            synchronise(self.device)
        except torch.OutOfMemoryError:
            self._images = None
            torch.cuda.empty_cache()
            raise
        return time.perf_counter() - start

    def memory(self, batch: int) -> int | None:
        """Bytes of weights, images and peak activations."""
        images = self.images(batch)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.forward(images)
            synchronise(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        if self.device.type != "cpu":
            return None
        held = sum(one.numel() * one.element_size() for one in (*self.network.parameters(), *self.network.buffers()))
        return held + images.numel() * images.element_size() + count_allocated(lambda: self.forward(images))

    @torch.inference_mode()
    def forward(self, images: Tensor) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "autocast"):
            self.network(images)

    def images(self, batch: int) -> Tensor:
        if self._images is None or len(self._images) != batch:
            config: Any = self.network.config
            self._images = None  # frees the previous ones
            random = torch.Generator(self.device).manual_seed(0)
            shape = (batch, config.channels, *config.image)
            self._images = torch.randn(shape, generator=random, device=self.device, dtype=self.dtype)
        return self._images


def count_allocated(work: Callable[[], None]) -> int:
    """Peak bytes that torch allocates on the CPU during some work: counted, not sampled."""
    from torch.profiler import ProfilerActivity, profile

    with silence_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        work()
    inner: Any = seen.profiler
    events = (event for event in inner.kineto_results.events() if event.name() == "[memory]")
    changes = (size for _, size in sorted((event.start_ns(), event.nbytes()) for event in events))
    return max(itertools.accumulate(changes), default=0)


@contextlib.contextmanager
def silence_profiler() -> Generator[None]:
    """Silences the profiler's warning about a missing GPU, which bypasses Python."""
    name, before = "KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL")
    os.environ[name] = "99" if before is None else before
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


FLOPS_A_MAC = 6.0
TPUV3_CORE_FLOPS = 1567e18 / (680 * 86400)  # of the paper's ViT-L/16 on JFT: 1567 exaFLOPs in 680 core-days


def training_flops(macs_an_image: float, images: float) -> float:
    """FLOPs of training on a number of images, each seen once: forward and backward."""
    return FLOPS_A_MAC * macs_an_image * images


def tpuv3_core_days(flops: float) -> float:
    """TPUv3 core-days at the speed of the paper's ViT-L/16, to compare a run with Table 2."""
    return flops / TPUV3_CORE_FLOPS / 86400


def count_paper_macs(config: ModelConfig) -> int:
    """Multiply-accumulates per image as the paper counts them: without taps on padding."""
    return config.macs - config.padding_macs
