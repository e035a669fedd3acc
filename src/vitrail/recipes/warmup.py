"""The warm-up of a fine-tuning run follows from its length, whether that was set by default, by the user, or by a time
budget."""

from collections.abc import Collection
from typing import Final

from vitrail.train.config import Run

DENSE: Final = (500, 1000)  # EoMT's steps of warm-up: of the head, then of the encoder


def choose_warmup(steps: int) -> int:
    """A tenth of the run, at most 500 steps."""
    return min(steps // 10, 500)


def choose_dense_warmup(steps: int) -> tuple[int, int]:
    """The warm-up of the head and then of the encoder: a twentieth and a tenth of the run, at most EoMT's."""
    return min(steps // 20, DENSE[0]), min(steps // 10, DENSE[1])


def fit_warmup(run: Run, steps: int, typed: Collection[str]) -> list[str]:
    """Settings that fit the warm-up of a fine-tuning run to a number of steps; fields that were `typed` stay."""
    head, encoder = choose_dense_warmup(steps) if run.model.has_queries else (choose_warmup(steps), 0)
    settings = {"schedule.warmup": head}
    if run.schedule.encoder_warmup:
        settings["schedule.encoder_warmup"] = encoder
    return [f"{name}={value}" for name, value in settings.items() if name not in typed]
