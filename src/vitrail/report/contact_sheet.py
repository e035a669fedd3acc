"""A contact sheet: samples of every class at a glance, drawn from arrays.

Under the title lies a strip of coloured glass with a piece for each class, as wide as the class is large; the same
colour marks the class below.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitrail.core.errors import ConfigError
from vitrail.report.fonts import fitted, font

Colour = tuple[int, int, int]

PAPER, INK, GREY, HAIR = (252, 251, 248), (38, 38, 44), (128, 126, 124), (222, 219, 212)
BROKEN, CRACK = (244, 239, 233), (190, 74, 70)
TILE, GAP, MARGIN = 104, 6, 44
ACROSS: Final = 12  # tiles side by side, whatever the number of columns
GUTTER, CAPTION, LEADING = 26, 26, 20
CORNER = 3
# Hue, lightness and saturation of glass, in an order that keeps neighbours apart.
GLASS: Final = (
    *((0.61, 0.42, 0.72), (0.97, 0.46, 0.66), (0.12, 0.54, 0.82), (0.42, 0.38, 0.56), (0.76, 0.48, 0.42)),
    *((0.52, 0.48, 0.60), (0.05, 0.55, 0.76), (0.30, 0.44, 0.44), (0.90, 0.66, 0.58), (0.57, 0.66, 0.56)),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """A class: its name, what is said next to it, how large it is, and some of its images. An image is pixels uint8
    [H, W, 3], or None where it cannot be read."""

    name: str
    said: str = ""
    weight: float = 1.0
    pictures: Sequence[NDArray[np.uint8] | None] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Columns of groups, and tiles in a row of one of them."""

    columns: int
    tiles: int

    @property
    def width(self) -> int:
        return 2 * MARGIN + self.columns * self.column + (self.columns - 1) * GUTTER

    @property
    def column(self) -> int:
        return self.tiles * TILE + (self.tiles - 1) * GAP


