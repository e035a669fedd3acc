"""Writes the predictions for many images to one file in COCO's formats.

Instances become a list of results, for pycocotools' `COCO.loadRes`; panoptic maps become an object whose `annotations`
name the PNG of each image. If all file names are distinct numbers, as in COCO, they are the image ids; otherwise images
are numbered from 1. A category id is the index of the network's output plus 1.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.tasks.mask_queries.prediction import PredictedSegments, describe_rle

Row = dict[str, Any]


def list_results(prediction: PredictedSegments, image: str = "") -> list[Row]:
    """Lists the COCO results of one image, without its image id."""
    rows: list[Row] = []
    for one in prediction.segments:
        left, top, right, bottom = one.box
        place: Row = {"bbox": [left, top, right - left, bottom - top], "area": one.area}
        about: Row = {"category_id": one.index + 1, "category": one.label, "score": float(f"{one.score:.6g}")}
        rows.append(
            {**({"file_name": image} if image else {}), **about, **place, "segmentation": describe_rle(one.rle)}
        )
    return rows


def list_panoptic(prediction: PredictedSegments) -> list[Row]:
    """Lists the `segments_info` of one image. Segment ids are those of its PNG, from 1."""
    rows: list[Row] = []
    for number, one in enumerate(prediction.segments, start=1):
        left, top, right, bottom = one.box
        place: Row = {"bbox": [left, top, right - left, bottom - top], "area": one.area, "iscrowd": 0}
        rows.append({"id": number, "category_id": one.index + 1, "score": float(f"{one.score:.6g}"), **place})
    return rows


class InstanceResults:
    """Collects images for a file of COCO results."""

    name = "predictions.json"

    def __init__(self) -> None:
        self.images, self.rows = list[str](), list[list[Row]]()

    def add(self, image: str, prediction: PredictedSegments, files: Mapping[str, str]) -> None:
        self.images.append(image)
        self.rows.append(list_results(prediction, image))

    def to_bytes(self) -> bytes:
        found = zip(number_images(self.images), self.rows, strict=True)
        return json.dumps([{"image_id": number, **row} for number, rows in found for row in rows]).encode()


class PanopticResults:
    """Collects images for a file in COCO's panoptic format."""

    name = "predictions.json"

    def __init__(self, names: Sequence[str], things: Sequence[bool] | None) -> None:
        self.names, self.things = names, things or (True,) * len(names)
        self.images, self.rows = list[str](), list[Row]()

    def add(self, image: str, prediction: PredictedSegments, files: Mapping[str, str]) -> None:
        self.images.append(image)
        size = {"height": prediction.size[0], "width": prediction.size[1]}
        self.rows.append({"file_name": files.get("file", ""), "segments_info": list_panoptic(prediction), **size})

    def to_bytes(self) -> bytes:
        numbers, kinds = number_images(self.images), zip(self.names, self.things, strict=True)
        categories = [{"id": at, "name": name, "isthing": int(one)} for at, (name, one) in enumerate(kinds, start=1)]
        images, annotations = list[Row](), list[Row]()
        for number, image, row in zip(numbers, self.images, self.rows, strict=True):
            images.append({"id": number, "file_name": image, "height": row["height"], "width": row["width"]})
            annotations.append({"image_id": number, **{name: row[name] for name in ("file_name", "segments_info")}})
        return json.dumps({"images": images, "annotations": annotations, "categories": categories}).encode()


def number_images(names: Sequence[str]) -> list[int]:
    """Chooses the id of each image: the number that is its file name, or its place counted from 1."""
    stems = [os.path.splitext(os.path.basename(name))[0] for name in names]
    if all(stem.isascii() and stem.isdigit() and len(stem) < 16 for stem in stems):
        numbers = [int(stem) for stem in stems]
        if len(set(numbers)) == len(numbers):
            return numbers
    return list(range(1, len(names) + 1))
