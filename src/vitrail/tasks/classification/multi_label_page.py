"""What the page of an evaluation shows of multi-label weights: each class."""

from vitrail.evaluation.multi_label import MultiLabel
from vitrail.report.page import Section, Table

COLUMNS = ("class", "images", "average precision", "precision", "recall", "F1")


def multi_label_sections(found: MultiLabel) -> list[Section]:
    return [Table(title="Each class", columns=COLUMNS, rows=class_rows(found))]


def class_rows(found: MultiLabel) -> list[tuple[str, ...]]:
    """A row for each class, the lowest average precision first."""
    order = sorted(found.classes, key=lambda each: (each.average_precision, -each.count))
    values = [(each.average_precision, each.precision, each.recall, each.f1) for each in order]
    return [
        (each.name, f"{each.count:,}", *(f"{value:.1%}" for value in row))
        for each, row in zip(order, values, strict=True)
    ]
