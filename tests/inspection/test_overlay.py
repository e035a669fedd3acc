"""The overlay of Figure 6, step by step."""

import numpy as np
import pytest
import torch

from vitrail.core.errors import ConfigError
from vitrail.inspection.rollout import brighten, light_from_map, overlay


def test_light_falls_where_the_map_is_large() -> None:
    pixels = np.full((64, 96, 3), 200, np.uint8)
    marks = torch.zeros(4, 6)
    marks[1, 4] = 0.3  # the middle is at row 24, column 72
    shown = overlay(pixels, marks)
    assert shown.shape == pixels.shape
    assert shown.dtype == np.uint8
    brightest = np.argwhere(shown[..., 0] == 200).mean(axis=0)
    assert brightest == pytest.approx((24, 72), abs=1.5)
    assert shown.max() == 200
    assert shown[-1, 0].max() == 0
    assert np.array_equal(shown[..., 0], shown[..., 1])


def test_only_the_shape_of_a_map_counts() -> None:
    marks = np.random.default_rng(0).random((4, 6)).astype(np.float32)
    light = light_from_map(marks, (40, 60))
    assert (light.min(), light.max()) == (0, 1)
    assert np.array_equal(light, light_from_map(torch.from_numpy(marks) / 1024, (40, 60)))
    assert not np.array_equal(light, light_from_map(marks.T, (40, 60)))


def test_the_blur_is_as_wide_as_a_patch() -> None:
    """One lit patch of 8 px: a Gaussian of radius 8 leaves 0.607 of its height one radius off the middle, and Lanczos
    widens it a little."""
    marks = np.zeros((15, 15), np.float32)
    marks[7, 7] = 1
    light = light_from_map(marks, (120, 120))
    assert light[60, 60] > 0.99
    assert light[60, 68] == pytest.approx(0.607, abs=0.1)
    assert light[60, 60 + 32] < 0.05


def test_a_map_that_says_nothing_leaves_the_picture() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    assert np.array_equal(overlay(pixels, torch.ones(3, 3)), pixels)
    assert np.array_equal(overlay(pixels, torch.zeros(3, 3)), pixels)


@pytest.mark.parametrize("level", [0, 3, 12, 30])
def test_dark_images_can_be_seen_where_they_are_lit(level: int) -> None:
    """Today's photograph at night: without more light its overlay would be black."""
    noise = np.random.default_rng(0).integers(0, 12, (64, 64, 3))
    pixels = np.clip(level + noise - 6, 0, 255).astype(np.uint8)
    marks = torch.zeros(4, 4)
    marks[1, 1] = 1.0
    shown = overlay(pixels, marks).astype(float)
    there, elsewhere = shown[20:28, 20:28].mean(), shown[48:, 48:].mean()
    assert there > 50
    assert elsewhere < 0.2 * there


def test_images_of_usual_brightness_are_not_changed() -> None:
    pixels = np.random.default_rng(0).integers(40, 200, (16, 16, 3), np.uint8)
    assert np.array_equal(brighten(pixels), pixels)


def test_misfits_are_refused() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(ConfigError):
        overlay(pixels, torch.zeros(1, 2, 2))
    with pytest.raises(ConfigError, match="finite"):
        overlay(pixels, torch.tensor([[float("nan")]]))
    with pytest.raises(ConfigError, match="uint8"):
        overlay(pixels.astype(np.float32), torch.ones(2, 2))  # type: ignore[arg-type]
