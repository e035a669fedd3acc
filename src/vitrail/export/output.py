"""Outputs of an export, which get their names only once they are checked, and `ExportResult`, which describes them."""

import contextlib
import os
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from vitrail.checkpoint.bundle import sidecar_path
from vitrail.core.atomic_files import sync_folder
from vitrail.core.errors import ConfigError, ExportRefused
from vitrail.export.verify import ExportReport, ExportScores, ExportSpeed


@contextlib.contextmanager
def atomic_output(target: Path) -> Generator[Path]:
    """Yields a path to write a file or folder to, in a hidden folder next to the target. After the block, it and any
    files next to it are moved to their final names; if the block raises, nothing is left."""
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=target.absolute().parent, prefix=".vitrail-export-", ignore_cleanup_errors=True
        ) as scratch:
            yield Path(scratch) / target.name
            put_in_place(Path(scratch), target.absolute())
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror or error}); give another --out") from error


def put_in_place(scratch: Path, target: Path) -> None:
    """Moves every file of the scratch folder next to the target; each is synced to disk before it is renamed."""
    files = sorted(path for path in scratch.rglob("*") if path.is_file())
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    stale = sidecar_path(target / "model.safetensors" if target.is_dir() else target)
    stale.unlink(missing_ok=True)  # of a previous export
    mask = os.umask(0o077)  # the mask can only be read by setting it
    os.umask(mask)
    for file in files:
        final = target.parent / file.relative_to(scratch)
        final.parent.mkdir(exist_ok=True)
        file.chmod(0o666 & ~mask)  # the temporary folder is private, its files must not be
        os.replace(file, final)
        sync_folder(final.parent)


def check_target(target: Path, *, suffixes: tuple[str, ...], folder: bool = False, source: Path | None = None) -> None:
    """Refuses a target that cannot be written, before any work is done, or that is `source`, the weights."""
    named = ", ".join(suffixes)
    if source is not None and target.exists() and target.samefile(source):
        raise ConfigError(f"{target} holds the weights themselves; give another --out")
    if folder:
        if target.exists() and not target.is_dir():
            raise ExportRefused(f"{target} is a file, but this format is a folder; give another --out")
    elif target.suffix not in suffixes:
        raise ConfigError(f"{target} must end in {named}; give another --out")
    elif target.is_dir():
        raise ConfigError(f"{target} is a folder; name a file in it, ending in {named}")
    above = next(path for path in (target.absolute() / "x").parents if path.exists() and path != target.absolute())
    if not above.is_dir():
        raise ConfigError(f"{target} cannot be written: {above} is not a folder; give another --out")
    for place in (above, target) if folder and target.is_dir() else (above,):
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"{target} cannot be written: no permission to write to {place}; give another --out")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """What was written, the result of its check, notes on the format's limits, and the call that loads it (`use`). For
    an int8 file, `report` is its own check, and `plain` that of the float file it was made from."""

    target: Path
    to: str
    files: tuple[Path, ...]
    report: ExportReport
    use: str
    notes: tuple[str, ...] = ()
    scores: ExportScores | None = None
    pace: ExportSpeed | None = None
    plain: ExportReport | None = None
    plain_bytes: int = 0
    replaced: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def list_files(target: Path) -> tuple[Path, ...]:
    """The files of an export: the target and its companions (.data, .vitrail.json), or everything in a folder."""
    if target.is_dir():
        return tuple(sorted(path for path in target.iterdir() if path.is_file()))
    others = (target.with_name(target.name + end) for end in (".data", ".vitrail.json"))
    return (target, *(path for path in others if path.is_file()))
