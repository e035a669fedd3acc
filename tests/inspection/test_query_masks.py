"""What queries see is what the network computes, and the section shows it of networks that have queries."""

import numpy as np
import pytest
import torch

from tests.models.tiny import VIT, awake
from tests.tasks.mask_queries.tiny_queries import NAMES, make_network
from vitrail.core.errors import ConfigError
from vitrail.inspection import query_masks
from vitrail.inspection.context import InspectionContext
from vitrail.inspection.query_masks import light_mask
from vitrail.inspection.sections import KINDS, build_explorer
from vitrail.models.build import Model
from vitrail.models.query_configs import query_config


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def context(model: Model, count: int = 2) -> InspectionContext:
    pixels = [np.full((32, 48, 3), 200, np.uint8)] * count
    shown = images(count)
    return InspectionContext(
        model=model, images=shown, pixels=pixels, names=["a", "b"][:count], crowd=lambda: iter([shown]), count=count,
        labels=NAMES,
    )  # fmt: skip


def test_masks_are_those_of_every_block() -> None:
    model = make_network("panoptic")
    classes, masks = query_masks(model, images())
    layers = model.forward_layers(images())
    assert masks.shape == (2, len(layers), 12, *layers[0].masks.shape[2:])
    for at, layer in enumerate(layers):
        torch.testing.assert_close(masks[:, at], layer.masks.sigmoid())
    torch.testing.assert_close(classes, layers[-1].classes.softmax(-1)[..., :-1])


@pytest.mark.parametrize("masked", [1, 2])
def test_the_last_ones_are_the_answer_with_masked_attention_too(masked: int) -> None:
    model = make_network("panoptic", masked_blocks=masked)
    classes, masks = query_masks(model, images())
    output = model(images())
    torch.testing.assert_close(masks[:, -1], output.masks.sigmoid())
    torch.testing.assert_close(classes, output.classes.softmax(-1)[..., :-1])


def test_a_network_without_queries_is_refused() -> None:
    with pytest.raises(ConfigError, match="no queries"):
        query_masks(awake(VIT, torch.float32), torch.zeros(1, 3, 6, 12))
    given = context(awake(VIT, torch.float32))
    assert KINDS["queries"].obstacle(given) is not None


def test_an_image_is_lit_by_the_mask() -> None:
    pixels = np.full((4, 8, 3), 100, np.uint8)
    lit = light_mask(pixels, np.array([[1.0, 1.0, 0.0, 0.0]], np.float32))
    assert (lit[:, :3] == 100).all()
    assert (lit[:, -3:] == 20).all()


@pytest.mark.parametrize("count", [1, 2])
def test_the_section_has_a_row_for_each_query(count: int) -> None:
    section = KINDS["queries"].make(context(make_network("panoptic"), count))
    (drawing,) = section.drawings
    rows, captions = drawing.draw.args[0], drawing.draw.keywords["captions"]  # pyright: ignore[reportFunctionMemberAccess]
    assert [len(row) for row in rows] == [3 * count] * 4  # two blocks and the answer
    assert [len(row) for row in captions] == [3 * count] * 4
    assert captions[0][:2] == ["before block 1", "before block 2"]
    assert all(row[2].split(",")[0] in NAMES for row in captions)


@pytest.mark.parametrize("kind", ["eomt", "pmt"])
def test_sections_of_one_answer_say_why_not(kind: str) -> None:
    given = context(awake(query_config(VIT, kind, 3, queries=5), torch.float32))  # pyright: ignore[reportArgumentType]
    absent = {name for name, section in KINDS.items() if section.obstacle(given)}
    assert absent == {"gradcam", "gradient", "faithfulness", "cka"}
    assert given.probabilities.shape == (2, 0)


def test_the_explorer_says_whose_attention_it_is() -> None:
    assert "encoder" in build_explorer(context(make_network("panoptic"))).lead
