"""Results of any kind in one table: a row for weights, a column for a measure on some data, and what must not be
compared.

table = compare(gather([Path("results")]).found)
table.rows, table.columns, table.notes

The page of an evaluation: which images count, the numbers, what the task shows of them, and what they are of.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vitrail.core.errors import DataError, unknown_name
from vitrail.evaluation.result import Measure, Result, format_interval, format_value
from vitrail.evaluation.scoring import EvaluationOutcome
from vitrail.report.page import Notes, Section, render_page
from vitrail.report.sections import Facts, ImageRows, Tile, Tiles

# What is not a difference of method: what belongs to the weights (their shape, normalisation, number of features), what
# has columns of its own (shots, neighbours), and what is not a choice (a seed of the bootstrap, how classes match).
ASIDE: Final = {
    *("preprocessing.mean", "preprocessing.std", "preprocessing.image", "features", "weights", "name"),
    *("shots", "k", "seed", "classes"),
}
DETAILED: Final = 3  # settings whose values are told; of more, the names
MACHINE: Final = ("img/s", "ms", "bytes")  # units of what depends on the machine
SHORT: Final = 8  # letters of a hash
CLASSIFICATION: Final = "classification"  # the task of evaluations that name none


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result and the file that it is in."""

    path: Path
    result: Result


@dataclass(frozen=True, slots=True)
class GatheredResults:
    """All results that were found, and the files of folders that are none, each with the reason."""

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
        """Columns with one of these come from the same results."""
        return (self.kind, self.task, self.data)


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """Weights, in one way of using them where there are several; a cell for each of the columns that it has."""

    name: str
    cells: Mapping[MeasureColumn, tuple[Measure, ResultFile]]


@dataclass(frozen=True, slots=True)
class Comparison:
    columns: tuple[MeasureColumn, ...]
    rows: tuple[WeightsRow, ...]
    notes: tuple[str, ...]

    def title(self, column: MeasureColumn, *, whole: bool = True) -> str:
        """What stands above a column: the command or the task only where two of them have a measure of that name."""
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
        """Some of the columns, and the rows that have something there."""
        rows = tuple(row for row in self.rows if any(column in row.cells for column in columns))
        return Comparison(tuple(columns), rows, self.notes)

    def groups(self) -> list[tuple[str, "Comparison"]]:
        """A table for each data set."""
        names = dict.fromkeys(column.data for column in self.columns)
        return [(name, self.part([column for column in self.columns if column.data == name])) for name in names]


def gather_results(paths: Iterable[Path]) -> GatheredResults:
    """The results in files, and in folders with all that is below them. A named file that is none is an error; in a
    folder it is passed over, and said."""
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
        raise DataError(f"there is no result in {looked}{bad}; `vitrail evaluate ... --out FILE.json` writes one")
    return GatheredResults(tuple(found.values()), tuple(passed))


def compare_results(found: Sequence[ResultFile], measures: Sequence[str] = ()) -> Comparison:
    """The table of some results, of all of their measures or of those that are named."""
    there = list(dict.fromkeys(measure.name for one in found for measure in one.result.measures))
    for name in measures:
        if name not in there:
            raise unknown_name("measure", name, there)
    columns = [
        column_of(one.result, measure)
        for one in found
        for measure in one.result.measures
        if not measures or measure.name in measures
    ]
    # Measures of one result stand together, whatever the order of the files.
    places = {group: at for at, group in enumerate(dict.fromkeys(column.group for column in columns))}
    ordered = sorted(dict.fromkeys(columns), key=lambda column: places[column.group])
    by_row: dict[tuple[str, ...], list[ResultFile]] = {}
    for one in found:
        by_row.setdefault(key_of(one, found), []).append(one)
    names = called(by_row)
    notes: list[str] = []
    rows = tuple(row_of(names[key], some, ordered, notes) for key, some in by_row.items())
    rows = tuple(row for row in rows if row.cells)
    check_tasks(rows)
    for group in dict.fromkeys(column.group for column in ordered):
        notes += doubts(group, rows)
    return Comparison(tuple(ordered), rows, tuple(dict.fromkeys(notes)))


