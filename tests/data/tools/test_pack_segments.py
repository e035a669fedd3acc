"""Segments in packs: the same ones come back, smaller with their image, and nothing changes for packs without any."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.tools.test_annotated import Marked
from tests.data.tools.test_pack import photos
from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.annotations.packed_segments import SegmentKinds, format_segments, parse_segments, read_kinds
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.datasets.scenes import CLASSES, SceneDataset
from vitrail.data.readers import shard_index, shards
from vitrail.data.tools import pack as packing
from vitrail.data.tools.pack import pack


def same(one: Segments, other: Segments) -> bool:
    arrays = [(getattr(one, name), getattr(other, name)) for name in ("classes", "boxes", "crowd")]
    if (one.masks is None) != (other.masks is None) or one.size != other.size:
        return False
    if one.masks is not None:
        arrays.append((one.decode(), other.decode()))
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays)


def test_segments_come_back_from_a_pack(tmp_path: Path) -> None:
    scenes = SceneDataset(6, size=32)
    for name, source in (("scenes", scenes), ("marked", Marked()), ("boxes", Marked(boxes_only=True))):
        report = pack({"train": source}, tmp_path / name, workers=1)
        again = shards.read(tmp_path / name)["train"]
        assert again.segment_classes == source.segment_classes
        assert (again.segments_overlap, again.boxes_only) == (source.segments_overlap, source.boxes_only)
        assert again.pixel_classes == source.pixel_classes
        assert report.unreadable == (0 if name == "scenes" else 1)
        assert len(again) == report.splits["train"] == len(source) - report.unreadable
        assert all(same(again.segments(index), source.segments(index)) for index in range(len(again)))
    again = shards.read(tmp_path / "scenes")["train"]
    assert same(pickle.loads(pickle.dumps(again)).segments(3), scenes.segments(3))
    with pytest.raises(IndexError):
        again.segments(6)


def test_segments_get_smaller_with_their_image(tmp_path: Path) -> None:
    source = SceneDataset(4, size=64)
    pack({"train": source}, tmp_path / "out", max_side=16, workers=1)
    small = shards.read(tmp_path / "out")["train"]
    assert small.open_image(0).size == (16, 16)
    for index in range(4):
        found, whole = small.segments(index), source.segments(index)
        masks = whole.decode()[:, 2::4, 2::4]
        kept = masks.any((1, 2))
        assert np.array_equal(found.decode(), masks[kept])
        assert found.classes.tolist() == whole.classes[kept].tolist()
        assert np.array_equal(found.boxes, whole.boxes[kept] / 4)
    pack({"train": Marked(boxes_only=True)}, tmp_path / "boxes", max_side=100, workers=1)
    boxes = shards.read(tmp_path / "boxes")["train"].segments(1)
    assert (boxes.size, boxes.boxes.tolist()[1]) == ((100, 50), [10, 10, 30, 30])


def test_a_stopped_pack_of_segments_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SceneDataset(12, size=32)
    pack({"train": source}, tmp_path / "whole", shard_size=20_480, workers=1)

    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "write_description", stop)
        with pytest.raises(KeyboardInterrupt):
            pack({"train": source}, tmp_path / "parts", shard_size=20_480, workers=1)
    (tmp_path / "parts/train-00001.tar").unlink()
    report = pack({"train": source}, tmp_path / "parts", shard_size=20_480, workers=1)
    assert 0 < report.kept < report.shards
    for file in (tmp_path / "whole").iterdir():
        if file.suffix != ".index":
            assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes()


def test_an_index_of_an_earlier_version_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shard_index.write_columns

    def without(*args: Any) -> list[shard_index.ShardFile]:
        return [shard._replace(segments=-1) for shard in made(*args)]

    pack({"train": SceneDataset(3, size=32)}, tmp_path / "out", workers=1)
    listed = tmp_path / "out/segment_classes.json"
    text = listed.read_text()
    listed.unlink()
    (tmp_path / "out/vitrail.index").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(shard_index, "write_columns", without)
        plain = shards.read(tmp_path / "out")["train"]
    assert plain.segment_classes == ()
    with pytest.raises(DataError):
        plain.segments(0)
    listed.write_text(text)
    assert shards.read(tmp_path / "out")["train"].segment_classes == CLASSES
    listed.write_text("[]")
    with pytest.raises(DataError, match="segment_classes"):
        shards.read(tmp_path / "out")


def test_packs_without_segments_are_what_they_were(tmp_path: Path) -> None:
    pack({"train": photos(3)}, tmp_path / "out", workers=1)
    assert "segment_classes" not in json.loads((tmp_path / "out/pack.json").read_text())
    assert not (tmp_path / "out/segment_classes.json").exists()
    other = SceneDataset(2, size=32)
    other.segment_classes = CLASSES[:-1]
    with pytest.raises(BadLabels):
        pack({"train": SceneDataset(2, size=32), "test": other}, tmp_path / "new", workers=1)


KINDS = SegmentKinds((SegmentClass("a"), SegmentClass("b", False)), overlap=False, boxes_only=False)


def test_json_of_segments() -> None:
    assert read_kinds(json.dumps(KINDS.to_dict())) == KINDS
    found = replace(Marked().segments(1), classes=np.array([0, 1, 0, 1, 0]))
    text = format_segments(found)
    assert same(parse_segments(text.encode(), KINDS), found)
    assert same(parse_segments(format_segments(Marked().segments(0)).encode(), KINDS), Marked().segments(0))
    one = '"class": 1'
    for damaged in (
        *(text[:-9], "[]", "{}", text.replace(one, '"class": 2'), text.replace(one, '"class": -1'), "[" * 100_000),
        *(text.replace('"counts"', '"count"'), text.replace("200, 100", "200, 90"), text.replace("[0, 0, 10", "[0")),
    ):
        with pytest.raises(BadImage):
            parse_segments(damaged.encode(), KINDS)
    for damaged in ("", "[]", '{"classes": []}', '{"classes": [], "overlap": true, "boxes_only": false}'):
        with pytest.raises(ValueError):  # noqa: PT011
            read_kinds(damaged)
