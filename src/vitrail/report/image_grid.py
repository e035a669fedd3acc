"""Draws images in rows under column names as one picture, for example an image, its ground truth and a prediction."""

from collections.abc import Sequence
from typing import Final

from PIL import Image, ImageDraw

from vitrail.core.errors import ConfigError
from vitrail.report.contact_sheet import load_font, make_legible

MARGIN: Final = 28
GAP: Final = 14
HEADER: Final = 34
LETTERS: Final = 18
PAPER: Final = (255, 255, 255)
INK: Final = (40, 44, 52)


def draw_grid(columns: Sequence[str], rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Draws rows of images of equal size, with a name above each column."""
    if not rows or not columns or any(len(row) != len(columns) for row in rows):
        raise ConfigError(f"{len(columns)} columns need at least one row, and rows with as many images")
    wide, tall = rows[0][0].size
    width = 2 * MARGIN + len(columns) * (wide + GAP) - GAP
    sheet = Image.new("RGB", (width, 2 * MARGIN + HEADER + len(rows) * (tall + GAP) - GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for across, name in enumerate(columns):
        left, text = MARGIN + across * (wide + GAP), make_legible(name)
        draw.text((left, MARGIN), text, INK, font=load_font(LETTERS, text))
        for down, row in enumerate(rows):
            sheet.paste(row[across].convert("RGB"), (left, MARGIN + HEADER + down * (tall + GAP)))
    return sheet
