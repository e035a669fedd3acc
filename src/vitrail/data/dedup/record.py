"""What a comparison says of itself: which sets, how, how many. A result can then say whether its test was checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import replacing
from vitrail.core.errors import DataError
from vitrail.data.dedup.block_files import KINDS, WITHIN, Pairs
from vitrail.data.dedup.match import Method

KIND: Final = "vitrail dedup 1"
COLUMNS: Final = ("training set", "compared with", "pictures", "duplicates", "share", *KINDS, "dropped", "unreadable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One set that TRAIN was compared with (itself, where `within`), and how many of its images are in TRAIN: in all,
    and by the surest kind. `dropped` are the images of TRAIN that go for it."""

    name: str
    fingerprint: str
    pictures: int
    unreadable: int
    duplicates: int
    kinds: dict[str, int]
    dropped: int
    within: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The whole of dedup.json. `filtered` is the fingerprint of TRAIN without what the selection drops."""

    train: str
    fingerprint: str
    filtered: str
    pictures: int
    unreadable: int
    checked: tuple[Checked, ...]
    method: Method
    selection: str  # the selection's hash
    dropped: int
    bad: dict[str, tuple[str, ...]]  # by set: unreadable images with their reasons, the first hundred of each

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        with replacing(path) as file:
            file.write(json.dumps({"kind": KIND, **asdict(self)}, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Reads a file that `save` wrote."""
        try:
            body: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if body.pop("kind") != KIND:
                raise ValueError("it is of another kind")
            body["checked"] = tuple(Checked(**one) for one in body["checked"])
            body["method"] = Method(**body["method"])
            body["bad"] = {name: tuple(reasons) for name, reasons in body["bad"].items()}
            return cls(**body)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a record of a de-duplication: {error}") from None

    def rows(self) -> list[tuple[str, ...]]:
        """The table, under COLUMNS: one row a pair of sets, as BiT counts them; a dash where nothing was sought."""
        by = self.method
        sought = {"exact": by.exact, "near": by.near, "flipped": by.near, "embedding": bool(by.embedding)}
        sought = {kind for kind, was in sought.items() if was}
        return [
            (
                self.train,
                "itself" if one.within else one.name,
                f"{one.pictures:,}",
                f"{one.duplicates:,}",
                f"{100 * one.duplicates / max(1, one.pictures):.2f}%",
                *(f"{one.kinds[kind]:,}" if kind in sought else "-" for kind in KINDS),
                f"{one.dropped:,}",
                f"{one.unreadable:,}",
            )
            for one in self.checked
        ]


def checked_against(record: Record, train_fingerprint: str, test_fingerprint: str) -> bool:
    """Whether this record compared that training set, whole or as the selection left it, with that test set."""
    return train_fingerprint in (record.fingerprint, record.filtered) and any(
        one.fingerprint == test_fingerprint and not one.within for one in record.checked
    )


def counted(pairs: Pairs, where: int, dropped: NDArray[np.int64]) -> tuple[int, dict[str, int]]:
    """Of the set `where`: images with a duplicate in TRAIN, and the same by their surest kind. Within TRAIN itself
    the `dropped` ones count, which are all but the first of each group."""
    mine = pairs[pairs["set"] == where]
    numbers = np.concatenate([mine["test"], mine["train"]]) if where == WITHIN else mine["test"]
    kinds = np.resize(mine["kind"].astype(np.int64), len(numbers))
    if where == WITHIN:
        counts = np.isin(numbers, dropped)
        numbers, kinds = numbers[counts], kinds[counts]
    one, at = np.unique(numbers, return_inverse=True)
    surest = np.full(len(one), len(KINDS), np.int64)
    np.minimum.at(surest, at, kinds)
    return len(one), {kind: int((surest == i).sum()) for i, kind in enumerate(KINDS)}


def bit_table(records: Sequence[Record]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns and rows as BiT prints them: a row a test set, a column a training set."""
    counts: Mapping[tuple[str, str], str] = {
        (one.name, record.train): f"{one.duplicates:,}"
        for record in records
        for one in record.checked
        if not one.within
    }
    tests, trains = (list(dict.fromkeys(names)) for names in zip(*counts, strict=True)) if counts else ([], [])
    rows = [(test, *(counts.get((test, train), "") for train in trains)) for test in tests]
    return ["test set", *(f"in {train}" for train in trains)], rows
