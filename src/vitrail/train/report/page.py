"""RUN/report.html: what happened, the results and the cost, on one self-contained page.

    write_report(folder, RunFacts(title="vit-ti on digits", status="running", steps=2000))

The curves come from metrics.jsonl, the rest from the run itself. The page is written atomically, so it can be viewed
while the run is in progress.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.core.config_overrides import format_plain, to_plain
from vitrail.core.errors import ConfigError, VitrailError
from vitrail.core.text import format_duration
from vitrail.data.dataset import ImageDataset
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.metrics import ClassificationScore, Criterion
from vitrail.report import sections
from vitrail.report.axis import format_share, format_short, smooth_values
from vitrail.report.charts import Charts
from vitrail.report.page import Notes, Section, render_page, save_page
from vitrail.report.sections import Facts, ImageRow, ImageRows, State, Tile, make_pane
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import task_of
from vitrail.train.assemble import Parts
from vitrail.train.report import charts
from vitrail.train.report.charts import is_same_split, name_score
from vitrail.train.run_folder import metric_rows
from vitrail.train.run_folder.files import ENVIRONMENT, METRICS, read_json
from vitrail.train.run_folder.metric_rows import LOSS, Row, column, last, number, of_kind, scores, title_of
from vitrail.train.run_folder.run import RunFolder
from vitrail.train.scoring import SplitScore
from vitrail.train.selfsup_scoring import ReportSamples

REPORT: Final = "report.html"
STYLE: Final = "image_rows.css"
LISTED: Final = 50  # unreadable files by name
RECENT: Final = 50  # rows whose median is the current throughput
CLOSE: Final = 0.995  # similarities above this need more digits
PREFIXES: Final = ("", "kilo", "mega", "giga", "tera", "peta", "exa", "zetta")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunFacts:
    """What the page shows next to the metrics. `command` resumes the run; `notes` are the warnings; `steps` is the
    length of the run, 0 if unknown, and `step` its position, by default that of the metrics. `criteria` are the numbers
    of its task, empty without labels; `panels` are the task's or the objective's own sections, after the curves."""

    title: str
    lead: str = ""
    status: State = "running"
    message: str = ""
    notes: Sequence[str] = ()
    command: str = ""
    step: int | None = None
    steps: int = 0
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chosen: int = -1  # the step of the best weights, which the run stands for; below 0 if the last ones count
    criteria: Sequence[Criterion] = ClassificationScore.criteria
    panels: Sequence[Section] = ()
    unreadable: Sequence[str] = ()

    @property
    def is_tuned(self) -> bool:
        """FLOPs and core-days, the paper's units, are for runs from scratch."""
        return bool(self.config.get("weights"))


def present(
    folder: RunFolder, parts: Parts, score: SplitScore | None, state: State, message: str, *, step: int, chosen: int
) -> None:
    """Writes the report of a run. `chosen` is the step of the best weights, below 0 if the last ones count."""
    run, splits = parts.run, parts.splits
    task, num_classes = task_of(run.objective), len(splits.class_names)
    if task is None:
        targets = f" of {num_classes:,} classes, labels unseen" if num_classes else ""
    else:
        targets = f"{' of' if task is CLASSIFICATION else ','} {task.describe_outputs(splits.class_names)}"
    try:
        environment = read_json(folder.path / ENVIRONMENT)
    except ConfigError:
        environment = {}
    facts = RunFacts(
        title=run.name,
        lead=f"{run.name} on {splits.title}: {len(splits.train):,} images{targets}",
        status=state,
        message=message,
        notes=[note for note in folder.warnings if note != message],
        command=folder.next if state != "done" else "",
        step=step,
        steps=run.steps,
        config=to_plain(run),
        environment=environment,
        chosen=chosen,
        criteria=() if task is None else task.criteria,
        panels=[] if score is None else make_panels(parts, score, chosen),
        unreadable=[str(entry) for entry in parts.ledger.known.values()],
    )
    write_report(folder.path, facts)


