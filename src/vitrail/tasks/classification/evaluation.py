"""The evaluation of a classifier: its classes are matched to those of the data, every image is predicted once, and the
predictions are compared with the data's labels and ReaL's, or per class if the weights are multi-label."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vitrail.checkpoint.bundle import get_card, list_other_names
from vitrail.core.errors import DataError
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.datasets.imagenet import match_real_labels
from vitrail.data.targets import CLASS_LABELS
from vitrail.evaluation.multi_label import STATISTICS, THRESHOLD, MultiLabelScore, score_labels
from vitrail.evaluation.scoring import EvaluationOutcome, EvaluationSetting, ScoringOptions
from vitrail.report.page import Table
from vitrail.tasks.classification.metrics import (
    Assessment,
    ClassMatching,
    PredictedClasses,
    PredictionTable,
    judge,
    match_classes,
)
from vitrail.tasks.classification.report import (
    CAPTIONS,
    COLUMNS,
    build_assessment_sections,
    build_multi_label_sections,
    list_class_rows,
)

ORIGINAL: Final = "original"
REAL: Final = "ReaL"
LISTED: Final = 5  # confusions and classes printed
SHARES: Final = ("top-1", "top-5", "ReaL", "exact match")  # measures that count images


def assess_classifier(setting: EvaluationSetting) -> EvaluationOutcome:
    """The numbers of a classifier, with what is printed, written and shown."""
    how, about = setting.how, setting.about
    labels, matching = find_labels(setting)
    table = PredictionTable(
        len(setting.source),
        about.network.config.classes,
        labels,
        setting.world.device,
        multi_label=about.multi_label,
    )
    said = setting.run(table, CLASS_LABELS)
    if setting.world.is_main:
        setting.advance("computing intervals", 0, None)
    main = next(iter(labels))
    settings: dict[str, Any] = {"labels": main, "classes": matching.how, "seed": how.seed}
    if said.scores is not None:
        several = assess_labels(said, labels[main], matching, how)
        return evaluate_labels(several, said, matching, setting, {**settings, "threshold": several.threshold})
    found = Assessment(
        judged=judge(said, labels[main], main),
        names=matching.names,
        real=judge(said, labels[REAL], REAL) if REAL in labels and main != REAL else None,
        seed=how.seed,
    )
    return evaluate_classes(found, said, labels, matching, setting, settings)


def assess_labels(
    said: PredictedClasses, labels: Labels, matching: ClassMatching, how: ScoringOptions
) -> MultiLabelScore:
    """Scores each class separately."""
    assert said.scores is not None
    threshold = THRESHOLD if how.threshold is None else how.threshold
    return score_labels(said.scores, said.seen, labels, matching.names, threshold=threshold, seed=how.seed)


def evaluate_classes(
    found: Assessment,
    said: PredictedClasses,
    labels: Mapping[str, Labels],
    matching: ClassMatching,
    setting: EvaluationSetting,
    settings: Mapping[str, Any],
) -> EvaluationOutcome:
    """The outcome for single-label weights."""
    source = setting.source
    return EvaluationOutcome(
        outputs=describe_matching(setting, matching),
        lead=f"{len(found.judged):,} images, {len(found.classes):,} classes",
        measures=found.measures,
        brief=(*SHARES, "ECE", "loss"),
        counting=SHARES,
        captions=CAPTIONS,
        settings=settings,
        details=found.details(),
        outputs_notes=matching.notes,
        notes=(*note_unlabelled(found, said, labels), *note_unsound(said)),
        tables=list_mistakes(found),
        sections=lambda: build_assessment_sections(found, source),
        answers=lambda: write_answers(found, matching.names, list_names(source)),
    )


def evaluate_labels(
    found: MultiLabelScore,
    said: PredictedClasses,
    matching: ClassMatching,
    setting: EvaluationSetting,
    settings: Mapping[str, Any],
) -> EvaluationOutcome:
    """The outcome for multi-label weights."""
    source, rows = setting.source, list_class_rows(found)
    title = "Each class" if len(rows) <= LISTED else "Hardest classes"
    count = f"{len(found.sample):,} images, {len(found.classes):,} classes, each by itself"
    return EvaluationOutcome(
        outputs=describe_matching(setting, matching),
        lead=f"{count}; chosen from {found.threshold:g}",
        measures=found.measures,
        brief=(*SHARES, *STATISTICS),
        counting=SHARES,
        captions=CAPTIONS,
        settings=settings,
        details=found.details(),
        outputs_notes=matching.notes,
        notes=tuple(note_unsound(said)),
        tables=(Table(columns=("class", "images", "AP", *COLUMNS[3:]), rows=rows[:LISTED], title=title),),
        sections=lambda: build_multi_label_sections(found),
        answers=lambda: write_scores(found, list_names(source)),
    )


def describe_matching(setting: EvaluationSetting, matching: ClassMatching) -> str:
    classes = setting.collection.classes
    return f"{len(classes):,} classes, matched {matching.how}" if classes else "no labels"


def find_labels(setting: EvaluationSetting) -> tuple[dict[str, Labels], ClassMatching]:
    """The labels to compare with, as numbers of the network's outputs: the data's own, if there are any, and ReaL's."""
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


