"""Four annotations of one hundred COCO pictures, read by four readers, tell the same.

The class-index PNG files are the panoptic ones painted with the ids of the categories: equal pixel by pixel, crowds
included, which `mask` ignores. The YOLO polygons are outlines of the panoptic segments through the centres of their
pixels, without holes: half a pixel smaller all around, and larger where something else lies in front. The YOLO boxes
belong to COCO's own objects, before panoptic segments were cut where they overlap.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitrail.data.annotations import rle
from vitrail.data.collection import open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_mask
from vitrail.data.readers.yolo import YoloFiles

ARCHIVE = Path(__file__).parents[2].parent / "shared" / "data" / "coco128_train.tar"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ARCHIVE.is_file(), reason="needs ../shared/data/coco128_train.tar"),
]
Sources = dict[str, ImageDataset]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    root = tmp_path_factory.mktemp("coco128")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    top = next(path.parent for path in root.rglob("names.json"))
    texts = {
        "panoptic": str(top / "panoptic_segmentation"),
        "polygons": f"yolo:{top}/instance_segmentation",
        "boxes": str(top / "object_detection"),
        "pixels": f"masks:{top}/semantic_segmentation",
        "json": str(top / "panoptic_segmentation/annotations/panoptic_train2017.json"),
    }
    return {name: open_collection(text).splits["train"] for name, text in texts.items()}


def places(source: ImageDataset) -> dict[str, int]:
    return {Path(source.name(at)).stem: at for at in range(len(source))}


def category_ids() -> NDArray[np.int64]:
    """The ids of the categories, by class."""
    with tarfile.open(ARCHIVE) as archive:
        name = next(name for name in archive.getnames() if name.endswith("panoptic_train2017.json"))
        file = archive.extractfile(name)
        assert file is not None
        return np.array(sorted(one["id"] for one in json.load(file)["categories"]), np.int64)


def pairs(one: ImageDataset, other: ImageDataset) -> Iterator[tuple[int, int]]:
    """The same picture in two sources."""
    others = places(other)
    yield from ((at, others[name]) for name, at in places(one).items() if name in others)


def test_numbers(sources: Sources) -> None:
    assert {name: len(source) for name, source in sources.items()} == {
        "panoptic": 100,
        "polygons": 100,
        "boxes": 126,
        "pixels": 100,
        "json": 100,
    }
    assert [len(sources[name].segment_classes) for name in ("panoptic", "polygons", "boxes")] == [133, 201, 80]
    panoptic, polygons = sources["panoptic"], sources["polygons"]
    things = [sum(panoptic.segment_classes[kind].thing for kind in panoptic.segments(at).classes) for at in range(100)]
    lines = [len(polygons.segments(at)) for at in range(100)]
    assert (sum(things), sum(lines)) == (746, 746)


def test_pixels_are_the_panoptic_segments(sources: Sources) -> None:
    panoptic, pixels, ids = sources["panoptic"], sources["pixels"], category_ids()
    ignored = 0
    for at, other in pairs(panoptic, pixels):
        segments, truth = panoptic.segments(at), read_mask(pixels.mask(other))
        painted = np.zeros(segments.size, np.int64)
        for kind, mask in zip(segments.classes, segments.decode(), strict=True):
            painted[mask] = ids[kind]
        assert np.array_equal(painted, truth)
        mask = panoptic.mask(at)
        assert isinstance(mask, np.ndarray)
        known = mask != 255
        assert np.array_equal(ids[mask[known]], truth[known])
        ignored += int((~known & (truth > 0)).sum())
    assert ignored == 51_366  # of six crowds


def test_polygons_are_outlines_of_the_panoptic_segments(sources: Sources) -> None:
    """As we paint them, and with the pixels on the outline."""
    panoptic, polygons, ids = sources["panoptic"], sources["polygons"], category_ids()
    assert isinstance(polygons, YoloFiles)
    ours: list[float] = []
    outlined: list[float] = []
    distance: list[float] = []
    for at, other in pairs(panoptic, polygons):
        truth, found = panoptic.segments(at), polygons.segments(other)
        for kind, mask, box, crowd in zip(truth.classes, truth.masks or (), truth.boxes, truth.crowd, strict=True):
            if panoptic.segment_classes[kind].thing and not crowd:
                same = [place for place in range(len(found)) if found.classes[place] == ids[kind]]
                overlaps = rle.overlap([mask], [(found.masks or ())[place] for place in same])[0]
                place = same[int(overlaps.argmax())]
                distance.append(float(np.abs(found.boxes[place] - box).max()))
                ours.append(float(overlaps.max()))
                canvas = Image.new("1", truth.size[::-1])
                points = polygons.objects(other)[place].numbers * np.array(truth.size[::-1])
                ImageDraw.Draw(canvas).polygon([tuple(point) for point in np.rint(points).tolist()], fill=1, outline=1)
                outlined.append(float(rle.overlap([mask], [rle.encode(np.asarray(canvas))])[0, 0]))
    assert len(ours) == 740
    assert np.mean(ours) == pytest.approx(0.861, abs=0.002)
    assert np.median(ours) == pytest.approx(0.908, abs=0.002)
    assert np.mean(outlined) == pytest.approx(0.978, abs=0.004)
    assert np.median(outlined) == pytest.approx(0.995, abs=0.002)
    assert np.mean(np.array(distance) <= 1.01) > 0.95  # pixels between the boxes


def test_boxes_enclose_the_polygons(sources: Sources) -> None:
    polygons, boxes, ids = sources["polygons"], sources["boxes"], category_ids()
    best: list[float] = []
    for at, other in pairs(boxes, polygons):
        found, truth = boxes.segments(at), polygons.segments(other)
        for kind, box in zip(found.classes, found.boxes, strict=True):
            same = truth.boxes[truth.classes == ids[kind]]
            low, high = np.maximum(same[:, :2], box[:2]), np.minimum(same[:, 2:], box[2:])
            common = np.clip(high - low, 0, None).prod(1)
            union = (same[:, 2:] - same[:, :2]).prod(1) + (box[2:] - box[:2]).prod() - common
            best.append(float((common / union).max(initial=0)))
    assert len(best) == 741
    assert np.mean(best) == pytest.approx(0.906, abs=0.002)
    assert np.mean(np.array(best) >= 0.5) > 0.99
