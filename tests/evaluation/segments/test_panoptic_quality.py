"""Panoptic quality against a loop over pixels and segments, written after panopticapi's definition."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.evaluation.segments.panoptic_quality import PanopticCounts, count_cells, count_segments

CLASSES, THINGS = 6, 3
SIZE = (14, 18)


@dataclass
class Scene:
    """Maps of segments [H, W] (-1: none), and the classes of the segments."""

    truth: NDArray[np.int64]
    truth_classes: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    predicted: NDArray[np.int64]
    classes: NDArray[np.int64]


def draw_scene(seed: int) -> Scene:
    """Rectangles over each other; predictions are the true ones with errors. Some images are empty, some all void."""
    draw = np.random.default_rng(seed)

    def paint(onto: NDArray[np.int64], segments: int) -> None:
        for number in range(segments):
            top, left = draw.integers(0, SIZE[0] - 2), draw.integers(0, SIZE[1] - 2)
            onto[top : top + draw.integers(2, 12), left : left + draw.integers(2, 14)] = number

    truth, objects = np.full(SIZE, -1), 0 if draw.random() < 0.1 else int(draw.integers(1, 7))
    paint(truth, objects)
    truth_classes = draw.integers(0, CLASSES - 1, objects)
    crowd, seen = draw.random(objects) < 0.25, set[int]()
    for at in range(objects):  # at most one crowd of a class, as in COCO
        crowd[at] &= truth_classes[at] not in seen
        if crowd[at]:
            seen.add(int(truth_classes[at]))
    predicted, classes = truth.copy(), truth_classes.copy()
    wrong = draw.random(objects) < 0.2
    classes[wrong] = draw.integers(0, CLASSES, int(wrong.sum()))
    predicted = np.roll(predicted, draw.integers(-2, 3), 1)
    extra = int(draw.integers(0, 4))
    for number in range(objects, objects + extra):
        top, left = draw.integers(0, SIZE[0] - 2), draw.integers(0, SIZE[1] - 2)
        predicted[top : top + draw.integers(2, 9), left : left + draw.integers(2, 9)] = number
    predicted[draw.random(SIZE) < 0.1] = -1
    classes = np.concatenate([classes, draw.integers(0, CLASSES, extra)])
    if draw.random() < 0.1:
        predicted[:] = -1
    return Scene(truth, truth_classes, crowd, predicted, classes)


def count(scene: Scene) -> NDArray[np.float64]:
    maps = torch.from_numpy(scene.predicted), torch.from_numpy(scene.truth)
    cells = count_cells(*maps, len(scene.classes), len(scene.truth_classes)).numpy()
    return count_segments(cells, scene.classes, scene.truth_classes, scene.crowd, CLASSES)


def slow_counts(scene: Scene) -> list[list[float]]:
    """IoUs, TP, FP, FN of each class."""
    pairs = Counter(zip(scene.truth.flatten().tolist(), scene.predicted.flatten().tolist(), strict=True))
    areas, truth_areas = Counter(scene.predicted.flatten().tolist()), Counter(scene.truth.flatten().tolist())
    rows = [[0.0] * CLASSES for _ in range(4)]
    matched, found = set[int](), set[int]()
    for (truth, predicted), both in pairs.items():
        if truth < 0 or predicted < 0 or scene.crowd[truth]:
            continue
        label = int(scene.truth_classes[truth])
        if label != scene.classes[predicted]:
            continue
        either = areas[predicted] + truth_areas[truth] - both - pairs[-1, predicted]
        if both / either > 0.5:
            rows[0][label] += both / either
            rows[1][label] += 1
            matched.add(truth)
            found.add(predicted)
    crowds = {int(scene.truth_classes[at]): at for at in range(len(scene.crowd)) if scene.crowd[at]}
    for truth, label in enumerate(scene.truth_classes.tolist()):
        if truth in truth_areas and truth not in matched and not scene.crowd[truth]:
            rows[3][label] += 1
    for predicted, label in enumerate(scene.classes.tolist()):
        if predicted not in areas or predicted in found:
            continue
        unclear = pairs[-1, predicted]
        if label in crowds:
            unclear += pairs[crowds[label], predicted]
        if unclear / areas[predicted] <= 0.5:
            rows[2][label] += 1
    return rows


def slow_quality(rows: NDArray[np.float64], chosen: range) -> list[float]:
    """PQ, SQ and RQ, averaged over the chosen classes that occur."""
    sums, classes = [0.0] * 3, 0
    for label in chosen:
        ious, right, wrong, missed = rows[:, label].tolist()
        if right + wrong + missed:
            size = right + 0.5 * wrong + 0.5 * missed
            parts = (ious / size, ious / right if right else 0.0, right / size)
            sums, classes = [one + part for one, part in zip(sums, parts, strict=True)], classes + 1
    return [one / classes for one in sums] if classes else [math.nan] * 3


SCENES = [draw_scene(seed) for seed in range(200)]


def test_200_images_are_counted_as_a_loop_counts_them() -> None:
    for scene in SCENES:
        np.testing.assert_allclose(count(scene), slow_counts(scene), rtol=1e-14)
    total = np.sum([slow_counts(scene) for scene in SCENES], 0)
    assert (total[1:, :THINGS] > 30).all()  # each kind of outcome is there


def test_qualities_are_averages_over_the_classes_that_occur() -> None:
    for part in (SCENES, SCENES[:3], SCENES[7:8]):
        counts, rows = PanopticCounts(np.stack([count(scene) for scene in part])), np.zeros((4, CLASSES))
        for scene in part:
            rows += slow_counts(scene)
        things = np.arange(CLASSES) < THINGS
        sides = ((None, range(CLASSES)), (things, range(THINGS)), (~things, range(THINGS, CLASSES)))
        for chosen, classes in sides:
            np.testing.assert_allclose(counts.quality(chosen), slow_quality(rows, classes), rtol=1e-12)
        for label in range(CLASSES):
            expected = slow_quality(rows, range(label, label + 1))
            np.testing.assert_allclose(counts.per_class()[:, label], expected, rtol=1e-12)
        singles = [slow_quality(np.array(slow_counts(scene)), range(CLASSES))[0] for scene in part]
        expected = [1.0 if math.isnan(one) else one for one in singles]
        np.testing.assert_allclose(counts.image_quality(), expected, rtol=1e-12)


def test_weights_of_images_stand_for_copies_of_them() -> None:
    things, whole = np.arange(CLASSES) < THINGS, np.stack([count(scene) for scene in SCENES[:9]])
    weights = np.array([2, 0, 1, 0, 0, 3, 1, 1, 1])
    copies = PanopticCounts(np.repeat(whole, weights, 0))
    found = PanopticCounts(whole).statistics(weights.astype(np.float64), things)
    expected = [*copies.quality(), copies.quality(things).pq, copies.quality(~things).pq]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def corner(rows: int, columns: int, number: int = 0) -> NDArray[np.int64]:
    out = np.full(SIZE, -1)
    out[:rows, :columns] = number
    return out


@pytest.mark.parametrize(
    ("truth", "predicted", "expected"),
    [
        (corner(4, 4), corner(4, 4), [1, 1, 0, 0]),
        (corner(4, 4), corner(14, 18), [1, 1, 0, 0]),  # the rest of the predicted one is void
        (np.where(corner(4, 4) < 0, 1, 0), corner(4, 8), [0, 0, 1, 1]),  # an IoU of just one half
        (np.where(corner(4, 4) < 0, 1, 0), corner(4, 7), [16 / 28, 1, 0, 0]),
        (corner(4, 4), np.full(SIZE, -1), [0, 0, 0, 1]),
        (np.full(SIZE, -1), corner(4, 4), [0, 0, 0, 0]),  # on void alone
        (np.full(SIZE, -1), np.full(SIZE, -1), [0, 0, 0, 0]),
    ],
)
def test_single_segments(truth: NDArray[np.int64], predicted: NDArray[np.int64], expected: list[float]) -> None:
    """Segment 1 of the truth is of a class of its own."""
    segments = Scene(truth, np.array([2, 4]), np.zeros(2, np.bool_), predicted, np.array([2]))
    assert count(segments)[:, 2].tolist() == pytest.approx(expected)


def test_a_prediction_on_a_crowd_is_wrong_only_where_classes_differ() -> None:
    truth = np.zeros(SIZE, np.int64)
    for label, wrong in ((2, 0), (3, 1)):
        scene = Scene(truth, np.array([2]), np.ones(1, np.bool_), corner(5, 5), np.array([label]))
        assert count(scene).sum(1).tolist() == [0, 0, wrong, 0]