def make_panels(parts: Parts, score: SplitScore, chosen: int) -> list[Section]:
    """The task's own sections on a score; for a run without labels, reconstructions and neighbours."""
    task, splits, title = task_of(parts.run.objective), parts.splits, score.split
    if chosen >= 0:
        named = "best weights (step {:,})" if score.step == chosen else "weights of step {:,}, not the best"
        title += f", {named.format(score.step)}"
    if isinstance(score.found, ReportSamples):
        rebuilt = [show_reconstructions(score.found, title)] if score.found.rebuilt else []
        near = [show_neighbours(score.found, title, splits.class_names)] if score.found.neighbours else []
        return [*rebuilt, *near]
    source = splits.test if score.split == splits.test_name and score.split else splits.watch
    return [] if task is None else task.report_sections(score.found, source, splits.class_names, title)


def show_reconstructions(samples: ReportSamples, split: str) -> ImageRows:
    names = ("image", "as seen", "rebuilt")
    lead = "Each image, the part that the network saw, and its reconstruction of the rest."
    strips = [ImageRow(panes=list(map(make_pane, images, names))) for images in samples.rebuilt]
    return ImageRows(title=f"Reconstructions on {split}", lead=lead, strips=strips, sides=names)


def show_neighbours(samples: ReportSamples, split: str, class_names: Sequence[str]) -> ImageRows:
    """Each image next to its nearest training images, framed by whether the label is the same."""

    def show(source: ImageDataset, sample: int, default: str, **options: Any) -> tuple[Any, str]:
        label = ", ".join(class_names[at] for at in source.labels[sample] if at < len(class_names))
        try:
            image: sections.ImageLike | None = source.open_image(sample).rgb()
        except VitrailError:  # it has become unreadable
            image = None
        return make_pane(image, label or default, **options), label

    strips: list[ImageRow] = []
    for query in samples.neighbours:
        first, label = show(samples.source, query.sample, "an image")
        panes = [first]
        for one in query.neighbours:
            mood: sections.Mood = "" if one.same is None else "right" if one.same else "wrong"
            caption = f"{one.similarity:.3f}" if one.similarity < CLOSE else f"{one.similarity:.5f}"
            panes.append(show(samples.references, one.sample, "a neighbour", caption=caption, mood=mood)[0])
        right = [one.same for one in query.neighbours if one.same is not None]
        note = f"{sum(right)} of {len(right)} the same" if right else ""
        strips.append(ImageRow(panes=panes, caption=label, note=note))
    frames = " A green frame marks the same label, a red one another." if any(strip.note for strip in strips) else ""
    lead = f"Images next to the training images with the most similar features, and their cosine.{frames}"
    return ImageRows(title=f"Nearest neighbours of {split}", lead=lead, strips=strips, apart=True)


def write_report(folder: Path, facts: RunFacts) -> None:
    """Writes the page from the folder's metrics and the facts."""
    rows, lost = metric_rows.read_metrics(folder / METRICS)
    save_page(folder / REPORT, render_page(facts.title, make_sections(rows, lost, facts), lead=facts.lead, style=STYLE))


def make_sections(rows: Sequence[Row], lost: int, facts: RunFacts) -> list[Section]:
    """The page from top to bottom."""
    train = of_kind(rows, "train")
    found: list[Section] = [make_status(train, lost, facts)]
    if tiles := make_tiles(rows, facts):
        found.append(sections.Tiles(tiles=tiles))
    end = float(facts.steps) if facts.status == "running" and facts.steps else None
    if rows:
        found.append(Charts(charts=charts.large_charts(rows, end, facts.criteria)))
        if small := charts.small_charts(rows, end, facts.criteria):
            found.append(Charts(charts=small, small=len(small) != 4))
        if collapse := charts.collapse_charts(rows, end, facts.config):
            found.append(collapse)
    found += facts.panels
    if cost := cost_rows(train, facts):
        found.append(sections.Facts(title="Cost", rows=cost))
    if facts.unreadable:
        more = f"{len(facts.unreadable) - LISTED:,} more." if len(facts.unreadable) > LISTED else ""
        found.append(Notes(title="Unreadable files", lines=facts.unreadable[:LISTED], more=more))
    for title, values in (("Configuration", facts.config), ("Environment", facts.environment)):
        if values:
            found.append(sections.DetailsSection(title=title, groups=group_values(values)))
    return found


