"""Segments on the page in a real Chromium: pointed at, kept and walked through, by mouse and by keys."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.browser import CONTRAST, NAMES, Browsed, content, picture, served, upload
from tests.tasks.mask_queries.tiny_queries import make_network
from vitrail.checkpoint.weights import save
from vitrail.predict.predictor import Predictor
from vitrail.tasks.mask_queries.prediction import PredictedSegments

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the system's package `chromium`"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'vitrail[test]'")
SHADE = 150  # alpha of what is not in the segment


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("segments") / "tiny.safetensors"
    save(make_network("instances"), path)
    return path


@pytest.fixture(scope="module")
def address(weights: Path) -> Iterator[str]:
    yield from served(weights)


@pytest.fixture(params=["light", "dark"])
def browsed(request: pytest.FixtureRequest, address: str) -> Iterator[Browsed]:
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1180, "height": 900}, color_scheme=request.param).new_page()
        found = Browsed(page, address)
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.goto(address)
        found.until("document.title !== 'vitrail'")
        found.give(upload("one.png", content(picture())))
        found.settled()
        found.until("document.querySelector('#drawing img')?.naturalWidth")
        yield found
        assert found.complaints == []
        browser.close()


@pytest.fixture(scope="module")
def wanted(weights: Path) -> PredictedSegments:
    asker: Predictor[PredictedSegments] = Predictor(weights, device="cpu")
    found = asker(picture())
    assert len(found) > 2
    return found


def lit_mask(browsed: Browsed) -> np.ndarray[Any, Any]:
    return browsed.pixels("segment-light")[..., 3] != SHADE


def test_keys_walk_through_the_segments(browsed: Browsed, wanted: PredictedSegments) -> None:
    assert browsed.text("#answer-title") == str(wanted)
    assert browsed.text("#top").split("\n")[::2] == [one.label for one in wanted.segments]
    assert browsed.page.is_hidden("#segment-light")
    browsed.page.focus(".segmented")
    for one in wanted.segments[:3]:
        browsed.page.keyboard.press("ArrowRight")
        assert browsed.text("#segment-said").startswith(f"{one.label}, ")
        assert np.array_equal(lit_mask(browsed), one.mask())
    browsed.page.keyboard.press("ArrowLeft")
    assert np.array_equal(lit_mask(browsed), wanted.segments[1].mask())
    browsed.page.keyboard.press("Escape")
    assert browsed.page.is_hidden("#segment-light")


def test_the_pointer_finds_the_smallest_segment_and_a_click_keeps_it(
    browsed: Browsed, wanted: PredictedSegments
) -> None:
    masks = np.stack([one.mask() for one in wanted.segments])
    areas = np.where(masks, masks.sum((1, 2))[:, None, None], masks[0].size + 1)
    smallest = np.where(masks.any(0), areas.argmin(0), -1)
    row, column = np.argwhere(smallest == smallest.max())[0]  # a pixel of it is several on the page
    box = browsed.page.locator(".segmented").bounding_box()
    at = box["x"] + box["width"] * (column + 0.5) / 60, box["y"] + box["height"] * (row + 0.5) / 45
    browsed.page.mouse.move(*at)
    assert np.array_equal(lit_mask(browsed), masks[smallest.max()])
    browsed.page.mouse.move(2, 2)
    assert browsed.page.is_hidden("#segment-light")
    browsed.page.mouse.click(*at)
    browsed.page.mouse.move(2, 2)
    assert np.array_equal(lit_mask(browsed), masks[smallest.max()])
    rows = "[...document.getElementById('top').children].findIndex((one) => one.classList.contains('lit'))"
    assert browsed.page.evaluate(rows) == smallest.max()


def test_rows_of_the_answer_light_their_segment(browsed: Browsed, wanted: PredictedSegments) -> None:
    browsed.page.hover("#top li:nth-child(2)")
    assert np.array_equal(lit_mask(browsed), wanted.segments[1].mask())


def test_everything_has_a_name_and_can_be_read(browsed: Browsed) -> None:
    browsed.page.focus(".segmented")
    browsed.page.keyboard.press("ArrowRight")
    assert browsed.page.evaluate(NAMES) == []
    assert [row for row in browsed.page.evaluate(CONTRAST) if row[1] < 4.5] == []
