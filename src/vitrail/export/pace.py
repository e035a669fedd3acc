"""How quick exported files are beside each other: batch by batch in turn, so that whatever else runs falls on both."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from vitrail.checkpoint.bundle import Bundle
from vitrail.export.check import Forward, as_bytes, pictures

BATCH: Final = 16
LEAST, MOST = 3, 30  # rounds
SECONDS: Final = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Pictures a second of each, at one batch size."""

    batch: int
    images_per_s: Mapping[str, float]


def pace(
    runners: Mapping[str, Forward],
    bundle: Bundle,
    *,
    pixels: bool = False,
    batch: int = BATCH,
    seconds: float = SECONDS,
) -> Pace:
    """Medians over rounds in which each runs once, behind a warm one."""
    images = pictures(batch, bundle.config.channels, bundle.config.image)
    images = as_bytes(images) if pixels else images
    times: dict[str, list[float]] = {name: [] for name in runners}
    begun, rounds = time.perf_counter(), 0
    while rounds <= LEAST or (rounds <= MOST and time.perf_counter() - begun < seconds):
        for name, run in runners.items():
            start = time.perf_counter()
            run(images)
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return Pace(batch=batch, images_per_s={name: batch / median(found[1:]) for name, found in times.items()})
