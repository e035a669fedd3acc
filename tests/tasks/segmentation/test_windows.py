"""Sliding windows: the mean over all windows that see a pixel, by a slow reference; one window is the plain network."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadImage, ConfigError, UnknownName
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.tasks.segmentation.windows import Windows, average_bands, place_windows, segment_windows

WINDOW = (6, 8)
WEIGHT = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))


def blur(views: Tensor) -> Tensor:
    """Logits that depend on neighbours and on where the window ends."""
    assert tuple(views.shape[2:]) == WINDOW
    return F.conv2d(views.float() / 255 - 0.5, WEIGHT, padding=1)


def pointwise(views: Tensor) -> Tensor:
    return F.conv2d(views.float() / 255 - 0.5, WEIGHT[:, :, :1, :1])


def noise(*size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)


def pixels(*size: int) -> Tensor:
    return torch.from_numpy(noise(*size)).permute(2, 0, 1)


def test_windows_reach_from_edge_to_edge_and_are_never_too_far_apart() -> None:
    for length in range(8, 60):
        for stride in (0.3, 2 / 3, 1.0):
            starts = place_windows(length, 8, stride)
            assert (starts[0], starts[-1]) == (0, length - 8)
            assert max([0, *np.diff(starts)]) <= max(round(8 * stride), 1)
    assert place_windows(24, 8, 1.0) == [0, 8, 16]
    assert place_windows(8, 8, 0.5) == [0]


@pytest.mark.parametrize("size", [(6, 8), (6, 21), (17, 8), (23, 30)])
@pytest.mark.parametrize("stride", [0.34, 2 / 3, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_are_the_mean_over_windows(size: Pair, stride: float, batch: int) -> None:
    image = pixels(*size)
    sums, counts = torch.zeros(4, *size), torch.zeros(*size)
    for top in place_windows(size[0], WINDOW[0], stride):
        for left in place_windows(size[1], WINDOW[1], stride):
            rows, columns = slice(top, top + WINDOW[0]), slice(left, left + WINDOW[1])
            sums[:, rows, columns] += blur(image[None, :, rows, columns])[0]
            counts[rows, columns] += 1
    bands = list(average_bands(blur, image, Windows("full", stride), WINDOW, batch))
    torch.testing.assert_close(torch.cat(bands, 1), sums / counts)
    if size[0] > WINDOW[0]:
        assert max(band.shape[1] for band in bands) <= WINDOW[0]  # not the whole image at once
    mask = segment_windows(blur, image, size, Windows("full", stride), WINDOW, batch)
    assert np.array_equal(mask, torch.cat(bands, 1).argmax(0).numpy())


def test_an_image_of_tiles_is_its_tiles_and_local_networks_see_no_windows() -> None:
    image = pixels(18, 24)
    mask = segment_windows(blur, image, (18, 24), Windows("full", 1.0), WINDOW, 2)
    for top in (0, 6, 12):
        for left in (0, 8, 16):
            tile = blur(image[None, :, top : top + 6, left : left + 8])[0].argmax(0)
            assert np.array_equal(mask[top : top + 6, left : left + 8], tile.numpy())
    local = segment_windows(pointwise, image, (18, 24), Windows("full", 0.4), WINDOW, 2)
    assert (local == pointwise(image[None])[0].argmax(0).numpy()).mean() > 0.999  # but for rounding


def test_images_are_kept_or_resized_until_they_cover_a_window() -> None:
    prepared = Preprocessing(image=WINDOW, resize=12)
    large = Image.fromarray(noise(30, 24))
    assert torch.equal(Windows("full").cut(large, prepared), pixels(30, 24))
    assert Windows("fit").cut(large, prepared).shape == (3, 10, 8)
    small = Image.fromarray(noise(3, 4))
    for scale in ("fit", "full"):
        assert Windows(scale).cut(small, prepared).shape == (3, *WINDOW)
    plain = Preprocessing(image=WINDOW)
    same_aspect = Image.fromarray(noise(12, 16))
    assert torch.equal(Windows("fit").cut(same_aspect, plain), plain.pixels(same_aspect))
    assert Windows("full").choose_size((20000, 20000), WINDOW) == (20000, 20000)
    with pytest.raises(BadImage, match="would become"):
        Windows("fit").choose_size((1, 10_000_000), WINDOW)


def test_smaller_copies_are_resized_to_the_image() -> None:
    image = pixels(6, 20)
    bands = torch.cat(list(average_bands(blur, image, Windows(), WINDOW, 4)), 1)
    expected = F.interpolate(bands[None], (12, 40), mode="bilinear", align_corners=False)[0].argmax(0)
    assert np.array_equal(segment_windows(blur, image, (12, 40), Windows(), WINDOW, 4), expected.numpy())


def test_unknown_scales_and_strides_are_refused() -> None:
    with pytest.raises(UnknownName):
        Windows("large")  # type: ignore[arg-type]
    for stride in (0.0, 1.5):
        with pytest.raises(ConfigError, match="stride"):
            Windows("fit", stride)
