"""The charts of a run's report: loss, scores and speed, and the collapse indicators of a run without labels."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from vitrail.evaluation.metrics import ClassificationScore, Criterion
from vitrail.report.axis import format_short, smooth_values
from vitrail.report.charts import Charts, Colour, LineChart, Series
from vitrail.train.run_folder import metric_rows
from vitrail.train.run_folder.metric_rows import LOSS, TALLIES, Row, column, last, number, of_kind, title_of

HEIGHT: Final = 132  # of a small chart
NOISY: Final = 60  # from this many rows on, curves are smoothed
FEW: Final = 3.0  # directions
ALIKE, SAME = 0.99, 0.9999  # cosine between two images
NARROW: Final = 0.1  # spread of the features; 1 if they are isotropic
SURE: Final = 0.01  # entropy, as a share of the maximum, from either end
AGREED: Final = 0.01  # nats by which a student still differs from its teacher
COLOURS: Final[tuple[Colour, ...]] = ("leaf", "amber", "violet", "sky", "ruby", "cobalt")
WATCHED: Final = ("agreement", "spread", "teacher_entropy", "kl")  # tallies that indicate collapse
COLLAPSED: Final = "This looks collapsed: "


def large_charts(rows: Sequence[Row], end: float | None, criteria: Sequence[Criterion]) -> list[LineChart]:
    """Loss and the main number of the task, for training and for each scored split; without labels the second is the
    accuracy of neighbours, if there is one."""
    series = [*train_series(rows, "loss"), *scored_series(rows, "loss")]
    loss = LineChart(title="Loss", series=series, log=None, end=end)
    main = (*criteria, *ClassificationScore.criteria)[0]
    found = [*train_series(rows, main.name), *baseline_series(rows), *scored_series(rows, main.name)]
    title = next((name_score(row) for row in rows if row.get("measure")), title_of(main))
    score = LineChart(title=capitalise(title), series=found, percent=main.share, end=end)
    return [loss, score] if criteria or score.thin else [loss]


def small_charts(rows: Sequence[Row], end: float | None, criteria: Sequence[Criterion]) -> list[LineChart]:
    """The other numbers of the task, the learning rate, the gradient norm, the speed and the few-shot accuracy."""
    train, known, found = of_kind(rows, "train"), metric_rows.known_measures(), list[LineChart]()
    make_chart = partial(LineChart, end=end, height=HEIGHT)
    for criterion in criteria[1:]:
        series = [*train_series(rows, criterion.name), *scored_series(rows, criterion.name)]
        chart = make_chart(title=capitalise(title_of(criterion)), series=series, percent=criterion.share)
        if criterion.name != LOSS and chart.thin:
            found.append(chart)
    curves: tuple[tuple[str, str, Colour, bool | None], ...] = (
        ("hits", "Hits", "sky", False),
        ("lr", "Learning rate", "violet", False),
        ("norm", "Gradient norm", "amber", None),
        ("images_per_s", "Images per second", "leaf", False),
    )
    for name, title, colour, log in curves:
        x, y = column(train, name)
        if np.isfinite(y).any():
            one = Series(name=title, x=x, y=y, colour=colour, area=log is False)
            found.append(make_chart(title=title, series=[one], log=log, percent=name in known and known[name].share))
    few: dict[tuple[str, int], list[Row]] = {}
    for row in of_kind(rows, "fewshot"):
        few.setdefault((str(row.get("source", "")), int(row.get("shots") or 0)), []).append(row)
    if few:
        named = {f"{source}, {shots} shots".removeprefix(", "): few[source, shots] for source, shots in sorted(few)}
        series = dotted_series(named, "accuracy", "ruby cobalt leaf violet sky amber")
        title = "Few-shot accuracy" if len(series) > 1 else next(iter(named))
        found.append(make_chart(title=title, series=series, percent=True))
    return found


def dotted_series(groups: Mapping[str, Sequence[Row]], number: str, colours: str) -> list[Series]:
    """One series with dots per group of rows, by its name, in these colours in turn."""
    palette: Any = colours.split()
    columns = {name: column(rows, number) for name, rows in groups.items()}
    return [
        Series(name=name, x=x, y=y, colour=palette[at % len(palette)], dots=True)
        for at, (name, (x, y)) in enumerate(columns.items())
    ]


def group_by_split(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("split") or ""), []).append(row)
    return found


def train_series(rows: Sequence[Row], name: str) -> list[Series]:
    """The values as measured if they are few; else their running mean, with the values behind it."""
    x, y = column(of_kind(rows, "train"), name)
    if len(x) < NOISY:
        return [Series(name="train", x=x, y=y)]
    return [Series(name="train", x=x, y=smooth_values(y, max(3, len(y) // 40))), Series(name="", x=x, y=y, faint=True)]


def scored_series(rows: Sequence[Row], name: str) -> list[Series]:
    """The watched splits, and the test split unless it is the watched one again."""
    watch, test = of_kind(rows, "watch"), of_kind(rows, "test")
    kinds = [("watch", watch, "ruby"), *([] if is_same_split(watch, test) else [("test", test, "leaf")])]
    found: list[Series] = []
    for kind, mine, colour in kinds:
        groups = {split or kind: group for split, group in group_by_split(mine).items()}
        found += dotted_series(groups, name, colour)
    return found


def baseline_series(rows: Sequence[Row]) -> list[Series]:
    """The baseline as a horizontal line, up to the current step."""
    closed, last_step = metric_rows.scores(rows, "baseline"), float(max(row["step"] for row in rows))
    if not closed or not last_step:
        return []
    name = f"{closed[0].get('split') or ''}, without training".removeprefix(", ")
    main = metric_rows.headline(closed[0])
    assert main is not None
    y = np.array([main.value] * 2)
    return [Series(name=name, x=np.array([0.0, last_step]), y=y, colour="amber")]


def is_same_split(watch: Sequence[Row], test: Sequence[Row]) -> bool:
    return bool(watch and test) and watch[-1].get("split") == test[-1].get("split")


def name_score(row: Row) -> str:
    """The name of a row's main number."""
    main = metric_rows.headline(row)
    return "score" if main is None else main.name


