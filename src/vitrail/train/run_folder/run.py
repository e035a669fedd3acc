"""What a run leaves behind, and how a person tells from it what happened.

    RUN/
        config.json         the run as it was resolved       command.json     what was asked for
        environment.json    what it ran on                   status.json      how it stands
        metrics.jsonl       a row of numbers a line          tensorboard/     the same for TensorBoard
        log.txt             what was said, with the time     lock             held while a job uses the folder
        checkpoints/  best.safetensors  last.safetensors  report.html  unreadable.jsonl

Nothing here stops a run: on a full disk it goes on, says so, and writes what it kept when there is room again.

Weight files of a run: whatever is sharded or averaged, one file that describes itself.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, cast

from vitrail.checkpoint.bundle import Bundle, get_card
from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.checkpoint.weights import write_bundle
from vitrail.core.atomic_files import replace_on_success
from vitrail.core.config_overrides import diff_plain, drop_fields
from vitrail.core.console import escape_controls
from vitrail.core.errors import ConfigError
from vitrail.distributed.meta_init import gather_tensor
from vitrail.distributed.process_group import World
from vitrail.evaluation.result import describe_environment
from vitrail.models.backbone import Backbone
from vitrail.train.run_folder.files import (
    COMMAND,
    CONFIG,
    ENVIRONMENT,
    LOG,
    METRICS,
    STATUS,
    AppendLog,
    DiskReserve,
    RunLock,
    State,
    encode_row,
    now,
    read_json,
    read_rows,
    read_status,
    rewind_rows,
    to_json_value,
)
from vitrail.train.run_folder.tensorboard import FOLDER as BOARD
from vitrail.train.run_folder.tensorboard import EventFile

NAMED: Final = 40  # differing fields that a refusal lists
REMEMBERED: Final = 200  # notes
# Fields that older folders lack, as they were then.
LATER: Final[Mapping[str, Any]] = {
    "start": "zero",
    "positions": "resized",
    "objective": {"kind": "Classification"},
    "data": {"part": 1.0, "part_seed": 0},
    "augmentation": {"crop": {"sampler": "torchvision"}},
}


class RunFolder:
    """The folder of a run, held by one job. `next` is the command that goes on with the run, `warnings` is what was
    noted since the start."""

    def __init__(self, path: Path, lock: RunLock, *, next: str, tell: Callable[[str], None]) -> None:
        self.path, self.next, self.tell = path, next, tell
        self.warnings: list[str] = []
        self._lock, self._writing = lock, threading.RLock()
        self._reserve = DiskReserve(path / ".reserve")
        self._metrics = AppendLog(path / METRICS, tell)
        self._log = AppendLog(path / LOG, tell, self._reserve)
        self._board: EventFile | None = None
        self._status: dict[str, Any] = {"started": now(), "pid": os.getpid(), "host": socket.gethostname()}
        self._status_failed, self._board_failed = False, False
        self._tables: dict[str, Any] = {}
        self._metrics.mend()
        self._log.mend()
        self._reserve.hold()
        self._identity = _identity(path)

    @staticmethod
    def open(
        path: Path,
        *,
        rank: int = 0,
        config: Mapping[str, Any],
        command: Mapping[str, Any],
        force: bool = False,
        free: Collection[str] = frozenset(),
        tell: Callable[[str], None],
    ) -> "RunFolder":
        """Make the folder, or take up one that is there, if it is of this config.

        A field that differs from the config in the folder is refused without `force`, unless it is named in `free`, by
        itself or by what it is part of ("keep" or "data.workers"). Only the first process writes; others get a folder
        that does nothing. What `force` changes is written when `taken_up` is called.
        """
        if rank:
            return NullRunFolder(path)
        lock: RunLock | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = RunLock(path, tell)
            untrained = _untrained(path)
            changes = compare_config(path, to_json_value(config), free=free, force=force or untrained)
            folder = RunFolder(path, lock, next=str(command.get("go_on", "")), tell=tell)
            folder._tables = {
                CONFIG: to_json_value(config),
                COMMAND: to_json_value(command),
                ENVIRONMENT: describe_environment(),
            }
            if not changes or untrained:
                folder.taken_up()
        except OSError as error:
            if lock is not None:
                lock.release()
            raise _unwritable(path, error) from error
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        folder.status("preparing")
        for change in changes:
            folder.note(f"config changed{', where nothing had been trained' if untrained else ' by --force'}: {change}")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_there(self) -> bool:
        """Whether the path still leads to this folder; one of the same name may be another run's."""
        try:
            return _identity(self.path) == self._identity
        except FileNotFoundError:
            return False
        except OSError:  # a file system that does not answer may do so again
            return True

    def taken_up(self) -> None:
        """What lies here fits the new config: it takes the old one's place, which until now stood as it was."""
        try:
            for name, content in self._tables.items():
                _write_json(self.path / name, content)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._tables = {}

    def record(self, row: Mapping[str, Any], text: str = "") -> None:
        """A row of metrics, with its `step`; a `text` is a line of the log, too."""
        with self._writing:
            self._metrics.append(encode_row(row))
            if text:
                self._log.append(f"{now()} {text}\n".encode())
            board = self._open_board()
            if board is not None:
                board.add(row)

    def rewind(self, step: int) -> None:
        """Forget the metrics after a step, from which the run resumes, and the score of an end that is yet to come."""
        with self._writing:
            self._metrics.close()
            try:
                rewind_rows(self.path / METRICS, step)
            except OSError as error:
                self.note(f"{METRICS} could not be cut back to step {step} ({error.strerror}); later rows stand twice")
            board = self._open_board()
            if board is not None:
                board.restart(step)

    def note(self, text: str) -> None:
        """A line in the log that `tell` hears, too. May be called from any thread."""
        self.log(text)
        self.tell(text)

    def log(self, text: str) -> None:
        """A line in the log, with the time."""
        with self._writing:
            self.warnings = [*self.warnings[-REMEMBERED + 1 :], text]
            self._log.append(f"{now()} {escape_controls(' '.join(text.splitlines()))}\n".encode())
            if not self._log.failing:
                self._reserve.hold()

    def status(
        self, state: State, *, step: int | None = None, total: int | None = None, message: str | None = None
    ) -> None:
        """How the run stands; `step` and `total` stay as they were where they are not given."""
        with self._writing:
            changed = state != self._status.get("state")
            self._status |= {"state": state, "updated": now(), "message": message or ""}
            self._status["next"] = "" if state in ("done", "diverged") else self.next
            for name, value in (("step", step), ("steps", total)):
                if value is not None:
                    self._status[name] = value
            self._write_status(sync=changed)

    def write_json(self, name: str, content: Any) -> None:
        """Something else to keep, under a name of its own; a full disk is told of."""
        try:
            _write_json(self.path / name, to_json_value(content))
        except OSError as error:
            self.note(f"{self.path / name} could not be written ({error.strerror}); the run goes on")

    def close(self) -> None:
        """Give the folder free."""
        with self._writing:
            self._metrics.close()
            self._log.close()
            if self._board is not None:
                self._board.close()
            self._reserve.give()
            self._lock.release()

    def _open_board(self) -> EventFile | None:
        if self._board is None:
            try:
                self._board = EventFile(self.path / BOARD, self.tell)
            except OSError as error:
                if not self._board_failed:
                    self.note(f"{self.path / BOARD} cannot be written ({error.strerror}); the run goes on without it")
                self._board_failed = True
        return self._board

    def _write_status(self, *, sync: bool) -> None:
        """Atomic, and on disk where the state is a new one. A mere sign of life does not wait for the disk, which may
        be busy with a checkpoint."""
        content = json.dumps(self._status, indent=1).encode() + b"\n"
        try:
            try:
                _replace(self.path / STATUS, content, sync=sync)
            except OSError:
                self._reserve.give()
                _replace(self.path / STATUS, content, sync=sync)
        except OSError as error:
            if not self._status_failed:
                self.note(
                    f"{self.path / STATUS} cannot be written ({error.strerror}); the run goes on, and tries again"
                )
            self._status_failed = True
        else:
            self._status_failed = False


