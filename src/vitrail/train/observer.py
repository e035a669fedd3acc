"""Who watches a run (a terminal, a program or nobody), how a signal stops it, and what a run says about its troubles.

The first SIGTERM or SIGINT ends the run after its current step, a second SIGINT at once. Each message gives the cause,
what is kept, and what to do.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol, runtime_checkable

from vitrail.core.errors import VitrailError
from vitrail.core.text import pluralise
from vitrail.data.loader import Batch
from vitrail.train.metrics import MetricsSnapshot
from vitrail.train.run_folder.files import LAST

STEP: Final = "step"  # the activity that advances while the network trains
GENTLER: Final = "Start again, or resume with --force, with a lower optim.lr, a longer schedule.warmup, or optim.clip=1"
Advance = Callable[[str, int, int | None], None]  # the activity, how much of it is done, how much there is


class Observer(Protocol):
    """Receives notes and rows of metrics."""

    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


@runtime_checkable
class Advancing(Protocol):
    """An observer that also follows every step, and every batch of what happens between steps."""

    def advance(self, what: str, done: int, total: int | None) -> None: ...


class NullObserver:
    """Ignores everything."""

    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


def ignore_advance(what: str, done: int, total: int | None) -> None: ...


def get_advance(observer: object) -> Advance:
    """The observer's `advance`, or one that does nothing: the method is optional."""
    return observer.advance if isinstance(observer, Advancing) else ignore_advance


def count_batches(
    batches: Iterable[Batch], what: str, total: int, advance: Advance, *, processes: int = 1
) -> Iterator[Batch]:
    """Yields the batches, and reports after each how many of `total` images are done."""
    done = 0
    advance(what, 0, total)
    for batch in batches:
        yield batch
        done = min(done + len(batch) * processes, total)
        advance(what, done, total)


class Stop:
    """A signal handler that remembers which signal came."""

    def __init__(self) -> None:
        self.signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def listen_for_signals() -> Generator[Stop]:
    """Handles signals while a run is in progress. Outside the main thread that is impossible, and nothing changes. If a
    `Stop` is already installed, as for several runs in turn, it is shared: a signal is for all of them."""
    current = signal.getsignal(signal.SIGINT)
    if isinstance(current, Stop) or threading.current_thread() is not threading.main_thread():
        yield current if isinstance(current, Stop) else Stop()
        return
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_smaller_micro(before: int, after: int, parts: int) -> str:
    return f"out of memory with {before} images at once: continuing with {after}, in {parts} micro-batches per step"


def describe_out_of_memory(step: int, micro: int, *, couples: bool) -> str:
    """`micro` images at once were too many for the device."""
    if couples:
        remedy = (
            "its images are compared with each other and cannot be split: use a smaller batch or more processes, and "
            "--set recompute=true"
        )
    elif micro == 1:
        remedy = "not even one fits: use --set recompute=true, --set sharding=fsdp on several devices, or fewer tokens"
    else:
        remedy = f"resume with the same command and --set micro={micro // 2}"
    return f"out of memory at step {step:,} with {pluralise(micro, 'image')} at once; {remedy}"


def describe_skipped_updates(more: int, snapshot: MetricsSnapshot, limit: int) -> str:
    return (
        f"skipped {pluralise(more, 'update')} up to step {snapshot.step:,}: loss or gradient was not finite "
        f"(first at step {snapshot.first_bad:,}, counted from 0; {snapshot.skipped} in all, {limit} end the run)"
    )


def describe_unusable_images(images: int, unreadable: int, folder: Path) -> str:
    """`unreadable` counts the files known to be; if there are none, the images have no usable target."""
    why = f"see {folder / 'unreadable.jsonl'}" if unreadable else "all of their labels or pixels are ignored"
    return f"none of the {images:,} training images could be used: {why}"


def describe_divergence(snapshot: MetricsSnapshot, kept: int | None, folder: Path) -> str:
    weights = "nothing had been saved" if kept is None else f"the weights of step {kept} are kept"
    return (
        f"loss or gradient was not finite in {snapshot.skipped} updates, first at step {snapshot.first_bad}; "
        f"{weights}. `vitrail replay {folder} --step {snapshot.first_bad}` runs that batch again; its images are in "
        f"bad_batch.json. {GENTLER}"
    )


def describe_overflow(step: int, steps: int, fault: str, kept: int | None) -> str:
    """`fault` names a tensor and what it holds."""
    return (
        f"step {step:,} of {steps:,} was reached, but its weights have overflowed ({fault}), so they were not written; "
        f"{_describe_kept(kept)}. {GENTLER}"
    )


def describe_failed_write(step: int, steps: int, kept: int | None, *, weights: bool) -> str:
    """`weights` says whether the weights could be written, and only the checkpoint could not."""
    what = f"checkpoint could not be written ({LAST} was)" if weights else "weights could not be written"
    return (
        f"step {step:,} of {steps:,} was reached, but its {what}; {_describe_kept(kept)}. The log says why. Free some "
        "disk space and resume with the same command"
    )


def describe_missing_folder(folder: Path, step: int, steps: int) -> str:
    return (
        f"the run folder {folder} was removed or moved while the run was at step {step:,} of {steps:,}: no checkpoint "
        "and no weights are left there; start again with the same command"
    )


def _describe_kept(kept: int | None) -> str:
    return "there is no earlier checkpoint" if kept is None else f"the checkpoint of step {kept:,} is intact"


def describe_failure(error: BaseException, processes: int) -> str:
    """An error in one line. With several processes, the first to notice a loss rarely knows which one it was."""
    if isinstance(error, VitrailError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if processes > 1 and isinstance(error, RuntimeError) and any(name in text.lower() for name in ("gloo", "nccl")):
        return f"another process of the job was lost, and the job's output says which ({text})"
    return text


def describe_ending(ending: str, step: int, steps: int, since: int) -> str:
    if ending == "interrupted":
        return f"stopped by a signal after step {step:,} of {steps:,}, saved"
    if ending == "early":
        return f"stopped early at step {step:,}: {since} scorings without a better one"
    return f"all {steps:,} steps done"
