"""Mask AP and AR against pycocotools on random result sets: crowds, sizes, equal scores, empty images and classes."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.evaluation.segments.mask_ap import AT50, MaskRanking
from vitrail.evaluation.segments.matching import (
    ImageMatches,
    ImageOverlaps,
    divide_overlaps,
    match_images,
    overlap_masks,
)

NAMES = ["map", "map50", "map75", "map_small", "map_medium", "map_large"]
NAMES += ["ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"]  # in the order of COCOeval.stats
CLASSES, SIZE = 5, (104, 110)
Masks = NDArray[np.bool_]


class Scene:
    """The true and the predicted masks of an image."""

    def __init__(self, draw: np.random.Generator, sample: int) -> None:
        self.sample, kind = sample, draw.integers(0, 8)
        objects = 0 if kind == 0 else int(draw.integers(1, 9))
        self.truth_classes = draw.integers(0, CLASSES - 1, objects)  # the last class has no object
        self.truth = np.stack([blob(draw) for _ in range(objects)] or [np.zeros(SIZE, np.bool_)])[:objects]
        self.crowd = draw.random(objects) < 0.2
        near = [shift(draw, self.truth[at]) for at in range(objects) for _ in range(int(draw.integers(0, 3)))]
        found = near + [blob(draw) for _ in range(int(draw.integers(0, 6)))]
        found = [] if kind == 1 else found
        self.masks = np.stack([*found, np.zeros(SIZE, np.bool_)])[: len(found)]
        overlap = overlap_masks(torch.from_numpy(self.masks), torch.from_numpy(self.truth)).numpy()
        likely = self.truth_classes[overlap.argmax(1)] if objects else np.zeros(len(found), np.int64)
        self.classes = np.where(draw.random(len(found)) < 0.15, draw.integers(0, CLASSES, len(found)), likely)
        self.scores = np.round(draw.random(len(found)), 1 if kind < 5 else 3)

    def overlaps(self) -> ImageOverlaps:
        masks, truth = torch.from_numpy(self.masks), torch.from_numpy(self.truth)
        areas, truth_areas = self.masks.sum((1, 2)), self.truth.sum((1, 2))
        both = overlap_masks(masks, truth).numpy()
        return ImageOverlaps(
            sample=self.sample,
            classes=self.classes.astype(np.int64),
            scores=self.scores,
            areas=areas,
            ious=divide_overlaps(both, areas, truth_areas, self.crowd),
            truth_classes=self.truth_classes,
            truth_areas=truth_areas,
            crowd=self.crowd,
        )


def blob(draw: np.random.Generator) -> Masks:
    """A rectangle or an ellipse of any size."""
    rows, columns = np.ogrid[: SIZE[0], : SIZE[1]]
    height, width = (np.array(SIZE) * draw.choice([0.12, 0.3, 0.6, 1.0]) * draw.uniform(0.6, 1.0, 2)).tolist()
    top, left = draw.uniform(-height / 4, SIZE[0] - height / 2), draw.uniform(-width / 4, SIZE[1] - width / 2)
    down, across = (rows - top - height / 2) / (height / 2), (columns - left - width / 2) / (width / 2)
    round_one = draw.random() < 0.5
    mask = down**2 + across**2 <= 1 if round_one else np.maximum(abs(down), abs(across)) <= 1
    return mask if mask.any() else np.ones(SIZE, np.bool_)


def shift(draw: np.random.Generator, mask: Masks) -> Masks:
    """The mask, moved a little, or just as it is."""
    amount = draw.integers(-5, 6, 2) * int(draw.integers(0, 3))
    return np.roll(mask, amount.tolist(), (0, 1))


def scenes_of(seed: int, images: int = 6) -> list[Scene]:
    draw = np.random.default_rng(seed)
    return [Scene(draw, sample) for sample in range(images)]


def rank(scenes: list[Scene]) -> MaskRanking:
    return MaskRanking(match_images([scene.overlaps() for scene in scenes]), CLASSES)


def judge(scenes: list[Scene], copies: list[int] | None = None) -> Any:
    """COCOeval on these images, or on copies of them in this order."""
    pytest.importorskip("pycocotools")
    from pycocotools import mask as coder
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def encode(mask: Masks) -> Any:
        return coder.encode(np.asfortranarray(mask.astype(np.uint8)))

    order = range(len(scenes)) if copies is None else copies
    truth, found = list[dict[str, Any]](), list[dict[str, Any]]()
    for at, scene in ((at, scenes[which]) for at, which in enumerate(order)):
        for mask, label, crowd in zip(scene.truth, scene.truth_classes, scene.crowd, strict=True):
            row = {"id": len(truth) + 1, "image_id": at, "category_id": int(label), "iscrowd": int(crowd)}
            truth.append(row | {"segmentation": encode(mask), "area": int(mask.sum())})
        for mask, label, score in zip(scene.masks, scene.classes, scene.scores, strict=True):
            row = {"image_id": at, "category_id": int(label), "score": float(score)}
            found.append(row | {"segmentation": encode(mask)})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": at, "height": SIZE[0], "width": SIZE[1]} for at in range(len(order))],
            "annotations": truth,
            "categories": [{"id": label} for label in range(CLASSES)],
        }
        coco.createIndex()
        predicted = coco.loadRes(found) if found else COCO()
        evaluation = COCOeval(coco, predicted, "segm")
        if not found:
            predicted.dataset = {**coco.dataset, "annotations": []}
            predicted.createIndex()
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def assert_as_judged(seed: int) -> None:
    scenes = scenes_of(seed)
    verdict, ranking = judge(scenes), rank(scenes)
    found = [-1.0 if value is None else value for value in ranking.summarise().values()]
    assert list(ranking.summarise()) == NAMES
    np.testing.assert_allclose(found, verdict.stats, rtol=0, atol=1e-9)
    precision = verdict.eval["precision"][:, :, :, 0, 2]  # [T, R, K]
    known = (precision > -1).all((0, 1))
    own = ranking.per_class()
    assert np.array_equal(~np.isnan(own), known)
    np.testing.assert_allclose(own[known], precision.mean((0, 1))[known], rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_ap_and_ar_are_those_of_pycocotools(seed: int) -> None:
    assert_as_judged(seed)


@pytest.mark.slow
def test_ap_and_ar_are_those_of_pycocotools_on_500_sets() -> None:
    for seed in range(30, 500):
        assert_as_judged(seed)


def test_of_more_than_100_detections_of_a_class_the_best_100_count() -> None:
    draw = np.random.default_rng(1)
    scene = Scene(draw, 0)
    scene.truth, scene.crowd = np.stack([blob(draw) for _ in range(3)]), np.zeros(3, np.bool_)
    scene.truth_classes = np.array([0, 0, 1])
    scene.masks = np.concatenate([np.repeat(scene.truth[2:], 150, 0), scene.truth])
    scene.classes = np.array([0] * 150 + [0, 0, 1])
    scene.scores = np.array([0.9] * 60 + [0.5] * 90 + [0.7, 0.4, 0.2])  # the 61st of class 0, and one cut off
    found, verdict = rank([scene]).summarise(), judge([scene])
    np.testing.assert_allclose([-1.0 if value is None else value for value in found.values()], verdict.stats, atol=1e-9)
    assert found["ar100"] == 0.75


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_images_stand_for_copies_of_them(seed: int) -> None:
    scenes = scenes_of(seed + 2000, images=5)
    for scene in scenes:  # copies of an image whose own scores are equal stand one after the other
        scene.scores = np.random.default_rng(scene.sample).permutation(len(scene.scores)) / 100 + scene.sample / 1000
    ranking, copies = rank(scenes), np.random.default_rng(seed).integers(0, 5, 5)
    weights = np.bincount(copies, minlength=5).astype(np.float64)
    verdict = judge(scenes, sorted(copies.tolist()))
    found = np.nan_to_num(ranking.statistics(weights), nan=-1.0)
    np.testing.assert_allclose(found, verdict.stats[:3], rtol=0, atol=1e-9)
    recalls = ranking.whole.recall(weights)
    own = recalls[~np.isnan(recalls)].mean() if (~np.isnan(recalls)).any() else -1.0
    np.testing.assert_allclose(own, verdict.stats[8], rtol=0, atol=1e-9)


def slow_matches(image: ImageOverlaps, threshold: float) -> tuple[int, int]:
    """Right and wrong detections of all areas at a threshold, crowds left out."""
    taken, right = set[int](), 0
    order = sorted(range(len(image.scores)), key=lambda at: (-image.scores[at], at))
    for at in order:
        best, share = -1, threshold
        for other in range(len(image.truth_classes)):
            free = other not in taken and image.classes[at] == image.truth_classes[other]
            if free and image.ious[at, other] >= share:
                best, share = other, image.ious[at, other]
        if best >= 0:
            taken.add(best)
            right += 1
    return right, len(order) - right


@pytest.mark.parametrize("seed", range(5))
def test_the_f_score_counts_sure_detections(seed: int) -> None:
    scene = Scene(np.random.default_rng(seed + 70), 0)
    scene.crowd[:] = False
    image = scene.overlaps()
    (found,) = match_images([image])
    sure = image.scores >= 0.5
    part = ImageOverlaps(
        sample=0,
        classes=image.classes[sure],
        scores=image.scores[sure],
        areas=image.areas[sure],
        ious=image.ious[sure],
        truth_classes=image.truth_classes,
        truth_areas=image.truth_areas,
        crowd=image.crowd,
    )
    right, wrong = slow_matches(part, 0.5)
    total = right + wrong + len(image.truth_classes)
    assert found.f_score() == (2 * right / total if total else 1.0)


def assert_same(one: ImageMatches, other: ImageMatches) -> None:
    for name in ("classes", "scores", "ranks", "kinds", "truth_classes", "counted"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_images_are_matched_alike_one_by_one_and_together() -> None:
    images = [scene.overlaps() for scene in scenes_of(5, images=40)]
    for whole, image in zip(match_images(images), images, strict=True):
        assert_same(whole, match_images([image])[0])


def test_intervals_hold_the_numbers_and_depend_on_the_seed_alone() -> None:
    ranking = rank(scenes_of(3, images=12))
    found = ranking.intervals(seed=1, resamples=200)
    for name, value in zip(found, ranking.statistics(), strict=True):
        interval = found[name]
        assert interval is not None
        assert interval.low <= value <= interval.high
        assert interval.high - interval.low > 0.01
    assert found == rank(scenes_of(3, images=12)).intervals(seed=1, resamples=200)


def test_without_an_object_there_is_no_number() -> None:
    scenes = scenes_of(4)
    for scene in scenes:
        scene.truth, scene.truth_classes = scene.truth[:0], scene.truth_classes[:0]
        scene.crowd = scene.crowd[:0]
    ranking = rank(scenes)
    assert set(ranking.summarise().values()) == {None}
    assert np.isnan(ranking.whole.precision()[:, AT50]).all()
    assert MaskRanking([], CLASSES).summarise()["map"] is None
