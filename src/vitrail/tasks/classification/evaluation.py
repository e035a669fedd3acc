"""Evaluates a classifier: matches its classes to those of the data, predicts every image once, and compares the
predictions with the data's labels and ReaL's, or per class if the weights are multi-label."""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from vitrail.checkpoint.bundle import get_card, list_other_names
from vitrail.core.errors import DataError
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.datasets.imagenet import match_real_labels
from vitrail.data.targets import CLASS_LABELS
from vitrail.evaluation.metrics import ClassificationMetric
from vitrail.evaluation.multi_label import STATISTICS, THRESHOLD, MultiLabelScore, score_labels
from vitrail.evaluation.scoring import EvaluationOutcome, EvaluationSetting
from vitrail.report.page import Table
from vitrail.tasks.classification.metrics import Assessment, ClassMatching, match_classes
from vitrail.tasks.classification.report import CAPTIONS, COLUMNS, build_assessment_sections, list_class_rows

ORIGINAL: Final = "original"
REAL: Final = "ReaL"
LISTED: Final = 5  # confusions and classes printed
SHARES: Final = ("top-1", "top-5", "ReaL", "exact match")  # measures that count images


def assess_classifier(setting: EvaluationSetting) -> EvaluationOutcome:
    """Evaluates a classifier, and returns its measures with what to print, write and show."""
    how, about, source = setting.how, setting.about, setting.source
    labels, matching = find_labels(setting)
    main, *other = labels
    metric = ClassificationMetric(about.network.config.classes, setting.world.device, scores=about.multi_label)
    setting.relabel(labels[main], matching.names).run(metric, CLASS_LABELS)
    said, _ = metric.predictions()
    if setting.world.is_main:
        setting.advance("computing intervals", 0, None)
    classes, unsound = setting.collection.classes, int((said.predicted < 0).sum())
    notes = [f"{unsound:,} predictions are not finite numbers and count as wrong"] if unsound else []
    settings: dict[str, Any] = {"labels": main, "classes": matching.how, "seed": how.seed}
    if about.multi_label:
        threshold = THRESHOLD if how.threshold is None else how.threshold
        found = score_labels(said, labels[main], matching.names, threshold=threshold, seed=how.seed)
        settings["threshold"] = threshold
        outcome = describe_labels(found, source)
    else:
        real = said.judge(labels[REAL]) if other else None
        found = Assessment(judged=said.judge(), names=matching.names, real=real, seed=how.seed)
        outcome = describe_classes(found, source)
        if real is not None and (left := len(said) - len(real)):
            notes.insert(0, f"{left:,} images have no ReaL label and are left out of that score")
        if main == ORIGINAL and (left := len(said) - len(found.judged)):
            notes.insert(0, f"{left:,} images have no label and are left out")
    outputs = f"{len(classes):,} classes, matched {matching.how}" if classes else "no labels"
    common: dict[str, Any] = {"settings": settings, "captions": CAPTIONS, "counting": SHARES}
    return replace(outcome, outputs=outputs, outputs_notes=matching.notes, notes=tuple(notes), **common)


def describe_classes(found: Assessment, source: ImageDataset) -> EvaluationOutcome:
    """Describes the outcome for single-label weights."""
    return EvaluationOutcome(
        lead=f"{len(found.judged):,} images, {len(found.classes):,} classes",
        measures=found.measures,
        brief=(*SHARES, "ECE", "loss"),
        details=found.details(),
        tables=list_mistakes(found),
        sections=lambda: build_assessment_sections(found, source),
        answers=lambda: write_answers(found, source),
    )


def describe_labels(found: MultiLabelScore, source: ImageDataset) -> EvaluationOutcome:
    """Describes the outcome for multi-label weights."""
    rows = list_class_rows(found)
    title = "Each class" if len(rows) <= LISTED else "Hardest classes"
    count = f"{len(found.sample):,} images, {len(found.classes):,} classes, each decided separately"
    return EvaluationOutcome(
        lead=f"{count}; chosen from {found.threshold:g}",
        measures=found.measures,
        brief=(*SHARES, *STATISTICS),
        details=found.details(),
        tables=(Table(columns=("class", "images", "AP", *COLUMNS[3:]), rows=rows[:LISTED], title=title),),
        sections=lambda: [Table(title="Each class", columns=COLUMNS, rows=rows)],
        answers=lambda: write_scores(found, source),
    )


