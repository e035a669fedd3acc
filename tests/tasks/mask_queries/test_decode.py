"""Queries become the same maps and masks as in transformers, whatever the number that is decoded at a time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries import decode
from vitrail.tasks.mask_queries.decode import decode_instances, decode_panoptic, decode_semantic

CLASSES, SIZE = 5, (32, 32)
THINGS = (True, True, False, True, False)


def draw_output(seed: int, *, batch: int = 3, queries: int = 12, sharp: float = 6.0) -> QueryOutput:
    """Smooth masks, and classes of which most are certain."""
    generator = torch.Generator().manual_seed(seed)
    classes = sharp * torch.randn(batch, queries, CLASSES + 1, generator=generator)
    coarse = torch.randn(batch, queries, 3, 3, generator=generator)
    masks = 4 * torch.nn.functional.interpolate(coarse, (8, 8), mode="bilinear")
    return QueryOutput(classes, masks)


def make_judge() -> Any:
    eomt = pytest.importorskip("transformers.models.eomt.image_processing_eomt")
    return eomt.EomtImageProcessor(size={"shortest_edge": SIZE[0], "longest_edge": SIZE[1]})


def as_theirs(output: QueryOutput) -> Any:
    return SimpleNamespace(class_queries_logits=output.classes, masks_queries_logits=output.masks, patch_offsets=None)


@pytest.fixture(params=[2**25, 3 * 32 * 32], ids=["at once", "in parts"])
def held_pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PIXELS", request.param)


@pytest.mark.usefixtures("held_pixels")
class TestParity:
    def test_classes_of_pixels(self) -> None:
        output = draw_output(1)
        found = decode_semantic(output, SIZE)
        theirs = make_judge().post_process_semantic_segmentation(
            as_theirs(output), [SIZE] * 3, return_segmentation_scores=True
        )
        scores = torch.stack([one.segmentation_scores for one in theirs])
        assert torch.allclose(found.exp(), scores, atol=1e-5)
        assert torch.equal(found.argmax(1), torch.stack([one.segmentation for one in theirs]))

    @pytest.mark.parametrize("seed", range(6))
    def test_panoptic_maps(self, seed: int) -> None:
        output = draw_output(seed)
        stuff = [at for at, thing in enumerate(THINGS) if not thing]
        theirs = make_judge().post_process_panoptic_segmentation(
            as_theirs(output), [SIZE] * 3, threshold=0.6, overlap_mask_area_threshold=0.5, stuff_classes=stuff
        )
        for mine, other in zip(decode_panoptic(output, SIZE, THINGS, 0.6, 0.5), theirs, strict=True):
            assert torch.equal(mine.ids.long(), other["segmentation"].long())
            assert mine.classes.tolist() == [one["label_id"] for one in other["segments_info"]]
            scores = [one["score"] for one in other["segments_info"]]
            assert mine.scores.tolist() == pytest.approx(scores, abs=1e-6)

    @pytest.mark.parametrize("seed", range(4))
    def test_instances(self, seed: int) -> None:
        output, least = draw_output(seed), 0.5
        theirs = make_judge().post_process_instance_segmentation(as_theirs(output), [SIZE] * 3, threshold=least)
        seen = 0
        for mine, other in zip(decode_instances(output, SIZE), theirs, strict=True):
            kept = mine.scores >= least
            parts = (part[kept].tolist() for part in (mine.queries, mine.classes, mine.scores))
            rows = sorted(zip(*parts, strict=True))
            assert [row[1] for row in rows] == [one["label_id"] for one in other["segments_info"]]
            assert [row[2] for row in rows] == pytest.approx([one["score"] for one in other["segments_info"]], abs=1e-5)
            painted = torch.full(SIZE, -1.0)  # the later query over the earlier one, as there
            for at, place in enumerate(mine.queries[kept].argsort()):
                painted[mine.masks[kept][place]] = at
            assert torch.equal(painted, other["segmentation"])
            seen += len(rows)
        assert seen > 3


def test_maps_have_segments_of_both_kinds_somewhere() -> None:
    found = [one for seed in range(6) for one in decode_panoptic(draw_output(seed), SIZE, THINGS, 0.6, 0.5)]
    kinds = [THINGS[index] for one in found for index in one.classes.tolist()]
    assert any(kinds)
    assert not all(kinds)


def test_stuff_is_one_segment_and_things_are_several() -> None:
    masks = torch.full((1, 2, 4, 4), -9.0)
    masks[0, 0, :, :2] = 9.0
    masks[0, 1, :, 2:] = 9.0
    classes = torch.full((1, 2, CLASSES + 1), -9.0)
    classes[..., 2] = 9.0
    (stuff,) = decode_panoptic(QueryOutput(classes, masks), (4, 4), THINGS)
    assert stuff.classes.tolist() == [2]
    assert (stuff.ids == 0).all()
    (things,) = decode_panoptic(QueryOutput(classes, masks), (4, 4), (True,) * CLASSES)
    assert things.classes.tolist() == [2, 2]
    assert things.ids[0].tolist() == [0, 0, 1, 1]


def test_an_image_without_segments() -> None:
    classes = torch.zeros(1, 3, CLASSES + 1)
    classes[..., -1] = 20.0
    output = QueryOutput(classes, torch.full((1, 3, 4, 4), -5.0))
    (map_,) = decode_panoptic(output, (8, 6), THINGS)
    assert map_.ids.shape == (8, 6)
    assert (map_.ids == -1).all()
    assert not len(map_.classes)
    (found,) = decode_instances(output, (8, 6))
    assert found.masks.shape == (0, 8, 6)
    assert decode_semantic(output, (8, 6)).isfinite().all()


def test_instances_of_things_alone_and_at_most_so_many() -> None:
    output = draw_output(3)
    for found in decode_instances(output, SIZE, THINGS, top=7):
        assert 0 < len(found.classes) <= 7
        assert all(THINGS[index] for index in found.classes.tolist())
        assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
