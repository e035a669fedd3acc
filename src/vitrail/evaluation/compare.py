"""Results of any kind in one table: one row per set of weights, one column per measure and data set, and notes on
numbers that are not comparable.

    found, skipped = gather_results([Path("results")])
    table = compare_results(found)
    table.rows, table.columns, table.notes

`evaluation_page` shows which images count, the numbers, the sections of the task, and their origin.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from vitrail.core.errors import DataError, unknown_name
from vitrail.evaluation.result import Measure, Result, format_interval, format_value
from vitrail.report.page import Notes, Section, render_page
from vitrail.report.sections import Facts, ImageRows, Tile, Tiles

if TYPE_CHECKING:
    from vitrail.evaluation.scoring import EvaluationOutcome

# Settings that are not a difference of method: those that belong to the weights (shape, normalisation, number of
# features), those with columns of their own (shots, neighbours), and those that are not a choice (bootstrap seed).
ASIDE: Final = {
    *("preprocessing.mean", "preprocessing.std", "preprocessing.image", "features", "weights", "name"),
    *("shots", "k", "seed", "classes"),
}
DETAILED: Final = 3  # settings that are listed with their values; the rest by name
MACHINE: Final = ("img/s", "ms", "bytes")  # units of measures that depend on the machine
SHORT: Final = 8  # characters of a hash
CLASSIFICATION: Final = "classification"  # the task of evaluations that do not name one


class ResultFile(NamedTuple):
    """A result and its file."""

    path: Path
    result: Result


class MeasureColumn(NamedTuple):
    """A measure of one command and task on one split."""

    kind: str
    task: str
    data: str
    measure: str

    @property
    def group(self) -> tuple[str, str, str]:
        """Columns of one group come from the same results."""
        return (self.kind, self.task, self.data)


class WeightsRow(NamedTuple):
    """One set of weights with one group of settings, and its cells by column."""

    name: str
    cells: Mapping[MeasureColumn, tuple[Measure, ResultFile]]


@dataclass(frozen=True, slots=True)
class Comparison:
    columns: tuple[MeasureColumn, ...]
    rows: tuple[WeightsRow, ...]
    notes: tuple[str, ...]

    def title(self, column: MeasureColumn, *, whole: bool = True) -> str:
        """The heading of a column; it names the command or the task only if two of them have a measure of that name."""
        twins = [other for other in self.columns if (other.data, other.measure) == (column.data, column.measure)]
        kinds, tasks = {other.kind for other in twins}, {other.task for other in twins if other.task}
        before = [column.kind if len(kinds) > 1 else "", column.task if len(tasks) > 1 else ""]
        measure = " ".join(filter(None, [*before, column.measure]))
        return f"{column.data}: {measure}" if whole and column.data else measure

    def text(self, row: WeightsRow, column: MeasureColumn) -> str:
        """The text of a cell: 70.10% (67.19–72.86)."""
        if column not in row.cells:
            return ""
        measure, _ = row.cells[column]
        span = format_interval(measure)
        return f"{format_value(measure)} ({span})" if span else format_value(measure)

    def groups(self) -> list[tuple[str, "Comparison"]]:
        """One table per data set, with the rows that have values there."""
        found: list[tuple[str, Comparison]] = []
        for name in dict.fromkeys(column.data for column in self.columns):
            columns = tuple(column for column in self.columns if column.data == name)
            rows = tuple(row for row in self.rows if not row.cells.keys().isdisjoint(columns))
            found.append((name, Comparison(columns, rows, self.notes)))
        return found


def gather_results(paths: Iterable[Path]) -> tuple[list[ResultFile], list[str]]:
    """Reads the results in files and, recursively, in folders; also returns why other files there are not results. A
    named file that is not a result is an error."""
    found: dict[Path, ResultFile] = {}
    skipped: list[str] = []
    for path in paths:
        for inner in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                found[inner.absolute()] = ResultFile(inner, Result.read(inner))
            except DataError as error:
                if inner is path:
                    raise
                skipped.append(str(error))
    if not found:
        bad = f" ({'; '.join(skipped[:3])})" if skipped else ""
        looked = f"{', '.join(map(str, paths))}{bad}"
        raise DataError(f"no result found in {looked}; `vitrail evaluate ... --out FILE.json` writes one")
    return list(found.values()), skipped


def compare_results(found: Sequence[ResultFile], measures: Sequence[str] = ()) -> Comparison:
    """The table of results, with all of their measures or the named ones."""
    there = list(dict.fromkeys(measure.name for one in found for measure in one.result.measures))
    for name in measures:
        if name not in there:
            raise unknown_name("measure", name, there)
    columns = dict.fromkeys(
        make_column(one.result, measure)
        for one in found
        for measure in one.result.measures
        if not measures or measure.name in measures
    )
    # Measures of one result stay together, whatever the order of the files.
    groups = list(dict.fromkeys(column.group for column in columns))
    ordered = sorted(columns, key=lambda column: groups.index(column.group))
    by_row: dict[tuple[str, ...], list[ResultFile]] = {}
    for one in found:
        by_row.setdefault(make_row_key(one, found), []).append(one)
    notes: list[str] = []
    names = name_rows(by_row)
    every = [build_row(names[key], some, ordered, notes) for key, some in by_row.items()]
    rows = tuple(row for row in every if row.cells)
    check_tasks(rows)
    notes += [note for group in groups for note in find_doubts(group, rows)]
    return Comparison(tuple(ordered), rows, tuple(dict.fromkeys(notes)))


def check_tasks(rows: Sequence[WeightsRow]) -> None:
    """Raises DataError for results of several tasks if no two numbers are comparable."""
    cells = [(column, one.path) for row in rows for column, (_, one) in row.cells.items()]
    examples = {column.task: path for column, path in reversed(cells)}
    comparable = len({column for column, _ in cells}) < len(cells)
    if not comparable and len(rows) > 1 and len(examples) > 1 and "" not in examples:
        tasks = ", ".join(f"{path} is for {task}" for task, path in reversed(examples.items()))
        raise DataError(f"no measure is in two results: {tasks}; compare results of one task")


def make_column(result: Result, measure: Measure) -> MeasureColumn:
    """Evaluations have a task, classification by default. Results of other commands have none."""
    task = str(result.config.get("task", CLASSIFICATION)) if result.kind == "evaluate" else ""
    return MeasureColumn(result.kind, task, name_data(result), measure.name)


def build_row(name: str, some: Sequence[ResultFile], columns: Sequence[MeasureColumn], notes: list[str]) -> WeightsRow:
    """Builds the row of some weights. If several results have a cell, the newest counts, with a note."""
    cells: dict[MeasureColumn, tuple[Measure, ResultFile]] = {}
    for one in sorted(some, key=lambda one: one.result.made):
        for measure in one.result.measures:
            column = make_column(one.result, measure)
            if column in cells:
                older, where = cells[column][1], f"{name}, {column.data or column.kind}"
                same = one.result.data.get("fingerprint") == older.result.data.get("fingerprint")
                newer = f"{one.path} is newer than {older.path} and counts"
                notes.append(f"{where}: {newer}{'' if same else '; its images differ'}")
            if column in columns:
                cells[column] = (measure, one)
    return WeightsRow(name, cells)


def name_data(result: Result) -> str:
    name, split = result.data.get("name", ""), result.data.get("split", "")
    seen: Mapping[str, Any] = result.data.get("seen") or {}
    mark = ", seen in training" if seen.get("seen_are_scored") else ""
    return f"{name}@{split}{mark}" if split else f"{name}{mark}"


def describe_deduplication(result: Result) -> str:
    """Whether copies of the images were excluded from training; empty if unknown."""
    known: object = result.data.get("deduplicated")
    return "yes" if known is True else "no" if known is False else ""


def identify_weights(result: Result) -> str:
    return str(result.weights.get("hash") or result.weights.get("name", ""))


def make_row_key(one: ResultFile, found: Sequence[ResultFile]) -> tuple[str, ...]:
    """The key of a row: the weights and, if they were scored on the same data with several settings, as few of these as
    distinguish them."""
    mine, ways = identify_weights(one.result), dict[str, None]()
    by_data: dict[tuple[str, str], list[dict[str, str]]] = {}
    for other in (other.result for other in found if identify_weights(other.result) == mine):
        by_data.setdefault((other.kind, name_data(other)), []).append(list_settings(other))
    for configs in by_data.values():
        kept: list[str] = []
        for name in dict.fromkeys(name for config in configs for name in config):
            if len(distinct(configs, [*kept, name])) > len(distinct(configs, kept)):
                kept.append(name)
        ways |= dict.fromkeys(kept)
    config = list_settings(one.result)
    return (mine, *(format_setting(name, config[name]) for name in ways if name in config))


def distinct(configs: Sequence[Mapping[str, str]], names: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(config.get(name, "") for name in names) for config in configs}


def list_settings(result: Result) -> dict[str, str]:
    """The chosen settings of a result by dotted name. A tuned penalty is not a choice."""
    every = flatten_config(result.config)
    own = ("network", "penalty") if every.get("penalties", "[]") != "[]" else ("network",)
    return {name: value for name, value in every.items() if name not in ASIDE and name.partition(".")[0] not in own}


def format_setting(name: str, value: str) -> str:
    return f"{value} px" if name == "image" else f"{name}={value}"


def flatten_config(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings by dotted name, as text."""
    out: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            out |= flatten_config(cast("Mapping[str, Any]", value), f"{before}{name}.")
        elif name == "image" and isinstance(value, list):
            out[f"{before}{name}"] = "x".join(str(side) for side in value)
        else:
            out[f"{before}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return out


def name_rows(by_row: Mapping[tuple[str, ...], Sequence[ResultFile]]) -> dict[tuple[str, ...], str]:
    """A name for each row: the end of the weights' name, as long as it takes to be unique."""
    parts = {key: split_name(str(some[0].result.weights.get("name", "?"))) for key, some in by_row.items()}
    names: dict[tuple[str, ...], str] = {}
    for key, mine in parts.items():
        others = [theirs for other, theirs in parts.items() if other[0] != key[0]]
        length = next((n for n in range(1, len(mine) + 1) if all(t[-n:] != mine[-n:] for t in others)), 0)
        name = "/".join(mine[-length:]) if length else f"{mine[-1]} {key[0][:SHORT]}"
        names[key] = ", ".join([name, *key[1:]])
    return names


def split_name(name: str) -> list[str]:
    """The parts of a path to a file; any other name is a single part: ViT-B/16, runs/digits."""
    path = Path(name)
    return [part for part in path.parts if part != path.anchor] if path.suffix or path.anchor else [name]


def find_doubts(group: tuple[str, str, str], rows: Sequence[WeightsRow]) -> list[str]:
    """Why the numbers of one command on one data set may not be comparable between rows."""
    some: dict[str, Result] = {}
    units: set[str] = set()
    for row in rows:
        for column, (measure, one) in row.cells.items():
            if column.group == group:
                some[row.name] = one.result
                units.add(measure.unit)
    where = group[2] or group[0]
    facts: dict[str, Callable[[Result], str]] = {
        "the images themselves differ": lambda one: describe_images(one.data),
        "the training images differ": lambda one: describe_images(one.data.get("train")),
        "copies were excluded from some trainings only": lambda one: describe_deduplication(one) or "not known",
    }
    if units & set(MACHINE):
        facts["the machine differs"] = describe_machine
    notes: list[str] = []
    for what, describe in facts.items():
        values = {name: describe(one) for name, one in some.items()}
        if len(set(values.values())) > 1:
            notes.append(f"{where}: {what}: {group_by_value(values)}")
    configs = {name: list_settings(one) for name, one in some.items()}
    names = dict.fromkeys(name for config in configs.values() for name in config)
    # Settings in the names of the rows are not repeated; the crop's margin grows with the image.
    other: list[str] = []
    for name in names:
        values = {row: config.get(name, "") for row, config in configs.items()}
        said = all(format_setting(name, value) in row for row, value in values.items())
        said |= name == "preprocessing.resize" and all(f"{one.get('image')} px" in row for row, one in configs.items())
        if len(set(values.values())) > 1 and not said:
            other.append(name)
            notes += [f"{where}: {name} differs: {group_by_value(values)}"] if len(other) <= DETAILED else []
    if other[DETAILED:]:
        notes.append(f"{where}: more settings differ: {', '.join(other[DETAILED:])}")
    return notes


def describe_images(data: Mapping[str, Any] | None) -> str:
    """The number of images and the start of their fingerprint; empty without images."""
    if not data or not data.get("fingerprint"):
        return ""
    return f"{data.get('pictures', '?')} ({str(data['fingerprint'])[:SHORT]})"


def describe_machine(result: Result) -> str:
    devices = result.environment.get("devices") or ["?"]
    return f"{len(devices)} x {devices[0]}"


def group_by_value(values: Mapping[str, str]) -> str:
    """ "224x224 for a, b; 384x384 for c" """
    by: dict[str, list[str]] = {}
    for name, value in values.items():
        by.setdefault(value or "not said", []).append(name)
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in by.items())


