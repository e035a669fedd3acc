"""RUN/report.html: what happened, how it went and what it cost, on one page that opens anywhere.

    write_report(folder, RunFacts(title="vit-ti on digits", status="running", steps=2000))

The curves come from the rows of metrics.jsonl, the rest from what the run knows of itself. The page is written whole or
not at all, so it can be looked at while the run goes on.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.metrics import ClassificationScore, Criterion
from vitrail.report.axis import format_share, format_short, smooth_values
from vitrail.report.charts import Charts, Colour, LineChart, Series
from vitrail.report.page import Notes, Section, render_page, save_page
from vitrail.report.sections import DetailsSection, FactGroup, Facts, State, Status, Tile, Tiles
from vitrail.train.report.charts import collapse_charts, newest_feature_row
from vitrail.train.run_folder.metric_rows import (
    LOSS,
    Row,
    best_of,
    column,
    criteria_of,
    headline,
    known_measures,
    last,
    middle,
    number,
    of_kind,
    scores,
    title_of,
)

METRICS: Final = "metrics.jsonl"
REPORT: Final = "report.html"
STYLE: Final = "image_rows.css"
LISTED: Final = 50  # unreadable files by name
NOISY: Final = 60  # rows from which a mean is drawn through them
RECENT: Final = 50  # rows of which the middle one is the present throughput
PREFIXES: Final = ("", "kilo", "mega", "giga", "tera", "peta", "exa", "zetta")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunFacts:
    """What the page says next to the metrics. `command` goes on with the run, or does what `asks` says; `notes` is what
    went wrong on the way and was dealt with; `steps` is the length of the whole run, 0 where that is not known, and
    `step` how far it is, by default as far as the metrics. `criteria` are the numbers of its task, none where it learns
    from images alone; `panels` are sections of the task's or the objective's own, after the curves."""

    title: str
    lead: str = ""
    status: State = "running"
    message: str = ""
    notes: Sequence[str] = ()
    command: str = ""
    asks: str = ""
    step: int | None = None
    steps: int = 0
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cost: Sequence[tuple[str, str]] = ()  # more rows for the table of cost
    chosen: int = -1  # the step of the best weights, which the run stands for; below 0 where the last ones count
    criteria: Sequence[Criterion] = ClassificationScore.criteria
    panels: Sequence[Section] = ()
    unreadable: Sequence[str] = ()


def write_report(folder: Path, facts: RunFacts) -> None:
    """Writes the page again from what the folder and the facts say now."""
    rows, lost = read_metrics(folder / METRICS)
    save_page(folder / REPORT, render_page(facts.title, make_sections(rows, lost, facts), lead=facts.lead, style=STYLE))


def read_metrics(path: Path) -> tuple[list[Row], int]:
    """The rows that count, and how many lines were no rows. A run that was killed resumes from its last checkpoint:
    what it had noted beyond that is noted again, and the later rows stand. A truncated last line is ignored."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    kept: dict[tuple[Any, ...], list[Row]] = {}
    lines, lost = content.split(b"\n"), 0
    for at, line in enumerate(lines):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            lost += at < len(lines) - 1
            continue
        if row is None:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            lost += 1
            continue
        mine = kept.setdefault(tuple(row.get(name) for name in ("kind", "split", "source", "shots")), [])
        while mine and mine[-1]["step"] >= row["step"]:
            mine.pop()
        mine.append(row)
    return [row for several in kept.values() for row in several], lost


def make_sections(rows: Sequence[Row], lost: int, facts: RunFacts) -> list[Section]:
    """In the order in which a person asks."""
    train = of_kind(rows, "train")
    found: list[Section] = [make_status(train, lost, facts)]
    if tiles := make_tiles(rows, facts.chosen, facts.criteria, tuned=bool(facts.config.get("weights"))):
        found.append(Tiles(tiles=tiles))
    end = float(facts.steps) if facts.status == "running" and facts.steps else None
    if rows:
        found.append(Charts(charts=large_charts(rows, end, facts.criteria)))
        if small := small_charts(rows, end, facts.criteria):
            found.append(Charts(charts=small, small=len(small) != 4))
        if told := collapse_charts(rows, end, facts.config):
            found.append(told)
    found += facts.panels
    if cost := [*cost_rows(train, tuned=bool(facts.config.get("weights"))), *facts.cost]:
        found.append(Facts(title="Cost", rows=cost))
    if facts.unreadable:
        more = f"{len(facts.unreadable) - LISTED:,} more." if len(facts.unreadable) > LISTED else ""
        found.append(Notes(title="Unreadable files", lines=facts.unreadable[:LISTED], more=more))
    for title, values in (("Configuration", facts.config), ("Environment", facts.environment)):
        if values:
            found.append(DetailsSection(title=title, groups=group_values(values)))
    return found


