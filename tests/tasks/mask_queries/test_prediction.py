"""Segments of a whole image, from what the network saw of it; told in a line, as plain data and as COCO's files."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.core.errors import ConfigError
from vitrail.data.annotations.rle import encode, read_counts
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import Geometry
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.coco_results import number_images
from vitrail.tasks.mask_queries.decode import decode_instances
from vitrail.tasks.mask_queries.prediction import PredictedSegment, PredictedSegments
from vitrail.tasks.registry import find_task
from vitrail.tasks.task import PredictionOptions

NAMES, THINGS = ("cat", "dog", "sky"), (True, True, False)
SURE = 12.0
PANOPTIC = PredictionOptions(names=NAMES, things=THINGS, threshold=0.8)
INSTANCES = PredictionOptions(names=NAMES, threshold=0.5)


def halves() -> QueryOutput:
    """A cat at the left, sky at the right, and a query that says nothing; at [4, 8]."""
    classes, masks = torch.full((1, 3, 4), -SURE), torch.full((1, 3, 4, 8), -SURE)
    classes[0, 0, 0] = classes[0, 1, 2] = classes[0, 2, 3] = SURE
    masks[0, 0, :, :4] = masks[0, 1, :, 4:] = masks[0, 2] = SURE
    return QueryOutput(classes, masks)


def whole_view(height: int, width: int) -> Geometry:
    return Geometry(whole=(height, width), box=(0, 0, height, width), inner=(4, 8))


def predict(task: str, view: Geometry, options: PredictionOptions) -> PredictedSegments:
    (found,) = find_task(task).predict(halves(), [view], options)
    assert isinstance(found, PredictedSegments)
    return found


def test_a_panoptic_map_has_the_size_of_the_image() -> None:
    found = predict("panoptic", whole_view(40, 80), PANOPTIC)
    assert found.size == (40, 80)
    assert str(found) == "1 cat; sky"
    masks = {one.label: one.mask() for one in found.segments}
    assert masks["cat"][:, :38].all()
    assert masks["sky"][:, 42:].all()
    assert not (masks["cat"] & masks["sky"]).any()


def test_instances_are_ranked_and_one_for_each_query() -> None:
    found = predict("instances", whole_view(40, 80), INSTANCES)
    assert sorted(one.label for one in found.segments) == ["cat", "sky"]
    low = predict("instances", whole_view(40, 80), PredictionOptions(names=NAMES, threshold=1e-30))
    assert len(low) == 3


def test_without_a_threshold_instances_are_those_that_evaluation_counts() -> None:
    output = QueryOutput(*(torch.randn(shape, generator=torch.manual_seed(0)) for shape in [(1, 6, 4), (1, 6, 4, 8)]))
    options = PredictionOptions(names=NAMES, threshold=0.0)
    (found,) = find_task("instances").predict(output, [whole_view(4, 8)], options)
    assert isinstance(found, PredictedSegments)
    (counted,) = decode_instances(output, (4, 8))
    assert len(found) == len(counted.scores) == 18
    for segment, mask, label, score in zip(found.segments, *counted[:3], strict=True):
        assert (segment.index, segment.score) == (int(label), float(score))
        assert np.array_equal(segment.mask(), mask.numpy())


def test_what_the_network_did_not_see_has_no_segment() -> None:
    view = Preprocessing(image=(4, 8), resize=8).geometry((60, 80))
    for task, options in (("panoptic", PANOPTIC), ("instances", INSTANCES)):
        found = predict(task, view, options)
        union = np.logical_or.reduce([one.mask() for one in found.segments])
        rows = union.any(1).nonzero()[0]
        top, _, height, _ = view.box
        assert (rows[0], rows[-1] + 1) == (round(top), round(top + height))


def test_flipped_views_and_borders_come_off() -> None:
    view = Geometry(whole=(40, 40), box=(0, 0, 40, 40), inner=(4, 4), pad=(4, 0, 0, 0), flip=True)
    found = predict("panoptic", view, PANOPTIC)
    assert [(one.label, one.area) for one in found.segments] == [("cat", 1600)]


def test_plain_data_has_masks_that_can_be_read() -> None:
    data = json.loads(json.dumps(predict("panoptic", whole_view(40, 80), PANOPTIC).to_dict()))
    assert data["size"] == [40, 80]
    for one in data["segments"]:
        rle = read_counts(tuple(one["rle"]["size"]), one["rle"]["counts"])
        assert rle.area == one["area"]
        left, top, right, bottom = one["box"]
        assert (right - left) * (bottom - top) == one["area"]  # halves are rectangles
        assert one["thing"] is (one["label"] == "cat")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_masks_are_what_pycocotools_reads() -> None:
    coco = pytest.importorskip("pycocotools.mask")
    for one in predict("instances", whole_view(33, 57), INSTANCES).segments:
        assert np.array_equal(coco.decode(one.to_dict()["rle"]).astype(bool), one.mask())


def test_the_png_of_a_panoptic_map_numbers_its_segments() -> None:
    task, found = find_task("panoptic"), predict("panoptic", whole_view(40, 80), PANOPTIC)
    file = task.file_of(found)
    assert file is not None
    pixels = np.asarray(Image.open(io.BytesIO(file[1]))).astype(int)
    ids = pixels @ np.array([1, 256, 65536])
    for number, one in enumerate(found.segments, start=1):
        assert np.array_equal(ids == number, one.mask())


def test_one_file_about_all_images() -> None:
    found = predict("panoptic", whole_view(40, 80), PANOPTIC)
    made = find_task("panoptic").collect(PANOPTIC)
    assert made is not None
    made.add("a/000017.jpg", found, {"file": "a/000017.png"})
    made.add("a/000005.jpg", PredictedSegments((4, 5), ()), {"file": "a/000005.png"})
    data = json.loads(made.to_bytes())
    assert [one["id"] for one in data["images"]] == [17, 5]
    assert [one["isthing"] for one in data["categories"]] == [1, 1, 0]
    (first, second) = data["annotations"]
    assert (first["image_id"], first["file_name"], second["segments_info"]) == (17, "a/000017.png", [])
    assert {one["category_id"] for one in first["segments_info"]} == {1, 3}
    assert sum(one["area"] for one in first["segments_info"]) <= 3200

    made = find_task("instances").collect(INSTANCES)
    assert made is not None
    made.add("x.jpg", predict("instances", whole_view(40, 80), INSTANCES), {})
    rows = json.loads(made.to_bytes())
    assert {row["image_id"] for row in rows} == {1}
    assert all(len(row["bbox"]) == 4 and row["score"] > 0.9 for row in rows)


@pytest.mark.parametrize(
    ("names", "numbers"),
    [(["a/7.jpg", "8.png"], [7, 8]), (["7.jpg", "b/7.png"], [1, 2]), (["cat.jpg", "8.png"], [1, 2]), ([], [])],
)
def test_images_have_the_numbers_in_their_names_or_are_counted(names: list[str], numbers: list[int]) -> None:
    assert number_images(names) == numbers


def test_a_line_counts_things() -> None:
    mask = encode(np.ones((2, 2), bool))

    def make(label: str, thing: bool = True) -> PredictedSegment:
        return PredictedSegment(label=label, index=0, score=1.0, rle=mask, thing=thing)

    several = [make("dog"), make("sky", False), make("cat"), make("cat"), make("road", False), make("cat")]
    assert str(PredictedSegments((2, 2), tuple(several))) == "3 cats, 1 dog; sky, road"
    assert str(PredictedSegments((2, 2), ())) == "nothing found"


def test_drawings_rows_and_bars() -> None:
    task, found = find_task("panoptic"), predict("panoptic", whole_view(40, 80), PANOPTIC)
    image = Image.new("RGB", (80, 40), "white")
    drawn = task.draw(found, image)
    assert drawn is not None
    assert drawn.size == image.size
    assert (np.asarray(drawn) != 255).any(2).mean() > 0.9
    assert [bar.label for bar in task.bars(found)] == [one.label for one in found.segments]
    assert all(bar.colour.startswith("#") and 0 <= bar.share <= 1 for bar in task.bars(found))
    columns = task.columns(multi_label=False)
    assert all(len(row) == len(columns) for row in task.rows(found))
    assert len(task.rows(PredictedSegments((2, 2), ()))) == 1


def test_a_single_tensor_is_refused() -> None:
    with pytest.raises(ConfigError):
        find_task("panoptic").predict(torch.zeros(1, 3, 4, 8), [whole_view(4, 8)], PANOPTIC)


def test_classes_of_pixels_from_queries() -> None:
    (found,) = find_task("segmentation").predict(halves(), [whole_view(40, 80)], PANOPTIC)
    assert found.mask.shape == (40, 80)  # pyright: ignore[reportAttributeAccessIssue]
    assert (found.mask[:, :38] == 0).all()  # pyright: ignore[reportAttributeAccessIssue]
    assert (found.mask[:, 42:] == 2).all()  # pyright: ignore[reportAttributeAccessIssue]
