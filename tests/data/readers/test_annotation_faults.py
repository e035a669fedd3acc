"""Damaged annotations: a fault of a file is one error, one of an image makes that image unreadable."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.readers.annotated_sets import SIZE, write_coco, write_panoptic, write_voc, write_yolo
from vitrail.core.errors import BadImage, DataError, VitrailError
from vitrail.data.collection import Collection, open_collection
from vitrail.data.readers import find_annotations
from vitrail.data.sized_annotations import read_sized_segments
from vitrail.data.tools.overview import summarise

Change = Callable[[dict[str, Any]], object]


def edit(file: Path, change: Change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def unreadable(found: Collection) -> list[int]:
    """The images of train whose segments cannot be used."""
    source, bad = found.splits["train"], list[int]()
    for at in range(len(source)):
        try:
            source.segments(at)
        except BadImage as error:
            bad.append(at if str(error).isprintable() else -1)
    return bad


def first(change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the first annotation, which is of the first image."""
    return lambda content: change(content["annotations"][0])


def put(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda one: one.update(fields)


BAD_ANNOTATIONS: dict[str, Change] = {
    "category": first(put(category_id=99)),
    "category of a list": first(put(category_id=[7])),
    "no category": first(lambda one: one.pop("category_id")),
    "not a number": first(put(segmentation=[[float("nan"), 1, 5, 1, 5, 5]])),
    "endless": first(put(segmentation=[[float("inf"), 1, 5, 1, 5, 5]])),
    "far": first(put(segmentation=[[1e12, 1, 5, 1, 5, 5]])),
    "long": first(put(segmentation=[[1e8, 1, -1e8, 1, 5, 5]])),
    "two points": first(put(segmentation=[[1, 1, 5, 5]])),
    "odd": first(put(segmentation=[[1, 1, 5, 5, 6, 6, 7]])),
    "text": first(put(segmentation=[["1", 1, 5, 1, 5, 5]])),
    "word": first(put(segmentation="polygon")),
    "none while others have one": first(put(segmentation=[])),
    "crowd of text": first(put(iscrowd="yes")),
    "size": first(put(segmentation={"size": [5, 5], "counts": [25]})),
    "size of text": first(put(segmentation={"size": "big", "counts": [25]})),
    "no size": first(put(segmentation={"counts": [25]})),
    "sum": first(put(segmentation={"size": list(SIZE), "counts": [25]})),
    "negative": first(put(segmentation={"size": list(SIZE), "counts": [800, -32]})),
    "huge": first(put(segmentation={"size": list(SIZE), "counts": [2**63, 2**63]})),
    "fractions": first(put(segmentation={"size": list(SIZE), "counts": [0.5, 767.5]})),
    "letters": first(put(segmentation={"size": list(SIZE), "counts": "é~"})),
    "cut letters": first(put(segmentation={"size": list(SIZE), "counts": "PPPP"})),
    "empty letters": first(put(segmentation={"size": list(SIZE), "counts": ""})),
}


@pytest.mark.parametrize("kind", BAD_ANNOTATIONS)
def test_annotations_that_make_an_image_unreadable(tmp_path: Path, kind: str) -> None:
    file = write_coco(tmp_path)
    before = open_collection(tmp_path).splits["train"].fingerprint
    edit(file, BAD_ANNOTATIONS[kind])
    found = open_collection(tmp_path)
    assert unreadable(found) == [0]
    assert found.splits["train"].fingerprint != before


BAD_BOXES: dict[str, Any] = {
    "negative": [4, 4, -1, 2],
    "not a number": [float("nan"), 1, 1, 1],
    "three": [1, 2, 3],
    "text": "1 2 3 4",
    "none": None,
    "words": ["a", 1, 2, 3],
}


@pytest.mark.parametrize("kind", BAD_BOXES)
def test_boxes(tmp_path: Path, kind: str) -> None:
    """They are needed where there are no masks, and else found from these."""
    edit(write_coco(tmp_path / "boxes", masks=False), first(put(bbox=BAD_BOXES[kind])))
    assert unreadable(open_collection(tmp_path / "boxes")) == [0]
    edit(write_coco(tmp_path / "masks"), first(put(bbox=BAD_BOXES[kind])))
    found = open_collection(tmp_path / "masks")
    assert unreadable(found) == []
    assert found.splits["train"].segments(0).boxes[0].tolist() == [2, 2, 12, 10]


SKIPPED: dict[str, tuple[bool, Change]] = {
    "unknown image": (True, first(put(image_id=1234))),
    "image of a list": (True, first(put(image_id=[10]))),
    "outside to the left": (True, first(put(segmentation=[[-9, 1, -5, 1, -5, 5]]))),
    "outside below": (True, first(put(segmentation=[[1, 24, 5, 24, 5, 50]]))),
    "box outside": (False, first(put(bbox=[32, 1, 5, 5]))),
    "empty box": (False, first(put(bbox=[1, 1, 0, 5]))),
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_annotations_that_are_skipped_and_counted(tmp_path: Path, kind: str) -> None:
    masks, change = SKIPPED[kind]
    edit(write_coco(tmp_path, masks=masks), change)
    found = open_collection(tmp_path)
    assert unreadable(found) == []
    assert len(found.splits["train"].segments(0)) == 1
    assert len(found.notes) == 1


def test_what_reaches_beyond_the_image_is_cut_off(tmp_path: Path) -> None:
    edit(write_coco(tmp_path), first(put(segmentation=[[-50, 6, 6, 6, 6, 90, -50, 90]], bbox=[-50, 6, 56, 84])))
    segments = open_collection(tmp_path).splits["train"].segments(0)
    expected = np.zeros(SIZE, np.bool_)
    expected[6:, :6] = True
    assert np.array_equal(segments.decode()[0], expected)
    assert segments.boxes[0].tolist() == [0, 6, 6, 24]


def test_ids_that_repeat_among_annotations_are_noted(tmp_path: Path) -> None:
    edit(write_coco(tmp_path), lambda content: content["annotations"][1].update(id=1))
    found = open_collection(tmp_path)
    assert (unreadable(found), len(found.splits["train"].segments(0)), len(found.notes)) == ([], 2, 1)


def change_list(part: str, at: int, **fields: Any) -> Change:
    return lambda content: content[part][at].update(fields)


BAD_FILES: dict[str, Change] = {
    "no images": lambda content: content.pop("images"),
    "images of text": lambda content: content.update(images="all"),
    "empty images": lambda content: content.update(images=[]),
    "image of text": lambda content: content.update(images=["1.jpg"]),
    "annotation of text": lambda content: content["annotations"].append("cat"),
    "no annotations": lambda content: content.pop("annotations"),
    "no categories": lambda content: content.update(categories=[]),
    "ids of images": change_list("images", 1, id=10),
    "ids of images, one as text": change_list("images", 1, id="10"),
    "id of an image": change_list("images", 1, id=None),
    "file of an image": change_list("images", 1, file_name=3),
    "file of two images": lambda content: content["images"][1].update(file_name=content["images"][0]["file_name"]),
    "empty annotations": lambda content: content.update(annotations=[]),
    "file with a NUL": change_list("images", 1, file_name="a\0.jpg"),
    "file of a half letter": change_list("images", 1, file_name="\ud800.jpg"),
    "height": change_list("images", 1, height=-3),
    "width": change_list("images", 1, width="32"),
    "not a number": change_list("images", 1, width=float("nan")),
    "too large": change_list("images", 1, width=10**9),
    "missing images": lambda content: [one.update(file_name=f"x{one['id']}.jpg") for one in content["images"]],
    "ids of categories": change_list("categories", 1, id=7),
    "names of categories": change_list("categories", 1, name="cat"),
    "name of a category": change_list("categories", 1, name=None),
    "name of a half letter": change_list("categories", 1, name="\ud800"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_files_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    file = write_coco(tmp_path)
    edit(file, BAD_FILES[kind])
    with pytest.raises(DataError) as error:
        open_collection(f"coco:{tmp_path}")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"images": [\xff\xfe]}',
        b"\x1f\x8b\x08",
        b'{"images": [1' + b"0" * 9999,
    ],
)
def test_files_that_are_not_json(tmp_path: Path, content: bytes) -> None:
    file = write_coco(tmp_path)
    file.write_bytes(content)
    with pytest.raises(DataError):
        open_collection(file)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_encodings_of_json(tmp_path: Path, encoding: str) -> None:
    file = write_coco(tmp_path)
    edit(file, change_list("categories", 1, name="Müller"))
    text = json.dumps(json.loads(file.read_text()), ensure_ascii=False)
    file.write_text(text, encoding)
    assert open_collection(f"coco:{tmp_path}").segment_classes[1].name == "Müller"


def test_the_other_kind_of_coco_is_named(tmp_path: Path) -> None:
    write_coco(tmp_path / "objects")
    write_panoptic(tmp_path / "panoptic")
    for kind, other in (("panoptic", "objects"), ("coco", "panoptic")):
        with pytest.raises(DataError, match=rf"use {'coco' if kind == 'panoptic' else 'panoptic'}:"):
            open_collection(f"{kind}:{tmp_path / other}")


def test_annotations_on_their_side_name_the_cause(tmp_path: Path) -> None:
    file = write_coco(tmp_path)
    image = Image.open(tmp_path / "images/0.jpg")
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "images/0.jpg", exif=exif)
    with pytest.raises(BadImage, match="EXIF"):
        read_sized_segments(open_collection(file).splits["train"], 0, SIZE[::-1])


