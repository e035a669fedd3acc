"""The attention explorer: one picks a patch of an image, a layer and a head, and sees where it looks.

All weights of an image travel inside the page, a byte each. A row of attention sums to one, so that its scale need not
be kept: what is stored is the root of each weight over the largest of its row, in 255 steps, and whoever reads it
squares the bytes and divides by their sum. The root gives small weights finer steps than large ones.

What would make the page too large is thinned, and the page says so: first the patches of a fine grid are taken
together, then single heads are kept for some layers only and their mean for the others.

The page of an inspection: what was found in figures, each with how to read it, and the attention explorer.

Figures are in the page twice, for light screens and dark ones; the browser takes the one that fits.

What a network sees of an image, for a person: the same part of it, at the image's own resolution.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.core.text import Pair, format_size
from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import Preprocessing
from vitrail.report.figure_style import DARK, LIGHT, Theme, encoded
from vitrail.report.page import Notes, Section, data_uri, page
from vitrail.report.sections import Tile, Tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Floats = NDArray[np.floating[Any]]

MOST_PATCHES: Final = 400  # a side of 20; finer grids are taken together
MOST_BYTES: Final = 6_000_000  # of one image; a third more as text


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorerPlan:
    """What of a network's attention goes into a page."""

    layers: int
    heads: int
    grid: Pair  # of the network
    prefix: int  # tokens before the patches
    block: int = 1  # patches a side that are taken together
    kept: tuple[int, ...] = ()  # layers, from 0, whose heads are kept one by one; of others their mean

    @property
    def shown(self) -> Pair:
        """The grid of the page."""
        return -(-self.grid[0] // self.block), -(-self.grid[1] // self.block)

    @property
    def tokens(self) -> int:
        return self.prefix + self.shown[0] * self.shown[1]

    @property
    def size(self) -> int:
        """Bytes of one image."""
        return (len(self.kept) * self.heads + self.layers - len(self.kept)) * self.tokens**2

    @property
    def note(self) -> str:
        """What was left out; empty where nothing was."""
        said: list[str] = []
        if self.block > 1:
            said.append(
                f"{self.block} x {self.block} patches of the {format_size(self.grid)} grid are taken together, "
                "so that a "
                "rollout is near the exact one and not equal to it"
            )
        if len(self.kept) < self.layers:
            some = f"of layers {', '.join(str(layer + 1) for layer in self.kept)} only" if self.kept else "of no layer"
            said.append(f"single heads are kept {some}; for the others there is their mean")
        return f"To keep the page small, {' and '.join(said)}." if said else ""


def plan_explorer(layers: int, heads: int, grid: Pair, prefix: int, most: int = MOST_BYTES) -> ExplorerPlan:
    """As much as `most` bytes an image hold: the first and last layers before those between."""
    block = 1
    while -(-grid[0] // block) * -(-grid[1] // block) > MOST_PATCHES:
        block += 1
    found = ExplorerPlan(layers=layers, heads=heads, grid=grid, prefix=prefix, block=block)
    room = most - found.size
    count = layers if heads == 1 else min(max(room // ((heads - 1) * found.tokens**2), 0), layers)
    kept = tuple(sorted({round(at) for at in np.linspace(layers - 1, 0, count).tolist()}))
    return ExplorerPlan(layers=layers, heads=heads, grid=grid, prefix=prefix, block=block, kept=kept)


def pack_attention(plan: ExplorerPlan, attention: Iterable[Floats]) -> bytes:
    """The weights of one image, given layer by layer as [k, T, T]: one block of T x T bytes for each head, or for
    their mean."""
    out: list[bytes] = []
    for layer, weights in enumerate(attention):
        coarse = merge_patches(plan, weights)
        out.append(quantise(coarse if layer in plan.kept else coarse.mean(0, keepdims=True)).tobytes())
    return b"".join(out)


def merge_patches(plan: ExplorerPlan, weights: Floats) -> Floats:
    """[k, T, T] with blocks of patches as one: what they are looked at is summed, how they look is averaged."""
    if plan.block == 1:
        return weights
    rows, columns = np.indices(plan.grid) // plan.block
    place = np.concatenate([np.arange(plan.prefix), plan.prefix + (rows * plan.shown[1] + columns).ravel()])
    onto = np.zeros((weights.shape[-1], plan.tokens), weights.dtype)  # [T, T']
    onto[np.arange(len(place)), place] = 1
    return (onto / onto.sum(0)).T @ weights @ onto


def quantise(weights: Floats) -> NDArray[np.uint8]:
    """Rows of attention [..., T] as bytes: the largest of a row is 255."""
    largest = weights.max(-1, keepdims=True)
    return np.rint(255 * np.sqrt(weights / np.maximum(largest, 1e-30))).astype(np.uint8)


def dequantise(stored: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What the page makes of the bytes again: rows [..., T] that sum to one."""
    squares = stored.astype(np.float64) ** 2
    return squares / squares.sum(-1, keepdims=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExploredImage:
    """An image as a data URI, its name, and its weights as `packed` made them."""

    name: str
    picture: str
    weights: bytes

    @property
    def text(self) -> str:
        return base64.b64encode(self.weights).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorerSection:
    """The part of a page that has the explorer in it; it needs the page's script."""

    plan: ExplorerPlan
    pictures: Sequence[ExploredImage]
    prefix: Sequence[str]  # names of the tokens before the patches
    start: int  # the token that is asked first
    title: str = "Attention explorer"
    lead: str = ""
    template: str = field(default="explorer.html", init=False)

    @property
    def kept(self) -> str:
        return " ".join(map(str, self.plan.kept))


LARGEST: Final = 640  # pixels of the longer side


def prepare_image(image: Image.Image, preprocessing: Preprocessing) -> tuple[Tensor, NDArray[np.uint8]]:
    """An image for the network, uint8 [3, H, W], and the same part of it to look at, [H', W', 3]."""
    image = upright_rgb(image)
    pixels = preprocessing.pixels(image)
    return pixels, crop_for_display(image, pixels, preprocessing)


def crop_for_display(image: Image.Image, pixels: Tensor, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """The part that the network sees, in the shape that it sees. It has the image's own resolution, but is not larger
    than `LARGEST` and not smaller than the network's input."""
    height, width = preprocessing.image
    box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.resize is not None:
        box = preprocessing.centre(image)
    if min(box) < 0:  # what the crop adds around an image is in the network's input alone
        box = (0.0, 0.0, 0.0, 0.0)
    scale = min(max((box[2] - box[0]) / width, (box[3] - box[1]) / height), LARGEST / max(width, height))
    if scale <= 1:
        return pixels.permute(1, 2, 0).contiguous().numpy()
    size = (round(width * scale), round(height * scale))
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC, box))


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionFigure:
    """A figure, drawn when asked for: the name of its files, what it shows, and a line below it. Lines are kept as
    lines in the page, images as images."""

    name: str
    text: str
    draw: "Callable[[Theme], Figure]"
    lines: bool = False
    narrow: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOverlay:
    """An image, where the network looks on it, and what it says: classes with their probabilities."""

    name: str
    picture: NDArray[np.uint8]  # [H, W, 3]
    overlay: NDArray[np.uint8]
    said: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectionSection:
    """One kind of figure: its title, how to read it, and the drawings. `looks` stand in the page for the drawings."""

    kind: str
    title: str
    reading: str
    drawings: Sequence[SectionFigure]
    looks: Sequence[ImageOverlay] = ()
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    count: int | None = None  # images that the numbers are of; none where they are of the weights alone


@dataclass(frozen=True, kw_only=True, slots=True)
class ThemedFigure:
    """A figure as data URIs."""

    light: str
    dark: str
    text: str
    note: str
    narrow: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSection:
    """Drawings under a heading."""

    anchor: str
    title: str
    reading: str
    drawn: Sequence[ThemedFigure]
    template: str = field(default="drawing.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedOverlay:
    """A look as data URIs."""

    name: str
    picture: str
    overlay: str
    said: Sequence[tuple[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlaySection:
    """Images next to what the network looks at, side by side where there is room."""

    anchor: str
    title: str
    reading: str
    pictures: Sequence[EncodedOverlay]
    template: str = field(default="looked.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLinks:
    """The way to each part of the page."""

    links: Sequence[tuple[str, str]]
    template: str = field(default="kinds.html", init=False)


def inspection_page(
    title: str,
    parts: Sequence[InspectionSection],
    *,
    lead: str = "",
    facts: Sequence[Tile] = (),
    explorer: ExplorerSection | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """The whole file as text; it needs nothing else. Without an explorer there is no script in it."""
    links = [(part.kind, part.title) for part in parts]
    sections: list[Section] = [Tiles(tiles=facts)] if facts else []
    first = parts[:1] if explorer is not None and parts and parts[0].looks else []
    if explorer is not None:
        links.insert(len(first), ("explorer", explorer.title))
    sections.append(PageLinks(links=links))
    sections += [render_section(part) for part in first]
    sections += [explorer] if explorer is not None else []
    sections += [render_section(part) for part in parts[len(first) :]]
    if left_out:
        sections.append(Notes(title="Not on this page", lines=left_out))
    return page(title, sections, lead=lead, style="explorer.css", script="" if explorer is None else "explorer.js")


def render_section(part: InspectionSection) -> Section:
    if part.looks:
        pictures = [
            EncodedOverlay(
                name=one.name, picture=make_thumbnail(one.picture), overlay=make_thumbnail(one.overlay), said=one.said
            )
            for one in part.looks
        ]
        return OverlaySection(anchor=part.kind, title=part.title, reading=part.reading, pictures=pictures)
    return FigureSection(
        anchor=part.kind, title=part.title, reading=part.reading, drawn=[render_figure(one) for one in part.drawings]
    )


def render_figure(one: SectionFigure) -> ThemedFigure:
    light, dark = (encode_figure(one.draw(theme), theme, "svg" if one.lines else "webp") for theme in (LIGHT, DARK))
    return ThemedFigure(light=light, dark=dark, text=one.text, note=one.note, narrow=one.narrow)


def encode_figure(figure: "Figure", theme: Theme, form: Literal["svg", "webp"]) -> str:
    kind = {"svg": "svg+xml", "webp": "webp"}[form]
    return f"data:image/{kind};base64,{base64.b64encode(encoded(figure, theme, form)).decode()}"


def make_thumbnail(picture: NDArray[np.uint8], side: int = LARGEST) -> str:
    return data_uri(Image.fromarray(np.ascontiguousarray(picture)), side)
