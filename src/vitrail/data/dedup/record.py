"""What a comparison found, as a record (dedup.json) and as a page of pairs to look at."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup.fingerprints import decode
from vitrail.data.dedup.match import KINDS, WITHIN, MatchRule, PairArray
from vitrail.report import page as report

FORMAT: Final = "vitrail dedup 1"
COLUMNS: Final = ("training set", "compared with", "images", "duplicates", "share", *KINDS, "dropped", "unreadable")
PAIRS_SHOWN: Final = 500


@dataclass(frozen=True, slots=True)
class ComparedSet:
    """One set that the training set was compared with (itself, where `within`), and how many of its images are in the
    training set: in all, and by the most certain kind. `dropped` counts the training images that go because of it."""

    name: str
    fingerprint: str
    images: int
    unreadable: int
    duplicates: int
    kinds: dict[str, int]
    dropped: int
    within: bool = False


@dataclass(frozen=True, slots=True)
class DedupRecord:
    """The contents of dedup.json. `filtered` is the fingerprint of the training set without what the selection drops.
    On disk the number of images is called "pictures"."""

    train: str
    fingerprint: str
    filtered: str
    images: int
    unreadable: int
    checked: tuple[ComparedSet, ...]
    method: MatchRule
    selection: str  # the selection's hash
    dropped: int
    bad: dict[str, tuple[str, ...]]  # by set: unreadable images with their reasons, the first hundred of each

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        body = rename_key(asdict(self), "images", "pictures")
        body["checked"] = [rename_key(one, "images", "pictures") for one in body["checked"]]
        with replace_on_success(path) as file:
            file.write(json.dumps({"kind": FORMAT, **body}, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "DedupRecord":
        """Reads a file that `save` wrote."""
        try:
            body = rename_key(json.loads(path.read_text("utf-8")), "pictures", "images")
            if body.pop("kind") != FORMAT:
                raise ValueError("it is of another kind")
            body["checked"] = tuple(ComparedSet(**rename_key(one, "pictures", "images")) for one in body["checked"])
            body["method"] = MatchRule(**body["method"])
            body["bad"] = {name: tuple(reasons) for name, reasons in body["bad"].items()}
            return cls(**body)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a record of a de-duplication: {error}") from None

    def rows(self) -> list[tuple[str, ...]]:
        """The table, under COLUMNS: one row per pair of sets, as BiT counts them; a dash for kinds not searched for."""
        rule = self.method
        searched = {"exact": rule.exact, "near": rule.near, "flipped": rule.near, "embedding": bool(rule.embedding)}
        rows: list[tuple[str, ...]] = []
        for one in self.checked:
            counts = f"{one.images:,}", f"{one.duplicates:,}", f"{100 * one.duplicates / max(1, one.images):.2f}%"
            kinds = [f"{one.kinds[kind]:,}" if searched[kind] else "-" for kind in KINDS]
            name, ends = "itself" if one.within else one.name, (f"{one.dropped:,}", f"{one.unreadable:,}")
            rows.append((self.train, name, *counts, *kinds, *ends))
        return rows


def rename_key(body: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in body.items()}


def count_duplicates(pairs: PairArray, where: int, dropped: NDArray[np.int64]) -> tuple[int, dict[str, int]]:
    """The images of the set `where` with a duplicate in the training set, and these by their most certain kind. Within
    the training set the `dropped` ones count, which are all but the first of each group."""
    mine = pairs[pairs["set"] == where]
    numbers, kinds = mine["test"], mine["kind"].astype(np.int64)
    if where == WITHIN:
        numbers = np.concatenate([mine["test"], mine["train"]])
        counts = np.isin(numbers, dropped)
        numbers, kinds = numbers[counts], np.tile(kinds, 2)[counts]
    images, at = np.unique(numbers, return_inverse=True)
    surest = np.full(len(images), len(KINDS), np.int64)
    np.minimum.at(surest, at, kinds)
    return len(images), {kind: int((surest == i).sum()) for i, kind in enumerate(KINDS)}


def write_page(
    path: Path,
    record: DedupRecord,
    pairs: PairArray,
    train: ImageDataset,
    tests: Mapping[str, ImageDataset],
    *,
    shown: int = PAIRS_SHOWN,
) -> None:
    """The table, then the pairs side by side, the most distant first within each kind: those are the ones to doubt.
    Each set has an equal share of the `shown` pairs, spread over the full range where there are more."""
    titles = {WITHIN: record.train, **dict(enumerate(tests))}
    sources = {WITHIN: train, **dict(enumerate(tests.values()))}
    present = [where for where in titles if (pairs["set"] == where).any()]
    sections: list[report.Section] = [report.Table(columns=COLUMNS, rows=record.rows(), left=2)]
    for where in present:
        mine = pairs[pairs["set"] == where]
        most, kind = max(1, shown // len(present)), -mine["kind"].astype(np.int64)
        # The least certain kind first, the most distant first; at most so many, evenly spaced.
        chosen = mine[np.lexsort((mine["test"], mine["train"], -mine["distance"], kind))]
        chosen = chosen if len(chosen) <= most else chosen[np.arange(most) * len(chosen) // most]
        left, sides = len(mine) - len(chosen), (record.train, titles[where])
        title = f"Within {record.train}" if where == WITHIN else f"{titles[where]} in {record.train}"
        shown_pairs = [show_pair(row, train, sources[where]) for row in chosen.tolist()]
        more = f"{left:,} more in pairs.csv." if left else ""
        sections.append(report.Pairs(title=title, pairs=shown_pairs, sides=sides, more=more))
    unreadable = {record.train: record.unreadable, **{one.name: one.unreadable for one in record.checked}}
    for name, reasons in record.bad.items():
        left = unreadable[name] - len(reasons)
        more = f"{left:,} more." if left > 0 else ""
        sections.append(report.Notes(title=f"Unreadable in {name}", lines=reasons, more=more))
    report.save_page(path, report.render_page(f"Duplicates in {record.train}", sections, lead=summarise(record)))


def summarise(record: DedupRecord) -> str:
    rule, ways = record.method, list[str]()
    ways += ["the same decoded pixels"] if rule.exact else []
    ways += [f"perceptual hash and thumbnail (distance up to {rule.distance})"] if rule.near else []
    ways += [f"embeddings of {rule.embedding} (cosine from {rule.cosine})"] if rule.embedding else []
    compared = f"{record.images:,} images of {record.train} were compared by {', '.join(ways)}."
    return f"{compared} The selection {record.selection[:12]} (drop.json) skips {record.dropped:,} of them."


def show_pair(row: Sequence[float], train: ImageDataset, other: ImageDataset) -> report.Pair:
    _, first, second, kind, distance = row
    note = "same pixels" if distance == 0 and not kind else f"distance {distance:.4f}"
    one, two = show_image(train, int(first)), show_image(other, int(second))
    return report.Pair(one=one, other=two, kind=KINDS[int(kind)], note=note)


def show_image(source: ImageDataset, index: int) -> report.Plate:
    try:
        uri = report.to_data_uri(decode(source, index))
    except BadImage:  # it was readable when it was compared; the page shows that it no longer is
        uri = ""
    return report.Plate(name=source.name(index), picture=uri)
