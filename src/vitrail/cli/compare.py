"""What `vitrail compare` does."""

import csv
import io
from collections.abc import Sequence

from vitrail.cli.options.compare import CompareOptions
from vitrail.core.atomic_files import write_file
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.evaluation.compare import (
    Comparison,
    MeasureColumn,
    ResultFile,
    compare_results,
    describe_deduplication,
    gather_results,
)
from vitrail.evaluation.result import Measure

WIDE = 6  # columns above which a terminal gets a table for each data set, and one with a measure a line
FORMATS = (".md", ".csv", ".html")


def run_compare(options: CompareOptions) -> int:
    out = options.out
    if out is not None and out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out}: the name says the format; end it in {', '.join(FORMATS)}")
    gathered = gather_results(options.results)
    table = compare_results(gathered.found, options.measures)
    notes = [*table.notes, *(f"passed over: {why}" for why in gathered.passed_over)]
    show_comparison(table)
    for note in notes:
        print(f"note: {note}")
    if out is not None:
        text = {".md": to_markdown, ".csv": to_csv, ".html": to_html}[out.suffix.lower()](table, notes)
        write_file(out, text.encode("utf-8", "backslashreplace"))
        print(f"table: {out}")
    return 0


def show_comparison(table: Comparison) -> None:
    """One table where it fits, else one for each data set."""
    if len(table.columns) <= WIDE and len({column.data for column in table.columns}) > 1:
        print_table(["weights", *(table.title(column) for column in table.columns)], make_cells(table))
        return
    for name, part in table.groups():
        heads = [part.title(column, whole=False) for column in part.columns]
        if len(heads) > WIDE:  # a measure a line
            names, *numbers = zip(*make_cells(part), strict=True)
            print_table(
                ["measure", *names], [[head, *row] for head, row in zip(heads, numbers, strict=True)], title=name
            )
        else:
            print_table(["weights", *heads], make_cells(part), title=name)


def make_cells(table: Comparison) -> list[list[str]]:
    return [[row.name, *(table.text(row, column) or "–" for column in table.columns)] for row in table.rows]


def to_markdown(table: Comparison, notes: Sequence[str]) -> str:
    """One table, and the notes below it."""
    names = list(dict.fromkeys(column.data for column in table.columns))
    heads = ["weights", *(escape_cell(table.title(column, whole=len(names) > 1)) for column in table.columns)]
    rule = ["---", *("---:" for _ in table.columns)]
    lines = [heads, rule, *([escape_cell(cell) for cell in row] for row in make_cells(table))]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "\n".join(f"- {escape_cell(note)}" for note in notes)
    above = f"{escape_cell(names[0])}, with 95 % intervals:\n\n" if len(names) == 1 and names[0] else ""
    return f"{above}{text}\n" + (f"\n{below}\n" if below else "")


def escape_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def to_csv(table: Comparison, notes: Sequence[str]) -> str:
    """A line a number, with all digits and where it is from: what a spreadsheet or pandas takes."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    heads = ("weights", "hash", "kind", "data", "fingerprint", "deduplicated", "measure", "value", "low", "high")
    writer.writerow([*heads, "count", "unit", "made", "file"])
    for row in table.rows:
        for column in table.columns:
            if column in row.cells:
                writer.writerow([row.name, *csv_row(column, *row.cells[column])])
    return text.getvalue()


def csv_row(column: MeasureColumn, measure: Measure, found: ResultFile) -> list[object]:
    result = found.result
    return [
        *(
            result.weights.get("hash", ""),
            result.kind,
            column.data,
            result.data.get("fingerprint", ""),
            describe_deduplication(result),
        ),
        *(measure.name, measure.value, measure.low, measure.high, measure.count, measure.unit),
        *(result.made, found.path),
    ]


def to_html(table: Comparison, notes: Sequence[str]) -> str:
    """A page with a table for each data set, the notes, and where each number is from."""
    from vitrail.report.page import Notes, Section, Table, page

    sections: list[Section] = []
    for name, part in table.groups():
        heads = [part.title(column, whole=False) for column in part.columns]
        sections.append(Table(title=name or "Results", columns=["weights", *heads], rows=make_cells(part)))
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    files = {one.path: (row.name, one) for row in table.rows for _, one in row.cells.values()}
    rows = [
        (name, str(one.result.weights.get("hash", ""))[:16], one.result.kind, one.result.made, str(path))
        for path, (name, one) in files.items()
    ]
    sections.append(
        Table(title="Where they are from", columns=["weights", "hash", "by", "made", "file"], rows=rows, left=5)
    )
    return page("Results", sections, lead=f"{len(table.rows)} weights, intervals of 95 %")
