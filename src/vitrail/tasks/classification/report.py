"""Report sections for a classifier: calibration, confusion, best and worst images, and a table of multi-label
classes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vitrail.core.errors import VitrailError
from vitrail.data.dataset import ImageDataset
from vitrail.evaluation.metrics import ScoredSample
from vitrail.evaluation.multi_label import MultiLabelScore
from vitrail.report.charts import Charts, LineChart, Series
from vitrail.report.confusion_matrix import ConfusionSection
from vitrail.report.page import Section, Table
from vitrail.report.sections import Galleries, Gallery, Mood, Shot, make_shot
from vitrail.tasks.classification.metrics import Assessment

SHOWN = 12  # best and worst images
LISTED = 12

CAPTIONS = {
    "top-1": "the first answer is right",
    "top-5": "one of the first five is right",
    "ReaL": "the first answer is a ReaL label",
    "mean per class": "every class has equal weight",
    "ECE": "calibration error, equal widths",
    "adaptive ECE": "calibration error, equal counts",
    "loss": "cross-entropy",
}


def build_assessment_sections(found: Assessment, source: ImageDataset) -> list[Section]:
    """Builds the sections of an evaluation's page, with images."""
    best, worst = found.judged.extremes(SHOWN)
    galleries = [
        Gallery(title="Worst", shots=show_answers(worst, source, found.names), lead="largest loss"),
        Gallery(title="Best", shots=show_answers(best, source, found.names), lead="most confident"),
    ]
    return [draw_calibration(found), *confusion_sections(found), Galleries(galleries=galleries)]


def draw_calibration(found: Assessment) -> Charts:
    """Draws the reliability diagram, and the number of predictions by confidence."""
    bins, even = found.reliability, np.array([0.0, 1.0])
    there, edges = bins.counts > 0, np.arange(len(bins.counts)) + 0.5
    level = Series(name="calibrated", x=100 * even, y=even, faint=True)
    sure, right = 100 * bins.confidence[there], bins.accuracy[there]
    reached = Series(name="right", x=sure, y=right, dots=True, colour="ruby")
    middles = 100 * edges / len(bins.counts)
    unit: dict[str, Any] = {"along": "confidence in %", "unit": "confidence in %", "end": 100.0}
    note = "below the faint line the network is overconfident"
    by_bin = Series(name="answers", x=middles, y=bins.counts, dots=True, area=True, colour="amber")
    charts = [
        LineChart(title="Right answers by confidence", series=[level, reached], percent=True, note=note, **unit),
        LineChart(title="Answers by confidence", series=[by_bin], **unit),
    ]
    return Charts(title="Calibration", charts=charts)


def confusion_sections(found: Assessment) -> list[Section]:
    """Builds the confusion matrix, or a list of mistakes if there are too few images per class."""
    matrix = found.judged.confusion_matrix(len(found.names))
    if matrix is not None and len(found.judged) > 2 * len(found.classes):
        title = "Confusion matrix"
        return [ConfusionSection(counts=matrix, classes=list(found.names), title=title, listed=LISTED)]
    rows = [(pair.truth, pair.said, f"{pair.count:,}") for pair in found.rank_confusions(LISTED) if pair.count > 1]
    return [Table(title="Most often confused", columns=("true", "said", "times"), rows=rows, left=2)] if rows else []


COLUMNS = ("class", "images", "average precision", "precision", "recall", "F1")


def list_class_rows(found: MultiLabelScore) -> list[tuple[str, ...]]:
    """Lists one row per class, lowest average precision first."""
    order = sorted(found.classes, key=lambda each: (each.average_precision, -each.count))
    return [
        (one.name, f"{one.count:,}", *map("{:.1%}".format, (one.average_precision, one.precision, one.recall, one.f1)))
        for one in order
    ]


def show_answers(answers: Iterable[ScoredSample], source: ImageDataset | None, names: Sequence[str]) -> list[Shot]:
    """Shows each image with its true class and the prediction; blank if it is no longer readable."""
    shots: list[Shot] = []
    for answer in answers:
        mood: Mood = "right" if answer.predicted == answer.label else "wrong"
        predicted = names[answer.predicted] if answer.predicted >= 0 else "no number"
        said = "" if mood == "right" else f"said {predicted}, "
        try:
            image = None if source is None else source.open_image(answer.sample).rgb()
        except VitrailError:
            image = None
        shots.append(make_shot(image, f"{names[answer.label]}\n{said}{answer.probability:.1%}", mood=mood))
    return shots
