"""The numbers in a confusion matrix can be read in both looks of the page."""

import re
from itertools import product

import numpy as np
import pytest

from vitrail.report.confusion_matrix import LEVELS, ConfusionSection, blend_cell
from vitrail.report.contact_sheet import (
    BLACK,
    RGB,
    WHITE,
    measure_contrast,
    parse_colour,
    reads_white,
)
from vitrail.report.page import Scheme, read_palette, render_page

ENOUGH = 4.5  # WCAG 2, 1.4.3
SCHEMES: tuple[Scheme, Scheme] = ("light", "dark")


def test_contrast_is_that_of_the_guidelines() -> None:
    assert measure_contrast(BLACK, WHITE) == pytest.approx(21)
    assert measure_contrast(WHITE, parse_colour("#767676")) == pytest.approx(4.54, abs=0.01)


def test_the_two_looks_have_the_same_colours_by_name() -> None:
    light, dark = map(read_palette, SCHEMES)
    assert set(light) == set(dark)
    assert light["paper"] == "#faf9f6"
    assert dark["paper"] == "#15171a"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_black_or_white_can_be_read_on_every_shade(scheme: Scheme) -> None:
    for right, level in product((True, False), range(1, LEVELS + 1)):
        seen = blend_cell(scheme, right, level)
        assert measure_contrast(WHITE if reads_white(seen) else BLACK, seen) >= ENOUGH


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_number_of_a_page_has_enough_contrast(scheme: Scheme) -> None:
    """As a browser would: the number's class, the style's colour for it, over the cell's shade."""
    rng = np.random.default_rng(0)
    counts = (np.diag(rng.integers(1, 60, 12)) + rng.integers(0, 30, (12, 12)) * (rng.random((12, 12)) < 0.5)).astype(
        np.int64
    )
    heat = ConfusionSection(counts=counts, classes=[f"class {at}" for at in range(12)])
    text = render_page("a", [heat])
    fills: dict[str, RGB] = {
        name: parse_colour(value) for name, value in re.findall(r"\.cells \.([\w-]+) \{ fill: (#[0-9a-f]{6})", text)
    }
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" dy="4" class="(\w+) ([\w-]+)">', text)
    assert len(found) == np.count_nonzero(counts)
    for x, y, light, dark in found:
        row, column = (int(float(value) // heat.cell) for value in (y, x))
        seen = blend_cell(scheme, row == column, int(heat.levels[row, column]))
        assert measure_contrast(fills[light if scheme == "light" else dark], seen) >= ENOUGH
