"""The sections of an inspection for later families: all that a network has, and why not more."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES, VARIANTS, awake
from vitrail.inspection.context import InspectionContext, name_prefix_tokens
from vitrail.inspection.sections import KINDS, build_explorer

FEW = ("dinov3", "siglip", "sam")
ABSENT = {
    "dinov3": {"positions": "rotary positions"},
    "dinov3, gated, no biases": {"positions": "rotary positions"},
    "beit": {"positions": "position biases"},
}


def context(name: str) -> InspectionContext:
    torch.manual_seed(0)
    config = VARIANTS[name]
    images = torch.randn(2, 3, *config.image)

    def crowd() -> Iterator[Tensor]:
        yield torch.randn(16, 3, *config.image)

    pixels = [np.zeros((*config.image, 3), np.uint8)] * 2
    model = awake(config, torch.float32)
    return InspectionContext(model=model, images=images, pixels=pixels, names=["a", "b"], crowd=crowd, count=16)


@pytest.mark.parametrize("name", rest_slow(FAMILIES, FEW[0]))
def test_every_section_is_made_or_says_why_not(name: str) -> None:
    given = context(name)
    absent = {kind: why for kind, section in KINDS.items() if (why := section.obstacle(given))}
    expected = {"gradcam": "ResNets", "queries": "no queries", **ABSENT.get(name, {})}
    if not given.classes:
        expected |= dict.fromkeys(("gradient", "faithfulness"), "no head")
    assert set(absent) == set(expected)
    assert all(word in absent[kind] for kind, word in expected.items())
    for kind, section in KINDS.items():
        if kind not in absent:
            made = section.make(given)
            assert made.drawings
            assert all(np.isfinite(value) for value in made.numbers.values())
    explorer = build_explorer(given)
    assert list(explorer.prefix) == name_prefix_tokens(given)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("dinov3", ["class token", "register 1", "register 2"]),
        ("siglip", []),
        ("deit, distilled", ["class token", "distillation token"]),
        ("two class tokens", ["class token 1", "class token 2", "register 1", "register 2"]),
    ],
)
def test_tokens_before_the_patches_have_names(name: str, prefix: list[str]) -> None:
    assert name_prefix_tokens(context(name)) == prefix
