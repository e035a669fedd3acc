"""What an export gives back."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.export.check import Report
from vitrail.export.pace import Pace
from vitrail.export.scores import Scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What was written where, what its check found, what the format could not do, and how it is loaded (`use`). Of an
    int8 file `report` is its own, `plain` that of the float file that it was made from."""

    target: Path
    to: str
    files: tuple[Path, ...]
    report: Report
    use: str
    notes: tuple[str, ...] = ()
    scores: Scores | None = None
    pace: Pace | None = None
    plain: Report | None = None
    plain_bytes: int = 0
    replaced: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def files_of(target: Path) -> tuple[Path, ...]:
    """A file with what lies beside it under its name, or what is in a folder."""
    if target.is_dir():
        return tuple(sorted(path for path in target.iterdir() if path.is_file()))
    beside = (target.with_name(target.name + end) for end in (".data", ".vitrail.json"))
    return (target, *(path for path in beside if path.is_file()))
