"""CLEVR for two questions: how many objects are there, and how near is the nearest?

The labels come from scenes/CLEVR_train_scenes.json and its sibling for val. The test scenes were never given out.
"""

import json
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.core.errors import DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.named.trees import tree
from vitrail.data.source import Source

FEWEST, MOST = 3, 10
EDGES: Final = (8.0, 8.5, 9.0, 9.5, 10.0)


def count(root: Path) -> dict[str, Source]:
    """Objects less three."""
    return read(root, lambda objects: len(objects) - FEWEST, [str(n) for n in range(FEWEST, MOST + 1)])


def distance(root: Path) -> dict[str, Source]:
    """The depth of the nearest object, in six steps."""
    names = ["up to 8", *(f"up to {edge:g}" for edge in EDGES[1:]), "beyond 10"]
    return read(root, nearest, names)


def nearest(objects: list[dict[str, Any]]) -> int:
    """The step of the smallest depth; a depth at an edge counts to the step below it."""
    return bisect_left(EDGES, min(float(one["pixel_coords"][2]) for one in objects))


def read(root: Path, label: Callable[[list[dict[str, Any]]], int], classes: list[str]) -> dict[str, Source]:
    files, prefix = tree(root, "CLEVR_v1.0", "CLEVR_v1.0.zip")
    splits: dict[str, Source] = {}
    for split in ("train", "val"):
        where = f"{files.where}: CLEVR_{split}_scenes.json"
        try:
            scenes = json.loads(files.read(f"{prefix}scenes/CLEVR_{split}_scenes.json"))["scenes"]
            rows = sorted((str(scene["image_filename"]), label(scene["objects"])) for scene in scenes)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DataError(f"{where} is damaged, or no file of CLEVR ({reason_of(error)})") from None
        labels = Labels(np.array([value for _, value in rows], np.int64))
        labels.check(len(classes), where)
        splits[split] = files.source([f"{prefix}images/{split}/{name}" for name, _ in rows], labels, classes)
    return splits
