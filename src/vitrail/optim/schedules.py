"""The learning rate as a pure function of the step (Tables 3 and 4): nothing to save, nothing to resume."""

import math
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.optim.config import Schedule


class Rates(NamedTuple):
    """The learning rates of a step: that of the head and of whatever an objective adds, and the encoder's. They are
    the same number unless the schedule has an `encoder_warmup`."""

    head: float | Tensor
    encoder: float | Tensor


def learning_rates(step: int, schedule: Schedule, *, base: float, total: int) -> Rates:
    """The rates of a step, counted from 0, in a run of `total` steps. With an `encoder_warmup` the encoder follows the
    schedule of a run that starts where the head's warm-up ends; until then its rate is 0."""
    head = learning_rate(step, schedule, base=base, total=total)
    if not schedule.encoder_warmup:
        return Rates(head, head)
    if step < schedule.warmup:
        return Rates(head, 0.0)
    own = replace(schedule, warmup=schedule.encoder_warmup, encoder_warmup=0)
    return Rates(head, learning_rate(step - schedule.warmup, own, base=base, total=total - schedule.warmup))


def learning_rate(step: int, schedule: Schedule, *, base: float, total: int) -> float:
    """The learning rate of the head at a step, counted from 0, in a run of `total` steps.

    Linear, cosine and polynomial decay fall from `base` to `schedule.end` between the end of the warm-up and the end of
    the run; "steps" (BiT) divides by ten at each milestone. The warm-up multiplies all of them by step/warmup, so the
    first step has rate 0.
    """
    check_warmup(schedule, total)
    warmup = min(1.0, step / schedule.warmup) if schedule.warmup else 1.0
    progress = min(max((step - schedule.warmup) / (total - schedule.warmup), 0.0), 1.0)
    match schedule.decay:
        case "constant":
            rate = base
        case "linear":
            rate = schedule.end + (base - schedule.end) * (1 - progress)
        case "cosine":
            rate = schedule.end + (base - schedule.end) * 0.5 * (1 + math.cos(math.pi * progress))
        case "poly":
            rate = schedule.end + (base - schedule.end) * (1 - progress) ** schedule.power
        case "steps":
            # The quotient, correctly rounded, reaches a fraction such as 0.07 where the product 0.07·100 passes it.
            rate = base / 10 ** sum(step / total >= milestone for milestone in schedule.milestones)
    return rate * warmup


def check_warmup(schedule: Schedule, total: int) -> None:
    """Raises ConfigError if the warm-up leaves no step for the rest of the schedule."""
    if schedule.warmup + schedule.encoder_warmup < total:
        return
    remedy = f"use a tenth of them (schedule.warmup={total // 10}), or lengthen the run"
    if not schedule.encoder_warmup:
        reason = f"schedule.warmup={schedule.warmup} must be below the number of steps, {total}"
        raise ConfigError(f"{reason}; {remedy}")
    both = f"schedule.warmup={schedule.warmup} and schedule.encoder_warmup={schedule.encoder_warmup}"
    raise ConfigError(f"{both} must together be below the number of steps, {total}; {remedy}")
