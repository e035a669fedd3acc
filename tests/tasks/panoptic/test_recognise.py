"""Data are taken for what they are annotated with, and what they lack is said."""

import numpy as np
import pytest
import torch

from tests.models.tiny import RESNET, VIT
from vitrail.checkpoint.bundle import Card, describe, parse_description
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.annotations.rle import encode
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.collection import Collection
from vitrail.data.dataset import ArrayDataset
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.segment_targets import SegmentTargets
from vitrail.models.query_configs import EoMTConfig, query_config
from vitrail.tasks.registry import find_task, recognise_task

MIXED = (SegmentClass("cat"), SegmentClass("sky", False), SegmentClass("dog"))
THINGS = (SegmentClass("cat"), SegmentClass("dog"))


class Annotated(ArrayDataset):
    """One image with a segment of each class."""

    def __init__(self, classes: tuple[SegmentClass, ...] = (), *, overlap: bool = False, boxes: bool = False) -> None:
        super().__init__(np.zeros((1, 6, 8, 3), np.uint8))
        self.segment_classes, self.segments_overlap, self.boxes_only = classes, overlap, boxes
        self.pixel_classes = () if boxes else ("background", "other")

    def segments(self, index: int) -> Segments:
        count = len(self.segment_classes)
        masks = [np.arange(48).reshape(6, 8) // 16 == at for at in range(count)]
        numbers = np.arange(count, dtype=np.int64)
        crowd = numbers == count - 1
        boxes = np.repeat(numbers[:, None].astype(float), 4, 1)
        return Segments(size=(6, 8), classes=numbers, boxes=boxes, crowd=crowd, masks=tuple(map(encode, masks)))


def collect(source: Annotated) -> Collection:
    return Collection(name="set", kind="test", path=None, splits={"train": source})


@pytest.mark.parametrize(
    ("source", "task"),
    [
        (Annotated(MIXED), "panoptic"),
        (Annotated(THINGS), "panoptic"),
        (Annotated(THINGS, overlap=True), "instances"),
        (Annotated(), "segmentation"),
        (Annotated(THINGS, overlap=True, boxes=True), "instances"),
    ],
)
def test_tasks_are_recognised(source: Annotated, task: str) -> None:
    assert recognise_task(collect(source)).name == task


def test_outputs_are_the_classes_of_segments_or_of_things_alone() -> None:
    assert find_task("panoptic").output_names(collect(Annotated(MIXED))) == ("cat", "sky", "dog")
    assert find_task("instances").output_names(collect(Annotated(MIXED))) == ("cat", "dog")


@pytest.mark.parametrize(
    ("source", "task"),
    [
        (Annotated(THINGS, overlap=True, boxes=True), "instances"),
        (Annotated(THINGS, boxes=True), "panoptic"),
        (Annotated(THINGS, overlap=True), "panoptic"),
        (Annotated(), "instances"),
        (Annotated((SegmentClass("sky", False),)), "instances"),
    ],
)
def test_what_data_lack_is_refused(source: Annotated, task: str) -> None:
    with pytest.raises(DataError):
        find_task(task).output_names(collect(source))


def test_things_alone_are_numbered_anew() -> None:
    source = Annotated(MIXED)
    found = SegmentTargets(things_only=True).read(source, 0, (6, 8))
    assert found.classes.tolist() == [0, 1]
    assert found.crowd.tolist() == [False, True]
    assert found.boxes[:, 0].tolist() == [0, 2]
    assert found.masks is not None
    assert np.array_equal(found.decode(), source.segments(0).decode()[[0, 2]])
    assert SegmentTargets().read(source, 0, (6, 8)).classes.tolist() == [0, 1, 2]


def test_a_card_says_which_classes_are_things() -> None:
    task = find_task("panoptic")
    facts = task.card_facts(task.objective(), Annotated(MIXED))
    card = Card(preprocessing=Preprocessing(image=(6, 12)), labels=("cat", "sky", "dog"), task="panoptic", **facts)
    config = query_config(VIT, "eomt", 3)
    data = describe(config, card)
    assert parse_description(data)[1].things == (True, False, True)
    assert card.without_labels(keep_task=True).things is None
    for wrong in ([True], "yes", [1, 0, 1]):
        with pytest.raises(ConfigError):
            parse_description({**data, "things": wrong})
    assert task.metric_for(card, 3, torch.device("cpu")).things == (True, False, True)  # pyright: ignore


@pytest.mark.parametrize("name", ["panoptic", "instances"])
def test_a_plain_vit_becomes_eomt_and_queries_stay(name: str) -> None:
    task = find_task(name)
    made = task.fit_model(VIT, 7, new_head=True)
    assert isinstance(made, EoMTConfig)
    assert made.classes == 7
    other = query_config(VIT, "pmt", 7, queries=9)
    kept = task.fit_model(other, 4, new_head=True)
    assert (kept.family, kept.classes, kept.queries) == ("pmt", 4, 9)  # pyright: ignore[reportAttributeAccessIssue]
    assert find_task("segmentation").fit_model(other, 4, new_head=True).has_queries
    with pytest.raises(ConfigError):
        task.fit_model(RESNET, 4, new_head=True)
