"""Figures are drawn from arrays of any size, show the numbers they are given, and leave matplotlib as it was."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import ConfigError
from vitrail.inspection import figures
from vitrail.report import figure_style as style
from vitrail.report.figure_style import (
    DARK,
    LIGHT,
    Theme,
    encode_figure,
    load_matplotlib,
    make_legible,
    map_colours,
    save_figure,
)

DRAW = np.random.default_rng(0)
PICTURE = DRAW.integers(0, 256, (24, 36, 3), dtype=np.uint8)


def curves(*names: str) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    return {name: (DRAW.random((3, 5)), DRAW.random((3, 5))) for name in names}


EVERY: dict[str, Callable[[Theme], Any]] = {
    "one pair": lambda theme: figures.draw_pairs([PICTURE], [PICTURE], ["a snipe, 91 %"], theme),
    "three pairs": lambda theme: figures.draw_pairs([PICTURE] * 3, [PICTURE] * 3, ["$x$ 鳥", "", "z" * 200], theme),
    "sheet": lambda theme: figures.draw_sheet(
        [[PICTURE, PICTURE], [PICTURE]], theme, columns=["a", "b"], rows=["r"], bar=(0.0, 1.0, "cosine")
    ),
    "filters": lambda theme: figures.draw_filters(DRAW.random((9, 4, 4, 3)), theme),
    "positions": lambda theme: figures.draw_positions(2 * DRAW.random((2, 3, 2, 3)) - 1, theme),
    "one head": lambda theme: figures.draw_heads(DRAW.random((1, 1)), "distance", theme),
    "many heads": lambda theme: figures.draw_heads(
        DRAW.random((32, 16)), "distance", theme, reference=2.0, label="even"
    ),
    "norms": lambda theme: figures.draw_norms(DRAW.random((3, 2, 8)) + 1, ["class token", "register"], theme),
    "norms far apart": lambda theme: figures.draw_norms(np.exp(9 * DRAW.random((33, 1, 6))), [], theme),
    "matrix": lambda theme: figures.draw_matrix(DRAW.random((3, 3)), theme),
    "faithfulness": lambda theme: figures.draw_faithfulness(curves("rollout", "random"), theme),
    "one image": lambda theme: figures.draw_faithfulness({"Grad-CAM": (np.ones((1, 3)), np.ones((1, 3)))}, theme),
}


QUICK = ("three pairs", "sheet", "filters", "positions", "one head")


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick to draw."""
    monkeypatch.setattr(style, "DPI", 30)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
)
def test_every_figure_is_drawn(name: str) -> None:
    assert len(encode_figure(EVERY[name](LIGHT), LIGHT, "png")) > 500


@pytest.mark.usefixtures("coarse")
def test_a_dark_figure_is_dark() -> None:
    for theme in (LIGHT, DARK):
        with Image.open(
            io.BytesIO(encode_figure(figures.draw_heads(np.ones((2, 2)), "", theme), theme, "png"))
        ) as image:
            red, green, blue = image.convert("RGB").getpixel((0, 0))  # type: ignore[misc]
            assert f"#{red:02x}{green:02x}{blue:02x}" == theme.paper


@pytest.mark.slow
def test_files_are_whole_and_the_same_each_time(tmp_path: Path) -> None:
    values = DRAW.random((4, 2))
    for name in ("one", "two"):
        png, svg = save_figure(figures.draw_heads(values, "distance", LIGHT), tmp_path / "new" / name)
        with Image.open(png) as image:
            assert image.size == (1152, 518)
        assert svg.read_text("utf-8").lstrip().startswith("<?xml")
    for ending in ("png", "svg"):
        assert (tmp_path / f"new/one.{ending}").read_bytes() == (tmp_path / f"new/two.{ending}").read_bytes()


def test_matplotlib_stays_as_it_was() -> None:
    matplotlib = load_matplotlib()
    with matplotlib.rc_context({"font.size": 31.0}):
        figures.draw_matrix(np.eye(2), DARK)
        assert matplotlib.rcParams["font.size"] == 31.0
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError):
        load_matplotlib()


def test_heads_are_dots_at_their_values_and_the_line_is_their_mean() -> None:
    values = np.array([[1.0, 3.0], [4.0, 8.0], [0.0, 2.0]])
    axes: Any = figures.draw_heads(values, "distance", LIGHT, reference=20.0).axes[0]
    dots = {tuple(place) for place in axes.collections[0].get_offsets().tolist()}
    assert dots == {(1, 1), (1, 3), (2, 4), (2, 8), (3, 0), (3, 2)}
    assert axes.lines[0].get_ydata().tolist() == [2.0, 6.0, 1.0]
    assert axes.get_ylim()[1] > 20


def test_the_tile_of_a_place_shows_its_similarities() -> None:
    similarity = 2 * DRAW.random((2, 3, 2, 3)) - 1
    axes: Any = figures.draw_positions(similarity, LIGHT).axes[0]
    canvas = np.asarray(axes.images[-1].get_array())
    tiles = map_colours(similarity, -1, 1, "viridis")
    assert canvas.shape == (2 * 3 - 1, 3 * 4 - 1, 3)
    for row in range(2):
        for column in range(3):
            cut = canvas[3 * row : 3 * row + 2, 4 * column : 4 * column + 3]
            assert np.array_equal(cut, tiles[row, column])


def test_areas_stand_in_the_legend() -> None:
    deletion, insertion = np.array([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]]), np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    drawn: Any = figures.draw_faithfulness({"rollout": (deletion, insertion)}, LIGHT)
    said = [text.get_text() for axes in drawn.axes for text in axes.get_legend().get_texts()]
    assert said == ["rollout (0.500)", "rollout (0.750)"]


def test_colours_go_from_the_first_to_the_last() -> None:
    colours = map_colours(np.array([-9.0, 0.0, 1.0, 9.0]), 0.0, 1.0, "gray")
    assert colours.tolist() == [[0, 0, 0], [0, 0, 0], [255, 255, 255], [255, 255, 255]]
    assert map_colours(np.full((2, 2), 3.0), 3.0, 3.0, "gray").max() == 0  # nothing to tell apart


def test_texts_are_in_letters_that_there_are() -> None:
    assert make_legible("Blässhuhn 鳥\n2") == "Blässhuhn ? 2"
    assert make_legible("x" * 60) == "x" * 39 + "…"