def capitalise(title: str) -> str:
    """With a capital, unless it has one of its own: Accuracy, mIoU."""
    return title[0].upper() + title[1:] if title.split()[0].islower() else title


def collapse_charts(rows: Sequence[Row], end: float | None, config: Mapping[str, Any]) -> Charts | None:
    """Curves of the collapse indicators, and a sentence below them; None if none were measured."""
    charts, scored, train = list[LineChart](), feature_rows(rows), of_kind(rows, "train")
    width, entropy = last(scored, "width"), max_entropy(config)
    make_chart = partial(LineChart, end=end, height=HEIGHT)
    for name, title, unit in (
        ("rank", "Feature rank", "" if width is None else f"of {width:.0f}"),
        ("similarity", "Similarity between images", "mean cosine"),
    ):
        series = dotted_series(group_by_split(scored), name, " ".join(COLOURS))
        charts.append(make_chart(title=title, unit=unit, series=series))
    units = {"teacher_entropy": "nats" if entropy is None else f"nats, {format_short(entropy)} at most", "kl": "nats"}
    for at, name in enumerate(WATCHED):
        x, y = column(train, name)
        title, share, unit = title_of(TALLIES[name]), TALLIES[name].share, units.get(name, "")
        one = Series(name=title, x=x, y=y, colour=COLOURS[at + 2])
        charts.append(make_chart(title=title[0].upper() + title[1:], unit=unit, series=[one], percent=share))
    charts = [chart for chart in charts if chart.thin]
    if not charts:
        return None
    warnings = describe_collapse(rows, config)
    notes = warnings or (describe_common_part(rows) or "Nothing here looks collapsed.",)
    small = len(charts) not in (2, 4)  # three per row, unless that leaves one alone
    return Charts(title="Collapse indicators", charts=charts, small=small, notes=notes, alarming=bool(warnings))


def feature_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows about features, one per split and step: at the end the watched split may be scored twice."""
    known = [row for kind in ("look", "watch", "test") for row in of_kind(rows, kind)]
    found = {(row.get("split"), row["step"]): row for row in known if number(row.get("rank")) is not None}
    return list(found.values())


def newest_feature_row(rows: Sequence[Row]) -> Row | None:
    return max(feature_rows(rows), key=lambda row: row["step"], default=None)


def describe_collapse(rows: Sequence[Row], config: Mapping[str, Any]) -> list[str]:
    """One sentence for each indicator of collapse in the last rows."""
    found: list[str] = []
    row, train = newest_feature_row(rows), of_kind(rows, "train")
    if row is not None and row["rank"] < FEW:
        width = f" of {row['width']}" if row.get("width") else ""
        rank = f"the features have a rank of {format_short(row['rank'])}{width}"
        found.append(f"{COLLAPSED}{rank}, so two images differ in hardly more than one or two numbers.")
    alike = None if row is None else number(row.get("similarity"))
    if alike is not None and (alike > SAME or (alike > ALIKE and found)):
        cosine = f"the features of two images have a cosine of {alike:.5f} on average"
        found.append(f"{COLLAPSED}{cosine}, so all images look the same to the network.")
    spread = last(train, "spread")
    if spread is not None and spread < NARROW:
        found.append(f"{COLLAPSED}the compared features have a spread of {format_short(spread)}, where 1 is isotropic.")
    entropy, kl, most = last(train, "teacher_entropy"), last(train, "kl"), max_entropy(config)
    if entropy is not None and most is not None and kl is not None and kl < AGREED:
        nats = f"entropy {format_short(entropy)} of {format_short(most)} nats"
        numbers = f"{nats}, and a student that differs by {format_short(kl)}"
        if entropy < SURE * most:
            found.append(f"{COLLAPSED}the teacher assigns every image to one output ({numbers}).")
        elif entropy > (1 - SURE) * most:
            found.append(f"{COLLAPSED}the teacher assigns every image to all outputs alike ({numbers}).")
    return found


def describe_common_part(rows: Sequence[Row]) -> str:
    """A sentence for features with a large part common to all images but a remainder of high rank: they have not
    collapsed, but their cosines hardly show it."""
    row = newest_feature_row(rows)
    alike = None if row is None else number(row.get("similarity"))
    if row is None or alike is None or alike <= ALIKE:
        return ""
    common = f"Most of a feature is common to all images (a cosine of {alike:.4f} on average)"
    rest = f"a rank of {format_short(row['rank'])} shows that the rest has not collapsed"
    return f"{common}; {rest}, but neighbours by cosine see little of it."


def max_entropy(config: Mapping[str, Any]) -> float | None:
    """The largest entropy of the teacher's outputs, in nats."""
    objective = config.get("objective")
    outputs = number(objective.get("outputs")) if isinstance(objective, Mapping) else None
    return None if outputs is None or outputs < 2 else math.log(outputs)
