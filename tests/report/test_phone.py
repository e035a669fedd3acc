"""Pages on a phone, 390 pixels wide, in a real browser: nothing is cut off, and there are no holes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.report.confusion_matrix import ConfusionSection
from vitrail.report.page import render_page, save_page
from vitrail.report.sections import Tile, Tiles

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the system's package `chromium`"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'vitrail[test]'")

GAPS = """() => {
  const box = document.querySelector('.tiles').getBoundingClientRect();
  const tiles = [...document.querySelectorAll('.tiles div')].map((one) => one.getBoundingClientRect());
  const covered = tiles.reduce((sum, one) => sum + one.width * one.height, 0);
  return [covered / (box.width * box.height), document.documentElement.scrollWidth - innerWidth];
}"""
HINT = """() => {
  const matrix = document.querySelector('.matrix'), hint = document.querySelector('.hint');
  return [matrix.scrollWidth > matrix.clientWidth, !!hint && hint.checkVisibility()];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        browser.close()


def look(browser: Any, path: Path, text: str, script: str, width: int) -> Any:
    save_page(path, text)
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.goto(path.as_uri())
    found = tab.evaluate(script)
    tab.close()
    return found


@pytest.mark.parametrize("count", range(1, 9))
def test_tiles_leave_no_hole(browser: Any, tmp_path: Path, count: int) -> None:
    text = render_page(
        "a", [Tiles(tiles=[Tile(value="1.2", label=f"tile {at}", note="a note") for at in range(count)])]
    )
    covered, beyond = look(browser, tmp_path / "page.html", text, GAPS, 390)
    assert covered > 0.95  # the rest is the lead between them
    assert beyond <= 0


@pytest.mark.parametrize("classes", [3, 10, 16, 40, 100])
def test_a_matrix_that_is_wider_than_the_screen_says_so(browser: Any, tmp_path: Path, classes: int) -> None:
    heat = ConfusionSection(
        counts=np.eye(classes, dtype=np.int64), classes=[f"class number {at}" for at in range(classes)]
    )
    text = render_page("a", [heat])
    for width in (390, 1400):
        cut, said = look(browser, tmp_path / "page.html", text, HINT, width)
        assert cut == said
    assert not cut