def layout(groups: int, pictures: int) -> Layout:
    """Few classes get a line each, many stand in columns, and so do classes of few images; the sheet stays about as
    wide."""
    columns = 1 if groups <= 12 else 2 if groups <= 26 else 3 if groups <= 48 else 4
    while ACROSS // columns > pictures and columns < min(ACROSS, groups):
        columns = {1: 2, 2: 3, 3: 4, 4: 6, 6: 12}[columns]
    return Layout(columns=columns, tiles=ACROSS // columns)


def contact_sheet(title: str, subtitle: str, groups: Sequence[Group], *, footer: str = "") -> Image.Image:
    """The groups with their captions, in reading order down the columns."""
    if not groups:
        raise ConfigError("a contact sheet needs at least one group")
    form = layout(len(groups), max(len(group.pictures) for group in groups))
    deep = -(-len(groups) // form.columns)
    step = CAPTION + TILE + LEADING
    top = MARGIN + 96
    sheet = blank(form.width, top + deep * step - LEADING + (48 if footer else 0) + MARGIN)
    head(sheet, title, subtitle, [group.weight for group in groups])
    for at, group in enumerate(groups):
        column, row = divmod(at, deep)
        left, upper = MARGIN + column * (form.column + GUTTER), top + row * step
        caption(sheet, group, glass(at), left, upper, form.column)
        for place, pixels in enumerate(group.pictures[: form.tiles]):
            sheet.paste(*placed(pixels, left + place * (TILE + GAP), upper + CAPTION))
    foot(sheet, footer)
    return sheet


def mosaic(title: str, subtitle: str, pictures: Sequence[NDArray[np.uint8] | None], *, footer: str = "") -> Image.Image:
    """Images without classes, side by side."""
    if not pictures:
        raise ConfigError("a contact sheet needs at least one image")
    form, deep = Layout(columns=1, tiles=ACROSS), -(-len(pictures) // ACROSS)
    top = MARGIN + 96
    sheet = blank(form.width, top + deep * (TILE + GAP) - GAP + (48 if footer else 0) + MARGIN)
    head(sheet, title, subtitle, [1.0] * ACROSS)
    for at, pixels in enumerate(pictures):
        row, place = divmod(at, ACROSS)
        sheet.paste(*placed(pixels, MARGIN + place * (TILE + GAP), top + row * (TILE + GAP)))
    foot(sheet, footer)
    return sheet


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), PAPER)


def head(sheet: Image.Image, title: str, subtitle: str, weights: Sequence[float]) -> None:
    """The title, what is said below it, and the strip of glass."""
    draw, room = ImageDraw.Draw(sheet), sheet.width - 2 * MARGIN
    title, subtitle = fitted(title, 30, room), fitted(subtitle, 15, room)
    draw.text((MARGIN - 1, MARGIN + 26), title, INK, font(30, title), anchor="ls")
    draw.text((MARGIN, MARGIN + 54), subtitle, GREY, font(15, subtitle), anchor="ls")
    ends = MARGIN + np.rint(np.cumsum([0.0, *weights]) / sum(weights) * room).astype(int)
    for at, (left, right) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        lead = 2 if right - left > 5 else 1 if right - left > 2 else 0
        if at == len(weights) - 1:
            lead = 0
        if right - lead > left:
            draw.rectangle((left, MARGIN + 68, right - lead - 1, MARGIN + 72), glass(at))


def caption(sheet: Image.Image, group: Group, colour: Colour, left: int, top: int, width: int) -> None:
    """A mark of the class's colour, its name, and what is said next to it in grey."""
    draw, base = ImageDraw.Draw(sheet), top + CAPTION - 10
    draw.rectangle((left, base - 9, left + 3, base), colour)
    said = font(13).getlength(group.said)
    name = fitted(group.name, 15, width - 12 - (said + 10 if group.said else 0))
    draw.text((left + 11, base), name, INK, font(15, name), anchor="ls")
    if group.said:
        draw.text((left + 11 + font(15, name).getlength(name) + 8, base), group.said, GREY, font(13), anchor="ls")


def foot(sheet: Image.Image, text: str) -> None:
    if text:
        place, text = (MARGIN, sheet.height - MARGIN), fitted(text, 14, sheet.width - 2 * MARGIN)
        ImageDraw.Draw(sheet).text(place, text, GREY, font(14, text), anchor="ls")


def placed(pixels: NDArray[np.uint8] | None, left: int, top: int) -> tuple[Image.Image, tuple[int, int], Image.Image]:
    """A tile, where it goes, and its outline: the arguments of `paste`."""
    return (broken() if pixels is None else tile(pixels)), (left, top), corners()


def tile(pixels: NDArray[np.uint8]) -> Image.Image:
    """The middle square of an image, at the size of a tile. The pixels of a small one stay squares."""
    side = min(pixels.shape[:2])
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    square = Image.fromarray(np.ascontiguousarray(pixels[top : top + side, left : left + side])).convert("RGB")
    if side <= TILE // 2:
        whole = -(-TILE // side) * side  # first to a whole multiple, for even edges
        square = square.resize((whole, whole), Image.Resampling.NEAREST)
        square = square if whole == TILE else square.resize((TILE, TILE), Image.Resampling.BOX)
    else:
        square = square.resize((TILE, TILE), Image.Resampling.LANCZOS)
    return edged(square)


def edged(square: Image.Image) -> Image.Image:
    """With a line at the edge, a little darker than the image, so that a white one does not melt into the paper."""
    dark = square.point([value * 9 // 10 for value in range(256)] * 3)
    inner = Image.new("L", (TILE, TILE), 255)
    ImageDraw.Draw(inner).rounded_rectangle((1, 1, TILE - 2, TILE - 2), CORNER - 1, 0)
    square.paste(dark, (0, 0), inner)
    return square


@lru_cache(maxsize=1)
def broken() -> Image.Image:
    """Stands where an image cannot be read: a pane with a crack."""
    large = Image.new("RGB", (4 * TILE, 4 * TILE), BROKEN)
    draw = ImageDraw.Draw(large)
    for start, end in (((0.30, 0.0), (0.46, 0.40)), ((0.46, 0.40), (0.38, 0.58)), ((0.38, 0.58), (0.62, 1.0))):
        draw.line((*(4 * TILE * part for part in start), *(4 * TILE * part for part in end)), CRACK, 5)
    draw.line((4 * TILE * 0.46, 4 * TILE * 0.40, 4 * TILE * 1.0, 4 * TILE * 0.24), CRACK, 5)
    draw.line((4 * TILE * 0.38, 4 * TILE * 0.58, 0, 4 * TILE * 0.70), CRACK, 5)
    square = edged(large.resize((TILE, TILE), Image.Resampling.LANCZOS))
    words = ImageDraw.Draw(square)
    width = font(12).getlength("unreadable")
    middle = TILE / 2
    words.rounded_rectangle((middle - width / 2 - 5, TILE - 27, middle + width / 2 + 5, TILE - 9), 4, BROKEN)
    words.text((middle, TILE - 18), "unreadable", CRACK, font(12), anchor="mm")
    return square


@lru_cache(maxsize=1)
def corners() -> Image.Image:
    """Slightly rounded."""
    large = Image.new("L", (4 * TILE, 4 * TILE), 0)
    ImageDraw.Draw(large).rounded_rectangle((0, 0, 4 * TILE - 1, 4 * TILE - 1), 4 * CORNER, 255)
    return large.resize((TILE, TILE), Image.Resampling.BOX)


def glass(at: int) -> Colour:
    """The colour of the class in this place; the tenth is like the first, a little lighter or darker."""
    hue, light, saturation = GLASS[at % len(GLASS)]
    light += 0.06 * ((at // len(GLASS)) % 3 - 1) if at >= len(GLASS) else 0
    red, green, blue = colorsys.hls_to_rgb(hue, light, saturation)
    return round(255 * red), round(255 * green), round(255 * blue)