def note_unlabelled(found: Assessment, said: PredictedClasses, labels: Mapping[str, Labels]) -> list[str]:
    notes: list[str] = []
    for name, judged in ((ORIGINAL, found.judged if ORIGINAL in labels else None), (REAL, found.real)):
        left = 0 if judged is None else int(said.seen.sum()) - len(judged)
        if left:
            word = "ReaL label" if name == REAL else "label"
            notes.append(f"{left:,} images have no {word} and count for nothing{' there' if name == REAL else ''}")
    return notes


def note_unsound(said: PredictedClasses) -> list[str]:
    unsound = int((said.top[said.seen, 0] < 0).sum())
    return [f"{unsound:,} answers are not numbers and count as wrong"] if unsound else []


def list_mistakes(found: Assessment) -> tuple[Table, ...]:
    """Tables of the most frequent mistakes and the hardest classes."""
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


def list_names(source: ImageDataset) -> list[str]:
    return [source.name(at) for at in range(len(source))]


def write_answers(found: Assessment, called: Sequence[str], names: Sequence[str]) -> bytes:
    """One row per image: name, true class, prediction, confidence, correctness and loss; blank if it is unreadable or
    has no label."""
    judged = found.judged
    rows: list[list[str]] = [[name, "", "", "", "", ""] for name in names]
    for at in range(len(judged)):
        said, truth = int(judged.said[at]), int(judged.truth[at])
        right = "yes" if judged.right[at] else "no"
        answer = [called[truth], called[said] if said >= 0 else "", f"{judged.confidence[at]:.6f}", right]
        rows[judged.sample[at]][1:] = [*answer, f"{judged.loss[at]:.6f}"]
    return write_csv(["picture", "true", "said", "confidence", "right", "loss"], rows)


def write_scores(found: MultiLabelScore, names: Sequence[str]) -> bytes:
    """One row per image: true classes, predicted classes, and the score of every class; blank if it is unreadable or
    has no label."""
    rows: list[list[str]] = [[name, "", "", *([""] * len(found.names))] for name in names]
    for at, place in enumerate(found.sample.tolist()):
        true, chosen = (join_names(found.names, flags[at]) for flags in (found.truth, found.chosen))
        rows[place][1:] = [true, chosen, *(f"{score:.6f}" for score in found.scores[at])]
    return write_csv(["picture", "true", "chosen", *found.names], rows)


def join_names(names: Sequence[str], flags: Sequence[bool]) -> str:
    return "|".join(name for name, flag in zip(names, flags, strict=True) if flag)


def write_csv(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")
