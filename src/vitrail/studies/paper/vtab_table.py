"""The results of a VTAB study as tables: by task and by group, next to the paper's Table 9; as Result and as a page."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from vitrail.core.config_overrides import to_plain
from vitrail.core.paper_tables import TABLE_9
from vitrail.data.datasets.catalogue import VTAB_TASKS
from vitrail.evaluation.intervals import Interval, wilson_interval
from vitrail.evaluation.result import Measure, Result, read_deduplication
from vitrail.report.page import Section, Table, page
from vitrail.report.sections import Facts, Folded, Group, Tile, Tiles
from vitrail.studies.paper.vtab import Outcome, Score, Study, changed
from vitrail.train.report.page import REPORT

GROUPS: Final = ("natural", "specialized", "structured")
HEADS: Final = ("task", "group", "test", "accuracy", "95 %", *TABLE_9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A plain mean over tasks, as VTAB scores: of those that are done, out of so many. The paper's is over the same."""

    name: str
    tasks: tuple[str, ...]
    of: int
    value: float
    interval: Interval

    @property
    def whole(self) -> bool:
        return len(self.tasks) == self.of

    @property
    def title(self) -> str:
        return self.name if self.whole else f"{self.name}, {len(self.tasks)} of {self.of}"

    def paper(self, network: str) -> float:
        return sum(TABLE_9[network][task] for task in self.tasks) / len(self.tasks)


def in_group(group: str) -> list[str]:
    return [name for name, task in VTAB_TASKS.items() if task.group == group]


def means(scores: Mapping[str, Score]) -> list[Mean]:
    """Of each group that has a task, and of all."""
    parts = [(group.capitalize(), in_group(group)) for group in GROUPS]
    found = [_mean(name, tasks, scores) for name, tasks in (*parts, ("VTAB (19)", list(VTAB_TASKS)))]
    return [one for one in found if one is not None]


def _mean(name: str, tasks: Sequence[str], scores: Mapping[str, Score]) -> Mean | None:
    done = tuple(task for task in tasks if task in scores)
    if not done:
        return None
    value = sum(scores[task].accuracy for task in done) / len(done)
    # Tasks are drawn apart, so their variances add up; each is read off its own interval.
    widths = [interval(scores[task]) for task in done]
    low = math.sqrt(sum((scores[task].accuracy - w.low) ** 2 for task, w in zip(done, widths, strict=True))) / len(done)
    up = math.sqrt(sum((w.high - scores[task].accuracy) ** 2 for task, w in zip(done, widths, strict=True))) / len(done)
    return Mean(name=name, tasks=done, of=len(tasks), value=value, interval=Interval(value - low, value + up))


def interval(score: Score) -> Interval:
    return wilson_interval(score.right, score.count)


def rows(outcome: Outcome) -> list[list[str]]:
    """A line a task in the paper's order, then one a group and one for all."""
    found: list[list[str]] = []
    for name, task in VTAB_TASKS.items():
        if name not in outcome.states:
            continue
        paper = [f"{table[name]:.1f}" for table in TABLE_9.values()]
        score = outcome.scores.get(name)
        if score is None:
            found.append([task.title, task.group, "", outcome.states[name], "", *paper])
            continue
        found.append([task.title, task.group, f"{score.count:,}", *_cells(score.accuracy, interval(score)), *paper])
    for mean in means(outcome.scores):
        paper = [f"{mean.paper(network):.1f}" for network in TABLE_9]
        found.append([mean.title, "mean", "", *_cells(mean.value, mean.interval), *paper])
    return found


def _cells(value: float, around: Interval) -> list[str]:
    return [f"{100 * value:.1f}", f"{100 * around.low:.1f} to {100 * around.high:.1f}"]


def deduplicated(provenance: Mapping[str, Any], prints: Iterable[str]) -> bool | None:
    """What the weights themselves say of the test images of all tasks; none where they say it of some alone."""
    told = {read_deduplication(provenance, one) for one in prints}
    return told.pop() if len(told) == 1 else None


def result(study: Study, outcome: Outcome, weights: Mapping[str, Any]) -> Result:
    """As JSON. The mean of an incomplete group says so in its name, so that it never stands next to a whole one."""
    scores = outcome.scores
    single = ((score.task.title, score.accuracy, score.count, interval(score)) for score in scores.values())
    grouped = ((mean.title, mean.value, len(mean.tasks), mean.interval) for mean in means(scores))
    measures = [
        Measure(name=name, value=value, count=count, low=around.low, high=around.high)
        for name, value, count, around in (*single, *grouped)
    ]
    prints = {name: score.fingerprint for name, score in scores.items()}
    data = {
        "name": "VTAB-1k",
        "split": "test",
        "pictures": sum(score.count for score in scores.values()),
        "fingerprint": hashlib.sha256(repr(sorted(prints.items())).encode()).hexdigest(),
        "deduplicated": deduplicated(weights.get("provenance", {}), prints.values()),
        "tasks": prints,
    }
    tasks = {
        name: {"accuracy": one.accuracy, "loss": one.loss, "count": one.count, "step": one.step, "run": name}
        for name, one in scores.items()
    }
    details = {
        "tasks": tasks,
        "missing": {name: outcome.reasons[name] for name in outcome.of("missing", "failed") if name in outcome.reasons},
        "paper": {network: dict(table) for network, table in TABLE_9.items()},
        "changed": changed(study),
    }
    return Result(
        kind="vtab",
        weights=dict(weights),
        data=data,
        measures=tuple(measures),
        config=to_plain(study.base),
        details=details,
    )


def html(study: Study, outcome: Outcome, name: str) -> str:
    """The page of a study."""
    tiles = [
        Tile(value=f"{100 * mean.value:.1f}", label=mean.title, note=" · ".join(beside(mean)))
        for mean in means(outcome.scores)
    ]
    sections: list[Section] = [Tiles(tiles=tiles)] if tiles else []
    listed = rows(outcome)
    links = [link(study, name) for name in VTAB_TASKS if name in outcome.states]
    links += [""] * (len(listed) - len(links))  # the means
    sections.append(Table(title="By task", columns=HEADS, rows=listed, left=2, links=links))
    reasons = [(VTAB_TASKS[name].title, outcome.reasons[name]) for name in outcome.of("missing", "failed")]
    if reasons:
        sections.append(
            Folded(title="Passed over", groups=[Group(name=title, rows=lines(text)) for title, text in reasons])
        )
    other = changed(study) or ["nothing: the paper's recipe"]
    sections.append(
        Facts(
            title="Changed against the paper", rows=[(line.partition(":")[0], line.partition(":")[2]) for line in other]
        )
    )
    lead = f"{study.base.weights}, fine-tuned on a thousand images of each task and scored on its whole test split."
    return page(f"VTAB-1k: {name}", sections, lead=lead)


def link(study: Study, task: str) -> str:
    """The way from the study's page to that of a task's run, where there is one."""
    path = study.folder(task) / REPORT
    return quote(path.relative_to(study.out).as_posix()) if path.exists() else ""


def beside(mean: Mean) -> Iterable[str]:
    return (f"{network} {mean.paper(network):.1f}" for network in TABLE_9)


def lines(text: str) -> list[tuple[str, str]]:
    return [("", line) for line in text.splitlines()]