def change_ids(root: Path, change: Callable[[Any], object]) -> None:
    path = root / "annotations/panoptic_train/0.png"
    pixels = np.array(Image.open(path))
    change(pixels)
    Image.fromarray(pixels).save(path)


PANOPTIC: dict[str, Callable[[Path], object]] = {
    "an id that the json lacks": lambda root: change_ids(root, lambda pixels: pixels.__setitem__((5, 5), (9, 9, 9))),
    "an id that the PNG lacks": lambda root: change_ids(
        root, lambda pixels: pixels.__setitem__(pixels[:, :, 0] == 44, 0)
    ),
    "damaged": lambda root: (root / "annotations/panoptic_train/0.png").write_bytes(b"\x89PNG\r\n\x1a\n..."),
    "missing": lambda root: (root / "annotations/panoptic_train/0.png").unlink(),
    "a photograph": lambda root: Image.open(root / "images/0.jpg").save(
        root / "annotations/panoptic_train/0.png", "JPEG"
    ),
    "grey": lambda root: Image.new("L", SIZE[::-1], 5).save(root / "annotations/panoptic_train/0.png"),
    "category": lambda root: edit_info(root, category_id=8),
    "crowd": lambda root: edit_info(root, iscrowd=2),
    "id of text": lambda root: edit_info(root, id="a"),
    "id that repeats": lambda root: edit_info(root, id=70_001),
    "negative id": lambda root: edit_info(root, id=-1),
    "no list": lambda root: edit_first(root, segments_info=None),
    "no objects": lambda root: edit_first(root, segments_info=[3]),
}


