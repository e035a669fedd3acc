"""The names in a run folder, and what they say to whoever only reads."""

import json
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from vitrail.core.errors import ConfigError, reason_of

CONFIG: Final = "config.json"
COMMAND: Final = "command.json"
ENVIRONMENT: Final = "environment.json"
STATUS: Final = "status.json"
METRICS: Final = "metrics.jsonl"
LOG: Final = "log.txt"
BEST: Final = "best.safetensors"
LAST: Final = "last.safetensors"
SWEEP: Final = "sweep.json"
POINTS: Final = "sweep"  # a folder for each point in it

State: TypeAlias = Literal["preparing", "running", "interrupted", "exploded", "failed", "done"]


def command_in(folder: Path) -> dict[str, Any]:
    """What was asked for when the run in a folder was started."""
    return read_json(_run(folder) / COMMAND)


def is_done(folder: Path) -> bool:
    """Whether a run was finished in the folder."""
    return (folder / STATUS).exists() and status_in(folder).get("state") == "done"


def status_in(folder: Path) -> dict[str, Any]:
    """How the run stood when it last said so; empty where that cannot be read, as after a power cut."""
    try:
        return read_json(folder / STATUS)
    except ConfigError:
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """One of the folder's tables."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); is {path.parent} a run folder?") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({reason_of(error)}); remove it, or give another --out") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged (no table); remove it, or give another --out")
    return cast(dict[str, Any], content)


def _run(folder: Path) -> Path:
    if not (folder / COMMAND).is_file():
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise ConfigError(f"{folder} {what}: there is no {COMMAND}; give the folder of a run")
    return folder
