"""What reports show of a segmentation: classes with the colours of the drawings, and strips of the worst images."""

from base64 import b64decode
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.masked import PIXEL_CLASSES, masked, painted
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.report.page import Table, render_page
from vitrail.report.sections import ImageRows
from vitrail.tasks.segmentation.mask_drawing import blend_mask, list_colours, make_palette
from vitrail.tasks.segmentation.metric import SegmentationMetric, SegmentationScore, SegmentedImage
from vitrail.tasks.segmentation.task import SEGMENTATION, build_panes

SIZES = [(12, 10), (7, 9)]
SOURCE = masked(SIZES)


@pytest.fixture
def score() -> SegmentationScore:
    metric = SegmentationMetric(len(PIXEL_CLASSES), torch.device("cpu"), 4)
    logits = torch.randn(2, len(PIXEL_CLASSES), 6, 6, generator=torch.Generator().manual_seed(0))
    batch = Batch(
        step=0,
        views=(torch.zeros(2, 3, 6, 6, dtype=torch.uint8),),
        targets=(torch.ones(2, 6, 6, dtype=torch.uint8),),
        sample=torch.arange(2),
        epoch=torch.zeros(2, dtype=torch.int64),
        valid=torch.ones(2, dtype=torch.bool),
    )
    metric.update(logits, batch)
    return metric.result()


@pytest.mark.parametrize("resize", [None, 8])
def test_masks_lie_over_the_image_where_the_whole_of_it_was_seen(resize: int | None) -> None:
    """A prediction that is right looks like the mask, and never lies over a part of the image that it is not of."""
    view = Preprocessing(image=(6, 6), resize=resize).geometry(SIZES[0])
    seen = view.mask(torch.from_numpy(painted(0, SIZES[0])), 255).numpy()
    image, mask, predicted = build_panes(
        SegmentedImage(0, 1.0, seen, seen), SOURCE, ("image", "mask", "predicted"), PIXEL_CLASSES
    )
    pictures = [np.asarray(Image.open(BytesIO(b64decode(one.picture.partition(",")[2])))) for one in (image, mask)]
    if resize is None:
        assert pictures[0].shape == pictures[1].shape
    else:
        assert mask.picture == predicted.picture
        assert pictures[1].shape[0] == pictures[1].shape[1] != pictures[0].shape[1]


@pytest.mark.parametrize(("title", "wanted"), [("", "Classes"), ("dev, best weights", "Classes on dev, best weights")])
def test_classes_and_strips(score: SegmentationScore, title: str, wanted: str) -> None:
    table, strips = SEGMENTATION.report_sections(score, SOURCE, PIXEL_CLASSES, title)
    assert isinstance(table, Table)
    assert isinstance(strips, ImageRows)
    assert table.title == wanted
    assert [row[0] for row in table.rows] == list(PIXEL_CLASSES)
    assert len(table.colours) == len(PIXEL_CLASSES)
    assert [len(strip.panes) for strip in strips.strips] == [3, 3]
    text = render_page("Segmentation", [table, strips], style="image_rows.css")
    assert text.count(f'fill="{table.colours[1]}"') == 1
    assert SEGMENTATION.report_sections(score, None, PIXEL_CLASSES, title)[1:] == []


def test_a_class_has_the_colour_of_its_drawing() -> None:
    names = ("Background", *(f"class {at}" for at in range(1, 255)))
    colours = list_colours(names)
    assert colours[0] == ""
    assert colours[7] == "#{:02x}{:02x}{:02x}".format(*make_palette(names)[7].tolist())
    assert list_colours(("wall", "floor"))[0] != ""
    mask = np.array([[0, 7], [255, 7]], np.uint8)
    image = SOURCE.open_image(0).rgb().resize((2, 2))
    drawn = np.asarray(blend_mask(mask, image, names))
    assert np.array_equal(drawn[:, 0], np.asarray(image)[:, 0])
    assert not np.array_equal(drawn[:, 1], np.asarray(image)[:, 1])
