"""Text on an image. Pillow's own letters, so that a sheet looks the same everywhere; they are the plain Latin ones, so
a text with others is set in a font of the system that has them, and without one in the nearest plain letters.

Which colour of text can be read on which ground, in the light and the dark look of a page (WCAG 2, 1.4.3).
"""

import re
import unicodedata
from functools import lru_cache
from typing import Any, Final, Literal

from PIL import ImageFont

from vitrail.report.page import template

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Tried in this order, by the names that Linux, macOS and Windows know them by.
OTHERS: Final = (
    *("NotoSans-Regular.ttf", "DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "segoeui.ttf"),
    *("NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc", "PingFang.ttc", "msyh.ttc", "Arial Unicode.ttf"),
)
ABSENT: Final = "\U0010fffe"  # a sign that is in no font, so it looks like all that are not


@lru_cache(maxsize=64)
def opened(name: str, size: int) -> Font | None:
    try:
        return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
    except OSError:
        return None


@lru_cache(maxsize=4096)
def has(name: str, sign: str) -> bool:
    """Whether a font can draw a sign."""
    tried: Any = opened(name, 15)  # what getmask gives has no annotation that says that it is bytes
    return tried is not None and (sign.isspace() or bytes(tried.getmask(sign)) != bytes(tried.getmask(ABSENT)))


def named(text: str) -> str | None:
    """The first font that has every sign of a text; the empty name is Pillow's own."""
    return next((name for name in ("", *OTHERS) if all(has(name, sign) for sign in set(text))), None)


def font(size: int, text: str = "") -> Font:
    """What to set a text in."""
    found = opened(named(text) or "", size)
    assert found is not None  # Pillow's own is always there
    return found


def legible(text: str) -> str:
    """A text in one line of which every sign can be drawn here: as it is, else without accents, else with gaps."""
    line = " ".join("".join(sign if sign.isprintable() else "?" for sign in text).split())
    if named(line) is not None:
        return line
    plain = "".join(sign for sign in unicodedata.normalize("NFKD", line) if not unicodedata.combining(sign))
    if named(plain) is not None:
        return plain
    best = max(("", *OTHERS), key=lambda name: sum(has(name, sign) for sign in line))
    return "".join(sign if has(best, sign) else "?" for sign in line)


def length(text: str, size: int) -> float:
    """In pixels, in the font that it would be set in."""
    return font(size, text).getlength(text)


def fitted(text: str, size: int, room: float) -> str:
    """A legible text, cut with dots where it is longer than its room."""
    text = legible(text)
    if length(text, size) <= room:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(text[:middle] + "…", size) <= room else (low, middle - 1)
    return text[:low].rstrip() + "…"


Scheme = Literal["light", "dark"]
Colour = tuple[float, float, float]  # red, green, blue, from 0 to 1

BLACK: Final[Colour] = (0.0, 0.0, 0.0)
WHITE: Final[Colour] = (1.0, 1.0, 1.0)


@lru_cache(maxsize=2)
def palette(scheme: Scheme) -> dict[str, Colour]:
    """The colours by name, as the style of every page has them."""
    light, _, rest = template("page.css").partition("@media (prefers-color-scheme: dark)")
    text = light if scheme == "light" else rest.partition("}")[0]
    return {name: colour(value) for name, value in re.findall(r"--(\w+): (#[0-9a-f]{6})", text)}


def colour(text: str) -> Colour:
    """ "#ff8000" as numbers."""
    red, green, blue = (int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def blend(over: Colour, under: Colour, opacity: float) -> Colour:
    """What is seen where a colour lies over another."""
    red, green, blue = (opacity * a + (1 - opacity) * b for a, b in zip(over, under, strict=True))
    return red, green, blue


def luminance(of: Colour) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in of)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """From 1 to 21; small text needs 4.5."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def reads_white(ground: Colour) -> bool:
    """Whether white text stands out more than black; the better of the two has a contrast of 4.58 on any ground."""
    return contrast(WHITE, ground) > contrast(BLACK, ground)
