"""Results of any kind in one table: one row per set of weights, one column per measure and data set, and notes on
numbers that are not comparable.

table = compare(gather([Path("results")]).found)
table.rows, table.columns, table.notes

The page of an evaluation shows which images count, the numbers, the sections of its task, and where they come from.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result and its file."""

    path: Path
    result: Result


@dataclass(frozen=True, slots=True)
class GatheredResults:
    """All results found, and the files in folders that are not results, each with the reason."""

    found: tuple[ResultFile, ...]
    passed_over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasureColumn:
    """A measure of one command and task on one split."""

    kind: str
    task: str
    data: str
    measure: str

    @property
    def group(self) -> tuple[str, str, str]:
        """Columns of one group come from the same results."""
        return (self.kind, self.task, self.data)


@dataclass(frozen=True, slots=True)
class WeightsRow:
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
        kinds, tasks = len({other.kind for other in twins}), len({other.task for other in twins if other.task})
        before = [*([column.kind] if kinds > 1 else []), *([column.task] if tasks > 1 and column.task else [])]
        measure = " ".join([*before, column.measure])
        return f"{column.data}: {measure}" if whole and column.data else measure

    def text(self, row: WeightsRow, column: MeasureColumn) -> str:
        """A cell: 70.10% (67.19–72.86)."""
        if column not in row.cells:
            return ""
        measure, _ = row.cells[column]
        span = format_interval(measure)
        return f"{format_value(measure)} ({span})" if span else format_value(measure)

    def part(self, columns: Sequence[MeasureColumn]) -> "Comparison":
        """Some of the columns, and the rows that have values there."""
        rows = tuple(row for row in self.rows if any(column in row.cells for column in columns))
        return Comparison(tuple(columns), rows, self.notes)

    def groups(self) -> list[tuple[str, "Comparison"]]:
        """One table per data set."""
        names = dict.fromkeys(column.data for column in self.columns)
        return [(name, self.part([column for column in self.columns if column.data == name])) for name in names]


def gather_results(paths: Iterable[Path]) -> GatheredResults:
    """The results in files and, recursively, in folders. A file that is not a result is an error if it is named, and
    skipped with a note if it is in a folder."""
    found: dict[Path, ResultFile] = {}
    passed: list[str] = []
    for path in paths:
        if not path.is_dir():
            found[path.absolute()] = ResultFile(path, Result.read(path))
            continue
        for inner in sorted(path.rglob("*.json")):
            try:
                found[inner.absolute()] = ResultFile(inner, Result.read(inner))
            except DataError as error:
                passed.append(str(error))
    if not found:
        looked = ", ".join(map(str, paths))
        bad = f" ({'; '.join(passed[:3])})" if passed else ""
        raise DataError(f"no result found in {looked}{bad}; `vitrail evaluate ... --out FILE.json` writes one")
    return GatheredResults(tuple(found.values()), tuple(passed))


def compare_results(found: Sequence[ResultFile], measures: Sequence[str] = ()) -> Comparison:
    """The table of results, with all of their measures or the named ones."""
    there = list(dict.fromkeys(measure.name for one in found for measure in one.result.measures))
    for name in measures:
        if name not in there:
            raise unknown_name("measure", name, there)
    columns = [
        make_column(one.result, measure)
        for one in found
        for measure in one.result.measures
        if not measures or measure.name in measures
    ]
    # Measures of one result stay together, whatever the order of the files.
    places = {group: at for at, group in enumerate(dict.fromkeys(column.group for column in columns))}
    ordered = sorted(dict.fromkeys(columns), key=lambda column: places[column.group])
    by_row: dict[tuple[str, ...], list[ResultFile]] = {}
    for one in found:
        by_row.setdefault(make_row_key(one, found), []).append(one)
    names = name_rows(by_row)
    notes: list[str] = []
    rows = tuple(build_row(names[key], some, ordered, notes) for key, some in by_row.items())
    rows = tuple(row for row in rows if row.cells)
    check_tasks(rows)
    for group in dict.fromkeys(column.group for column in ordered):
        notes += find_doubts(group, rows)
    return Comparison(tuple(ordered), rows, tuple(dict.fromkeys(notes)))


def check_tasks(rows: Sequence[WeightsRow]) -> None:
    """Raises DataError for results of several tasks if no two numbers are comparable."""
    if max((sum(column in row.cells for row in rows) for row in rows for column in row.cells), default=0) > 1:
        return
    examples: dict[str, Path] = {}
    for row in rows:
        for column, (_, one) in row.cells.items():
            examples.setdefault(column.task, one.path)
    if len(rows) > 1 and len(examples) > 1 and "" not in examples:
        tasks = ", ".join(f"{path} is of {task}" for task, path in examples.items())
        raise DataError(f"no measure is in two results: {tasks}; compare results of one task")


def make_column(result: Result, measure: Measure) -> MeasureColumn:
    return MeasureColumn(result.kind, name_task(result), name_data(result), measure.name)


