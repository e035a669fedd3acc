"""Contact sheets: what is where on them. Whether they are worth looking at is for people to say."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError
from vitrail.report.contact_sheet import (
    ACROSS,
    BROKEN,
    CAPTION,
    GAP,
    MARGIN,
    PAPER,
    TILE,
    SheetGroup,
    choose_layout,
    cut_tile,
    draw_broken_tile,
    draw_contact_sheet,
    draw_mosaic,
    pick_colour,
)

TOP = MARGIN + 96


def plain(value: int, height: int = 200, width: int = 300) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


def middle(column: int, row: int = 0, top: int = TOP + CAPTION) -> tuple[int, int]:
    return MARGIN + column * (TILE + GAP) + TILE // 2, top + row * (TILE + GAP) + TILE // 2


def test_every_picture_is_in_its_place() -> None:
    groups = [
        SheetGroup(name=f"class {k}", said="3", pictures=[plain(10 * k + i) for i in range(12)]) for k in range(3)
    ]
    sheet = np.asarray(draw_contact_sheet("title", "subtitle", groups))
    for k in range(3):
        for i in range(12):
            x, y = middle(i, 0, TOP + CAPTION + k * (CAPTION + TILE + 20))
            assert tuple(sheet[y, x]) == (10 * k + i,) * 3


def test_sheet_has_even_margins() -> None:
    groups = [SheetGroup(name="a", pictures=[plain(0)] * 12), SheetGroup(name="b", pictures=[plain(0)] * 12)]
    sheet = np.asarray(draw_contact_sheet("title", "subtitle", groups))
    rows, columns = (np.flatnonzero((sheet != PAPER).any(2).any(axis)) for axis in (1, 0))
    assert (columns[0], sheet.shape[1] - columns[-1] - 1) == (MARGIN, MARGIN)
    assert sheet.shape[0] - rows[-1] - 1 == MARGIN
    assert abs(int(rows[0]) - MARGIN) < 12  # the cap height of the title


@pytest.mark.parametrize("groups", [1, 5, 12, 13, 30, 60, 144])
@pytest.mark.parametrize("pictures", [1, 2, 3, 12])
def test_layout_fills_about_the_same_width(groups: int, pictures: int) -> None:
    columns, tiles = choose_layout(groups, pictures)
    assert columns * tiles == ACROSS
    assert 1300 < draw_contact_sheet("t", "s", [SheetGroup(name="a", pictures=[None] * pictures)] * groups).width < 1700
    assert tiles <= pictures or columns >= min(groups, ACROSS) or columns * 2 > groups


def test_glass_is_as_wide_as_the_classes_are_large() -> None:
    groups = [SheetGroup(name="a", weight=3, pictures=[plain(0)]), SheetGroup(name="b", weight=1, pictures=[plain(0)])]
    strip = np.asarray(draw_contact_sheet("t", "s", groups))[MARGIN + 70]
    widths = [int((strip == pick_colour(at)).all(1).sum()) for at in range(2)]
    assert widths[0] == pytest.approx(3 * widths[1], abs=8)


def test_unreadable_ones_are_marked() -> None:
    sheet = np.asarray(draw_contact_sheet("t", "s", [SheetGroup(name="a", pictures=[plain(0), None])]))
    x, y = middle(1)
    assert tuple(sheet[y - TILE // 2 + 8, x - TILE // 2 + 8]) == BROKEN
    reddish = np.asarray(draw_broken_tile()).astype(int)
    assert (reddish[..., 0] - reddish[..., 1] > 60).sum() > 100


def test_small_pictures_keep_their_pixels_square() -> None:
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    large = np.asarray(cut_tile(pixels))
    blocks = np.kron(pixels, np.ones((TILE // 8, TILE // 8, 1), np.uint8))
    assert np.array_equal(large[2:-2, 2:-2], blocks[2:-2, 2:-2])


def test_large_pictures_show_their_middle_square() -> None:
    pixels = plain(0, 100, 300)
    pixels[:, 100:200] = 200
    assert np.asarray(cut_tile(pixels))[2:-2, 2:-2].min() == 200


def test_white_picture_has_an_edge() -> None:
    edge = np.asarray(cut_tile(plain(255)))
    assert edge[50, 0].tolist() == [229] * 3
    assert edge[50, 50].tolist() == [255] * 3


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (104, 104), (3, 2)])
def test_any_shape_becomes_a_tile(shape: tuple[int, int]) -> None:
    assert cut_tile(plain(7, *shape)).size == (TILE, TILE)


def test_mosaic() -> None:
    sheet = np.asarray(draw_mosaic("t", "s", [plain(i) for i in range(30)]))
    for i in range(30):
        x, y = middle(i % ACROSS, i // ACROSS, TOP)
        assert tuple(sheet[y, x]) == (i,) * 3


@pytest.mark.parametrize("text", ["short", "a very long name " * 20, "日本語" * 50, "tab\tand\nline\udcff", ""])
def test_names_of_all_kinds_are_drawn(text: str) -> None:
    draw_contact_sheet(text, text, [SheetGroup(name=text, said="1,000", pictures=[plain(0)])])


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        draw_contact_sheet("t", "s", [])
    with pytest.raises(ConfigError, match="at least one"):
        draw_mosaic("t", "s", [])
