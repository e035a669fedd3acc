"""The page of an inspection stands by itself, and its explorer knows what the network does."""

import base64
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tests.models.tiny import VIT, awake
from vitrail.inspection import figures, page
from vitrail.inspection.context import InspectionContext
from vitrail.inspection.layer_taps import iterate_layers
from vitrail.inspection.page import (
    ExploredImage,
    ExplorerPlan,
    ExplorerSection,
    ImageOverlay,
    InspectionSection,
    SectionFigure,
    inspection_page,
    make_thumbnail,
    merge_patches,
    pack_attention,
    plan_explorer,
    quantise,
)
from vitrail.inspection.rollout import combine_layers
from vitrail.inspection.sections import build_explorer, iterate_attention
from vitrail.report.figure_style import Theme, encode_figure

WICKED = "<script>alert(1)</script>\"' onerror=x {{ 7 * 7 }}"
DRAW = np.random.default_rng(0)
PICTURE = DRAW.integers(0, 256, (6, 12, 3), dtype=np.uint8)


def attention(layers: int, heads: int, tokens: int) -> list[NDArray[np.float64]]:
    found = np.exp(4 * DRAW.standard_normal((layers, heads, tokens, tokens)))
    return list(found / found.sum(-1, keepdims=True))


def dequantise(stored: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The weights that the page computes from the bytes: rows [..., T] that sum to one."""
    squares = stored.astype(np.float64) ** 2
    return squares / squares.sum(-1, keepdims=True)


@cache
def matrix(theme: Theme) -> Figure:
    return figures.draw_matrix(np.eye(2), theme)


@pytest.fixture(autouse=True)
def encode_figures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "encode_figure", encode_once)


@cache
def encode_once(figure: Figure, theme: Theme, form: Literal["svg", "webp"]) -> bytes:
    return encode_figure(figure, theme, form)


def explorer(name: str = "a.jpg") -> ExplorerSection:
    asked = plan_explorer(2, 2, (3, 4), 1)
    one = ExploredImage(name=name, picture=make_thumbnail(PICTURE), weights=pack_attention(asked, attention(2, 2, 13)))
    return ExplorerSection(plan=asked, pictures=[one, one], prefix=[name], start=0, lead=name)


def part(name: str) -> InspectionSection:
    draw = SectionFigure(name="d", text=name, note=name, lines=True, draw=matrix)
    return InspectionSection(kind="cka", title=name, reading=name, drawings=[draw])


def whole(name: str, with_explorer: bool = True) -> str:
    look = ImageOverlay(name=name, picture=PICTURE, overlay=PICTURE, said=[(name, 0.5)])
    parts = [InspectionSection(kind="rollout", title=name, reading=name, drawings=[], looks=[look]), part(name)]
    return inspection_page(
        name, parts, lead=name, explorer=explorer(name) if with_explorer else None, left_out=[f"{name}: why"]
    )


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_is_fetched_and_only_our_own_script_may_run() -> None:
    text = whole("a")
    tags = Elements(text).tags
    policy = next(attrs["content"] for _, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    allowed = base64.b64encode(sha256(scripts[0].encode()).digest()).decode()
    assert policy is not None
    assert re.fullmatch(
        rf"default-src 'none'; img-src data:; style-src 'sha256-[^']+'; script-src 'sha256-{re.escape(allowed)}'",
        policy,
    )
    for tag, attrs in tags:
        assert tag not in {"link", "iframe", "object", "base", "form"}
        assert not {key for key in attrs if key.startswith("on") or key == "style"}
        for key in ("src", "srcset"):
            assert (attrs.get(key) or "data:").startswith("data:")
        assert (attrs.get("href") or "#").startswith("#")
    plain = re.sub(r"data:[\w/+]+;base64,[\w+/=]*", "", text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp|WebSocket|import\(", plain)


def test_without_an_explorer_there_is_no_script() -> None:
    text = whole("a", with_explorer=False)
    assert "<script" not in text
    assert "script-src" not in text


def test_markup_in_names_is_shown_and_not_obeyed() -> None:
    plain, wicked = Elements(whole("plain")).tags, Elements(whole(WICKED)).tags
    assert [tag for tag, _ in plain] == [tag for tag, _ in wicked]
    assert {key for _, attrs in plain for key in attrs} == {key for _, attrs in wicked for key in attrs}


def test_figures_are_there_for_light_and_dark_screens() -> None:
    text = inspection_page("a", [part("a")])
    light = re.search(r'<img src="(data:image/svg[^"]+)"', text)
    dark = re.search(r'media="\(prefers-color-scheme: dark\)" srcset="(data:image/svg[^"]+)"', text)
    assert light is not None
    assert dark is not None
    assert light[1] != dark[1]


def test_weights_come_back_from_their_bytes() -> None:
    weights = attention(1, 3, 40)[0]
    again = dequantise(quantise(weights))
    assert np.allclose(again.sum(-1), 1)
    assert np.abs(again - weights).max() < 0.01 * weights.max()
    even = np.full((1, 50), 0.02)
    assert np.allclose(dequantise(quantise(even)), even)


@pytest.mark.parametrize(
    ("layers", "heads", "grid", "prefix", "block", "kept"),
    [
        (12, 3, (14, 14), 1, 1, 12),
        (12, 12, (14, 14), 1, 1, 12),
        (24, 16, (14, 14), 1, 1, 8),
        (24, 16, (32, 32), 5, 2, 4),
    ],
    ids=["Ti/16", "B/16", "L/16", "L/16 at 512"],
)
def test_what_is_large_is_thinned_and_the_page_says_so(
    layers: int, heads: int, grid: tuple[int, int], prefix: int, block: int, kept: int
) -> None:
    found = plan_explorer(layers, heads, grid, prefix)
    assert (found.block, len(found.kept)) == (block, kept)
    assert found.size <= 6_000_000
    assert found.kept[-1] == layers - 1
    assert ("merged" in found.note) == (block > 1)
    assert ("single heads are kept" in found.note) == (kept < layers)


def test_patches_that_are_taken_together_keep_what_they_give_and_get() -> None:
    asked = ExplorerPlan(layers=1, heads=1, grid=(2, 3), prefix=1, block=2, kept=(0,))
    weights = attention(1, 1, 7)[0]
    small_one = merge_patches(asked, weights)[0]
    assert asked.page_grid == (1, 2)
    assert np.allclose(small_one.sum(-1), 1)
    full = weights[0]  # tokens: 0 class; 1 2 3 / 4 5 6 the patches, of which 1 2 4 5 are one block and 3 6 the other
    assert small_one[0, 1] == pytest.approx(full[0, [1, 2, 4, 5]].sum())
    assert small_one[2, 1] == pytest.approx(full[[3, 6]][:, [1, 2, 4, 5]].sum(1).mean())


def test_the_page_holds_the_weights_of_the_network() -> None:
    model, images = awake(VIT, torch.float32), torch.randn(1, 3, 6, 12, generator=torch.Generator().manual_seed(0))
    asked = plan_explorer(2, 2, (3, 4), 1)
    stored = np.frombuffer(pack_attention(asked, iterate_attention(model, images)), np.uint8).reshape(2, 2, 13, 13)
    for view, layer in zip(iterate_layers(model, images), dequantise(stored), strict=True):
        assert np.abs(view.attention[0].numpy() - layer).max() < 2e-3
    mean_only = ExplorerPlan(layers=2, heads=2, grid=(3, 4), prefix=1, kept=(1,))
    assert len(pack_attention(mean_only, iterate_attention(model, images))) == mean_only.size == 3 * 13 * 13


@pytest.mark.slow
def test_the_script_rolls_out_as_we_do(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here to run the script in")
    weights = attention(2, 2, 13)
    asked = plan_explorer(2, 2, (3, 4), 1)
    one = ExploredImage(name="a", picture=make_thumbnail(PICTURE), weights=pack_attention(asked, weights))
    made = ExplorerSection(plan=asked, pictures=[one], prefix=["class token"], start=0)
    (tmp_path / "page.html").write_text(inspection_page("a", [], explorer=made), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [browser, *options, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    said = re.search(r'class="readout"[^>]*>(.*?)</p>', done.stdout, re.DOTALL)
    assert said is not None
    row = combine_layers([torch.tensor(layer.mean(0))[None] for layer in weights])[0, 0].numpy()
    best = 1 + int(row[1:].argmax())
    assert f"row {(best - 1) // 4 + 1}, column {(best - 1) % 4 + 1} ({percent(row[best])})" in said[1]
    assert f"gives {percent(row[0])} to itself" in said[1]
    assert done.stdout.count("<canvas") == 1 + 2 * 4  # the large one; rollout, mean and two heads of two layers


def percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.0995 else 0}f}&nbsp;%"


def test_the_first_patch_that_is_asked_is_on_the_grid_of_the_page() -> None:
    """Also where patches are taken together: the middle of what is shown, not of what the network sees."""
    config = replace(VIT, image=(22, 44), patch=(1, 2), depth=1, pool="mean", class_token=False)
    model = awake(config)
    given = InspectionContext(
        model=model,
        images=torch.zeros(1, 3, 22, 44),
        pixels=[np.zeros((22, 44, 3), np.uint8)],
        names=["a"],
        crowd=lambda: iter(()),
        count=1,
    )
    made = build_explorer(given)
    assert made.plan.page_grid == (11, 11)
    assert made.start == 5 * 11 + 5
