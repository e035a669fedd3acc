"""The page of an inspection: figures, each with how to read it, and the attention explorer.

Figures are in the page twice, for light and dark screens; the browser shows the one that fits.

In the explorer, the user picks a patch of an image, a layer and a head, and sees where the patch looks. All weights of
an image are inside the page, one byte each. A row of attention sums to one, so its scale need not be stored: each byte
is the square root of a weight relative to the largest of its row, in 255 steps, and the reader squares the bytes and
divides by their sum. The root gives small weights finer steps than large ones. If the page would become too large it
holds less, and states so: first the patches of a fine grid are merged, then single heads are kept for some layers only
and their mean for the others.
"""

import base64
import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.core.text import Pair, format_size, pluralise
from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import Preprocessing
from vitrail.report.figure_style import DARK, LIGHT, Theme, encode_figure
from vitrail.report.page import Notes, Section, render_page, to_data_uri
from vitrail.report.sections import Tile, Tiles

Floats = NDArray[np.floating[Any]]

LARGEST: Final = 640  # pixels of the longer side of an image on the page
MOST_PATCHES: Final = 400  # in the explorer: 20 x 20; finer grids are merged
MOST_BYTES: Final = 6_000_000  # of one image in the explorer; a third more as text
READINGS: Final = tomllib.loads(resources.files("vitrail.inspection").joinpath("readings.toml").read_text("utf-8"))


def prepare_image(image: Image.Image, preprocessing: Preprocessing) -> tuple[Tensor, NDArray[np.uint8]]:
    """An image for the network, uint8 [3, H, W], and the part of it that the network sees for display, [H', W', 3].
    That has the image's own resolution, but is not larger than `LARGEST` and not smaller than the network's input."""
    image = upright_rgb(image)
    pixels = preprocessing.pixels(image)
    height, width = preprocessing.image
    box = preprocessing.view_box((image.height, image.width))
    has_borders = min(box) < 0 or box[2] > image.width or box[3] > image.height
    scale = min(max((box[2] - box[0]) / width, (box[3] - box[1]) / height), LARGEST / max(width, height))
    if scale <= 1 or has_borders:  # which are in the network's input only
        return pixels, pixels.permute(1, 2, 0).contiguous().numpy()
    size = (round(width * scale), round(height * scale))
    return pixels, np.asarray(image.resize(size, Image.Resampling.BICUBIC, box))


def make_thumbnail(image: NDArray[np.uint8], side: int = LARGEST) -> str:
    return to_data_uri(Image.fromarray(np.ascontiguousarray(image)), side)


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionFigure:
    """A figure that is drawn on demand: the name of its files, its description, and a note below it. `draw` returns a
    matplotlib figure or the bytes of an SVG. With `lines` it is embedded as vectors, otherwise as an image."""

    name: str
    text: str
    draw: Callable[[Theme], Any]
    lines: bool = False
    narrow: bool = False
    note: str = ""

    def encode(self, *, dark: bool = False) -> str:
        """A data URI, for a light or a dark screen."""
        theme = DARK if dark else LIGHT
        drawn = self.draw(theme)
        body = drawn if isinstance(drawn, bytes) else encode_figure(drawn, theme, "svg" if self.lines else "webp")
        return f"data:image/{'svg+xml' if self.lines else 'webp'};base64,{base64.b64encode(body).decode()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOverlay:
    """An image, where the network looks on it, and the likeliest classes with their probabilities."""

    name: str
    picture: NDArray[np.uint8]  # [H, W, 3]
    overlay: NDArray[np.uint8]
    said: Sequence[tuple[str, float]] = ()

    def encode(self, image: NDArray[np.uint8]) -> str:
        return make_thumbnail(image)


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectionSection:
    """One kind of figure: its title, how to read it, and the drawings. The page shows `looks`, if there are any,
    instead of the drawings."""

    kind: str
    title: str
    reading: str
    drawings: Sequence[SectionFigure]
    looks: Sequence[ImageOverlay] = ()
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    count: int | None = None  # images that the numbers are measured on; None if on the weights alone

    @property
    def template(self) -> str:
        return "overlays.html" if self.looks else "drawing.html"


