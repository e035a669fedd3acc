"""The page of an evaluation of multi-label weights: the numbers, and each class."""

from collections.abc import Sequence

from vitrail.evaluation.comparison import data_of, parts_of
from vitrail.evaluation.multi_label import MultiLabel
from vitrail.evaluation.presentation import facts, tile
from vitrail.evaluation.result import Result
from vitrail.report.page import Notes, Section, Table, page
from vitrail.report.panels import Tiles

COLUMNS = ("class", "images", "average precision", "precision", "recall", "F1")


def multi_label_page(result: Result, found: MultiLabel, notes: Sequence[str], seen: Sequence[str]) -> str:
    """One HTML file. `seen` says which images the weights were trained on."""
    sections: list[Section] = [
        Notes(title="Seen in training", lines=list(seen)),
        Tiles(tiles=[tile(measure) for measure in result.measures]),
        Table(title="Each class", columns=COLUMNS, rows=class_rows(found)),
        facts(result),
    ]
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    count = f"{len(found.sample):,} images, {len(found.classes):,} classes, each by itself"
    lead = f"{data_of(result)}: {count}; chosen from {found.threshold:g}; with 95 % intervals"
    return page(parts_of(str(result.weights["name"]))[-1], sections, lead=lead)


def class_rows(found: MultiLabel) -> list[tuple[str, ...]]:
    """A row for each class, the lowest average precision first."""
    order = sorted(found.classes, key=lambda each: (each.average_precision, -each.count))
    values = [(each.average_precision, each.precision, each.recall, each.f1) for each in order]
    return [
        (each.name, f"{each.count:,}", *(f"{value:.1%}" for value in row))
        for each, row in zip(order, values, strict=True)
    ]
