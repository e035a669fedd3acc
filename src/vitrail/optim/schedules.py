"""The learning rate as a pure function of the step (Tables 3 and 4): nothing to save, nothing to resume."""

import math

from vitrail.core.errors import ConfigError
from vitrail.optim.config import Schedule


def learning_rate(schedule: Schedule, base: float, step: int, total: int) -> float:
    """The rate of a step, counted from 0, in a run of `total` steps. With p the part of the way from the end of the
    warm-up to the end of the run: linear and cosine fall from `base` to `end` along p, steps (BiT) divides by ten at
    each milestone; the warm-up multiplies all of them by step/warmup, so that the first step has rate 0."""
    check_warmup(schedule, total)
    return _decayed(schedule, base, step, total) * _warmed(schedule, step)


def check_warmup(schedule: Schedule, total: int) -> None:
    """Refuses a warm-up that leaves no step for the rest of the schedule."""
    if schedule.warmup >= total:
        raise ConfigError(
            f"schedule.warmup={schedule.warmup} must be below the number of steps, {total}; shorten the warm-up "
            f"(schedule.warmup={total // 10} is a tenth) or lengthen the run"
        )


def _decayed(schedule: Schedule, base: float, step: int, total: int) -> float:
    way = min(max((step - schedule.warmup) / (total - schedule.warmup), 0.0), 1.0)
    match schedule.decay:
        case "constant":
            return base
        case "linear":
            return schedule.end + (base - schedule.end) * (1 - way)
        case "cosine":
            return schedule.end + (base - schedule.end) * 0.5 * (1 + math.cos(math.pi * way))
        case "steps":
            # The quotient, correctly rounded, meets a fraction such as 0.07 where the product 0.07·100 passes it.
            return base / 10 ** sum(step / total >= milestone for milestone in schedule.milestones)


def _warmed(schedule: Schedule, step: int) -> float:
    return min(1.0, step / schedule.warmup) if schedule.warmup else 1.0
