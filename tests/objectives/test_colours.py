"""The 512 colour classes of B.1.2, by hand and against slow loops."""

import pytest
import torch
from torch import Tensor

from tests.objectives.masked import slow_classes
from vitrail.objectives.masked_patches import bin_centres, to_colour_classes


def flat(red: int, green: int, blue: int) -> Tensor:
    return torch.tensor([red, green, blue], dtype=torch.uint8).expand(4, 2, 3)


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ((0, 0, 0), 0),
        ((255, 255, 255), 511),
        ((255, 0, 0), 448),  # 64 · 7
        ((0, 255, 0), 56),  # 8 · 7
        ((0, 0, 255), 7),
        ((31, 32, 63), 9),  # 8·31/255 = 0.97, 8·32/255 = 1.004, 8·63/255 = 1.98: 0, 1, 1
        ((128, 127, 223), 4 * 64 + 3 * 8 + 6),  # 4.02, 3.98, 6.996
        ((224, 96, 64), 7 * 64 + 3 * 8 + 2),  # 7.03, 3.01, 2.008
    ],
)
def test_colour_classes_by_hand(colour: tuple[int, int, int], expected: int) -> None:
    assert to_colour_classes(flat(*colour), 1).tolist() == [expected]
    assert to_colour_classes(torch.cat([flat(*colour)] * 2, 1), 4).tolist() == [expected] * 16


def test_a_mean_on_the_edge_of_two_bins_is_in_the_upper_one() -> None:
    patch = torch.zeros(4, 2, 3, dtype=torch.uint8)
    patch[0, 0] = torch.tensor([255, 254, 255])  # means of 1/8 exactly, just below, and 1/8
    patch[1, 0] = torch.tensor([0, 0, 255])  # blue: 2/8 exactly
    assert to_colour_classes(patch, 1).tolist() == [64 * 1 + 8 * 0 + 2]
    for eighths in range(9):
        patch = torch.zeros(8, 3, dtype=torch.uint8)
        patch[:eighths, 0] = 255
        assert to_colour_classes(patch.view(2, 4, 3), 1).tolist() == [64 * min(eighths, 7)]


@pytest.mark.parametrize("shape", [(6, 5), (8, 4), (4, 4), (7, 9)])
def test_small_patches_against_a_slow_loop(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    patches = torch.randint(0, 256, (2, 3, *shape, 3), generator=generator).byte()
    found = {side: to_colour_classes(patches, side) for side in (1, 4)}
    for picture in range(2):
        for patch in range(3):
            for side in (1, 4):
                assert found[side][picture, patch].tolist() == slow_classes(patches[picture, patch], side)


def test_the_middle_of_a_bin_is_in_its_class() -> None:
    levels = (bin_centres(torch.arange(512)) * 255).round().byte()  # [512, 3]
    assert levels[0b001_010_111].tolist() == [round(255 * 1.5 / 8), round(255 * 2.5 / 8), round(255 * 7.5 / 8)]
    assert torch.equal(to_colour_classes(levels[:, None, None], 1)[:, 0], torch.arange(512))
