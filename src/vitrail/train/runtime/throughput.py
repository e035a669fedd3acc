"""Metrics that never make the host wait: sums grow on the device, and a copy is read when it has arrived.

Every process adds the same global sums in the same steps and reads each copy at the same step, so what is decided from
a reading is decided alike everywhere: that too many updates were left out.

How fast a run goes: images a second between two readings, with the time for scoring left out.
"""

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.distributed.process_group import widest_float
from vitrail.train.runtime.cost import Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
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

    def read(self) -> Reading | None:
        """What was sent last; it has long arrived when the next is sent."""
        if self.sent is None:
            return None
        step, steps, packed, event = self.sent
        if event is not None:
            event.synchronize()
        *values, norm, skipped, first_bad = packed.tolist()
        self.sent = None
        return Reading(
            step=step,
            steps=steps,
            values=dict(zip(self.names, values, strict=True)),
            norm=norm,
            skipped=int(skipped),
            first_bad=int(first_bad),
        )


class Pace:
    """Counts steps and the seconds that they took. A reading comes when the device is done with its steps, so between
    two of them the host's clock tells the device's speed."""

    def __init__(self, cost: Cost, batch: int) -> None:
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

    def so_far(self) -> Cost:
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
