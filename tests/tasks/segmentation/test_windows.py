"""Sliding windows: the mean over all windows that see a pixel, by a slow reference; one window is the plain network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tests.models.tiny import VIT, awake
from tests.tasks.segmentation.drawn import CLASSES, draw_folder
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.core.errors import BadImage, ConfigError, UnknownName
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.result import Result
from vitrail.models.zoo import adapt_config
from vitrail.predict.predictor import Predictor
from vitrail.tasks.segmentation.prediction import PredictedMask
from vitrail.tasks.segmentation.windows import SlidingWindows, average_bands, place_windows, segment_windows

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
    bands = list(average_bands(blur, image, SlidingWindows("full", stride), WINDOW, batch))
    torch.testing.assert_close(torch.cat(bands, 1), sums / counts)
    if size[0] > WINDOW[0]:
        assert max(band.shape[1] for band in bands) <= WINDOW[0]  # not the whole image at once
    mask = segment_windows(blur, image, size, SlidingWindows("full", stride), WINDOW, batch)
    assert np.array_equal(mask, torch.cat(bands, 1).argmax(0).numpy())


def test_an_image_of_tiles_is_its_tiles_and_local_networks_see_no_windows() -> None:
    image = pixels(18, 24)
    mask = segment_windows(blur, image, (18, 24), SlidingWindows("full", 1.0), WINDOW, 2)
    for top in (0, 6, 12):
        for left in (0, 8, 16):
            tile = blur(image[None, :, top : top + 6, left : left + 8])[0].argmax(0)
            assert np.array_equal(mask[top : top + 6, left : left + 8], tile.numpy())
    local = segment_windows(pointwise, image, (18, 24), SlidingWindows("full", 0.4), WINDOW, 2)
    assert (local == pointwise(image[None])[0].argmax(0).numpy()).mean() > 0.999  # but for rounding


def test_images_are_kept_or_resized_until_they_cover_a_window() -> None:
    prepared = Preprocessing(image=WINDOW, resize=12)
    large = Image.fromarray(noise(30, 24))
    assert torch.equal(SlidingWindows("full").cut(large, prepared), pixels(30, 24))
    assert SlidingWindows("fit").cut(large, prepared).shape == (3, 10, 8)
    small = Image.fromarray(noise(3, 4))
    for scale in ("fit", "full"):
        assert SlidingWindows(scale).cut(small, prepared).shape == (3, *WINDOW)
    plain = Preprocessing(image=WINDOW)
    same_aspect = Image.fromarray(noise(12, 16))
    assert torch.equal(SlidingWindows("fit").cut(same_aspect, plain), plain.pixels(same_aspect))
    assert SlidingWindows("full").choose_size((20000, 20000), WINDOW) == (20000, 20000)
    assert SlidingWindows("full").choose_size((10, 20000), WINDOW) == (10, 20000)  # needs no resize
    for scale, size in (("fit", (1, 10_000_000)), ("fit", (40, 80000)), ("full", (1, 2000))):
        with pytest.raises(BadImage, match="would become"):
            SlidingWindows(scale).choose_size(size, WINDOW)


def test_smaller_copies_are_resized_to_the_image() -> None:
    image = pixels(6, 20)
    bands = torch.cat(list(average_bands(blur, image, SlidingWindows(), WINDOW, 4)), 1)
    expected = F.interpolate(bands[None], (12, 40), mode="bilinear", align_corners=False)[0].argmax(0)
    assert np.array_equal(segment_windows(blur, image, (12, 40), SlidingWindows(), WINDOW, 4), expected.numpy())


def test_unknown_scales_and_strides_are_refused() -> None:
    with pytest.raises(UnknownName):
        SlidingWindows("large")  # type: ignore[arg-type]
    for stride in (0.0, 1.5):
        with pytest.raises(ConfigError, match="stride"):
            SlidingWindows("fit", stride)


@pytest.mark.parametrize("scale", ["fit", "full"])
def test_evaluation_slides_over_images_of_their_own_sizes(tmp_path: Path, scale: str) -> None:
    """Numbers of a loop over pixels, an image that cannot be read left out."""
    folder = draw_folder(tmp_path / "drawn")
    for at, size in enumerate(((40, 30), (16, 60), (25, 25))):
        for kind in ("images", "masks"):
            file = folder / "test" / kind / f"{at:02}.png"
            Image.open(file).resize(size, Image.Resampling.NEAREST).save(file)
    (folder / "test" / "images" / "05.png").write_bytes(b"no image")
    torch.manual_seed(0)
    network = awake(adapt_config(VIT, image_size=(16, 18), classes=3, head="patches"), torch.float32)
    network.card = Card(preprocessing=Preprocessing(image=(16, 18)), task="segmentation", labels=CLASSES)
    save(network, tmp_path / "w.safetensors")
    words = ["evaluate", str(tmp_path / "w.safetensors"), "--data", str(folder), "--windows", scale, "--workers", "0"]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.html")]) == 0
    result = Result.read(tmp_path / "r.json")

    cells = np.zeros((3, 3), np.int64)
    predictor: Predictor[PredictedMask] = Predictor(network, device="cpu", windows=scale)  # type: ignore[arg-type]
    for at in (0, 1, 2, 3, 4, 6, 7):
        truth = np.asarray(Image.open(folder / "test" / "masks" / f"{at:02}.png"))
        said = predictor(folder / "test" / "images" / f"{at:02}.png").mask
        for true, found in zip(truth[truth != 255], said[truth != 255], strict=True):
            cells[true, found] += 1
    assert result.details["confusion"] == cells.tolist()
    both = cells.diagonal()
    assert result.measures[0].name == "mIoU"
    assert result.measures[0].value == pytest.approx((both / (cells.sum(0) + cells.sum(1) - both)).mean())
    assert result.measures[0].low is not None
    assert [measure.name for measure in result.measures] == ["mIoU", "pixel accuracy"]
    assert result.measures[0].count == 7
    assert result.config["windows"] == scale


def test_windows_are_refused_for_classes_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save(awake(VIT, torch.float32), tmp_path / "w.safetensors")
    words = ["evaluate", str(tmp_path / "w.safetensors"), "--data", "digits", "--windows", "full"]
    assert main([*words, "--device", "cpu"]) == 2
    assert "classes of pixels" in capsys.readouterr().err
