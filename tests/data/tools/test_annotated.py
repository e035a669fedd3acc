"""What is said of annotated segments, against segments whose every number is known; and how a sheet shows them."""

import json
from pathlib import Path

import numpy as np
import pytest

from vitrail.cli.app import main
from vitrail.core.errors import BadImage
from vitrail.data.annotations.rle import encode
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.collection import Collection
from vitrail.data.dataset import ArrayDataset
from vitrail.data.datasets.scenes import SceneDataset
from vitrail.data.tools import overview
from vitrail.data.tools.annotated_sheet import draw_annotations, has_annotations, load_annotated
from vitrail.report.contact_sheet import arrange_rows


class Marked(ArrayDataset):
    """Grey images of 200 x 100 pixels: one without segments, one with four, one whose annotations are damaged."""

    segments_overlap = True

    def __init__(self, boxes_only: bool = False) -> None:
        super().__init__(np.full((3, 200, 100, 3), 128, np.uint8))
        self.boxes_only = boxes_only
        self.segment_classes = (SegmentClass("cat"), SegmentClass("dog"), SegmentClass("sky", thing=False))

    def segments(self, index: int) -> Segments:
        if index == 2:
            raise BadImage("damaged")
        boxes = np.array([[0, 0, 10, 10], [20, 20, 60, 60], [0, 60, 100, 160], [0, 0, 100, 50], [5, 5, 9, 9]], float)
        boxes = boxes if index else boxes[:0]
        masks = np.zeros((len(boxes), 200, 100), np.bool_)
        for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
            mask[top:bottom, left:right] = True
        return Segments(
            size=(200, 100),
            classes=np.array([0, 0, 1, 2, 1])[: len(boxes)],
            boxes=boxes,
            crowd=np.array([False, False, False, False, True])[: len(boxes)],
            masks=None if self.boxes_only else tuple(map(encode, masks)),
        )


def one(source: ArrayDataset) -> Collection:
    return Collection(name="x", kind="arrays", path=None, splits={"train": source})


@pytest.mark.parametrize("boxes_only", [False, True])
def test_every_number_of_segments(boxes_only: bool) -> None:
    summary = overview.summarise(one(Marked(boxes_only)))["train"]
    assert summary.unreadable == (("array[2]", "segments: damaged"),)
    found = summary.segments
    assert found is not None
    assert (found.segments.tolist(), found.images.tolist()) == ([2, 1, 1], [1, 1, 1])
    assert found.per_image.tolist() == [0, 4]
    assert found.sizes == (1, 1, 1)  # 100, 1,600 and 10,000 pixels; the sky is no thing
    assert (found.crowd, found.count, found.things, found.boxes_only) == (1, 4, 3, boxes_only)
    assert found.shares.tolist() == [1700 / 40_000, 10_000 / 40_000, 5_000 / 40_000]
    said = json.loads(json.dumps(summary.to_dict()))["segments"]
    assert said["classes"]["sky"] == {"thing": False, "segments": 1, "images": 1, "share": 0.125}
    assert (said["per_image"], said["without"], said["crowd"]) == ([0, 2.0, 4], 1, 1)


def test_the_sizes_are_cocos() -> None:
    from vitrail.data.tools.segment_summary import ImageSegments, summarise_segments

    areas = np.array([1023.0, 1024.0, 9215.0, 9216.0])
    image = ImageSegments(10_000, np.zeros(4, np.int64), areas, np.zeros(4, np.bool_))
    assert summarise_segments([SegmentClass("cat")], False, [image]).sizes == (1, 2, 1)


def test_a_sheet_shows_whole_images_with_their_segments() -> None:
    source = Marked()
    assert has_annotations(source)
    plain = source.open_image(1).rgb()
    drawn = np.asarray(draw_annotations(source, 1, plain.resize((50, 100))))
    assert (drawn[:25] != 128).any(-1).mean() > 0.9  # the sky
    assert load_annotated(source, 2, (50, 100)) is None
    sheet = overview.make_sheet(one(source), "train")
    assert sheet.width > 1000
    assert len(sheet.convert("RGB").getcolors(1 << 24) or []) > 10


def test_masks_are_drawn_without_their_background() -> None:
    class Painted(ArrayDataset):
        pixel_classes = ("background", "cat")

        def mask(self, index: int) -> np.ndarray:
            mask = np.zeros((40, 40), np.uint8)
            mask[20:, :30], mask[20:, 30:] = 1, 255
            return mask

    source = Painted(np.full((1, 40, 40, 3), 128, np.uint8))
    drawn = np.asarray(draw_annotations(source, 0, source.open_image(0).rgb()))
    changed = (drawn != 128).any(-1)
    assert changed[20:, :30].all()
    assert not changed[:, 30:].any()
    assert has_annotations(source)


def test_rows_of_a_gallery_are_as_wide_as_the_sheet() -> None:
    rows = arrange_rows([1.5, 0.7, 1.0, 9.0, 0.1, 1.3, 1.3, 1.3, 1.3, 0.5])
    assert sum(map(len, rows)) == 10
    widths = [sum(width for width, _ in row) + 6 * (len(row) - 1) for row in rows]
    assert set(widths[:-1]) == {1314}
    assert widths[-1] <= 1314
    for row in rows:
        assert len({height for _, height in row}) == 1
        assert 120 < row[0][1] <= 295


def test_what_the_command_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"test": SceneDataset(2, size=32)}
    monkeypatch.setattr("vitrail.data.datasets.scenes.read_scenes", lambda _name: small)
    assert main(["data", "scenes/32", "--json", "--no-sheet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["segment_classes"][-1] == {"name": "ground", "thing": False}
    segments = record["splits"]["test"]["segments"]
    assert segments["classes"]["sky"]["images"] == 2
    assert main(["data", "scenes/32", "--no-sheet"]) == 0
    said = capsys.readouterr().out
    assert f"{segments['segments']} segments in 2 images" in said