def make_status(train: Sequence[Row], lost: int, facts: RunFacts) -> Status:
    step = facts.step if facts.step is not None else int(train[-1]["step"]) if train else 0
    far = f"step {step:,} of {facts.steps:,}" if facts.steps else f"step {step:,}"
    skipped = int(last(train, "skipped") or 0)
    told = bool(facts.message) and (not train or facts.status == "interrupted")  # which says where it stopped
    lines = [*facts.notes]
    if skipped:
        lines.append(f"{skipped:,} updates were left out because loss or gradient was not finite.")
    if lost:
        lines.append(f"{lost:,} lines of {METRICS} could not be read and are not shown.")
    return Status(
        state=facts.status,
        text=facts.message if told else f"at {far}{'. ' if facts.message else ''}{facts.message}",
        lines=lines,
        asks=facts.asks or ("If it is stopped, go on with" if facts.status == "running" else "Go on with"),
        command=facts.command,
        progress=step / facts.steps if facts.steps and facts.status != "done" else None,
    )


def make_tiles(
    rows: Sequence[Row],
    chosen: int = -1,
    criteria: Sequence[Criterion] = ClassificationScore.criteria,
    *,
    tuned: bool = False,
) -> list[Tile]:
    """The few that matter. `chosen` is the step of the best weights, where a run chooses some. FLOPs and core-days, the
    paper's units, are for runs from scratch, not for those that are `tuned`."""
    train, watch, test = of_kind(rows, "train"), scores(rows, "watch"), scores(rows, "test")
    averaged, closed = scores(rows, "averaged"), scores(rows, "baseline")
    found: list[Tile] = []
    if test:
        found.append(score_tile(f"test {name_score(test[-1])}", test[-1], closed))
    if watch and not same_split(watch, test):  # the split of the end chooses nothing, so its best is none
        best = next((row for row in watch if row["step"] == chosen), best_of(watch))
        found.append(score_tile(f"best {best.get('split') or 'watched'} {name_score(best)}", best, closed))
    if averaged and not test:
        found.append(score_tile("averaged weights", averaged[-1]))
    if closed and not found:  # nothing is scored yet
        split = str(closed[0].get("split") or "")
        found.append(Tile(value=format_share(closed[0]["accuracy"]), label="without training", note=split))
    loss = smooth_values(column(train, "loss")[1], RECENT // 5)
    if len(loss) and math.isfinite(loss[-1]):
        found.append(Tile(value=format_short(loss[-1]), label="training loss", note=tally_note(train, criteria)))
    if (told := rank_tile(rows)) is not None:
        found.append(told)
    rate = column(train, "images_per_s")[1][-RECENT:]
    if np.isfinite(rate).any():
        used = last(train, "mfu") if last(train, "memory_gb") is not None else None  # of a GPU
        note = "" if used is None else f"{100 * used:.0f}% of peak"
        found.append(Tile(value=format_short(float(np.nanmedian(rate))), label="images a second", note=note))
    if (exa := last(train, "exaflops")) is not None and not tuned:
        value, unit = with_prefix(exa * 1e18)
        seen = last(train, "images")
        found.append(
            Tile(
                value=value,
                label=f"{unit}FLOPs of training",
                note="" if seen is None else f"{format_short(seen)} images",
            )
        )
    if (hours := last(train, "device_hours")) is not None:
        note = "" if tuned else f"{format_short(hours / 24)} core-days"
        found.append(Tile(value=duration(hours), label="device time", note=note))
    return found


def score_tile(label: str, row: Row, closed: Sequence[Row] = ()) -> Tile:
    """A score, with that of the closed form on the same split, which fine-tuning has to beat."""
    count, top5, first = row.get("count"), row.get("top5"), headline(row)
    assert first is not None
    size: list[str] = []
    if count:
        right = f"{round(first.value * count):,} of {count:,}"
        size = [right, interval(first.value, count)] if first.is_accuracy else [f"{count:,} images"]
    notes = [
        *size,
        *other_numbers(row),
        *([f"top 5: {format_share(top5)}"] if top5 is not None and (count or 0) and top5 < 1 else []),
        *([f"step {row['step']:,}"] if row.get("kind") == "watch" else []),
        *([f"best weights (step {row['step']:,})"] if row.get("weights") == "best" else []),
        *(
            f"without training: {format_share(one['accuracy'])}"
            for one in closed
            if one.get("split") == row.get("split")
        ),
    ]
    return Tile(value=show(first.criterion, first.value), label=label, note=", ".join(notes))


def name_score(row: Row) -> str:
    """What the number is called that stands for a row."""
    first = headline(row)
    return "score" if first is None else first.name


def other_numbers(row: Row) -> list[str]:
    """The numbers of a row's task that do not stand for it, without the loss, which has a curve."""
    return [
        f"{title_of(criterion)} {show(criterion, value)}"
        for criterion in criteria_of(row)[1:]
        if criterion.name != LOSS and (value := number(row.get(criterion.name))) is not None
    ]


def show(criterion: Criterion, value: float) -> str:
    return format_share(value) if criterion.share else format_short(value)


def interval(accuracy: float, count: int) -> str:
    """How far a score can be trusted: "95% interval 92.2–96.8"."""
    low, high = wilson_interval(round(accuracy * count), count)
    return f"95% interval {100 * low:.1f}–{100 * high:.1f}"


def tally_note(train: Sequence[Row], criteria: Sequence[Criterion]) -> str:
    """What the objective counts of its task, or as right, smoothed as the loss is."""
    known = known_measures()
    for tally in (*criteria, *(known[name] for name in ("accuracy", "hits", "agreement"))):
        values = smooth_values(column(train, tally.name)[1], RECENT // 5)
        if tally.name != LOSS and len(values) and math.isfinite(values[-1]):
            return f"{title_of(tally)} {show(tally, values[-1])}"
    return ""


def rank_tile(rows: Sequence[Row]) -> Tile | None:
    row = newest_feature_row(rows)
    if row is None:
        return None
    notes = [*([f"of {row['width']}"] if row.get("width") else []), *([row["split"]] if row.get("split") else [])]
    return Tile(value=format_short(row["rank"]), label="feature rank", note=", ".join(notes))


def large_charts(rows: Sequence[Row], end: float | None, criteria: Sequence[Criterion]) -> list[LineChart]:
    """Loss and the first number of the task, each of training and of what is scored; of images alone there may be none
    but the accuracy of neighbours."""
    loss = LineChart(
        title="Loss", series=[*train_series(rows, "loss"), *scored_series(rows, "loss")], log=None, end=end
    )
    first = (*criteria, *ClassificationScore.criteria)[0]
    found = [*train_series(rows, first.name), *baseline_series(rows), *scored_series(rows, first.name)]
    title = next((name_score(row) for row in rows if row.get("measure")), title_of(first))
    score = LineChart(title=as_heading(title), series=found, percent=first.share, end=end)
    return [loss, score] if criteria or score.thin else [loss]


def as_heading(title: str) -> str:
    """With a capital, unless it has one of its own: Accuracy, mIoU."""
    return title[0].upper() + title[1:] if title.split()[0].islower() else title


def small_charts(rows: Sequence[Row], end: float | None, criteria: Sequence[Criterion]) -> list[LineChart]:
    train, known, found = of_kind(rows, "train"), known_measures(), list[LineChart]()
    for criterion in criteria[1:]:
        series = [*train_series(rows, criterion.name), *scored_series(rows, criterion.name)]
        title = as_heading(title_of(criterion))
        one = LineChart(title=title, series=series, percent=criterion.share, end=end, height=132)
        if criterion.name != LOSS and one.thin:
            found.append(one)
    wanted: tuple[tuple[str, str, Colour, bool | None], ...] = (
        ("hits", "Hits", "sky", False),
        ("lr", "Learning rate", "violet", False),
        ("norm", "Gradient norm", "amber", None),
        ("images_per_s", "Images a second", "leaf", False),
    )
    for name, title, colour, log in wanted:
        x, y = column(train, name)
        if np.isfinite(y).any():
            one = Series(name=title, x=x, y=y, colour=colour, area=log is False)
            percent = name in known and known[name].share
            found.append(LineChart(title=title, series=[one], log=log, percent=percent, end=end, height=132))
    few = of_kind(rows, "fewshot")
    if few:
        named = sorted({(str(row.get("source", "")), int(row.get("shots") or 0)) for row in few})
        palette: tuple[Colour, ...] = ("ruby", "cobalt", "leaf", "violet", "sky", "amber")
        series: list[Series] = []
        for at, (source, shots) in enumerate(named):
            mine = [row for row in few if (str(row.get("source", "")), int(row.get("shots") or 0)) == (source, shots)]
            x, y = column(mine, "accuracy")
            name = f"{source}, {shots} shots".removeprefix(", ")
            series.append(Series(name=name, x=x, y=y, colour=palette[at % len(palette)], dots=True))
        title = "Few-shot accuracy" if len(series) > 1 else f"{series[0].name}"
        found.append(LineChart(title=title, series=series, percent=True, end=end, height=132))
    return found


def train_series(rows: Sequence[Row], name: str) -> list[Series]:
    """As measured where the values are few; else their mean, with what was measured behind it."""
    x, y = column(of_kind(rows, "train"), name)
    if len(x) < NOISY:
        return [Series(name="train", x=x, y=y)]
    return [Series(name="train", x=x, y=smooth_values(y, max(3, len(y) // 40))), Series(name="", x=x, y=y, faint=True)]


def scored_series(rows: Sequence[Row], name: str) -> list[Series]:
    found: list[Series] = []
    kinds: tuple[tuple[str, Colour], ...] = (("watch", "ruby"), ("averaged", "violet"), ("test", "leaf"))
    for kind, colour in kinds:
        mine = of_kind(rows, kind)
        if kind == "test" and same_split(of_kind(rows, "watch"), mine):
            continue  # the last of the watched scores, again
        for split in dict.fromkeys(str(row.get("split") or "") for row in mine):
            x, y = column([row for row in mine if str(row.get("split") or "") == split], name)
            title = f"{split}, averaged".removeprefix(", ") if kind == "averaged" else split or kind
            found.append(Series(name=title, x=x, y=y, colour=colour, dots=True))
    return found


def baseline_series(rows: Sequence[Row]) -> list[Series]:
    """A level line, as far as the run has come."""
    last_step = float(max(row["step"] for row in rows))
    return [
        Series(
            name=f"{row.get('split') or ''}, without training".removeprefix(", "),
            x=np.array([0.0, last_step]),
            y=np.array([row["accuracy"], row["accuracy"]]),
            colour="amber",
        )
        for row in scores(rows, "baseline")[:1]
        if last_step
    ]


def same_split(watch: Sequence[Row], test: Sequence[Row]) -> bool:
    return bool(watch and test) and watch[-1].get("split") == test[-1].get("split")


def cost_rows(train: Sequence[Row], *, tuned: bool = False) -> list[tuple[str, str]]:
    """The ledger at the last row, and how quick the run was; without the paper's units where a run is `tuned`."""
    rate, used, memory = (column(train, name)[1] for name in ("images_per_s", "mfu", "memory_gb"))
    known: list[tuple[str, float | None, str]] = [
        ("images seen", last(train, "images"), "{:,.0f}"),
        ("epochs", last(train, "epoch"), "{:,.2f}"),
        ("exaFLOPs of training", None if tuned else last(train, "exaflops"), "{:.4g}"),
        ("device-hours", last(train, "device_hours"), "{:.4g}"),
        ("core-days", None if tuned else last(train, "core_days"), "{:.4g}"),
        ("images a second, median", middle(rate), "{:,.0f}"),
        ("model FLOP/s utilisation, median", middle(used) if np.isfinite(memory).any() else None, "{:.1%}"),
        ("memory, most", float(np.nanmax(memory)) if np.isfinite(memory).any() else None, "{:.2f} GB"),
    ]
    return [(name, form.format(value)) for name, value, form in known if value is not None]


def group_values(values: Mapping[str, Any]) -> list[FactGroup]:
    """Nested values as names and texts: what lies at the top together, then one group for each part."""
    top = [(name, told(value)) for name, value in values.items() if not isinstance(value, Mapping)]
    found = [FactGroup(name="", rows=top)] if top else []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.append(FactGroup(name=name, rows=flatten(value)))
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", told(value)))
    return rows


def told(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(told(one) for one in value)
    return str(value) or "–"


def with_prefix(flops: float) -> tuple[str, str]:
    """1.3e15 -> ("1.3", "peta")."""
    at = min(max(int(math.log10(flops) // 3), 0), len(PREFIXES) - 1) if flops >= 1 else 0
    return format_short(flops / 1000.0**at), PREFIXES[at]


def duration(hours: float) -> str:
    seconds = round(3600 * hours)
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{hours:,.1f} h"