def make_section(
    kind: str,
    draw: Callable[[Theme], Any],
    facts: dict[str, Any],
    *,
    count: int | None = None,
    more: Sequence[SectionFigure] = (),
    **rest: Any,
) -> InspectionSection:
    """A section with one figure, or with `more`; its texts are those of readings.toml, with `facts` filled in."""
    facts = {"samples": pluralise(count or 0, "image"), **facts}
    about = READINGS[kind]
    title, reading, text, note = (about.get(key, "").format(**facts) for key in ("title", "reading", "figure", "note"))
    lines, narrow = about.get("lines", False), about.get("narrow", False)
    figure = SectionFigure(name=kind, text=text, draw=draw, lines=lines, narrow=narrow, note=note)
    return InspectionSection(kind=kind, title=title, reading=reading, drawings=[figure, *more], count=count, **rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLinks:
    """Links to the sections of the page."""

    links: Sequence[tuple[str, str]]
    template: str = field(default="links.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorerPlan:
    """How much of a network's attention goes into a page."""

    layers: int
    heads: int
    grid: Pair  # of the network
    prefix: int  # tokens before the patches
    block: int = 1  # side, in patches, of the blocks that are merged
    kept: tuple[int, ...] = ()  # layers, from 0, with every head; the others have the mean of their heads

    @property
    def page_grid(self) -> Pair:
        """The grid of the page."""
        return -(-self.grid[0] // self.block), -(-self.grid[1] // self.block)

    @property
    def tokens(self) -> int:
        return self.prefix + math.prod(self.page_grid)

    @property
    def size(self) -> int:
        """Bytes per image."""
        return (len(self.kept) * self.heads + self.layers - len(self.kept)) * self.tokens**2

    @property
    def note(self) -> str:
        """What is missing; empty if nothing is."""
        notes: list[str] = []
        if self.block > 1:
            merged = f"{self.block} x {self.block} patches of the {format_size(self.grid)} grid are merged"
            notes.append(f"{merged}, so a rollout is close to the exact one but not equal")
        if len(self.kept) < self.layers:
            which = f"for layers {', '.join(str(layer + 1) for layer in self.kept)}" if self.kept else "for no layer"
            notes.append(f"single heads are kept {which}; the others have the mean of their heads")
        return f"To keep the page small, {' and '.join(notes)}." if notes else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExploredImage:
    """An image as a data URI, its name, and its weights from `pack_attention`."""

    name: str
    picture: str
    weights: bytes

    @property
    def text(self) -> str:
        return base64.b64encode(self.weights).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorerSection:
    """The attention explorer; it needs the page's script."""

    plan: ExplorerPlan
    pictures: Sequence[ExploredImage]
    prefix: Sequence[str]  # names of the tokens before the patches
    start: int  # the token that is selected first
    title: str = "Attention explorer"
    lead: str = ""
    template: str = field(default="explorer.html", init=False)


def inspection_page(
    title: str,
    parts: Sequence[InspectionSection],
    *,
    lead: str = "",
    facts: Sequence[Tile] = (),
    explorer: ExplorerSection | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """The self-contained page as text. Without an explorer it has no script."""
    links = [(part.kind, part.title) for part in parts]
    sections: list[Section] = list(parts)
    if explorer is not None:
        first = 1 if parts and parts[0].looks else 0
        links.insert(first, ("explorer", explorer.title))
        sections.insert(first, explorer)
    sections = [*([Tiles(tiles=facts)] if facts else []), PageLinks(links=links), *sections]
    if left_out:
        sections.append(Notes(title="Not on this page", lines=left_out))
    script = "" if explorer is None else "explorer.js"
    return render_page(title, sections, lead=lead, style="explorer.css", script=script)


def plan_explorer(layers: int, heads: int, grid: Pair, prefix: int, most: int = MOST_BYTES) -> ExplorerPlan:
    """As much as fits into `most` bytes per image: the first and last layers before those between."""
    plan = ExplorerPlan(layers=layers, heads=heads, grid=grid, prefix=prefix)
    while math.prod(plan.page_grid) > MOST_PATCHES:
        plan = replace(plan, block=plan.block + 1)
    count = layers if heads == 1 else min(max((most - plan.size) // ((heads - 1) * plan.tokens**2), 0), layers)
    return replace(plan, kept=tuple(sorted({round(at) for at in np.linspace(layers - 1, 0, count).tolist()})))


def pack_attention(plan: ExplorerPlan, attention: Iterable[Floats]) -> bytes:
    """The weights of one image, given layer by layer as [k, T, T]: one block of T x T bytes per head, or for the mean
    of the heads."""
    coarse = (merge_patches(plan, weights) for weights in attention)
    chosen = (block if layer in plan.kept else block.mean(0, keepdims=True) for layer, block in enumerate(coarse))
    return b"".join(quantise(block).tobytes() for block in chosen)


def merge_patches(plan: ExplorerPlan, weights: Floats) -> Floats:
    """[k, T, T] with each block of patches as one token: summed over keys, averaged over queries."""
    if plan.block == 1:
        return weights
    rows, columns = np.indices(plan.grid) // plan.block
    place = np.concatenate([np.arange(plan.prefix), plan.prefix + (rows * plan.page_grid[1] + columns).ravel()])
    onto = np.zeros((weights.shape[-1], plan.tokens), weights.dtype)  # [T, T']
    onto[np.arange(len(place)), place] = 1
    return (onto / onto.sum(0)).T @ weights @ onto


def quantise(weights: Floats) -> NDArray[np.uint8]:
    """Rows of attention [..., T] as bytes: the largest of a row is 255."""
    largest = weights.max(-1, keepdims=True)
    return np.rint(255 * np.sqrt(weights / np.maximum(largest, 1e-30))).astype(np.uint8)