def check_tasks(rows: Sequence[WeightsRow]) -> None:
    """Refuses results of several tasks where no number can be compared with another."""
    if max((sum(column in row.cells for row in rows) for row in rows for column in row.cells), default=0) > 1:
        return
    examples: dict[str, Path] = {}
    for row in rows:
        for column, (_, one) in row.cells.items():
            examples.setdefault(column.task, one.path)
    if len(rows) > 1 and len(examples) > 1 and "" not in examples:
        tasks = ", ".join(f"{path} is of {task}" for task, path in examples.items())
        raise DataError(f"no measure is in two results: {tasks}; compare results of one task")


def column_of(result: Result, measure: Measure) -> MeasureColumn:
    return MeasureColumn(result.kind, task_of(result), data_of(result), measure.name)


def task_of(result: Result) -> str:
    """The task of an evaluation: classification where it does not say so. Results of other commands have none."""
    return str(result.config.get("task", CLASSIFICATION)) if result.kind == "evaluate" else ""


def row_of(name: str, some: Sequence[ResultFile], columns: Sequence[MeasureColumn], notes: list[str]) -> WeightsRow:
    """The newest of equal results counts."""
    cells: dict[MeasureColumn, tuple[Measure, ResultFile]] = {}
    for one in sorted(some, key=lambda one: one.result.made):
        for measure in one.result.measures:
            column = column_of(one.result, measure)
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


def data_of(result: Result) -> str:
    name, split = result.data.get("name", ""), result.data.get("split", "")
    seen: Mapping[str, Any] = result.data.get("seen") or {}
    mark = ", seen in training" if seen.get("seen_are_scored") else ""
    return f"{name}@{split}{mark}" if split else f"{name}{mark}"


def describe_deduplication(result: Result) -> str:
    """Whether copies of the images were left out of training; empty where nobody knows."""
    told = result.data.get("deduplicated")
    return "" if not isinstance(told, bool) else "yes" if told else "no"


def weights_of(result: Result) -> str:
    return str(result.weights.get("hash") or result.weights.get("name", ""))


def key_of(one: ResultFile, found: Sequence[ResultFile]) -> tuple[str, ...]:
    """What makes a row: the weights and, where they were scored on the same data in several ways, the way, by as few
    settings as tell them apart."""
    mine, ways = weights_of(one.result), dict[str, None]()
    same = [other.result for other in found if weights_of(other.result) == mine]
    for group in dict.fromkeys((other.kind, data_of(other)) for other in same):
        configs = [settings(other) for other in same if (other.kind, data_of(other)) == group]
        kept: list[str] = []
        for name in dict.fromkeys(name for config in configs for name in config):
            if len(distinct(configs, [*kept, name])) > len(distinct(configs, kept)):
                kept.append(name)
        ways |= dict.fromkeys(kept)
    config = settings(one.result)
    return (mine, *(worded(name, config[name]) for name in ways if name in config))


def distinct(configs: Sequence[Mapping[str, str]], names: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(config.get(name, "") for name in names) for config in configs}


def settings(result: Result) -> dict[str, str]:
    """How a result was made, by dotted name, as far as that is a choice. A penalty that was tuned is none."""
    every = flat(result.config)
    tuned = every.get("penalties", "[]") != "[]"
    return {
        name: value
        for name, value in every.items()
        if name not in ASIDE and not name.startswith("network.") and not (tuned and name.partition(".")[0] == "penalty")
    }


def worded(name: str, value: str) -> str:
    return f"{value} px" if name == "image" else f"{name}={value}"


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings by dotted name, as text."""
    out: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            inner: Mapping[str, Any] = value
            out |= flat(inner, f"{before}{name}.")
        elif name == "image" and isinstance(value, list):
            out[f"{before}{name}"] = "x".join(str(side) for side in value)
        else:
            out[f"{before}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return out


def called(by_row: Mapping[tuple[str, ...], Sequence[ResultFile]]) -> dict[tuple[str, ...], str]:
    """A name for each row: the last part of the weights' own, with as much before it as tells them apart."""
    parts = {key: parts_of(str(some[0].result.weights.get("name", "?"))) for key, some in by_row.items()}
    names: dict[tuple[str, ...], str] = {}
    for key, mine in parts.items():
        others = [theirs for other, theirs in parts.items() if other[0] != key[0]]
        length = next((n for n in range(1, len(mine) + 1) if all(t[-n:] != mine[-n:] for t in others)), 0)
        name = "/".join(mine[-length:]) if length else f"{mine[-1]} {key[0][:SHORT]}"
        names[key] = ", ".join([name, *key[1:]])
    return names


