"""D.5's measurement and its figure."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.studies.conftest import TINY
from vitrail.checkpoint.weights import build_fresh, to_bundle
from vitrail.core.errors import ImageSizeError
from vitrail.evaluation.speed import Speed, SpeedPoint
from vitrail.models.zoo import model_config
from vitrail.report.figure_style import save_figure
from vitrail.studies.paper.inference_speed import (
    NetworkSpeeds,
    choose_sizes,
    draw_figure,
    draw_random_weights,
    measure_speeds,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_sizes_are_d5s_as_the_patch_allows() -> None:
    assert [size[0] for size in choose_sizes(model_config("ViT-B/16"), GPU)] == [64, 128, 224, 384, 512]
    assert [size[0] for size in choose_sizes(model_config("ViT-H/14"), GPU)] == [56, 126, 224, 378, 504]
    assert [size[0] for size in choose_sizes(model_config("ViT-B/16"), CPU)] == [64, 128, 224]
    assert [size[0] for size in choose_sizes(model_config("ViT-Nano/4"), CPU)] == [16, 32, 64]
    assert choose_sizes(model_config("AxialResNet50"), GPU) == ((224, 224),)


def test_a_network_is_measured_at_every_size() -> None:
    told: list[str] = []
    found = measure_speeds(
        "tiny", draw_random_weights(TINY), (8, (12, 16)), device=CPU, precision="float32", batches=(1, 2), seconds=20.0,
        room=1 << 30, tell=told.append,
    )  # fmt: skip
    assert list(found.speeds) == [(8, 8), (12, 16)]
    assert told == [
        "tiny at 8 px, batch 1",
        "tiny at 8 px, batch 2",
        "tiny at 12 px, batch 1",
        "tiny at 12 px, batch 2",
    ]
    small, large = (speed.points[0].memory or 0 for speed in found.speeds.values())
    assert small < large


def test_a_size_that_leaves_pixels_over_is_refused_before_anything_runs() -> None:
    with pytest.raises(ImageSizeError):
        measure_speeds(
            "tiny", to_bundle(build_fresh(TINY)), (8, 9), device=CPU, precision="float32", seconds=1.0, room=0
        )


def known(name: str, pace: float) -> NetworkSpeeds:
    speeds = {
        (side, side): Speed(
            points=tuple(
                SpeedPoint(batch=b, seconds=b * side**2 / pace, passes=3, memory=10**6 * b) for b in (1, 2, 4)
            ),
            stopped="time",
            largest=10**9 // side**2,
        )
        for side in (64, 128, 224)
    }
    return NetworkSpeeds(name=name, speeds=speeds)


@pytest.mark.slow
def test_the_figure_has_d5s_panels_on_logarithmic_axes(tmp_path: Path) -> None:
    drawn = draw_figure([known("ViT-B/16", 1e6)], "a device")
    assert len(drawn.axes) == 4
    for axes in drawn.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    x, y = drawn.axes[0].lines[0].get_data()
    assert list(x) == [64, 128, 224]
    assert list(y) == pytest.approx([1e6 / side**2 for side in (64, 128, 224)])
    assert [text.get_text() for text in drawn.axes[0].get_xticklabels()] == ["64", "128", "224"]
    png, svg = save_figure(drawn, tmp_path / "speed")
    with Image.open(png) as picture:
        assert picture.size[0] > 800
    assert "<svg" in svg.read_text()


def test_several_networks_share_two_panels() -> None:
    drawn = draw_figure([known("ViT-B/16", 1e6), known("BiT-R50x1", 2e6)], "a device")
    assert len(drawn.axes) == 2
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["ViT-B/16", "BiT-R50x1"]
