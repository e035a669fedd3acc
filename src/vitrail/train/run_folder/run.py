"""The folder of a run, from which a person can see what happened.

    RUN/
        config.json         the resolved run                 command.json     the command that started it
        environment.json    what it runs on                  status.json      its state
        metrics.jsonl       one row of numbers per line      tensorboard/     the same for TensorBoard
        log.txt             messages, with the time          lock             held while a job uses the folder
        checkpoints/  best.safetensors  last.safetensors  report.html  unreadable.jsonl

Nothing here stops a run: on a full disk it continues, reports it, and catches up once there is space again.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from vitrail.checkpoint.bundle import Bundle, get_card
from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.checkpoint.weights import write_bundle
from vitrail.core.config_overrides import diff_plain, drop_fields
from vitrail.core.console import escape_controls
from vitrail.core.errors import ConfigError
from vitrail.distributed.meta_init import gather_tensor
from vitrail.distributed.process_group import World
from vitrail.evaluation.result import describe_environment
from vitrail.models.backbone import Backbone
from vitrail.train.run_folder import files
from vitrail.train.run_folder.files import CONFIG, METRICS, STATUS, TENSORBOARD, AppendLog, EventFile, State, now

Plain: TypeAlias = Mapping[str, Any]
LISTED: Final = 40  # differing fields that an error lists
REMEMBERED: Final = 200  # notes
# Fields that older folders lack, with the values they had then.
LATER_FIELDS: Final[Plain] = {
    "start": "zero",
    "positions": "resized",
    "objective": {"kind": "Classification"},
    "data": {"part": 1.0, "part_seed": 0},
    "augmentation": {"crop": {"sampler": "torchvision"}},
}


class RunFolder:
    """The folder of a run, held by one job. `next` is the command that resumes the run; `warnings` are the notes since
    the start."""

    def __init__(self, path: Path, lock: files.RunLock, *, next: str, tell: files.Tell) -> None:
        self.path, self.next, self.tell = path, next, tell
        self.warnings: list[str] = []
        self.failures = files.FailureNotes(self.note)
        self._lock, self._writing = lock, threading.RLock()
        self._reserve = files.DiskReserve(path / ".reserve")
        self._metrics = AppendLog(path / METRICS, tell)
        self._log = AppendLog(path / files.LOG, tell, self._reserve)
        self._events: EventFile | None = None
        self._status: dict[str, Any] = {"started": now(), "pid": os.getpid(), "host": socket.gethostname()}
        self._tables: dict[str, Any] = {}
        self._metrics.cut_partial_line()
        self._log.cut_partial_line()
        self._reserve.hold()
        self._identity = _identify(path)

    @staticmethod
    def open(
        path: Path, *, config: Plain, command: Plain, force: bool = False, free: Collection[str] = (), tell: files.Tell
    ) -> "RunFolder":
        """Creates the folder, or opens an existing one if its config is the same.

        ConfigError if a field differs, unless `force` is set or the field is in `free`, by its own name or by that of
        its parent ("keep" or "data.workers"). What `force` changes is written by `write_tables`.
        """
        with contextlib.ExitStack() as on_error:
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock = files.RunLock(path, tell)
                on_error.callback(lock.release)
                untrained = _is_untrained(path)
                changes = compare_config(path, files.to_json_value(config), free=free, force=force or untrained)
                folder = RunFolder(path, lock, next=str(command.get("go_on", "")), tell=tell)
                folder._tables = {CONFIG: config, files.COMMAND: command, files.ENVIRONMENT: describe_environment()}
                if not changes or untrained:
                    folder.write_tables()
            except OSError as error:
                raise _unwritable(path, error) from error
            on_error.pop_all()
        folder.set_status("preparing")
        why = " (nothing had been trained yet)" if untrained else " by --force"
        for change in changes:
            folder.note(f"config changed{why}: {change}")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def exists(self) -> bool:
        """Whether the path still leads to this folder; another run may have one of the same name."""
        try:
            return _identify(self.path) == self._identity
        except FileNotFoundError:
            return False
        except OSError:  # a file system that does not answer may do so again
            return True

    def write_tables(self) -> None:
        """Replaces config, command and environment, once the contents of the folder are known to fit them."""
        try:
            for name, content in self._tables.items():
                files.write_json(self.path / name, content)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._tables = {}

    def record(self, row: Mapping[str, Any], text: str = "") -> None:
        """Records a row of metrics, with its `step`; `text` also goes to the log."""
        with self._writing:
            self._metrics.append(files.encode_row(row))
            if text:
                self._log.append(f"{now()} {text}\n".encode())
            if (events := self._open_events()) is not None:
                events.add(row)

    def rewind(self, step: int) -> None:
        """Removes the metrics after a step, from which the run resumes, and the final score."""
        with self._writing:
            self._metrics.close()
            try:
                files.rewind_rows(self.path / METRICS, step)
            except OSError as error:
                self.note(f"{METRICS} could not be cut back to step {step} ({error.strerror}); later rows appear twice")
            if (events := self._open_events()) is not None:
                events.restart(step)

    def note(self, text: str) -> None:
        """Logs a line and shows it to the observer. May be called from any thread."""
        self.log(text)
        self.tell(text)

    def log(self, text: str) -> None:
        """Logs a line, with the time."""
        with self._writing:
            self.warnings = [*self.warnings[-REMEMBERED + 1 :], text]
            self._log.append(f"{now()} {escape_controls(' '.join(text.splitlines()))}\n".encode())
            if not self._log.failing:
                self._reserve.hold()

    def set_status(self, state: State, *, step: int | None = None, total: int | None = None, message: str = "") -> None:
        """Writes the state of the run; `step` and `total` keep their values if they are not given. A new state is
        forced to disk; a mere sign of life does not wait for a disk that may be busy with a checkpoint."""
        with self._writing:
            write = files.write_json if state != self._status.get("state") else _write_quickly
            self._status |= {"state": state, "updated": now(), "message": message}
            self._status["next"] = "" if state in ("done", "diverged") else self.next
            self._status |= {name: value for name, value in (("step", step), ("steps", total)) if value is not None}
            with self.failures.note_once(f"{self.path / STATUS} cannot be written", "the run continues and will retry"):
                self._reserve.use_for(partial(write, self.path / STATUS, self._status))

    def write_json(self, name: str, content: Any) -> None:
        """Writes another file; a full disk is noted, and does not stop the run."""
        with self.failures.note_once(f"{self.path / name} could not be written", "the run continues"):
            files.write_json(self.path / name, content)

    def close(self) -> None:
        """Releases the folder."""
        with self._writing:
            self._metrics.close()
            self._log.close()
            if self._events is not None:
                self._events.close()
            self._reserve.release()
            self._lock.release()

    def _open_events(self) -> EventFile | None:
        if self._events is None:
            path = self.path / TENSORBOARD
            with self.failures.note_once(f"{path} cannot be written", "the run continues without it"):
                self._events = EventFile(path, self.tell)
        return self._events


class NullRunFolder(RunFolder):
    """The folder as the other processes see it: a path to which nothing is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.next, self.warnings = path, "", []

    def exists(self) -> bool:
        return True

    def _ignore(self, *values: Any, **named: Any) -> None: ...

    write_tables = record = rewind = note = log = write_json = close = set_status = _ignore


