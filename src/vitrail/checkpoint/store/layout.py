"""What lies where in a run's `checkpoints` folder, and what a name there promises.

    00001000/                                whole: every byte of it was on disk before it took this name
        shard-00000-of-00002.safetensors     what a process held, sealed
        shard-00001-of-00002.safetensors
        checkpoint.json                      step, facts and the digest of every shard's header
    .saving-00001100-TOKEN/                  being written, or cut off while it was
    .replaced-00001000-TOKEN/                whole, and making room for a new one of the same step
    .removing-00000900-TOKEN/                being removed

So a crash at any moment leaves whole checkpoints under their names, and next to them only what the next start clears.

The moments of a save at which a crash leaves something new behind, so that a test can crash at each of them.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vitrail.core.atomic_files import sync_folder, unobserved

_FILE: Final = (
    "before write",
    "after write",
    "before sync",
    "after sync",
    "before rename",
    "after rename",
    "after folder sync",
)

CRASH_POINTS: Final = (
    "saving: before make",
    "saving: after make",
    *(f"shard: {moment}" for moment in _FILE),
    *(f"part: {moment}" for moment in _FILE[:-1]),  # of every process but the first
    *(f"manifest: {moment}" for moment in _FILE),
    "part: before unlink",
    "part: after unlink",
    "replaced: before rename",  # a checkpoint of the same step that is no longer wanted steps aside
    "replaced: after rename",
    "checkpoint: before rename",
    "checkpoint: after rename",
    "checkpoint: after folder sync",
    "old: before rename",
    "old: after rename",
    "old: before unlink",
    "old: after unlink",
    "old: after remove",
)

reached: Callable[[str], None] = unobserved
"""Told of each point as a save comes to it. A test puts its own here; nothing else does."""


def at(what: str) -> Callable[[str], None]:
    """Tells `reached` of the moments of one thing that is written."""

    def tell(moment: str) -> None:
        reached(f"{what}: {moment}")

    return tell


FOLDER: Final = "checkpoints"
MANIFEST: Final = "checkpoint.json"
PLAIN: Final = re.compile(r"[0-9]{8,}")
ASIDE: Final = re.compile(r"\.replaced-([0-9]{8,})-.*")


def step_name(step: int) -> str:
    return f"{step:08d}"


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def part_name(rank: int) -> str:
    """The note in which a process tells the first one what became of its shard; gone once the checkpoint is whole."""
    return f"part-{rank:05d}.json"


def saving(folder: Path, step: int, token: str) -> Path:
    return folder / f".saving-{step_name(step)}-{token}"


def places(folder: Path) -> dict[int, Path]:
    """Where the checkpoint of each step lies, newest first. One that made room counts while its successor has not
    taken the name."""
    found: dict[int, Path] = {}
    try:
        entries = sorted(folder.iterdir())  # names with a dot sort first, so a plain one has the last word
    except FileNotFoundError:
        return {}
    for entry in entries:
        if aside := ASIDE.fullmatch(entry.name):
            found[int(aside[1])] = entry
        elif PLAIN.fullmatch(entry.name):
            found[int(entry.name)] = entry
    return dict(sorted(found.items(), reverse=True))


def unfinished(folder: Path) -> list[int]:
    """The steps whose save was cut off, or is going on."""
    if not folder.is_dir():
        return []
    names = (entry.name.split("-") for entry in folder.iterdir() if entry.name.startswith(".saving-"))
    return sorted(int(parts[1]) for parts in names if len(parts) == 3 and parts[1].isdigit())


def commit(source: Path, target: Path, token: str) -> None:
    """Give a whole folder its name. One that stands there is set aside first and put back if this fails; `tidy` removes
    it."""
    aside = target.with_name(f".replaced-{target.name}-{token}")
    standing = target.exists()
    if standing:
        at("replaced")("before rename")
        os.rename(target, aside)
        at("replaced")("after rename")
    try:
        at("checkpoint")("before rename")
        os.rename(source, target)
    except BaseException:
        if standing:
            os.rename(aside, target)
        raise
    at("checkpoint")("after rename")
    sync_folder(target.parent)
    at("checkpoint")("after folder sync")


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a half-removed one is never taken for whole."""
    doomed = checkpoint.with_name(f".removing-{checkpoint.name.strip('.')}-{secrets.token_hex(4)}")
    at("old")("before rename")
    os.rename(checkpoint, doomed)
    sync_folder(checkpoint.parent)
    at("old")("after rename")
    remove(doomed)


def remove(folder: Path) -> None:
    """Remove a folder whose name promises nothing."""
    for entry in sorted(folder.iterdir()):
        at("old")("before unlink")
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        at("old")("after unlink")
    folder.rmdir()
    at("old")("after remove")


def tidy(folder: Path, token: str) -> None:
    """Clear what crashes left behind; only for the one process that may write here. What bears `token` is of this
    start."""
    standing = places(folder)
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith((".saving-", ".removing-")) and not entry.name.endswith(f"-{token}"):
            with contextlib.suppress(FileNotFoundError):
                remove(entry)
        elif aside := ASIDE.fullmatch(entry.name):
            if standing[int(aside[1])] == entry:
                os.rename(entry, folder / aside[1])
            else:
                discard(entry)
    sync_folder(folder)
