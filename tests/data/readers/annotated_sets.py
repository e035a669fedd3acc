"""Small sets of images with segments, in every format that is read: the same objects in each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.annotations import rle
from vitrail.data.annotations.polygons import fill, upsample

SIZE = (24, 32)
NAMES = ("cat", "dog", "sky")
Polygon = list[list[float]]
# Of each image: class and points of its objects.
OBJECTS: list[list[tuple[int, Polygon]]] = [
    [(0, [[2, 2], [12, 2], [12, 10], [2, 10]]), (1, [[16, 4], [30, 4], [23, 20]])],
    [(1, [[4, 12], [20, 12], [20, 22], [4, 22]])],
    [],
]
CROWD = np.zeros(SIZE, np.bool_)
CROWD[18:, 24:] = True


def paint(points: Polygon) -> NDArray[np.bool_]:
    return rle.decode(fill(upsample(np.array(points)), SIZE))


def write_images(folder: Path, suffix: str = "jpg") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for at in range(len(OBJECTS)):
        pixels = np.random.default_rng(at).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{at}.{suffix}")
    return [f"{at}.{suffix}" for at in range(len(OBJECTS))]


def coco(names: list[str], *, masks: bool = True) -> dict[str, Any]:
    """The content of a json: polygons, a crowd of runs in text, and one of runs in a list."""
    annotations: list[dict[str, Any]] = []
    for at, objects in enumerate(OBJECTS):
        for kind, points in objects:
            low, high = np.min(points, 0), np.max(points, 0)
            one: dict[str, Any] = {"id": len(annotations) + 1, "image_id": 10 + at, "category_id": 7 + 3 * kind}
            one |= {"bbox": [*map(float, low), *map(float, high - low)], "iscrowd": 0, "area": 1.0}
            if masks:
                one["segmentation"] = [[float(value) for point in points for value in point]]
            annotations.append(one)
    if masks:
        runs = rle.encode(CROWD)
        for number, counts in ((90, rle.write_counts(runs)), (91, runs.counts.tolist())):
            one = {"id": number, "image_id": 11, "category_id": 7, "iscrowd": 1, "bbox": [24, 18, 8, 6], "area": 48}
            annotations.append({**one, "segmentation": {"size": list(SIZE), "counts": counts}})
    images = [{"id": 10 + at, "file_name": name, "height": SIZE[0], "width": SIZE[1]} for at, name in enumerate(names)]
    categories = [{"id": 7 + 3 * at, "name": name, "supercategory": "all"} for at, name in enumerate(NAMES)]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def write_coco(root: Path, *, masks: bool = True) -> Path:
    content = coco(write_images(root / "images"), masks=masks)
    (root / "annotations").mkdir()
    file = root / "annotations/instances_train.json"
    file.write_text(json.dumps(content))
    return file


def write_panoptic(root: Path) -> Path:
    """Objects over sky, which is two segments in the first image; the last image has a crowd of dogs."""
    content = coco(write_images(root / "images"), masks=False)
    places = root / "annotations/panoptic_train"
    places.mkdir(parents=True)
    content["annotations"] = []
    for at, objects in enumerate(OBJECTS):
        ids = np.zeros(SIZE, np.int64)
        ids[:, :16], ids[:, 16:] = 70_000, 70_001
        infos = [{"id": 70_000, "category_id": 13}, {"id": 70_001, "category_id": 13}]
        if at == 2:
            ids[CROWD] = 5
            infos.append({"id": 5, "category_id": 10, "iscrowd": 1})
        for number, (kind, points) in enumerate(objects):
            ids[paint(points)] = 300 + number
            infos.append({"id": 300 + number, "category_id": 7 + 3 * kind, "iscrowd": 0})
        ids[0] = 0
        pixels = np.stack([ids % 256, ids // 256 % 256, ids // 65536], 2).astype(np.uint8)
        Image.fromarray(pixels).save(places / f"{at}.png")
        content["annotations"].append({"image_id": 10 + at, "file_name": f"{at}.png", "segments_info": infos})
    for category, thing in zip(content["categories"], (1, 1, 0), strict=True):
        category["isthing"] = thing
    file = root / "annotations/panoptic_train.json"
    file.write_text(json.dumps(content))
    return file


def write_yolo(root: Path, *, masks: bool = True, names: bool = True) -> Path:
    write_images(root / "images/train")
    (root / "labels/train").mkdir(parents=True)
    scale = np.array(SIZE[::-1])
    for at, objects in enumerate(OBJECTS):
        lines: list[str] = []
        for kind, points in objects:
            part = np.array(points) / scale
            box = np.concatenate([(part.min(0) + part.max(0)) / 2, part.max(0) - part.min(0)])
            lines.append(f"{kind} " + " ".join(f"{value:.9g}" for value in (part.ravel() if masks else box)))
        if lines or at % 2:
            (root / f"labels/train/{at}.txt").write_text("\n".join(lines))
    if names:
        (root / "data.yaml").write_text(
            "train: images/train\nnc: 3\nnames:\n  0: cat\n  1: dog # not a wolf\n  2: 'sky'\n"
        )
    return root / "labels/train/0.txt"


def voc_xml(objects: list[tuple[int, Polygon]]) -> str:
    parts: list[str] = []
    for kind, points in objects:
        (left, top), (right, bottom) = np.min(points, 0), np.max(points, 0)
        sides = {"xmin": left + 1, "ymin": top + 1, "xmax": right, "ymax": bottom}
        box = "".join(f"<{name}>{value:g}</{name}>" for name, value in sides.items())
        parts.append(f"<object><name>{NAMES[kind]}</name><difficult>0</difficult><bndbox>{box}</bndbox></object>")
    size = f"<size><width>{SIZE[1]}</width><height>{SIZE[0]}</height><depth>3</depth></size>"
    return f"<annotation><filename>a.jpg</filename>{size}{''.join(parts)}</annotation>"


def write_voc(root: Path, *, masks: bool = False) -> Path:
    write_images(root / "JPEGImages")
    (root / "Annotations").mkdir()
    for at, objects in enumerate(OBJECTS):
        (root / f"Annotations/{at}.xml").write_text(voc_xml(objects))
    (root / "classes.txt").write_text("\n".join(NAMES))
    if not masks:
        return root / "Annotations/0.xml"
    for at, objects in enumerate(OBJECTS):
        maps = {name: np.zeros(SIZE, np.uint8) for name in ("SegmentationClass", "SegmentationObject")}
        for number, (kind, points) in enumerate(objects):
            maps["SegmentationClass"][paint(points)], maps["SegmentationObject"][paint(points)] = kind + 1, number + 1
        for name, values in maps.items():
            values[:, -1] = 255
            (root / name).mkdir(exist_ok=True)
            image = Image.fromarray(values)
            image.putpalette([value % 256 for value in range(768)])
            image.save(root / name / f"{at}.png")
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    (root / "ImageSets/Segmentation/train.txt").write_text("0\n2\n")
    (root / "ImageSets/Segmentation/val.txt").write_text("1\nmissing\n")
    return root / "SegmentationObject/0.png"
