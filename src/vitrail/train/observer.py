"""Who hears how a run goes: a terminal, a program, or nobody.

Being asked to stop: the first SIGTERM or SIGINT ends the run after its step, a second SIGINT at once.

What a run says when something happens to it: the cause, what is kept, and what to do.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol, runtime_checkable

from vitrail.core.errors import VitrailError
from vitrail.data.loader import Batch
from vitrail.train.metrics import MetricsSnapshot
from vitrail.train.run_folder.files import LAST

STEP: Final = "step"  # what is advanced while the network trains
Advance = Callable[[str, int, int | None], None]  # what is being done, how much of it is done, how much there is


class Observer(Protocol):
    """Hears notes, and rows of metrics."""

    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


@runtime_checkable
class Advancing(Protocol):
    """An observer that also hears of every step, and of every batch of what comes between steps."""

    def advance(self, what: str, done: int, total: int | None) -> None: ...


class NullObserver:
    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


def ignore_advance(what: str, done: int, total: int | None) -> None:
    """Hears nothing."""


def get_advance(observer: object) -> Advance:
    """How the observer is told what is done; those of older programs do not ask for it."""
    return observer.advance if isinstance(observer, Advancing) else ignore_advance


def count_batches(
    batches: Iterable[Batch], what: str, total: int, advance: Advance, *, processes: int = 1
) -> Iterator[Batch]:
    """The batches as they are. After each the observer hears of how many of `total` images it was the last."""
    done = 0
    advance(what, 0, total)
    for batch in batches:
        yield batch
        done = min(done + len(batch) * processes, total)
        advance(what, done, total)


class Stop:
    """Whether a signal has come, and which."""

    def __init__(self) -> None:
        self.signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """What listens."""
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def listen_for_signals() -> Generator[Stop]:
    """Listens while a run goes on. Outside the main thread nobody can listen, and nothing changes. Where somebody
    listens already, as for several runs in turn, both hear the same: a signal is for all of them."""
    listening = signal.getsignal(signal.SIGINT)
    if isinstance(listening, Stop) or threading.current_thread() is not threading.main_thread():
        yield listening if isinstance(listening, Stop) else Stop()
        return
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


GENTLER = "Start again, or go on with --force, with a lower optim.lr, a longer schedule.warmup, or optim.clip=1"


def describe_smaller_micro(before: int, after: int, parts: int) -> str:
    return f"out of memory with {before} images at once: going on with {after}, and {parts} micro-batches a step"


def describe_out_of_memory(step: int, taken: int, *, couples: bool) -> str:
    """`taken` images at once were too many for the device."""
    if couples:
        what = (
            "its images are compared with each other and cannot be taken in parts: use a smaller batch or more "
            "processes, and --set recompute=true"
        )
    elif taken == 1:
        what = "not even one fits: use --set recompute=true, --set sharding=fsdp over several devices, or fewer tokens"
    else:
        what = f"go on with the same command and --set micro={taken // 2}"
    return f"out of memory at step {step:,} with {taken} image{'s' if taken > 1 else ''} at once; {what}"


def describe_skipped_updates(more: int, reading: MetricsSnapshot, limit: int) -> str:
    return (
        f"{more} update{'s' if more > 1 else ''} left out up to step {reading.step:,}: loss or gradient was not finite "
        f"(first at step {reading.first_bad:,}, counted from 0; {reading.skipped} in all, {limit} end the run)"
    )


def describe_unusable_images(images: int, unreadable: int, folder: Path) -> str:
    """`unreadable` counts the files that are known to be; without any, the images have no target that counts."""
    why = f"see {folder / 'unreadable.jsonl'}" if unreadable else "every label or pixel of theirs is ignored"
    return f"none of the {images:,} training images could be used: {why}"


def diverged(reading: MetricsSnapshot, kept: int | None, folder: Path) -> str:
    weights = "nothing had been saved" if kept is None else f"the weights of step {kept} are kept"
    return (
        f"loss or gradient was not finite in {reading.skipped} updates, first at step {reading.first_bad}; {weights}. "
        f"`vitrail replay {folder} --step {reading.first_bad}` runs that batch again; its images are in "
        f"bad_batch.json. {GENTLER}"
    )


def describe_overflow(step: int, steps: int, fault: str, kept: int | None) -> str:
    """`fault` names a tensor and what it holds."""
    return (
        f"step {step:,} of {steps:,} was reached, but its weights have overflowed ({fault}), so they were not written; "
        f"{_intact(kept)}. {GENTLER}"
    )


def describe_failed_write(step: int, steps: int, kept: int | None, *, weights: bool) -> str:
    """`weights` says whether those could be written, and only the checkpoint could not."""
    what = f"checkpoint could not be written ({LAST} was)" if weights else "weights could not be written"
    return (
        f"step {step:,} of {steps:,} was reached, but its {what}; {_intact(kept)}. The log says why. Make room, and "
        "go on with the same command"
    )


def describe_missing_folder(folder: Path, step: int, steps: int) -> str:
    return (
        f"the run folder {folder} was removed or moved while the run was at step {step:,} of {steps:,}: nothing of the "
        "run is left there, no checkpoint and no weights; start again with the same command"
    )


def _intact(kept: int | None) -> str:
    return "there is no checkpoint before it" if kept is None else f"the checkpoint of step {kept:,} is intact"


def describe_failure(error: BaseException, processes: int) -> str:
    """An error in one line. Where processes talk, the one that hears of a loss first seldom knows who it was."""
    if isinstance(error, VitrailError):
        return str(error)
    told = f"{type(error).__name__}: {error}"
    if processes > 1 and isinstance(error, RuntimeError) and any(name in told.lower() for name in ("gloo", "nccl")):
        return f"another process of the job was lost, and the job's output says which ({told})"
    return told


def describe_ending(ending: str, step: int, steps: int, since: int) -> str:
    if ending == "interrupted":
        return f"stopped by a signal after step {step:,} of {steps:,}, saved"
    if ending == "early":
        return f"stopped early at step {step:,}: {since} scorings without a better one"
    return f"all {steps:,} steps done"
