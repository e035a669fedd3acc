"""What a run says when something happens to it: the cause, what is kept, and what to do."""

from pathlib import Path

from vitrail.core.errors import VitrailError
from vitrail.train.run_folder.files import LAST
from vitrail.train.runtime.throughput import Reading

GENTLER = "Start again, or go on with --force, with a lower optim.lr, a longer schedule.warmup, or optim.clip=1"


def halved(before: int, after: int, parts: int) -> str:
    return f"out of memory with {before} images at once: going on with {after}, and {parts} micro-batches a step"


def out_of_memory(step: int, taken: int, *, couples: bool) -> str:
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


def left_out(more: int, reading: Reading, limit: int) -> str:
    return (
        f"{more} update{'s' if more > 1 else ''} left out up to step {reading.step:,}: loss or gradient was not finite "
        f"(first at step {reading.first_bad:,}, counted from 0; {reading.skipped} in all, {limit} end the run)"
    )


def none_counted(images: int, unreadable: int, folder: Path) -> str:
    """`unreadable` counts the files that are known to be; without any, the images have no target that counts."""
    why = f"see {folder / 'unreadable.jsonl'}" if unreadable else "every label or pixel of theirs is ignored"
    return f"none of the {images:,} training images could be used: {why}"


def diverged(reading: Reading, kept: int | None, folder: Path) -> str:
    weights = "nothing had been saved" if kept is None else f"the weights of step {kept} are kept"
    return (
        f"loss or gradient was not finite in {reading.skipped} updates, first at step {reading.first_bad}; {weights}. "
        f"`vitrail replay {folder} --step {reading.first_bad}` runs that batch again; its images are in "
        f"bad_batch.json. {GENTLER}"
    )


def overflowed(step: int, steps: int, fault: str, kept: int | None) -> str:
    """`fault` names a tensor and what it holds."""
    return (
        f"step {step:,} of {steps:,} was reached, but its weights have overflowed ({fault}), so they were not written; "
        f"{_intact(kept)}. {GENTLER}"
    )


def unwritten(step: int, steps: int, kept: int | None, *, weights: bool) -> str:
    """`weights` says whether those could be written, and only the checkpoint could not."""
    what = f"checkpoint could not be written ({LAST} was)" if weights else "weights could not be written"
    return (
        f"step {step:,} of {steps:,} was reached, but its {what}; {_intact(kept)}. The log says why. Make room, and "
        "go on with the same command"
    )


def folder_gone(folder: Path, step: int, steps: int) -> str:
    return (
        f"the run folder {folder} was removed or moved while the run was at step {step:,} of {steps:,}: nothing of the "
        "run is left there, no checkpoint and no weights; start again with the same command"
    )


def _intact(kept: int | None) -> str:
    return "there is no checkpoint before it" if kept is None else f"the checkpoint of step {kept:,} is intact"


def failed(error: BaseException, processes: int) -> str:
    """An error in one line. Where processes talk, the one that hears of a loss first seldom knows who it was."""
    if isinstance(error, VitrailError):
        return str(error)
    told = f"{type(error).__name__}: {error}"
    if processes > 1 and isinstance(error, RuntimeError) and any(name in told.lower() for name in ("gloo", "nccl")):
        return f"another process of the job was lost, and the job's output says which ({told})"
    return told


def ended(ending: str, step: int, steps: int, since: int) -> str:
    if ending == "interrupted":
        return f"stopped by a signal after step {step:,} of {steps:,}, saved"
    if ending == "early":
        return f"stopped early at step {step:,}: {since} scorings without a better one"
    return f"all {steps:,} steps done"