def parts_of(name: str) -> list[str]:
    """The parts of a path to a file; any other name is one whole: ViT-B/16, runs/digits."""
    path = Path(name)
    return [part for part in path.parts if part != path.anchor] if path.suffix or path.anchor else [name]


def doubts(group: tuple[str, str, str], rows: Sequence[WeightsRow]) -> list[str]:
    """Why the numbers of one command on one data set may not be compared from row to row."""
    some: dict[str, Result] = {}
    units: set[str] = set()
    for row in rows:
        for column, (measure, one) in row.cells.items():
            if column.group == group:
                some[row.name] = one.result
                units.add(measure.unit)
    where = group[2] or group[0]
    facts = {
        "the images themselves differ": {name: pictures_of(one.data) for name, one in some.items()},
        "what was learnt from differs": {name: pictures_of(one.data.get("train")) for name, one in some.items()},
        "copies were left out of some trainings only": {
            name: describe_deduplication(one) or "not known" for name, one in some.items()
        },
    }
    if units & set(MACHINE):
        facts["the machine differs"] = {name: machine_of(one) for name, one in some.items()}
    told = [f"{where}: {what}: {spoken(values)}" for what, values in facts.items() if len(set(values.values())) > 1]
    configs = {name: settings(one) for name, one in some.items()}
    names = dict.fromkeys(name for config in configs.values() for name in config)
    # What the names of the rows tell already need not be said again; the crop's margin grows with the image.
    said = {name for name in names if all(worded(name, one.get(name, "")) in row for row, one in configs.items())}
    said |= {"preprocessing.resize"} if "image" in said else set()
    other = [name for name in names if name not in said and len(distinct(list(configs.values()), [name])) > 1]
    told += [
        f"{where}: {name} differs: {spoken({row: config.get(name, '') for row, config in configs.items()})}"
        for name in other[:DETAILED]
    ]
    if other[DETAILED:]:
        told.append(f"{where}: more settings differ: {', '.join(other[DETAILED:])}")
    return told


def pictures_of(data: Mapping[str, Any] | None) -> str:
    """How many, and the beginning of their fingerprint; empty where there are none."""
    if not data or not data.get("fingerprint"):
        return ""
    return f"{data.get('pictures', '?')} ({str(data['fingerprint'])[:SHORT]})"


def machine_of(result: Result) -> str:
    devices = result.environment.get("devices") or ["?"]
    return f"{len(devices)} x {devices[0]}"


def spoken(values: Mapping[str, str]) -> str:
    """ "224x224 for a, b; 384x384 for c" """
    by: dict[str, list[str]] = {}
    for name, value in values.items():
        by.setdefault(value or "not said", []).append(name)
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in by.items())


def evaluation_page(result: Result, found: EvaluationOutcome, notes: Sequence[str], seen: Sequence[str]) -> str:
    """One HTML file, images included. `seen` says which images the weights were trained on."""
    sections: list[Section] = [
        Notes(title="Seen in training", lines=list(seen)),
        Tiles(tiles=[tile(measure, found.captions.get(measure.name, "")) for measure in result.measures]),
        *found.sections(),
        facts(result),
    ]
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    intervals = "; with 95 % intervals" if any(format_interval(measure) for measure in result.measures) else ""
    lead = f"{data_of(result)}: {found.lead}{intervals}"
    style = "image_rows.css" if any(isinstance(section, ImageRows) for section in sections) else ""
    return render_page(parts_of(str(result.weights["name"]))[-1], sections, lead=lead, style=style)


def tile(measure: Measure, caption: str) -> Tile:
    note = "; ".join(part for part in (format_interval(measure), caption) if part)
    return Tile(value=format_value(measure), label=measure.name, note=note)


def facts(result: Result) -> Facts:
    """What the numbers are of."""
    weights, data, config = result.weights, result.data, result.config
    known = {True: "yes", False: "no", None: "not known"}[data["deduplicated"]]
    rows = [
        ("weights", f"{weights['hash'][:16]}, {weights['parameters']:,} parameters"),
        ("pictures", f"{data['name']}@{data['split']}, {data['pictures']:,}, {data['fingerprint'][:16]}"),
        ("copies left out of training", known),
        *((name.removeprefix("preprocessing."), value) for name, value in flat(config).items() if name != "image"),
        ("vitrail, torch", f"{result.environment['vitrail']}, {result.environment['torch']}"),
        ("made", result.made),
    ]
    return Facts(title="What this is of", rows=rows)
