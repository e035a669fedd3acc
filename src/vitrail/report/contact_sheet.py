"""A contact sheet: samples of every class at a glance, drawn from arrays.

Below the title is a strip with one coloured piece per class, as wide as the class is large; the same colour marks the
class below.

Text uses Pillow's own font, so that a sheet looks the same everywhere. That font has plain Latin characters only; other
text is set in a system font that has them or, without one, in the nearest plain characters.

`reads_white` chooses the text colour with the better contrast on a background, by WCAG 2 (1.4.3).
"""

import bisect
import colorsys
import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.core.errors import ConfigError

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# System fonts in the order tried, by their names on Linux, macOS and Windows.
OTHERS: Final = (
    *("NotoSans-Regular.ttf", "DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "segoeui.ttf"),
    *("NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc", "PingFang.ttc", "msyh.ttc", "Arial Unicode.ttf"),
)
ABSENT: Final = "\U0010fffe"  # a character that no font has, so it is drawn like any missing one


@lru_cache(maxsize=64)
def open_font(name: str, size: int) -> Font | None:
    try:
        return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
    except OSError:
        return None


@lru_cache(maxsize=4096)
def has_glyph(name: str, sign: str) -> bool:
    """Whether a font has a glyph for a character."""
    tried: Any = open_font(name, 15)  # Any, as the result of getmask is not annotated as bytes
    return tried is not None and (sign.isspace() or bytes(tried.getmask(sign)) != bytes(tried.getmask(ABSENT)))


def find_font_name(text: str) -> str | None:
    """The first font that has every character of a text, or None; the empty name is Pillow's own font."""
    return next((name for name in ("", *OTHERS) if all(has_glyph(name, sign) for sign in set(text))), None)


def load_font(size: int, text: str = "") -> Font:
    """The font for a text."""
    found = open_font(find_font_name(text) or "", size)
    assert found is not None  # Pillow's own is always there
    return found


def make_legible(text: str) -> str:
    """Reduces a text to one line that can be drawn here: as it is, else without accents, else with gaps."""
    line = " ".join("".join(sign if sign.isprintable() else "?" for sign in text).split())
    if find_font_name(line) is not None:
        return line
    plain = "".join(sign for sign in unicodedata.normalize("NFKD", line) if not unicodedata.combining(sign))
    if find_font_name(plain) is not None:
        return plain
    best = max(("", *OTHERS), key=lambda name: sum(has_glyph(name, sign) for sign in line))
    return "".join(sign if has_glyph(best, sign) else "?" for sign in line)


def measure_text(text: str, size: int) -> float:
    """The width of a text in pixels, in its font."""
    return load_font(size, text).getlength(text)


def fit_text(text: str, size: int, room: float) -> str:
    """Makes a text legible, and shortens it with an ellipsis if it is wider than `room`."""
    text = make_legible(text)
    if measure_text(text, size) <= room:
        return text
    fits = bisect.bisect_right(range(1, len(text)), room, key=lambda end: measure_text(text[:end] + "…", size))
    return text[:fits].rstrip() + "…"


RGB = tuple[float, float, float]  # red, green, blue, from 0 to 1

BLACK: Final[RGB] = (0.0, 0.0, 0.0)
WHITE: Final[RGB] = (1.0, 1.0, 1.0)


def parse_colour(text: str) -> RGB:
    """Parses a colour such as "#ff8000"."""
    red, green, blue = (int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def blend(over: RGB, under: RGB, opacity: float) -> RGB:
    """Blends a colour over another."""
    red, green, blue = (opacity * a + (1 - opacity) * b for a, b in zip(over, under, strict=True))
    return red, green, blue


def luminance(of: RGB) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in of)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def measure_contrast(one: RGB, other: RGB) -> float:
    """The contrast ratio of two colours, from 1 to 21; small text needs 4.5."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def reads_white(ground: RGB) -> bool:
    """Whether white text has more contrast than black; the better of the two has at least 4.58 on any background."""
    return measure_contrast(WHITE, ground) > measure_contrast(BLACK, ground)


Bytes = tuple[int, int, int]

PAPER, INK, GREY, HAIR = (252, 251, 248), (38, 38, 44), (128, 126, 124), (222, 219, 212)
BROKEN, CRACK = (244, 239, 233), (190, 74, 70)
TILE, GAP, MARGIN = 104, 6, 44
PANE = 236  # the height of a row of whole images
TOP: Final = MARGIN + 96  # top of the images
ACROSS: Final = 12  # tiles side by side, whatever the number of columns
GUTTER, CAPTION, LEADING = 26, 26, 20
CORNER = 3
# Hue, lightness and saturation of class colours, ordered so that neighbours differ.
GLASS: Final = (
    *((0.61, 0.42, 0.72), (0.97, 0.46, 0.66), (0.12, 0.54, 0.82), (0.42, 0.38, 0.56), (0.76, 0.48, 0.42)),
    *((0.52, 0.48, 0.60), (0.05, 0.55, 0.76), (0.30, 0.44, 0.44), (0.90, 0.66, 0.58), (0.57, 0.66, 0.56)),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SheetGroup:
    """A class: its name, the text next to it, its size, and some of its images. An image is uint8 [H, W, 3], or None if
    it is unreadable."""

    name: str
    said: str = ""
    weight: float = 1.0
    pictures: Sequence[NDArray[np.uint8] | None] = ()


def choose_layout(groups: int, pictures: int) -> tuple[int, int]:
    """The number of columns, and of tiles per row of a group. A few classes get one row each; many classes, or classes
    of few images, are set in columns. The width of the sheet stays about the same."""
    columns = 1 if groups <= 12 else 2 if groups <= 26 else 3 if groups <= 48 else 4
    while ACROSS // columns > pictures and columns < min(ACROSS, groups):
        columns = {1: 2, 2: 3, 3: 4, 4: 6, 6: 12}[columns]
    return columns, ACROSS // columns


def draw_contact_sheet(title: str, subtitle: str, groups: Sequence[SheetGroup], *, footer: str = "") -> Image.Image:
    """Draws the groups with their captions, column by column."""
    if not groups:
        raise ConfigError("a contact sheet needs at least one group")
    columns, tiles = choose_layout(len(groups), max(len(group.pictures) for group in groups))
    deep, step, across = -(-len(groups) // columns), CAPTION + TILE + LEADING, tiles * (TILE + GAP) - GAP
    width, weights = columns * (across + GUTTER) - GUTTER, [group.weight for group in groups]
    sheet = start_sheet(title, subtitle, weights, width, deep * step - LEADING, footer)
    for at, group in enumerate(groups):
        column, row = divmod(at, deep)
        left, upper = MARGIN + column * (across + GUTTER), TOP + row * step
        draw_caption(sheet, group, pick_colour(at), left, upper, across)
        for place, pixels in enumerate(group.pictures[:tiles]):
            paste_tile(sheet, pixels, left + place * (TILE + GAP), upper + CAPTION)
    return sheet


def draw_mosaic(
    title: str, subtitle: str, pictures: Sequence[NDArray[np.uint8] | None], *, footer: str = ""
) -> Image.Image:
    """Draws images without classes, side by side."""
    if not pictures:
        raise ConfigError("a contact sheet needs at least one image")
    width, height = (count * (TILE + GAP) - GAP for count in (ACROSS, -(-len(pictures) // ACROSS)))
    sheet = start_sheet(title, subtitle, [1.0] * ACROSS, width, height, footer)
    for at, pixels in enumerate(pictures):
        row, place = divmod(at, ACROSS)
        paste_tile(sheet, pixels, MARGIN + place * (TILE + GAP), TOP + row * (TILE + GAP))
    return sheet


def arrange_rows(aspects: Sequence[float], *, height: int = PANE) -> list[list[tuple[int, int]]]:
    """Arranges images by aspect ratio (width over height) in rows as wide as a sheet and about `height` high; returns
    their sizes (width, height). Extreme aspect ratios are limited."""
    room, rows, row = ACROSS * (TILE + GAP) - GAP, list[list[tuple[int, int]]](), list[float]()
    shapes = [min(max(aspect, 1 / 2.5), 2.5) for aspect in aspects]
    for at, aspect in enumerate(shapes):
        row.append(aspect)
        left = room - GAP * (len(row) - 1)
        last = at == len(shapes) - 1
        if sum(row) * height < left and not last:
            continue
        high = min(round(left / sum(row)), height + height // 4)
        wide = [round(one * high) for one in row]
        if high == round(left / sum(row)):
            wide[-1] += left - sum(wide)  # the rounding error
        rows.append([(one, high) for one in wide])
        row = []
    return rows


def draw_gallery(
    title: str,
    subtitle: str,
    rows: Sequence[Sequence[Image.Image | None]],
    sizes: Sequence[Sequence[tuple[int, int]]],
    *,
    footer: str = "",
) -> Image.Image:
    """Draws whole images in rows, at the sizes from `arrange_rows`; None stands for an unreadable image."""
    if not rows:
        raise ConfigError("a contact sheet needs at least one image")
    height = sum(row[0][1] + GAP for row in sizes) - GAP
    sheet = start_sheet(title, subtitle, [1.0] * ACROSS, ACROSS * (TILE + GAP) - GAP, height, footer)
    top = TOP
    for row, places in zip(rows, sizes, strict=True):
        left = MARGIN
        for image, size in zip(row, places, strict=True):
            pane = draw_broken_tile().resize(size) if image is None else image
            sheet.paste(pane, (left, top), round_corners(size))
            left += size[0] + GAP
        top += places[0][1] + GAP
    return sheet


def start_sheet(
    title: str, subtitle: str, weights: Sequence[float], room: int, height: int, footer: str
) -> Image.Image:
    """An empty sheet with title, subtitle, colour strip and footer, and space for content of some width and height."""
    sheet = Image.new("RGB", (room + 2 * MARGIN, TOP + height + (48 if footer else 0) + MARGIN), PAPER)
    draw, base = ImageDraw.Draw(sheet), sheet.height - MARGIN
    head, below = (MARGIN - 1, MARGIN + 26, title, 30, INK), (MARGIN, MARGIN + 54, subtitle, 15, GREY)
    for left, y, text, size, ink in (head, below, (MARGIN, base, footer, 14, GREY)):
        line = fit_text(text, size, room)
        draw.text((left, y), line, ink, load_font(size, line), anchor="ls")
    ends = MARGIN + np.rint(np.cumsum([0.0, *weights]) / sum(weights) * room).astype(int)
    for at, (left, right) in enumerate(itertools.pairwise(ends.tolist())):
        lead = 0 if at == len(weights) - 1 else 2 if right - left > 5 else 1 if right - left > 2 else 0
        if right - lead > left:
            draw.rectangle((left, MARGIN + 68, right - lead - 1, MARGIN + 72), pick_colour(at))
    return sheet


def draw_caption(sheet: Image.Image, group: SheetGroup, colour: Bytes, left: int, top: int, width: int) -> None:
    """Draws a mark in the class's colour, its name, and the text next to it in grey."""
    draw, base = ImageDraw.Draw(sheet), top + CAPTION - 10
    draw.rectangle((left, base - 9, left + 3, base), colour)
    said = load_font(13).getlength(group.said)
    name = fit_text(group.name, 15, width - 12 - (said + 10 if group.said else 0))
    draw.text((left + 11, base), name, INK, load_font(15, name), anchor="ls")
    if group.said:
        after = left + 19 + load_font(15, name).getlength(name)
        draw.text((after, base), group.said, GREY, load_font(13), anchor="ls")


def paste_tile(sheet: Image.Image, pixels: NDArray[np.uint8] | None, left: int, top: int) -> None:
    """Pastes an image, or the broken tile, with rounded corners."""
    tile = draw_broken_tile() if pixels is None else cut_tile(pixels)
    sheet.paste(tile, (left, top), round_corners())


def cut_tile(pixels: NDArray[np.uint8]) -> Image.Image:
    """Crops the middle square of an image and resizes it to a tile. Pixels of small images stay sharp squares."""
    side = min(pixels.shape[:2])
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    square = Image.fromarray(np.ascontiguousarray(pixels[top : top + side, left : left + side])).convert("RGB")
    if side <= TILE // 2:
        whole = -(-TILE // side) * side  # first to a whole multiple, so that edges stay even
        square = square.resize((whole, whole), Image.Resampling.NEAREST)
        square = square if whole == TILE else square.resize((TILE, TILE), Image.Resampling.BOX)
    else:
        square = square.resize((TILE, TILE), Image.Resampling.LANCZOS)
    return draw_edge(square)


def draw_edge(square: Image.Image) -> Image.Image:
    """Darkens the edge of an image a little, so that a white one stands out from the paper."""
    dark = square.point([value * 9 // 10 for value in range(256)] * 3)
    inner = Image.new("L", (TILE, TILE), 255)
    ImageDraw.Draw(inner).rounded_rectangle((1, 1, TILE - 2, TILE - 2), CORNER - 1, 0)
    square.paste(dark, (0, 0), inner)
    return square


@lru_cache(maxsize=1)
def draw_broken_tile() -> Image.Image:
    """The tile for an unreadable image: a pane with a crack."""
    large = Image.new("RGB", (4 * TILE, 4 * TILE), BROKEN)
    draw = ImageDraw.Draw(large)
    down, across = (0.30, 0.0, 0.46, 0.40, 0.38, 0.58, 0.62, 1.0), ((0.46, 0.40, 1.0, 0.24), (0.38, 0.58, 0.0, 0.70))
    for crack in (down, *across):
        draw.line([4 * TILE * part for part in crack], CRACK, 5)
    square = draw_edge(large.resize((TILE, TILE), Image.Resampling.LANCZOS))
    words, width, middle = ImageDraw.Draw(square), load_font(12).getlength("unreadable"), TILE / 2
    words.rounded_rectangle((middle - width / 2 - 5, TILE - 27, middle + width / 2 + 5, TILE - 9), 4, BROKEN)
    words.text((middle, TILE - 18), "unreadable", CRACK, load_font(12), anchor="mm")
    return square


@lru_cache(maxsize=8)
def round_corners(size: tuple[int, int] = (TILE, TILE)) -> Image.Image:
    """Slightly rounded."""
    width, height = size
    large = Image.new("L", (4 * width, 4 * height), 0)
    ImageDraw.Draw(large).rounded_rectangle((0, 0, 4 * width - 1, 4 * height - 1), 4 * CORNER, 255)
    return large.resize(size, Image.Resampling.BOX)


def pick_colour(at: int) -> Bytes:
    """The colour of a class by its index; after all hues, they repeat a little lighter or darker."""
    hue, light, saturation = GLASS[at % len(GLASS)]
    light += 0.06 * ((at // len(GLASS)) % 3 - 1) if at >= len(GLASS) else 0
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, light, saturation))
    return red, green, blue