def find_labels(setting: EvaluationSetting) -> tuple[dict[str, Labels], ClassMatching]:
    """Finds the labels to compare with, as indices of the network's outputs: the data's own, if any, and ReaL's."""
    how, about, collection, source = setting.how, setting.about, setting.collection, setting.source
    outputs = about.network.config.classes
    names = about.labels if how.labels is None else how.labels
    also = list_other_names(get_card(about.network)) if how.labels is None else []
    if not source.classes and how.real is None:
        collection.need_labels()
        raise DataError(f"{collection.name}@{setting.split} has no labels; choose another split")
    classes = source.classes or tuple(map(str, range(outputs)))
    matching = match_classes(outputs, names, classes, collection.name, by_number=how.by_number, also=also)
    labels: dict[str, Labels] = {}
    if source.classes:
        labels[ORIGINAL] = matching.relabel(source.labels)
    if how.real is not None:
        labels[REAL] = matching.usual(match_real_labels(source, how.real), str(how.real))
    return labels, matching


def list_mistakes(found: Assessment) -> tuple[Table, ...]:
    """Builds tables of the most frequent mistakes and the hardest classes."""
    tables: list[Table] = []
    confused = [pair for pair in found.rank_confusions(LISTED) if pair.count > 1]
    if confused:
        rows = [(pair.truth, pair.said, f"{pair.count:,}", f"{pair.share:.1%}") for pair in confused]
        columns = ("true", "said", "times", "of its class")
        tables.append(Table(columns=columns, rows=rows, title="Most often confused", left=2))
    mistaken = [each for each in found.classes if each.right < each.count and each.count > 1]
    hardest = sorted(mistaken, key=lambda each: (each.share, -each.count))[:LISTED]
    if hardest:
        rows = [(each.name, f"{each.right:,}", f"{each.count:,}", f"{each.share:.1%}") for each in hardest]
        tables.append(Table(columns=("class", "right", "pictures", "accuracy"), rows=rows, title="Hardest classes"))
    return tuple(tables)


def write_answers(found: Assessment, source: ImageDataset) -> bytes:
    """Writes one row per image: name, true class, prediction, confidence, correctness and loss; blank if it is
    unreadable or has no label."""
    judged, names = found.judged, found.names
    rows = dict[int, list[str]]()
    for at, place in enumerate(judged.sample.tolist()):
        said, right = int(judged.predicted[at]), "yes" if judged.right[at] else "no"
        answer = [names[int(judged.truth[at])], names[said] if said >= 0 else "", f"{judged.confidence[at]:.6f}"]
        rows[place] = [*answer, right, f"{judged.loss[at]:.6f}"]
    return write_csv(["picture", "true", "said", "confidence", "right", "loss"], rows, source)


def write_scores(found: MultiLabelScore, source: ImageDataset) -> bytes:
    """Writes one row per image: true classes, predicted classes, and the score of every class; blank if it is
    unreadable or has no label."""
    rows = dict[int, list[str]]()
    for at, place in enumerate(found.sample.tolist()):
        both = ("|".join(itertools.compress(found.names, flags[at])) for flags in (found.truth, found.predicted))
        rows[place] = [*both, *(f"{score:.6f}" for score in found.scores[at])]
    return write_csv(["picture", "true", "chosen", *found.names], rows, source)


def write_csv(columns: Sequence[str], rows: Mapping[int, Sequence[str]], source: ImageDataset) -> bytes:
    text, blank = io.StringIO(newline=""), [""] * (len(columns) - 1)
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([source.name(at), *rows.get(at, blank)] for at in range(len(source)))
    return text.getvalue().encode("utf-8", "surrogateescape")
