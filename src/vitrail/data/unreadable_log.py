"""A log of unreadable files, which lists each once, with its name and the reason.

An unreadable image is never replaced by another. Its place in the batch is filled with zeros and marked as not valid,
so that a step always has the same samples and the loss skips the place.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeAlias

from vitrail.core.errors import BadImage, DataError

FILE: Final = "unreadable.jsonl"


@dataclass(frozen=True, slots=True)
class UnreadableSample:
    """A sample that could not be decoded, with the reason."""

    sample: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


Tell: TypeAlias = Callable[[UnreadableSample], None]


class UnreadableLog:
    """Collects unreadable samples. With a folder it appends to `unreadable.jsonl` there; with `strict` the first one
    raises BadImage. `tell` is called once per file."""

    def __init__(self, folder: Path | None = None, *, strict: bool = False, tell: Tell | None = None) -> None:
        self.path = None if folder is None else folder / FILE
        self.strict, self.tell = strict, tell
        before = read_log(self.path) if self.path is not None and self.path.exists() else []
        self.known = {entry.name: entry for entry in before}

    def __len__(self) -> int:
        """Number of unreadable files."""
        return len(self.known)

    def note(self, found: Iterable[UnreadableSample]) -> None:
        """Adds the unreadable samples of a batch."""
        for entry in found:
            if self.strict:
                raise BadImage(f"{entry}; without --strict such files are skipped and listed")
            if entry.name in self.known:
                continue
            self.known[entry.name] = entry
            if self.path is not None:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(entry)) + "\n")  # ASCII, so that any name can be written
            if self.tell is not None:
                self.tell(entry)


def read_log(path: Path) -> list[UnreadableSample]:
    """The entries of an existing log; an incomplete last line is ignored."""
    entries: list[UnreadableSample] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for at, line in enumerate(lines):
        try:
            entries.append(UnreadableSample(**json.loads(line)))
        except (ValueError, TypeError):
            if at == len(lines) - 1 and not line.endswith(b"\n"):
                break
            raise DataError(f"{path}: line {at + 1} is not an entry of such a list; move the file away") from None
    return entries
