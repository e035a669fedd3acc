"""Whether a run without labels collapses, as its rows tell it: curves for the report, and a plain sentence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vitrail.report.axis import format_short
from vitrail.report.charts import Charts, Colour, LineChart, Series
from vitrail.train.run_folder.metric_rows import TALLIES, Row, column, last, number, of_kind, title_of

FEW: Final = 3.0  # directions
ALIKE, SAME = 0.99, 0.9999  # the cosine between two images
NARROW: Final = 0.1  # the spread of features, 1 where they point everywhere
SURE: Final = 0.01  # entropy, as a share of the most there could be, from either end
AGREED: Final = 0.01  # nats that a student still differs from its teacher
COLOURS: Final[tuple[Colour, ...]] = ("leaf", "amber", "violet", "sky", "ruby", "cobalt")
WATCHED: Final = ("agreement", "spread", "teacher_entropy", "kl")  # tallies that tell of collapse


def collapse_charts(rows: Sequence[Row], end: float | None, config: Mapping[str, Any]) -> Charts | None:
    """Curves of what tells of collapse, and a sentence below them; none where nothing of it was measured."""
    charts: list[LineChart] = []
    scored, train = feature_rows(rows), of_kind(rows, "train")
    width = last(scored, "width")
    splits = dict.fromkeys(str(row.get("split") or "") for row in scored)
    for name, title, unit in (
        ("rank", "Feature rank", "" if width is None else f"of {width:.0f}"),
        ("similarity", "Similarity between images", "mean cosine"),
    ):
        series = [
            Series(name=split, x=x, y=y, colour=COLOURS[at % len(COLOURS)], dots=True)
            for at, split in enumerate(splits)
            for x, y in [column([row for row in scored if str(row.get("split") or "") == split], name)]
        ]
        charts.append(LineChart(title=title, unit=unit, series=series, end=end, height=132))
    for at, name in enumerate(WATCHED):
        x, y = column(train, name)
        title = title_of(TALLIES[name])
        one = Series(name=title, x=x, y=y, colour=COLOURS[at + 2])
        charts.append(
            LineChart(
                title=title[0].upper() + title[1:],
                unit={"teacher_entropy": entropy_unit(config), "kl": "nats"}.get(name, ""),
                series=[one],
                percent=TALLIES[name].share,
                end=end,
                height=132,
            )
        )
    charts = [chart for chart in charts if chart.thin]
    if not charts:
        return None
    said = describe_collapse(rows, config)
    return Charts(
        title="Collapse indicators",
        charts=charts,
        small=len(charts) not in (2, 4),  # three in a row, where that leaves none alone
        notes=said or (common(rows) or "Nothing here looks collapsed.",),
        alarming=bool(said),
    )


def feature_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that tell of features, one a split and step: at the end the watched split may be scored once more."""
    known = [
        row for kind in ("look", "watch", "test") for row in of_kind(rows, kind) if number(row.get("rank")) is not None
    ]
    return list({(row.get("split"), row["step"]): row for row in known}.values())


def newest_feature_row(rows: Sequence[Row]) -> Row | None:
    return max(feature_rows(rows), key=lambda row: row["step"], default=None)


def describe_collapse(rows: Sequence[Row], config: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing that looks collapsed in the last rows."""
    found: list[str] = []
    row, train = newest_feature_row(rows), of_kind(rows, "train")
    if row is not None and row["rank"] < FEW:
        of = f" of {row['width']}" if row.get("width") else ""
        found.append(
            f"This looks collapsed: the features have a rank of {format_short(row['rank'])}{of}, so two images differ "
            "in hardly more than a number or two."
        )
    alike = None if row is None else number(row.get("similarity"))
    if alike is not None and (alike > SAME or (alike > ALIKE and found)):
        found.append(
            f"This looks collapsed: the features of two images have a cosine of {alike:.5f} on average, so all "
            "images look the same to the network."
        )
    spread = last(train, "spread")
    if spread is not None and spread < NARROW:
        found.append(
            f"This looks collapsed: what is compared has a spread of {format_short(spread)}, where 1 is all ways alike."
        )
    entropy, kl, most = last(train, "teacher_entropy"), last(train, "kl"), most_entropy(config)
    if entropy is not None and most is not None and kl is not None and kl < AGREED:
        said = (
            f"entropy {format_short(entropy)} of {format_short(most)} nats, and a student that differs by "
            f"{format_short(kl)}"
        )
        if entropy < SURE * most:
            found.append(f"This looks collapsed: the teacher gives every image to one output ({said}).")
        elif entropy > (1 - SURE) * most:
            found.append(f"This looks collapsed: the teacher gives every image to all outputs alike ({said}).")
    return found


def common(rows: Sequence[Row]) -> str:
    """A word on features that are mostly the same in all images though the rest has its directions: no collapse, but
    a cosine sees little of it."""
    row = newest_feature_row(rows)
    alike = None if row is None else number(row.get("similarity"))
    if row is None or alike is None or alike <= ALIKE:
        return ""
    return (
        f"Most of a feature is common to all images (a cosine of {alike:.4f} on average); a rank of "
        f"{format_short(row['rank'])} says that the rest has not collapsed, but neighbours by cosine see little of it."
    )


def most_entropy(config: Mapping[str, Any]) -> float | None:
    """Of the teacher's outputs, in nats: that of all alike."""
    objective = config.get("objective")
    outputs = number(objective.get("outputs")) if isinstance(objective, Mapping) else None
    return None if outputs is None or outputs < 2 else math.log(outputs)


def entropy_unit(config: Mapping[str, Any]) -> str:
    most = most_entropy(config)
    return "nats" if most is None else f"nats, {format_short(most)} at most"