def compare_config(folder: Path, config: Mapping[str, Any], *, free: Collection[str], force: bool) -> list[str]:
    """What `force` overrides in the config of the folder; without it, ConfigError if something differs."""
    if not (folder / CONFIG).exists():
        return []
    try:
        old = fill_missing_fields(files.read_json(folder / CONFIG), config)
    except ConfigError:
        if force:
            return [f"{CONFIG} was damaged"]
        raise
    found = drop_fields(diff_plain(old, json.loads(json.dumps(config))), free)
    if not found or force:
        return found
    listed = "; ".join(found[:LISTED]) + (f"; and {len(found) - LISTED} more" if len(found) > LISTED else "")
    remedy = "add --force to continue with the new one, or give another --out"
    raise ConfigError(f"{folder} holds a run with another config ({listed}); {remedy}")


def fill_missing_fields(old: Plain, config: Plain, later: Plain = LATER_FIELDS) -> dict[str, Any]:
    """An older config completed by the fields that were added later."""
    found = dict(old)
    for name, value in later.items():
        inner, now = old.get(name), config.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping) and isinstance(now, Mapping):
            inner, now, value = (cast(Plain, each) for each in (inner, now, value))
            found[name] = fill_missing_fields(inner, now, value)
        elif name in config and name not in old and not isinstance(value, Mapping):
            found[name] = value
    return found


def _identify(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _unwritable(path: Path, error: OSError) -> ConfigError:
    cause = f"the run folder {path} cannot be written ({error.strerror or error})"
    return ConfigError(f"{cause}; free space, change its permissions or give another --out")


def _is_untrained(folder: Path) -> bool:
    """Whether the run in a folder failed before its first step, so that it can be replaced by another one."""
    if not (folder / STATUS).exists() or files.read_status(folder).get("state") != "failed":
        return False
    has_rows = any(row.get("step") for row in files.read_rows(folder / METRICS))
    return not has_rows and not list_checkpoints(folder / FOLDER)


def _write_quickly(path: Path, content: Any) -> None:
    """Replaces a JSON file atomically, without forcing it to disk."""
    temporary = path.with_name(f".{path.name}.tmp")  # one process holds the folder, one thread the status
    try:
        temporary.write_bytes(json.dumps(content, indent=1).encode() + b"\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_weights(path: Path, network: Backbone, world: World, provenance: dict[str, Any]) -> None:
    """Writes one self-describing file; all processes gather, the main one writes."""
    state = network.state_dict(keep_vars=True)
    tensors = {name: gather_tensor(tensor.detach(), world) for name, tensor in state.items()}
    if world.is_main:
        card = get_card(network)
        card = replace(card, provenance={**card.provenance, **provenance})
        write_bundle(Bundle(config=network.config, tensors=tensors, card=card), path)
