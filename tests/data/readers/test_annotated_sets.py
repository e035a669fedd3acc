"""The same objects in every format: what is read is what was written."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.readers.annotated_sets import (
    CROWD,
    NAMES,
    OBJECTS,
    SIZE,
    coco,
    paint,
    write_coco,
    write_images,
    write_panoptic,
    write_voc,
    write_yolo,
)
from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.annotations.segments import SegmentClass
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset

THINGS = tuple(SegmentClass(name) for name in NAMES)
WRITERS: dict[str, Callable[[Path], object]] = {
    "coco": write_coco,
    "panoptic": write_panoptic,
    "yolo": write_yolo,
    "voc": write_voc,
}
KINDS = {"coco": "COCO", "panoptic": "COCO panoptic", "yolo": "YOLO", "voc": "Pascal VOC"}


def train(source: str | Path) -> ImageDataset:
    return open_collection(source).splits["train"]


def check_objects(found: ImageDataset, *, masks: bool = True) -> None:
    for at, objects in enumerate(OBJECTS):
        segments = found.segments(at)
        plain = np.flatnonzero(~segments.crowd)
        assert segments.size == SIZE
        assert segments.classes.dtype == np.int64
        assert segments.classes[plain].tolist() == [kind for kind, _ in objects]
        for place, (_, points) in zip(plain, objects, strict=True):
            np.testing.assert_allclose(segments.boxes[place], [*np.min(points, 0), *np.max(points, 0)], atol=1e-6)
            assert not masks or np.array_equal(segments.decode()[place], paint(points))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_recognised_by_looking(tmp_path: Path, kind: str, prefix: bool) -> None:
    WRITERS[kind](tmp_path)
    found = open_collection(f"{kind}:{tmp_path}" if prefix else tmp_path)
    assert (found.kind, list(found.splits), found.notes, found.classes) == (KINDS[kind], ["train"], (), ())
    assert [one.name for one in found.segment_classes] == list(NAMES)
    assert [found.splits["train"].open_image(at).size for at in range(3)] == [SIZE] * 3
    with pytest.raises(BadLabels):
        found.need_labels()


def test_coco_with_masks(tmp_path: Path) -> None:
    file = write_coco(tmp_path)
    found = train(tmp_path)
    assert (found.segment_classes, found.segments_overlap, found.boxes_only) == (THINGS, True, False)
    assert found.pixel_classes == ("background", *NAMES)
    check_objects(found)
    crowded = found.segments(1)
    assert crowded.crowd.tolist() == [False, True, True]
    assert all(np.array_equal(mask, CROWD) for mask in crowded.decode()[1:])
    mask = found.mask(1)
    assert isinstance(mask, np.ndarray)
    assert np.array_equal(mask, np.where(paint(OBJECTS[1][0][1]), 2, np.where(CROWD, 255, 0)))
    check_objects(train(file))


def test_coco_with_boxes(tmp_path: Path) -> None:
    write_coco(tmp_path, masks=False)
    found = train(tmp_path)
    assert (found.segment_classes, found.boxes_only, found.pixel_classes) == (THINGS, True, ())
    check_objects(found, masks=False)
    assert found.segments(0).masks is None


def test_panoptic(tmp_path: Path) -> None:
    write_panoptic(tmp_path)
    found = train(tmp_path)
    assert (found.segments_overlap, found.boxes_only, found.pixel_classes) == (False, False, NAMES)
    assert [one.thing for one in found.segment_classes] == [True, True, False]
    first = found.segments(0)
    assert first.classes.tolist() == [2, 0, 1]  # two segments of sky are one
    masks = first.decode()
    assert int(masks.sum(0).max()) == 1
    assert np.array_equal(masks.any(0), np.arange(SIZE[0])[:, None] * np.ones(SIZE[1]) > 0)
    assert np.array_equal(masks[1], paint(OBJECTS[0][0][1]))
    last, mask = found.segments(2), found.mask(2)
    assert isinstance(mask, np.ndarray)
    assert last.crowd.tolist() == [False, True]
    assert np.array_equal(mask == 255, CROWD | (np.arange(SIZE[0]) == 0)[:, None])


@pytest.mark.parametrize("names", [True, False])
def test_yolo(tmp_path: Path, names: bool) -> None:
    write_yolo(tmp_path / "polygons", names=names)
    found = train(tmp_path / "polygons")
    shown = NAMES if names else ("class 0", "class 1")
    assert (found.segments_overlap, found.boxes_only) == (True, False)
    assert found.pixel_classes == ("background", *shown)
    check_objects(found)
    write_yolo(tmp_path / "boxes", masks=False, names=names)
    found = train(tmp_path / "boxes")
    assert (found.boxes_only, found.pixel_classes, len(found.segment_classes)) == (True, (), len(shown))
    for at, objects in enumerate(OBJECTS):
        expected = [[*np.min(points, 0), *np.max(points, 0)] for _, points in objects]
        np.testing.assert_allclose(found.segments(at).boxes, np.reshape(expected, (-1, 4)), atol=1e-6)


def test_yolo_joins_and_repeats(tmp_path: Path) -> None:
    """Two squares joined by a line there and back are one object of two parts; a line that repeats counts once."""
    write_yolo(tmp_path)
    points = [(2, 2), (8, 2), (8, 8), (2, 8), (2, 2), (12, 12), (18, 12), (18, 18), (12, 18), (12, 12)]
    numbers = " ".join(f"{x / SIZE[1]:.9f} {y / SIZE[0]:.9f}" for x, y in points)
    (tmp_path / "labels/train/2.txt").write_text(f"1 {numbers}\r\n\n1  {numbers}\n")
    segments = train(tmp_path).segments(2)
    expected = np.zeros(SIZE, np.bool_)
    expected[2:8, 2:8] = expected[12:18, 12:18] = True
    assert len(segments) == 1
    assert np.array_equal(segments.decode()[0], expected)


def test_voc_boxes_and_masks(tmp_path: Path) -> None:
    write_voc(tmp_path / "boxes")
    found = train(tmp_path / "boxes")
    assert (found.segment_classes, found.boxes_only, found.pixel_classes) == (THINGS, True, ())
    check_objects(found, masks=False)
    write_voc(tmp_path / "masks", masks=True)
    both = open_collection(tmp_path / "masks")
    assert {split: source.names[0] for split, source in both.splits.items()} == {
        "train": "JPEGImages/0.jpg",
        "val": "JPEGImages/1.jpg",
    }
    segments, mask = both.splits["train"].segments(0), both.splits["train"].mask(0)
    assert isinstance(mask, np.ndarray)
    assert both.pixel_classes == ("background", *NAMES)
    assert segments.classes.tolist() == [0, 1]
    seen = np.arange(SIZE[1]) < SIZE[1] - 1  # the last column is void
    assert all(
        np.array_equal(one, paint(points) & seen)
        for one, (_, points) in zip(segments.decode(), OBJECTS[0], strict=True)
    )
    assert set(np.unique(mask)) == {0, 1, 2, 255}
    check_objects(train(f"voc:{tmp_path}/masks/Annotations"), masks=False)


def roboflow(root: Path, name: str = "_annotations.coco.json") -> Path:
    for split in ("train", "valid"):
        content = coco(write_images(root / split))
        content["categories"] = [{"id": 0, "name": "pets", "supercategory": "none"}, *content["categories"]]
        for category in content["categories"][1:]:
            category["supercategory"] = "pets"
        (root / split / name).write_text(json.dumps(content))
    return root


def published(root: Path) -> Path:
    for split in ("train", "val"):
        content = coco(write_images(root / f"{split}2017"))
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/instances_{split}2017.json").write_text(json.dumps(content))
        (root / f"annotations/person_keypoints_{split}2017.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize("layout", [roboflow, published])
def test_layouts_of_coco(tmp_path: Path, layout: Callable[[Path], Path]) -> None:
    found = open_collection(layout(tmp_path))
    assert {split: len(source) for split, source in found.splits.items()} == {"train": 3, "val": 3}
    assert found.segment_classes == THINGS
    for split, source in found.splits.items():
        check_objects(source)
        assert source.name(0).startswith(split)
    assert open_collection(f"{tmp_path}@val").splits["val"].fingerprint == found.splits["val"].fingerprint


YOLO_LAYOUTS = {
    "around splits": ("images/train/{}", "labels/train/{}"),
    "in splits": ("train/images/{}", "train/labels/{}"),
    "flat": ("images/{}", "labels/{}"),
    "beside": ("{}", "{}"),
    "beside in splits": ("train/{}", "train/{}"),
}


@pytest.mark.parametrize("layout", YOLO_LAYOUTS)
def test_layouts_of_yolo(tmp_path: Path, layout: str) -> None:
    write_yolo(tmp_path / "one")
    for at in range(3):
        for pattern, old, suffix in zip(YOLO_LAYOUTS[layout], ("images", "labels"), ("jpg", "txt"), strict=True):
            new, before = (
                tmp_path / "two" / pattern.format(f"{at}.{suffix}"),
                tmp_path / f"one/{old}/train/{at}.{suffix}",
            )
            new.parent.mkdir(parents=True, exist_ok=True)
            if before.exists():
                before.rename(new)
    (tmp_path / "two/classes.txt").write_text("\n".join(NAMES))
    for source in (tmp_path / "two", f"yolo:{tmp_path}/two"):
        found = open_collection(source)
        assert (found.kind, list(found.splits), found.segment_classes) == ("YOLO", ["train"], THINGS)
        check_objects(found.splits["train"])


def test_images_that_other_labels_share(tmp_path: Path) -> None:
    """Only those with labels are taken, and a note counts the others."""
    write_yolo(tmp_path / "set/boxes")
    os.rename(tmp_path / "set/boxes/images", tmp_path / "set/images")
    for at in range(2):
        path = tmp_path / f"set/pixels/masks/train/{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(SIZE, 1, np.uint8)).save(path)
    boxes, pixels = open_collection(tmp_path / "set/boxes"), open_collection(f"masks:{tmp_path}/set/pixels")
    assert [len(one.splits["train"]) for one in (boxes, pixels)] == [2, 2]
    assert (len(boxes.notes), len(pixels.notes)) == (1, 1)
    assert pixels.pixel_classes == ("class 0", "class 1")
    assert boxes.splits["train"].open_image(0).size == SIZE
    with pytest.raises(DataError):
        open_collection(tmp_path / "set")


def test_two_kinds_in_one_folder(tmp_path: Path) -> None:
    write_coco(tmp_path)
    (tmp_path / "labels/train").mkdir(parents=True)
    (tmp_path / "labels/train/0.txt").write_text("0 0.5 0.5 0.1 0.1")
    with pytest.raises(DataError) as error:
        open_collection(tmp_path)
    assert f"coco:{tmp_path}" in str(error.value)
    assert f"yolo:{tmp_path}" in str(error.value)
    assert open_collection(f"coco:{tmp_path}").kind == "COCO"


@pytest.mark.parametrize(
    "text",
    [
        "names: [cat, 'dog', \"sky\"]",
        "names: [\n  cat, # one\n  dog,\n  sky]\nnc: 3",
        "names: {0: cat, 2: sky, 1: dog}",
        "path: x\nnames:\n- cat\n- dog\n- sky\ntrain: a",
        "names:\n  2: sky\n  0: cat\n  # between\n  1: dog\n\nroboflow:\n  license: CC",
    ],
)
def test_names_in_yaml(tmp_path: Path, text: str) -> None:
    write_yolo(tmp_path, names=False)
    (tmp_path / "data.yaml").write_text(text)
    assert train(tmp_path).segment_classes == THINGS


@pytest.mark.parametrize(
    "text",
    [
        "names: *anchor",
        "names: [cat, dog",
        "names:\n  - [cat]",
        "nc: 4\nnames: [a, b, c]",
        "names: {0: a, 2: b}",
        "names:",
        "names: [a, a, b]",
        "names: !!python/object:os.system [x]",
    ],
)
def test_names_that_are_not_read(tmp_path: Path, text: str) -> None:
    write_yolo(tmp_path, names=False)
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError):
        open_collection(tmp_path)


def test_splits_agree_on_classes(tmp_path: Path) -> None:
    """By name, whatever their ids; a class that train lacks is refused."""
    roboflow(tmp_path)
    file = tmp_path / "valid/_annotations.coco.json"
    content = json.loads(file.read_text())
    order = {7: 3, 10: 2, 13: 1}
    for one in content["categories"]:
        one["id"] = order.get(one["id"], one["id"])
    for one in content["annotations"]:
        one["category_id"] = str(order[one["category_id"]])  # as text, too
    file.write_text(json.dumps(content))
    check_objects(open_collection(tmp_path).splits["val"])
    content["categories"][-1]["name"] = "wolf"
    file.write_text(json.dumps(content))
    with pytest.raises(BadLabels):
        open_collection(tmp_path)


def test_derived_sets_keep_segments(tmp_path: Path) -> None:
    write_coco(tmp_path)
    found: Collection = open_collection(f"{tmp_path}@train")
    source = found.splits["train"]
    assert source.fingerprint == open_collection(tmp_path).splits["train"].fingerprint
    os.remove(tmp_path / "images/0.jpg")
    with pytest.raises(BadImage):
        source.open_image(0)
    assert len(source.segments(0)) == 2  # which need no image
