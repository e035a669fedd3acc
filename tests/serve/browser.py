"""A page in a real browser, and what it should show: for the tests of the server's page."""

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitrail
from vitrail import inspection

ROWS = COLUMNS = 4  # patches of the network that is served

CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, box = element.getBoundingClientRect();
    if (!walk.currentNode.textContent.trim() || box.width < 2 || !element.checkVisibility()) continue;
    if (element.closest('.pane, script, style')) continue;
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    found.push([walk.currentNode.textContent.trim().slice(0, 40), (one + 0.05) / (other + 0.05)]);
  }
  return found;
}"""
NAMES = """() => [...document.querySelectorAll('button, input, select, a, [tabindex], [role=radio]')]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 120))"""


@dataclass
class Browsed:
    """A page that was opened, with all it asked for and all it complained about."""

    page: Any
    address: str
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def give(self, *files: "Path | dict[str, Any]") -> None:
        self.page.set_input_files("#files", list(files))

    def until(self, script: str, within: float = 20.0) -> Any:
        """The value of a script, once it is true: the page's policy forbids Playwright's own way of waiting."""
        end = time.monotonic() + within
        while not (value := self.page.evaluate(script)):
            assert time.monotonic() < end, f"never true: {script}"
            self.page.wait_for_timeout(20)
        return value

    def settled(self) -> None:
        self.page.wait_for_timeout(60)
        self.until(
            "['answer', 'look'].every((id) => document.getElementById(id).getAttribute('aria-busy') === 'false')"
        )
        self.page.wait_for_timeout(60)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector).replace("\u00a0", " ")

    def pixels(self, canvas: str) -> np.ndarray[Any, Any]:
        """RGBA of a canvas, through another one: to read the page's own would make it slow, and Chromium complain."""
        width, height, data = self.page.evaluate(
            """(id) => {
              const from = document.getElementById(id), copy = new OffscreenCanvas(from.width, from.height);
              const context = copy.getContext('2d', { willReadFrequently: true });
              context.drawImage(from, 0, 0);
              return [from.width, from.height, [...context.getImageData(0, 0, from.width, from.height).data]];
            }""",
            canvas,
        )
        return np.array(data).reshape(height, width, 4)

    def light(self) -> np.ndarray[Any, Any]:
        """Alpha of the map: dark patches are opaque."""
        return self.pixels("light-map")[..., 3]

    def click_patch(self, row: int, column: int) -> None:
        box = self.page.locator("#grid").bounding_box()
        self.page.mouse.click(
            box["x"] + box["width"] * (column + 0.5) / COLUMNS, box["y"] + box["height"] * (row + 0.5) / ROWS
        )
        self.settled()


def picture(seed: int = 0, size: tuple[int, int] = (60, 45)) -> Image.Image:
    """Blocks of colour, so that every patch is another."""
    draws = np.random.default_rng(seed)
    blocks = Image.fromarray(draws.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    return blocks.resize(size, Image.Resampling.NEAREST)


def content(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def upload(name: str, data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}


def served(weights: Path, *options: str) -> Iterator[str]:
    """The address of a server that runs until the test is done."""
    command = [sys.executable, "-m", "vitrail", "serve", str(weights), "--port", "0", "--threads", "1", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()
            process.communicate(timeout=20)


def expected(weights: Path, image: Image.Image, layer: int, head: int | None, row: int) -> np.ndarray[Any, Any]:
    """Alpha of the map as the network itself says: `row` 0 is the class token, then the patches."""
    model, ready = vitrail.load(weights), vitrail.predictor(weights, device="cpu").preprocessing(image)
    view = list(inspection.iterate_layers(model, ready[None]))[layer]
    heads = view.attention[0].double().numpy()
    seen = (heads.mean(0) if head is None else heads[head])[row, 1:]
    others = np.delete(seen, row - 1) if row else seen
    value = np.clip((seen - others.min()) / (others.max() - others.min()), 0, 1)
    return (240 * (1 - value) ** 1.6).reshape(ROWS, COLUMNS)
