"""The page of an inspection: figures, each with how to read it, and the attention explorer.

Figures are in the page twice, for light and dark screens; the browser shows the one that fits.

In the explorer a person picks a patch of an image, a layer and a head, and sees where it looks. All weights of an image
are inside the page, one byte each. A row of attention sums to one, so its scale need not be stored: each byte is the
square root of a weight relative to the largest of its row, in 255 steps, and the reader squares the bytes and divides
by their sum. The root gives small weights finer steps than large ones. If the page would become too large it holds
less, and says so: first the patches of a fine grid are merged, then single heads are kept for some layers only and
their mean for the others.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.core.text import Pair, format_size
from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import Preprocessing
from vitrail.report.figure_style import DARK, LIGHT, Theme, encode_figure
from vitrail.report.page import Notes, Section, render_page, to_data_uri
from vitrail.report.sections import Tile, Tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Floats = NDArray[np.floating[Any]]

LARGEST: Final = 640  # pixels of the longer side of an image on the page
MOST_PATCHES: Final = 400  # of the explorer, 20 x 20; finer grids are merged
MOST_BYTES: Final = 6_000_000  # of one image in the explorer; a third more as text


def prepare_image(image: Image.Image, preprocessing: Preprocessing) -> tuple[Tensor, NDArray[np.uint8]]:
    """An image for the network, uint8 [3, H, W], and the same part of it for display, [H', W', 3]."""
    image = upright_rgb(image)
    pixels = preprocessing.pixels(image)
    return pixels, crop_for_display(image, pixels, preprocessing)


def crop_for_display(image: Image.Image, pixels: Tensor, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """The part that the network sees, in the same shape. It has the image's own resolution, but is not larger than
    `LARGEST` and not smaller than the network's input."""
    height, width = preprocessing.image
    box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.resize is not None:
        box = preprocessing.centre(image)
    if min(box) < 0:  # the margin that the crop adds around an image is in the network's input only
        box = (0.0, 0.0, 0.0, 0.0)
    scale = min(max((box[2] - box[0]) / width, (box[3] - box[1]) / height), LARGEST / max(width, height))
    if scale <= 1:
        return pixels.permute(1, 2, 0).contiguous().numpy()
    size = (round(width * scale), round(height * scale))
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC, box))


def make_thumbnail(picture: NDArray[np.uint8], side: int = LARGEST) -> str:
    return to_data_uri(Image.fromarray(np.ascontiguousarray(picture)), side)


# Sections as they are computed.


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionFigure:
    """A figure that is drawn on demand: the name of its files, its description, and a note below it. With `lines` it is
    embedded as vectors, otherwise as an image."""

    name: str
    text: str
    draw: "Callable[[Theme], Figure]"
    lines: bool = False
    narrow: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOverlay:
    """An image, where the network looks on it, and the likeliest classes with their probabilities."""

    name: str
    picture: NDArray[np.uint8]  # [H, W, 3]
    overlay: NDArray[np.uint8]
    said: Sequence[tuple[str, float]] = ()


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


# Sections as they are on the page.


@dataclass(frozen=True, kw_only=True, slots=True)
class ThemedFigure:
    """A figure as data URIs for a light and a dark screen."""

    light: str
    dark: str
    text: str
    note: str
    narrow: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSection:
    """Figures under a heading."""

    anchor: str
    title: str
    reading: str
    drawn: Sequence[ThemedFigure]
    template: str = field(default="drawing.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlaySection:
    """Images next to where the network looks: name, picture and overlay as data URIs, and likeliest classes."""

    anchor: str
    title: str
    reading: str
    pictures: Sequence[dict[str, Any]]
    template: str = field(default="overlays.html", init=False)


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
    def shown(self) -> Pair:
        """The grid of the page."""
        return -(-self.grid[0] // self.block), -(-self.grid[1] // self.block)

    @property
    def tokens(self) -> int:
        return self.prefix + self.shown[0] * self.shown[1]

    @property
    def size(self) -> int:
        """Bytes per image."""
        return (len(self.kept) * self.heads + self.layers - len(self.kept)) * self.tokens**2

    @property
    def note(self) -> str:
        """What is missing; empty if nothing is."""
        notes: list[str] = []
        if self.block > 1:
            notes.append(
                f"{self.block} x {self.block} patches of the {format_size(self.grid)} grid are merged, so a rollout is "
                "close to the exact one but not equal"
            )
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

    @property
    def kept(self) -> str:
        return " ".join(map(str, self.plan.kept))


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
    sections = [render_section(part) for part in parts]
    if explorer is not None:
        first = 1 if parts and parts[0].looks else 0
        links.insert(first, ("explorer", explorer.title))
        sections.insert(first, explorer)
    sections = [*([Tiles(tiles=facts)] if facts else []), PageLinks(links=links), *sections]
    if left_out:
        sections.append(Notes(title="Not on this page", lines=left_out))
    return render_page(
        title, sections, lead=lead, style="explorer.css", script="" if explorer is None else "explorer.js"
    )


def render_section(part: InspectionSection) -> Section:
    heading: dict[str, str] = {"anchor": part.kind, "title": part.title, "reading": part.reading}
    if not part.looks:
        return FigureSection(**heading, drawn=[render_figure(figure) for figure in part.drawings])
    pictures = [
        {
            "name": look.name,
            "picture": make_thumbnail(look.picture),
            "overlay": make_thumbnail(look.overlay),
            "said": look.said,
        }
        for look in part.looks
    ]
    return OverlaySection(**heading, pictures=pictures)


def render_figure(figure: SectionFigure) -> ThemedFigure:
    def encode(theme: Theme) -> str:
        body = encode_figure(figure.draw(theme), theme, "svg" if figure.lines else "webp")
        return f"data:image/{'svg+xml' if figure.lines else 'webp'};base64,{base64.b64encode(body).decode()}"

    return ThemedFigure(
        light=encode(LIGHT), dark=encode(DARK), text=figure.text, note=figure.note, narrow=figure.narrow
    )


def plan_explorer(layers: int, heads: int, grid: Pair, prefix: int, most: int = MOST_BYTES) -> ExplorerPlan:
    """As much as fits into `most` bytes per image: the first and last layers before those between."""
    block = 1
    while -(-grid[0] // block) * -(-grid[1] // block) > MOST_PATCHES:
        block += 1
    plan = ExplorerPlan(layers=layers, heads=heads, grid=grid, prefix=prefix, block=block)
    room = most - plan.size
    count = layers if heads == 1 else min(max(room // ((heads - 1) * plan.tokens**2), 0), layers)
    return replace(plan, kept=tuple(sorted({round(at) for at in np.linspace(layers - 1, 0, count).tolist()})))


def pack_attention(plan: ExplorerPlan, attention: Iterable[Floats]) -> bytes:
    """The weights of one image, given layer by layer as [k, T, T]: one block of T x T bytes per head, or for the mean
    of the heads."""
    blocks: list[bytes] = []
    for layer, weights in enumerate(attention):
        coarse = merge_patches(plan, weights)
        blocks.append(quantise(coarse if layer in plan.kept else coarse.mean(0, keepdims=True)).tobytes())
    return b"".join(blocks)


def merge_patches(plan: ExplorerPlan, weights: Floats) -> Floats:
    """[k, T, T] with each block of patches as one token: summed over keys, averaged over queries."""
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
    """The weights that the page computes from the bytes: rows [..., T] that sum to one."""
    squares = stored.astype(np.float64) ** 2
    return squares / squares.sum(-1, keepdims=True)