def evaluation_page(result: Result, found: "EvaluationOutcome", notes: Sequence[str], seen: Sequence[str]) -> str:
    """One self-contained HTML file. `seen` says which images the weights were trained on."""
    tiles: list[Tile] = []
    for measure in result.measures:
        parts = (format_interval(measure), found.captions.get(measure.name, ""))
        tiles.append(Tile(value=format_value(measure), label=measure.name, note="; ".join(filter(None, parts))))
    sections: list[Section] = [
        Notes(title="Seen in training", lines=list(seen)),
        Tiles(tiles=tiles),
        *found.sections(),
        build_facts(result),
        *([Notes(title="Notes", lines=list(notes))] if notes else []),
    ]
    intervals = "; with 95 % intervals" if any(format_interval(measure) for measure in result.measures) else ""
    lead = f"{name_data(result)}: {found.lead}{intervals}"
    style = "image_rows.css" if any(isinstance(section, ImageRows) for section in sections) else ""
    return render_page(split_name(str(result.weights["name"]))[-1], sections, lead=lead, style=style)


def build_facts(result: Result) -> Facts:
    """Weights, images and settings behind the numbers."""
    weights, data, settings = result.weights, result.data, flatten_config(result.config)
    rows = [
        ("weights", f"{weights['hash'][:16]}, {weights['parameters']:,} parameters"),
        ("images", f"{data['name']}@{data['split']}, {data['pictures']:,}, {data['fingerprint'][:16]}"),
        ("copies excluded from training", describe_deduplication(result) or "not known"),
        *((name.removeprefix("preprocessing."), value) for name, value in settings.items() if name != "image"),
        ("vitrail, torch", f"{result.environment['vitrail']}, {result.environment['torch']}"),
        ("made", result.made),
    ]
    return Facts(title="Weights, images and settings", rows=rows)