class NullRunFolder(RunFolder):
    """The folder as the other processes see it: a path, and nothing is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.next, self.warnings = path, "", []

    def is_there(self) -> bool:
        return True

    def taken_up(self) -> None: ...
    def record(self, row: Mapping[str, Any], text: str = "") -> None: ...
    def rewind(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def log(self, text: str) -> None: ...
    def write_json(self, name: str, content: Any) -> None: ...
    def close(self) -> None: ...
    def status(
        self, state: State, *, step: int | None = None, total: int | None = None, message: str | None = None
    ) -> None: ...


def compare_config(folder: Path, config: Mapping[str, Any], *, free: Collection[str], force: bool) -> list[str]:
    """What `force` overrules in the config that lies in the folder; without it, an error."""
    if not (folder / CONFIG).exists():
        return []
    try:
        old = fill_missing_fields(read_json(folder / CONFIG), config)
    except ConfigError:
        if force:
            return [f"{CONFIG} was damaged"]
        raise
    lines = diff_plain(old, json.loads(json.dumps(config)))
    found = drop_fields(lines, (name.removesuffix(".*") for name in free))
    if not found or force:
        return found
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    listed = "; ".join([*found[:NAMED], *more])
    remedy = "add --force to go on with the new one, or give another --out"
    raise ConfigError(f"{folder} holds a run with another config ({listed}); {remedy}")


def fill_missing_fields(
    old: Mapping[str, Any], config: Mapping[str, Any], later: Mapping[str, Any] = LATER
) -> dict[str, Any]:
    """An older config with the fields that it lacks and a new one has."""
    found = dict(old)
    for name, value in later.items():
        inner, now = old.get(name), config.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping) and isinstance(now, Mapping):
            found[name] = fill_missing_fields(
                cast(Mapping[str, Any], inner), cast(Mapping[str, Any], now), cast(Mapping[str, Any], value)
            )
        elif name in config and name not in old and not isinstance(value, Mapping):
            found[name] = value
    return found


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _unwritable(path: Path, error: OSError) -> ConfigError:
    cause = f"the run folder {path} cannot be written ({error.strerror or error})"
    return ConfigError(f"{cause}; free space, change its permissions or give another --out")


def _untrained(folder: Path) -> bool:
    """Whether the run in a folder failed before its first step, so that there is nothing to mix another with."""
    if not (folder / STATUS).exists() or read_status(folder).get("state") != "failed":
        return False
    return not list_checkpoints(folder / FOLDER) and not any(row.get("step") for row in read_rows(folder / METRICS))


def _write_json(path: Path, content: Any) -> None:
    with replace_on_success(path) as file:
        file.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def _replace(path: Path, content: bytes, *, sync: bool) -> None:
    if sync:
        with replace_on_success(path) as file:
            file.write(content)
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_weights(path: Path, network: Backbone, world: World, provenance: dict[str, Any]) -> None:
    """All processes take part in gathering; the first one writes."""
    card = get_card(network)
    tensors = {
        name: gather_tensor(tensor.detach(), world) for name, tensor in network.state_dict(keep_vars=True).items()
    }
    if world.rank == 0:
        told = {**card.provenance, **provenance}
        bundle = Bundle(
            config=network.config,
            tensors=tensors,
            card=replace(card, provenance=told),
        )
        write_bundle(bundle, path)


def get_provenance(network: Backbone) -> dict[str, Any]:
    """What the weights that a run started from said of themselves."""
    return get_card(network).provenance


def set_provenance(network: Backbone, provenance: dict[str, Any]) -> None:
    """Of a run that goes on, whose first weights may be gone."""
    network.card = replace(get_card(network), provenance=provenance)
