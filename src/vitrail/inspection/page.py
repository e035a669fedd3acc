"""The page of an inspection: what was found in figures, each with how to read it, and the attention explorer.

Figures are in the page twice, for light screens and dark ones; the browser takes the one that fits.

What a network sees of an image, for a person: the same part of it, at the image's own resolution.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.explorer import ExplorerSection
from vitrail.report.figure_style import DARK, LIGHT, Theme, encoded
from vitrail.report.page import Notes, Section, data_uri, page
from vitrail.report.sections import Tile, Tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
            EncodedOverlay(name=one.name, picture=make_thumbnail(one.picture), overlay=make_thumbnail(one.overlay), said=one.said)
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
