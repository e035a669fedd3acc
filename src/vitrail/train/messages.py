"""What a run says when something happens to it: the cause, what is kept, and what to do."""

from pathlib import Path

from vitrail.train.meter import Reading


def halved(before: int, after: int, parts: int) -> str:
    return f"out of memory with {before} pictures at once: going on with {after}, and {parts} micro-batches a step"


def left_out(more: int, reading: Reading, limit: int) -> str:
    return (
        f"{more} update{'s' if more > 1 else ''} left out up to step {reading.step:,}: loss or gradient was not finite "
        f"(first at step {reading.first_bad:,}, counted from 0; {reading.skipped} in all, {limit} end the run)"
    )


def exploded(reading: Reading, kept: int | None, folder: Path) -> str:
    weights = "nothing had been saved" if kept is None else f"the weights of step {kept} are kept"
    return (
        f"loss or gradient was not finite in {reading.skipped} updates, first at step {reading.first_bad}; {weights}. "
        f"`vitrail replay {folder} --step {reading.first_bad}` runs that batch again; its pictures are in "
        "bad_batch.json. Start anew, or go on with --force, with a lower optim.lr, a longer schedule.warmup, or "
        "optim.clip=1"
    )


def unwritten(step: int, steps: int, kept: int | None) -> str:
    intact = "no checkpoint" if kept is None else f"the checkpoint of step {kept:,}"
    return (
        f"step {step:,} of {steps:,} was reached, but its weights could not be written; {intact} is intact. Make room, "
        "and go on with the same command"
    )


def ended(ending: str, step: int, steps: int, since: int) -> str:
    if ending == "interrupted":
        return f"stopped by a signal after step {step:,} of {steps:,}, saved"
    if ending == "early":
        return f"stopped early at step {step:,}: {since} scorings without a better one"
    return f"all {steps:,} steps done"
