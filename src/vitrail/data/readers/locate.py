"""Where the files of a list are: as it says, or as it is meant. Lists are written elsewhere, and name their images by
Windows paths, by paths of another machine, without the folder or without the suffix."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from vitrail.core.errors import DataError
from vitrail.data.readers.folder import is_folder, is_picture, listed
from vitrail.data.readers.split_folders import split_in_name

TRIED: Final = 8  # names that are looked for as they are; where all are there, so are the rest, or they are missing
DEEP: Final = 4  # folders below that of the list
MOST: Final = 5_000_000  # files that are looked through


class Locator:
    """The images near a list, by their names; looked through when the first name is not there as it is."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        self.whole: set[str] = set()
        self.tails: dict[str, list[str]] = {}  # by the last part of the name, with and without its suffix
        self.looked = False
        self.distinct = True  # whether no two names of the list end alike

    def find_all(self, names: Sequence[str]) -> list[str]:
        """Every name as a path from the folder of the list; one that is not found stays as it is."""
        if all(self.is_there(name) for name in names[:TRIED]):
            return list(names)
        self.distinct = len({name.replace("\\", "/").rpartition("/")[2] for name in names}) == len(names)
        return [self.find(name) or name for name in names]

    def finds(self, names: Sequence[str]) -> bool:
        """Whether any of the first names is a file."""
        return any(self.find(name) for name in names[:TRIED])

    def is_there(self, name: str) -> bool:
        return bool(name) and os.path.isfile(self.folder / name)

    def find(self, name: str) -> str | None:
        """The file that a name means. The folders of a relative path must agree; of another machine's path the last
        ones count, and the name alone only where no two names of the list end alike."""
        if self.is_there(name):
            return name
        self.look()
        parts = [part for part in name.strip().replace("\\", "/").split("/") if part not in ("", ".")]
        if not parts:
            return None
        if (same := "/".join(parts)) in self.whole:
            return same
        found = self.tails.get(parts[-1], [])
        agreeing = [shared(parts, one) for one in found]
        foreign = re.match(r"[/\\]|[A-Za-z]:", name.strip()) is not None
        least = len(parts) - 1 if not foreign else 0 if self.distinct else 1
        most = max(agreeing, default=0)
        found = [one for one, count in zip(found, agreeing, strict=True) if count == most >= least]
        if len(found) > 1:
            named = [one for one in found if self.is_named_like(one)]
            found = named or found
        if len(found) > 1:
            raise DataError(
                f"{self.path}: {name} may be {found[0]} or {found[1]}; write the folder in the list, or put the list "
                "into the folder of its images"
            )
        return found[0] if found else None

    def is_named_like(self, name: str) -> bool:
        """train.csv and train_images/1.jpg: whether a file is in a folder called like the list, or its split."""
        stem = self.path.stem.lower()
        folders = [part.lower() for part in PurePosixPath(name).parts[:-1]]
        split = split_in_name(stem)
        return any(folder == stem or (split and split_in_name(folder) == split) for folder in folders)

    def look(self) -> None:
        if self.looked:
            return
        self.looked = True
        waiting = [("", 0)]
        while waiting:
            inside, depth = waiting.pop()
            for entry in listed(str(self.folder / inside) if inside else str(self.folder)):
                name = f"{inside}/{entry.name}" if inside else entry.name
                if is_folder(entry):
                    waiting += [(name, depth + 1)] if depth < DEEP else []
                elif is_picture(entry.name):
                    self.add(name, entry.name)

    def add(self, name: str, last: str) -> None:
        self.whole.add(name)
        if len(self.whole) > MOST:
            raise DataError(f"{self.folder} holds more than {MOST:,} images; write the paths into {self.path.name}")
        for tail in {last, os.path.splitext(last)[0]}:
            self.tails.setdefault(tail, []).append(name)


def shared(parts: Sequence[str], name: str) -> int:
    """How many folders two names have in common, from the last one on."""
    count = 0
    for one, other in zip(reversed(parts[:-1]), reversed(name.split("/")[:-1]), strict=False):
        if one != other:
            break
        count += 1
    return count