def make_status(train: Sequence[Row], lost: int, facts: RunFacts) -> sections.Status:
    step = facts.step if facts.step is not None else int(train[-1]["step"]) if train else 0
    position = f"step {step:,} of {facts.steps:,}" if facts.steps else f"step {step:,}"
    skipped = int(last(train, "skipped") or 0)
    has_position = bool(facts.message) and (not train or facts.status == "interrupted")  # the message says where
    lines = [*facts.notes]
    if skipped:
        lines.append(f"{skipped:,} updates were skipped because loss or gradient was not finite.")
    if lost:
        lines.append(f"{lost:,} lines of {METRICS} could not be read and are not shown.")
    return sections.Status(
        state=facts.status,
        text=facts.message if has_position else f"at {position}{'. ' if facts.message else ''}{facts.message}",
        lines=lines,
        asks="If it is stopped, resume with" if facts.status == "running" else "Resume with",
        command=facts.command,
        progress=step / facts.steps if facts.steps and facts.status != "done" else None,
    )


def make_tiles(rows: Sequence[Row], facts: RunFacts) -> list[Tile]:
    """The main numbers."""
    train, watch, test = of_kind(rows, "train"), scores(rows, "watch"), scores(rows, "test")
    closed, found = scores(rows, "baseline"), list[Tile]()
    if test:
        found.append(score_tile(f"test {name_score(test[-1])}", test[-1], closed))
    if watch and not is_same_split(watch, test):  # the test split selects nothing, so it has no best score
        best = next((row for row in watch if row["step"] == facts.chosen), metric_rows.best_of(watch))
        found.append(score_tile(f"best {best.get('split') or 'watched'} {name_score(best)}", best, closed))
    if closed and not found and (first := metric_rows.headline(closed[0])):  # nothing is scored yet
        split = str(closed[0].get("split") or "")
        found.append(Tile(value=format_share(first.value), label="without training", note=split))
    loss = smooth_values(column(train, "loss")[1], RECENT // 5)
    if len(loss) and math.isfinite(loss[-1]):
        found.append(Tile(value=format_short(loss[-1]), label="training loss", note=tally_note(train, facts.criteria)))
    if (row := charts.newest_feature_row(rows)) is not None:
        notes = [f"of {row['width']}" if row.get("width") else "", row.get("split") or ""]
        found.append(Tile(value=format_short(row["rank"]), label="feature rank", note=", ".join(filter(None, notes))))
    rate = column(train, "images_per_s")[1][-RECENT:]
    if np.isfinite(rate).any():
        used = last(train, "mfu") if last(train, "memory_gb") is not None else None  # of a GPU
        note = "" if used is None else f"{100 * used:.0f}% of peak"
        found.append(Tile(value=format_short(float(np.nanmedian(rate))), label="images per second", note=note))
    if (exa := last(train, "exaflops")) is not None and not facts.is_tuned:
        value, unit = with_prefix(exa * 1e18)
        seen = last(train, "images")
        note = "" if seen is None else f"{format_short(seen)} images"
        found.append(Tile(value=value, label=f"{unit}FLOPs of training", note=note))
    if (hours := last(train, "device_hours")) is not None:
        note = "" if facts.is_tuned else f"{format_short(hours / 24)} core-days"
        found.append(Tile(value=format_duration(3600 * hours), label="device time", note=note))
    return found


def score_tile(label: str, row: Row, closed: Sequence[Row] = ()) -> Tile:
    """A score, with that of the closed form on the same split, which fine-tuning has to beat."""
    count, top5, main = row.get("count"), row.get("top5"), metric_rows.headline(row)
    assert main is not None
    notes = [f"{count:,} images"] if count else []
    if count and main.is_accuracy:
        notes = [f"{round(main.value * count):,} of {count:,}", describe_interval(main.value, count)]
    notes += [  # without the loss, which has a curve
        f"{title_of(criterion)} {format_number(criterion, value)}"
        for criterion in metric_rows.criteria_of(row)[1:]
        if criterion.name != LOSS and (value := number(row.get(criterion.name))) is not None
    ]
    if top5 is not None and count and top5 < 1:
        notes.append(f"top 5: {format_share(top5)}")
    if row.get("kind") == "watch":
        notes.append(f"step {row['step']:,}")
    if row.get("weights") == "best":
        notes.append(f"best weights (step {row['step']:,})")
    same = [metric_rows.headline(one) for one in closed if one.get("split") == row.get("split")]
    notes += [f"without training: {format_share(one.value)}" for one in same if one is not None]
    return Tile(value=format_number(main.criterion, main.value), label=label, note=", ".join(notes))


def format_number(criterion: Criterion, value: float) -> str:
    return format_share(value) if criterion.share else format_short(value)


def describe_interval(accuracy: float, count: int) -> str:
    """The uncertainty of an accuracy: "95% interval 92.2–96.8"."""
    low, high = wilson_interval(round(accuracy * count), count)
    return f"95% interval {100 * low:.1f}–{100 * high:.1f}"


def tally_note(train: Sequence[Row], criteria: Sequence[Criterion]) -> str:
    """The training accuracy, or what the objective reports instead, smoothed like the loss."""
    known = metric_rows.known_measures()
    for tally in (*criteria, *(known[name] for name in ("accuracy", "hits", "agreement"))):
        values = smooth_values(column(train, tally.name)[1], RECENT // 5)
        if tally.name != LOSS and len(values) and math.isfinite(values[-1]):
            return f"{title_of(tally)} {format_number(tally, values[-1])}"
    return ""


def cost_rows(train: Sequence[Row], facts: RunFacts) -> list[tuple[str, str]]:
    """The cost at the last row, and the speed; without the paper's units if the run is fine-tuned."""
    rate, used, memory = (column(train, name)[1] for name in ("images_per_s", "mfu", "memory_gb"))
    has_memory = np.isfinite(memory).any()
    paper_days = None if facts.is_tuned else last(train, "tpuv3_core_days")
    known: list[tuple[str, float | None, str]] = [
        ("images seen", last(train, "images"), "{:,.0f}"),
        ("epochs", last(train, "epoch"), "{:,.2f}"),
        ("exaFLOPs of training", None if facts.is_tuned else last(train, "exaflops"), "{:.4g}"),
        ("device-hours", last(train, "device_hours"), "{:.4g}"),
        ("core-days", None if facts.is_tuned else last(train, "core_days"), "{:.4g}"),
        ("TPUv3-core-days at the pace of the paper's ViT-L/16", paper_days, "{:.3g}"),  # the unit of Table 2
        ("images per second, median", metric_rows.middle(rate), "{:,.0f}"),
        ("model FLOP/s utilisation, median", metric_rows.middle(used) if has_memory else None, "{:.1%}"),
        ("peak memory", float(np.nanmax(memory)) if has_memory else None, "{:.2f} GB"),
    ]
    return [(name, form.format(value)) for name, value, form in known if value is not None]


def group_values(values: Mapping[str, Any]) -> list[Facts]:
    """Nested values as names and texts: the top level together, then one group for each part."""
    parts = {name: value for name, value in values.items() if isinstance(value, Mapping) and value}
    top = flatten({name: value for name, value in values.items() if not isinstance(value, Mapping)})
    groups = [Facts(title=name, rows=flatten(value)) for name, value in parts.items()]
    return [Facts(title="", rows=top), *groups] if top else groups


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        rows += flatten(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", format_plain(value) or "–")]
    return rows


def with_prefix(flops: float) -> tuple[str, str]:
    """1.3e15 -> ("1.3", "peta")."""
    at = min(max(int(math.log10(flops) // 3), 0), len(PREFIXES) - 1) if flops >= 1 else 0
    return format_short(flops / 1000.0**at), PREFIXES[at]
