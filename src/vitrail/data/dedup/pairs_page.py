"""The pairs as a page to look at: what a table of duplicates claims, a person can check here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from vitrail.core.errors import BadImage
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup.block_files import KINDS, WITHIN, Pairs
from vitrail.data.dedup.deduplicate import Job, Outcome
from vitrail.data.dedup.fingerprints import decoded
from vitrail.data.dedup.record import COLUMNS, Record
from vitrail.report import page as report

SHOWN: Final = 500  # pairs on a page


def write_page(job: Job, outcome: Outcome, path: Path, *, shown: int = SHOWN) -> None:
    """The table, then the pairs side by side, the farthest apart first within each kind: those are the ones to doubt.
    Each set has its fair share of the `shown` pairs, spread over the whole range where there are more."""
    record = outcome.record
    titles = {WITHIN: job.called, **dict(enumerate(job.tests))}
    sources = {WITHIN: job.train, **dict(enumerate(job.tests.values()))}
    present = [where for where in titles if (outcome.pairs["set"] == where).any()]
    sections: list[report.Section] = [report.Table(columns=COLUMNS, rows=record.rows(), left=2)]
    for where in present:
        mine = outcome.pairs[outcome.pairs["set"] == where]
        chosen = spread_out(mine, max(1, shown // len(present)))
        left = len(mine) - len(chosen)
        sections.append(
            report.Pairs(
                title=f"Within {job.called}" if where == WITHIN else f"{titles[where]} in {job.called}",
                pairs=[pair(row, job.train, sources[where]) for row in chosen.tolist()],
                sides=(job.called, titles[where]),
                more=f"{left:,} more in pairs.csv." if left else "",
            )
        )
    for name, reasons in record.bad.items():
        total = (
            record.unreadable if name == record.train else {one.name: one.unreadable for one in record.checked}[name]
        )
        more = f"{total - len(reasons):,} more." if total > len(reasons) else ""
        sections.append(report.Notes(title=f"Unreadable in {name}", lines=reasons, more=more))
    report.save_page(path, report.page(f"Duplicates in {job.called}", sections, lead=lead(record)))


def lead(record: Record) -> str:
    """What was done, in a few sentences."""
    ways = [
        *(["the same decoded pixels"] if record.method.exact else []),
        *([f"perceptual hash and thumbnail (distance up to {record.method.distance})"] if record.method.near else []),
        *(
            [f"embeddings of {record.method.embedding} (cosine from {record.method.cosine})"]
            if record.method.embedding
            else []
        ),
    ]
    return (
        f"{record.pictures:,} images of {record.train} were compared by {', '.join(ways)}. "
        f"{record.dropped:,} of them are left out by the selection {record.selection[:12]} (drop.json)."
    )


def spread_out(pairs: Pairs, most: int) -> Pairs:
    """Surest kind last, farthest first; where there are too many, every so-manyth."""
    ordered = pairs[np.lexsort((pairs["test"], pairs["train"], -pairs["distance"], -pairs["kind"].astype(np.int64)))]
    if len(ordered) <= most:
        return ordered
    return ordered[np.arange(most) * len(ordered) // most]


def pair(row: Sequence[float], train: ImageDataset, other: ImageDataset) -> report.Pair:
    _, one, two, kind, distance = row
    return report.Pair(
        one=plate(train, int(one)),
        other=plate(other, int(two)),
        kind=KINDS[int(kind)],
        note="same pixels" if distance == 0 and not kind else f"distance {distance:.4f}",
    )


def plate(source: ImageDataset, index: int) -> report.Plate:
    try:
        picture = report.data_uri(decoded(source, index))
    except BadImage:  # it was readable when it was compared; the page says that it is not now
        picture = ""
    return report.Plate(name=source.name(index), picture=picture)