def edit_first(root: Path, **fields: Any) -> None:
    edit(root / "annotations/panoptic_train.json", first(put(**fields)))


def edit_info(root: Path, **fields: Any) -> None:
    edit(root / "annotations/panoptic_train.json", first(lambda one: one["segments_info"][0].update(fields)))


@pytest.mark.parametrize("kind", PANOPTIC)
def test_panoptic_images_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    write_panoptic(tmp_path)
    PANOPTIC[kind](tmp_path)
    assert unreadable(open_collection(f"panoptic:{tmp_path}")) == [0]


def test_panoptic_files(tmp_path: Path) -> None:
    """An image without an annotation is left out; a category must say whether it is a thing."""
    file = write_panoptic(tmp_path)
    edit(file, lambda content: content["annotations"].pop())
    found = open_collection(tmp_path)
    assert (len(found.splits["train"]), len(found.notes)) == (2, 1)
    edit(file, lambda content: content["categories"][0].pop("isthing"))
    with pytest.raises(DataError):
        open_collection(tmp_path)


BAD_LINES = {
    "class": "3 0.5 0.5 0.2 0.2",
    "fraction of a class": "0.5 0.5 0.5 0.2 0.2",
    "negative class": "-1 0.5 0.5 0.2 0.2",
    "words": "cat 0.5 0.5 0.2 0.2",
    "pixels": "0 16 12 4 4",
    "not a number": "0 nan 0.5 0.2 0.2 0.5 0.5",
    "four": "0 0.5 0.5 0.2",
    "six": "0 0.5 0.5 0.2 0.2 0.9",
    "even": "0 0.1 0.1 0.2 0.1 0.2 0.2 0.3",
    "two points": "0 0.1 0.1 0.2 0.1 0.2",
    "outside": "0 -0.5 -0.5 -0.2 -0.5 -0.2 -0.2",
    "box among polygons": "0 0.5 0.5 0.2 0.2",
    "bytes": "0 \x00\x00 0.5 0.2 0.2",
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_lines_of_yolo(tmp_path: Path, kind: str) -> None:
    file = write_yolo(tmp_path)
    file.write_text(f"{file.read_text()}\n{BAD_LINES[kind]}\n")
    assert unreadable(open_collection(f"yolo:{tmp_path}")) == [0]


@pytest.mark.parametrize("layout", ["labels", "beside"])
@pytest.mark.parametrize("line", ["cat 0.5 0.5 0.2 0.2", "0 0.5 0.5 0.2", "<html>"])
def test_a_bad_first_line_leaves_a_folder_yolo(tmp_path: Path, layout: str, line: str) -> None:
    file = write_yolo(tmp_path, masks=False)
    file.write_text(line)
    if layout == "beside":
        for text in file.parent.iterdir():
            text.rename(tmp_path / "images/train" / text.name)
        shutil.rmtree(tmp_path / "labels")
        (tmp_path / "images/train").rename(tmp_path / "train")
        (tmp_path / "images").rmdir()
    found = open_collection(tmp_path)
    assert (found.kind, unreadable(found)) == ("YOLO", [0])
    ((name, reason),) = summarise(found)["train"].unreadable
    assert name.endswith("train/0.jpg")
    assert "0.txt, line 1: " in reason


def test_texts_of_words_are_not_yolo(tmp_path: Path) -> None:
    file = write_yolo(tmp_path, masks=False)
    for text in file.parent.iterdir():
        text.write_text("a cat on 2 mats\n0 0.5 0.5 0.2 0.2\nand a dog\n")
    with pytest.raises(DataError):
        open_collection(tmp_path)


def test_long_polygons_are_cut_anywhere(tmp_path: Path) -> None:
    file = write_yolo(tmp_path)
    for start in range(4):
        file.write_text(f"{'0 ':{start + 2}}{'0.25 -0.5 1e-3 0.125 ' * 500}")
        assert find_annotations.is_label_text(find_annotations.read_head(file))


@pytest.mark.parametrize("line", ["0 0.5 0.5 -0.2 0.2", "0 0.5 0.5 0 0.2", "0 1.5 0.5 0.2 0.2"])
def test_boxes_of_yolo(tmp_path: Path, line: str) -> None:
    write_yolo(tmp_path, masks=False).write_text(line)
    assert unreadable(open_collection(tmp_path)) == [0]


XML = {
    "empty": "",
    "cut": "<annotation><object>",
    "another": "<html></html>",
    "bomb": '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]><annotation><object><name>&c;</name></object>'
    "</annotation>",
    "deep": "<annotation>" * 1000 + "</annotation>" * 1000,
    "no box": "<annotation><object><name>cat</name></object></annotation>",
    "words": "<annotation><object><name>cat</name><bndbox><xmin>left</xmin></bndbox></object></annotation>",
    "no name": "<annotation><object><name> </name></object></annotation>",
    "unknown class": "<annotation><object><name>wolf</name>"
    "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax>"
    "</bndbox></object></annotation>",
    "reversed": "<annotation><object><name>cat</name>"
    "<bndbox><xmin>5</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax>"
    "</bndbox></object></annotation>",
    "endless": "<annotation><object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>inf</xmax><ymax>2</ymax>"
    "</bndbox></object></annotation>",
    "encoding": '<?xml version="1.0" encoding="utf-99"?><annotation></annotation>',
}


@pytest.mark.parametrize("kind", XML)
def test_xml_of_voc(tmp_path: Path, kind: str) -> None:
    write_voc(tmp_path).write_text(XML[kind])
    assert unreadable(open_collection(tmp_path)) == [0]


def test_masks_of_voc(tmp_path: Path) -> None:
    """An object of the background, a mask of another size, and a missing one."""
    write_voc(tmp_path, masks=True)
    path = tmp_path / "SegmentationObject/0.png"
    values = np.array(Image.open(path))
    changed = values.copy()
    changed[-1, 0] = 9
    for content in (changed, values[:-1]):
        Image.fromarray(content).save(path)
        assert unreadable(open_collection(tmp_path)) == [0]
    Image.fromarray(values).save(path)
    found = open_collection(tmp_path)
    path.unlink()
    assert unreadable(found) == [0]


def test_folders_without_annotations(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    for kind in ("coco", "panoptic", "voc"):
        with pytest.raises(VitrailError):
            open_collection(f"{kind}:{tmp_path}")
    with pytest.raises(VitrailError):
        open_collection(f"yolo:{tmp_path}/labels")