def name_task(result: Result) -> str:
    """The task of an evaluation, classification by default. Results of other commands have none."""
    return str(result.config.get("task", CLASSIFICATION)) if result.kind == "evaluate" else ""


def build_row(name: str, some: Sequence[ResultFile], columns: Sequence[MeasureColumn], notes: list[str]) -> WeightsRow:
    """The newest of several results for one cell counts."""
    cells: dict[MeasureColumn, tuple[Measure, ResultFile]] = {}
    for one in sorted(some, key=lambda one: one.result.made):
        for measure in one.result.measures:
            column = make_column(one.result, measure)
            if column not in columns:
                continue
            if column in cells:
                older = cells[column][1]
                same = one.result.data.get("fingerprint") == older.result.data.get("fingerprint")
                other = "" if same else "; it is of other images"
                where = f"{name}, {column.data or column.kind}"
                notes.append(f"{where}: {one.path} is newer than {older.path} and counts{other}")
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
    same = [other.result for other in found if identify_weights(other.result) == mine]
    for group in dict.fromkeys((other.kind, name_data(other)) for other in same):
        configs = [list_settings(other) for other in same if (other.kind, name_data(other)) == group]
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
    tuned = every.get("penalties", "[]") != "[]"
    return {
        name: value
        for name, value in every.items()
        if name not in ASIDE and not name.startswith("network.") and not (tuned and name.partition(".")[0] == "penalty")
    }


def format_setting(name: str, value: str) -> str:
    return f"{value} px" if name == "image" else f"{name}={value}"


def flatten_config(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings by dotted name, as text."""
    out: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            inner: Mapping[str, Any] = value
            out |= flatten_config(inner, f"{before}{name}.")
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
    facts = {
        "the images themselves differ": {name: describe_images(one.data) for name, one in some.items()},
        "what was learnt from differs": {name: describe_images(one.data.get("train")) for name, one in some.items()},
        "copies were excluded from some trainings only": {
            name: describe_deduplication(one) or "not known" for name, one in some.items()
        },
    }
    if units & set(MACHINE):
        facts["the machine differs"] = {name: describe_machine(one) for name, one in some.items()}
    notes = [
        f"{where}: {what}: {group_by_value(values)}" for what, values in facts.items() if len(set(values.values())) > 1
    ]
    configs = {name: list_settings(one) for name, one in some.items()}
    names = dict.fromkeys(name for config in configs.values() for name in config)
    # Settings in the names of the rows are not repeated; the crop's margin grows with the image.
    said = {
        name for name in names if all(format_setting(name, one.get(name, "")) in row for row, one in configs.items())
    }
    said |= {"preprocessing.resize"} if "image" in said else set()
    other = [name for name in names if name not in said and len(distinct(list(configs.values()), [name])) > 1]
    notes += [
        f"{where}: {name} differs: {group_by_value({row: config.get(name, '') for row, config in configs.items()})}"
        for name in other[:DETAILED]
    ]
    if other[DETAILED:]:
        notes.append(f"{where}: more settings differ: {', '.join(other[DETAILED:])}")
    return notes


def describe_images(data: Mapping[str, Any] | None) -> str:
    """Their number and the start of their fingerprint; empty without images."""
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
    sections: list[Section] = [
        Notes(title="Seen in training", lines=list(seen)),
        Tiles(tiles=[build_tile(measure, found.captions.get(measure.name, "")) for measure in result.measures]),
        *found.sections(),
        build_facts(result),
    ]
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    intervals = "; with 95 % intervals" if any(format_interval(measure) for measure in result.measures) else ""
    lead = f"{name_data(result)}: {found.lead}{intervals}"
    style = "image_rows.css" if any(isinstance(section, ImageRows) for section in sections) else ""
    return render_page(split_name(str(result.weights["name"]))[-1], sections, lead=lead, style=style)


def build_tile(measure: Measure, caption: str) -> Tile:
    note = "; ".join(part for part in (format_interval(measure), caption) if part)
    return Tile(value=format_value(measure), label=measure.name, note=note)


def build_facts(result: Result) -> Facts:
    """Weights, images and settings behind the numbers."""
    weights, data, config = result.weights, result.data, result.config
    known = {True: "yes", False: "no", None: "not known"}[data["deduplicated"]]
    rows = [
        ("weights", f"{weights['hash'][:16]}, {weights['parameters']:,} parameters"),
        ("pictures", f"{data['name']}@{data['split']}, {data['pictures']:,}, {data['fingerprint'][:16]}"),
        ("copies excluded from training", known),
        *(
            (name.removeprefix("preprocessing."), value)
            for name, value in flatten_config(config).items()
            if name != "image"
        ),
        ("vitrail, torch", f"{result.environment['vitrail']}, {result.environment['torch']}"),
        ("made", result.made),
    ]
    return Facts(title="What this is of", rows=rows)
