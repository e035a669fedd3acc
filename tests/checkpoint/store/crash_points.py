"""The moments of a save at which a crash leaves something new behind."""

from typing import Final

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
