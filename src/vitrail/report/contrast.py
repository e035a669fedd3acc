"""Which colour of text can be read on which ground, in the light and the dark look of a page (WCAG 2, 1.4.3)."""

import re
from functools import lru_cache
from typing import Final, Literal

from vitrail.report.page import template

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
