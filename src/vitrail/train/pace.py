"""How fast a run goes: images a second between two readings, with the time for scoring left out."""

import contextlib
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from vitrail.train.cost import Cost


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
