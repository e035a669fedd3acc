"""The page of an evaluation: the numbers, how far to trust its confidence, what is taken for what, and its pictures."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import VitrailError
from vitrail.data.source import Source
from vitrail.evaluation.answers import Judged
from vitrail.evaluation.assessment import Assessment
from vitrail.evaluation.comparison import data_of, flat, parts_of
from vitrail.evaluation.result import Measure, Result, shown, spanned
from vitrail.report.charts import Charts, Lines, Series
from vitrail.report.heat import Heat
from vitrail.report.page import Notes, Section, Table, page
from vitrail.report.panels import Facts, Galleries, Gallery, Shot, Tile, Tiles, shot

PICTURES = 12
LISTED = 12

CAPTIONS = {
    "top-1": "the first answer is right",
    "top-5": "one of the first five is right",
    "ReaL": "the first answer is on the picture",
    "mean per class": "every class counts the same",
    "ECE": "calibration error, equal widths",
    "adaptive ECE": "calibration error, equal counts",
    "loss": "cross-entropy",
}


def evaluation_page(
    result: Result, found: Assessment, source: Source, notes: Sequence[str], seen: Sequence[str]
) -> str:
    """One HTML file of an evaluation, pictures included. `seen` says which images the weights were trained on."""
    sections: list[Section] = [
        Notes(title="Seen in training", lines=list(seen)),
        Tiles(tiles=[tile(measure) for measure in result.measures]),
        charts(found),
        *heat(found),
        gallery(found, source),
        facts(result),
    ]
    if notes:
        sections.append(Notes(title="Notes", lines=list(notes)))
    count = f"{len(found.judged):,} pictures, {len(found.classes):,} classes"
    lead = f"{data_of(result)}: {count}; with 95 % intervals"
    return page(parts_of(str(result.weights["name"]))[-1], sections, lead=lead)


def tile(measure: Measure) -> Tile:
    note = "; ".join(part for part in (spanned(measure), CAPTIONS.get(measure.name, "")) if part)
    return Tile(value=shown(measure), label=measure.name, note=note)


def charts(found: Assessment) -> Charts:
    """The reliability diagram, and how many answers there are of each confidence."""
    bins = found.reliability
    there = bins.counts > 0
    edges = np.arange(len(bins.counts)) + 0.5
    sure, right = 100 * bins.confidence[there], bins.accuracy[there]
    return Charts(
        title="Calibration",
        charts=[
            Lines(
                title="Right answers by confidence",
                series=[
                    Series(name="as sure as right", x=np.array([0.0, 100.0]), y=np.array([0.0, 1.0]), faint=True),
                    Series(name="right", x=sure, y=right, dots=True, colour="ruby"),
                ],
                along="confidence in %",
                unit="confidence in %",
                percent=True,
                end=100.0,
                note="below the faint line it is surer than it should be",
            ),
            Lines(
                title="Answers by confidence",
                series=[
                    Series(
                        name="answers",
                        x=100 * edges / len(bins.counts),
                        y=bins.counts,
                        dots=True,
                        area=True,
                        colour="amber",
                    )
                ],
                along="confidence in %",
                unit="confidence in %",
                end=100.0,
            ),
        ],
    )


def heat(found: Assessment) -> list[Section]:
    """The confusion matrix; of classes that nothing can be said of one by one, neither matrix nor list."""
    matrix = found.matrix
    if matrix is not None and len(found.judged) > 2 * len(found.classes):
        return [Heat(counts=matrix, classes=list(found.names), title="What is taken for what", listed=LISTED)]
    rows = [(pair.truth, pair.said, f"{pair.count:,}") for pair in found.confused(LISTED) if pair.count > 1]
    return [Table(title="Most often confused", columns=("true", "said", "times"), rows=rows, left=2)] if rows else []


def gallery(found: Assessment, source: Source) -> Galleries:
    """The surest right answers beside those of the largest loss."""
    judged = found.judged
    right = np.flatnonzero(judged.right)
    best = right[np.lexsort((right, -judged.confidence[right]))][:PICTURES]
    worst = np.lexsort((judged.sample, -np.nan_to_num(judged.loss, nan=np.inf, posinf=np.inf)))[:PICTURES]
    return Galleries(
        galleries=[
            Gallery(title="Worst", shots=shots(worst, judged, found.names, source), lead="largest loss"),
            Gallery(title="Best", shots=shots(best, judged, found.names, source), lead="surest"),
        ]
    )


def shots(places: NDArray[np.int64], judged: Judged, names: Sequence[str], source: Source) -> list[Shot]:
    """Each picture with what it shows and what was said."""
    made: list[Shot] = []
    for at in places.tolist():
        truth, first = names[int(judged.truth[at])], int(judged.said[at])
        said = names[first] if first >= 0 else "no number"
        caption = f"{truth}\n{'' if judged.right[at] else f'said {said}, '}{judged.confidence[at]:.1%}"
        try:
            picture = source.picture(int(judged.sample[at])).rgb()
        except VitrailError:
            picture = None  # it has gone since it was scored
        made.append(shot(picture, caption, mood="right" if judged.right[at] else "wrong"))
    return made


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
