"""Draws the sample image that ships with the package: a rose window, lit from behind.

    python docs/figures/window.py

Everything is geometry and one seeded generator, so the same Pillow gives the same image again.
"""

import colorsys
import math
import random
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFilter

SIZE, OVERSAMPLE = 512, 4
FULL = SIZE * OVERSAMPLE
RADIUS = 0.468 * FULL  # of the glazed circle; one unit in all lengths below
TARGET = Path(__file__).parents[2] / "src" / "vitrail" / "assets" / "window.png"

Point = tuple[float, float]
Outline = list[Point]
Colour = tuple[float, float, float]  # hue, saturation, value

# Pot-metal glass.
COBALT, SKY = (0.622, 0.93, 0.64), (0.572, 0.84, 0.80)
RUBY, ROSE = (0.985, 0.92, 0.80), (0.955, 0.62, 0.92)
GOLD, AMBER = (0.125, 0.80, 0.98), (0.075, 0.88, 0.95)
EMERALD, LEAF = (0.405, 0.88, 0.58), (0.300, 0.72, 0.70)
VIOLET, PEARL = (0.760, 0.70, 0.66), (0.140, 0.22, 0.99)


def polar(radius: float, turn: float) -> Point:
    """A point by its distance and its turn, clockwise from the top, in full turns."""
    return radius * math.sin(math.tau * turn), -radius * math.cos(math.tau * turn)


def arc(radius: float, start: float, stop: float, *, steps: int = 24) -> Outline:
    return [polar(radius, start + (stop - start) * i / steps) for i in range(steps + 1)]


def sector(inner: float, outer: float, start: float, stop: float) -> Outline:
    return arc(outer, start, stop) + arc(inner, stop, start)


def moved(outline: Outline, centre: Point) -> Outline:
    return [(x + centre[0], y + centre[1]) for x, y in outline]


def circle(centre: Point, radius: float) -> Outline:
    return moved(arc(radius, 0, 1, steps=72), centre)


def leaf(turn: float, inner: float, outer: float, half: float) -> Outline:
    """A petal on the radius at `turn`: narrow at the foot, widest past the middle, pointed at the tip."""
    sine, cosine = math.sin(math.tau * turn), math.cos(math.tau * turn)
    right: Outline = []
    for i in range(33):
        t = i / 32
        right.append((half * math.sin(math.pi * t**1.35) ** 0.85 if 0 < i < 32 else 0.0, inner + (outer - inner) * t))
    side = right + [(-x, y) for x, y in reversed(right)]
    return [(x * cosine + y * sine, x * sine - y * cosine) for x, y in side]


def foil(centre: Point, radius: float, lobes: int, turn: float) -> Outline:
    """A rosette of round lobes, as stonemasons cut it."""
    points: Outline = []
    for i in range(180):
        a = i / 180
        r = radius * (0.62 + 0.38 * abs(math.cos(math.pi * lobes * a)) ** 0.62)
        points.append(polar(r, turn + a))
    return moved(points, centre)


class Window:
    """Glass and lead, painted in order: a later piece hides what lies beneath it, lead lines included."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.glass = Image.new("RGB", (FULL, FULL))
        self.lead = Image.new("L", (FULL, FULL), 0)
        self.glazed = Image.new("L", (FULL, FULL), 0)
        self._glass, self._lead, self._glazed = map(ImageDraw.Draw, (self.glass, self.lead, self.glazed))

    def piece(self, outline: Iterable[Point], colour: Colour, *, lead: float = 0.011) -> None:
        """Sets one piece of glass; no two panes of a colour come out of the furnace alike."""
        points = [(FULL / 2 + RADIUS * x, FULL / 2 + RADIUS * y) for x, y in outline]
        hue, saturation, value = colour
        hue += self.rng.uniform(-0.012, 0.012)
        value = min(1.0, value * self.rng.uniform(0.80, 1.14))
        saturation = min(1.0, saturation * self.rng.uniform(0.88, 1.08))
        rgb = colorsys.hsv_to_rgb(hue % 1, saturation, value)
        self._glass.polygon(points, fill=tuple(round(255 * c) for c in rgb))
        self._glazed.polygon(points, fill=255)
        self._lead.polygon(points, fill=0)
        width = max(2, round(lead * RADIUS))
        self._lead.line([*points, points[0], points[1]], fill=255, width=width, joint="curve")

    def noise(self, columns: int, rows: int, low: int, high: int) -> Image.Image:
        """Smooth seeded noise between two grey levels."""
        coarse = Image.frombytes("L", (columns, rows), self.rng.randbytes(columns * rows))
        smooth = coarse.resize((FULL, FULL), Image.Resampling.BICUBIC)
        return smooth.point([low + (high - low) * i // 255 for i in range(256)])


def glaze(window: Window) -> None:
    """All pieces of the rose, from the rim inward."""
    window.piece(circle((0, 0), 1.0), COBALT, lead=0.02)
    for i in range(72):  # the rim
        window.piece(sector(0.935, 1.0, i / 72, (i + 1) / 72), (RUBY, COBALT, GOLD)[i % 3], lead=0.008)
    for i in range(24):  # the field behind the medallions, in rays
        at = i / 24
        window.piece(sector(0.73, 0.935, at, at + 1 / 24), (COBALT, SKY)[i % 2])
        window.piece(sector(0.535, 0.73, at, at + 1 / 24), (SKY, COBALT)[i % 2])
    for i in range(12):  # small lights between the medallions
        window.piece(circle(polar(0.873, (i + 0.5) / 12), 0.036), GOLD, lead=0.010)
        window.piece(circle(polar(0.590, (i + 0.5) / 12), 0.026), AMBER, lead=0.010)
    for i in range(12):
        medallion(window, i / 12, *((RUBY, GOLD, EMERALD), (VIOLET, PEARL, RUBY))[i % 2])
    for i in range(48):  # the inner band
        window.piece(sector(0.490, 0.535, i / 48, (i + 1) / 48), (GOLD, RUBY, AMBER, VIOLET)[i % 4], lead=0.008)
    window.piece(circle((0, 0), 0.490), COBALT, lead=0.014)
    for i in range(24):
        window.piece(sector(0.30, 0.490, i / 24, (i + 1) / 24), (SKY, COBALT)[i % 2], lead=0.008)
    for i in range(12):  # back petals, then front petals
        window.piece(leaf((i + 0.5) / 12, 0.10, 0.475, 0.050), (EMERALD, LEAF)[i % 2])
    for i in range(12):
        window.piece(leaf(i / 12, 0.10, 0.484, 0.070), (RUBY, ROSE)[i % 2], lead=0.012)
        window.piece(leaf(i / 12, 0.19, 0.425, 0.034), (GOLD, PEARL)[i % 2], lead=0.009)
    for i in range(12):
        window.piece(sector(0.10, 0.165, i / 12, (i + 1) / 12), (SKY, VIOLET)[i % 2], lead=0.009)
    window.piece(foil((0, 0), 0.115, 6, 0), GOLD, lead=0.012)
    window.piece(foil((0, 0), 0.066, 6, 0.5 / 6), RUBY, lead=0.010)
    window.piece(circle((0, 0), 0.027), PEARL, lead=0.009)


def corners(window: Window) -> None:
    """A small roundel in each corner of the wall."""
    for i in range(4):
        turn = (i + 0.5) / 4
        centre = polar(1.270, turn)
        window.piece(circle(centre, 0.120), COBALT, lead=0.016)
        for k in range(8):
            at = turn + k / 8
            window.piece(moved(sector(0.04, 0.114, at, at + 1 / 8), centre), (COBALT, SKY)[k % 2], lead=0.008)
        window.piece(foil(centre, 0.086, 3, turn), AMBER, lead=0.010)
        window.piece(circle(centre, 0.034), RUBY, lead=0.009)


def medallion(window: Window, turn: float, ring: Colour, petals: Colour, heart: Colour) -> None:
    """One of the twelve roundels: a ring in eight pieces, a four-lobed rosette, a heart."""
    centre = polar(0.735, turn)
    window.piece(circle(centre, 0.158), ring, lead=0.030)
    for i in range(8):
        at = turn + (i + 0.5) / 8
        window.piece(moved(sector(0.05, 0.150, at, at + 1 / 8), centre), ring, lead=0.008)
    window.piece(foil(centre, 0.112, 4, turn), petals, lead=0.011)
    for i in range(4):
        at = turn + (i + 0.5) / 4
        window.piece([centre, moved([polar(0.070, at)], centre)[0]], petals, lead=0.007)
    window.piece(circle(centre, 0.044), heart, lead=0.010)


def light(window: Window) -> Image.Image:
    """Daylight through the glass: brightest above the centre, streaked as blown glass is."""
    glow = Image.radial_gradient("L").resize((FULL * 8 // 5, FULL * 8 // 5), Image.Resampling.BICUBIC)
    left, top = FULL * 3 // 10, FULL * 3 // 10 + FULL // 14
    glow = glow.crop((left, top, left + FULL, top + FULL)).point([255 - 150 * i // 255 for i in range(256)])
    lit = multiplied(window.glass, glow)
    for columns, rows in ((9, 9), (60, 16), (20, 70)):
        lit = multiplied(lit, window.noise(columns, rows, 205, 255))
    return lit.point([min(255, round(255 * (i / 255) ** 0.78 * 1.22)) for i in range(256)] * 3)


def multiplied(picture: Image.Image, grey: Image.Image) -> Image.Image:
    return ImageChops.multiply(picture, Image.merge("RGB", [grey] * 3))


def stone(window: Window) -> Image.Image:
    """The dark wall round the rose, with mouldings that catch the light."""
    wall = Image.new("RGB", (FULL, FULL), (70, 64, 70))
    for cells, dark in ((14, 170), (64, 195)):
        wall = multiplied(wall, window.noise(cells, cells, dark, 255))
    draw = ImageDraw.Draw(wall)
    rounds = [((0.0, 0.0), 1.0, 1.0), *((polar(1.270, (i + 0.5) / 4), 0.120, 0.6) for i in range(4))]
    for (x, y), radius, thickness in rounds:
        for i, shade in enumerate((30, 40, 58, 88, 112, 124, 104, 76, 48, 26)):
            r = RADIUS * (radius + thickness * (0.062 - 0.006 * i))
            cx, cy = FULL / 2 + RADIUS * x, FULL / 2 + RADIUS * y
            draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=(shade, round(shade * 0.95), round(shade * 0.92)))
    return wall


def paint() -> Image.Image:
    window = Window(seed=2010)
    glaze(window)
    corners(window)
    picture = stone(window)
    picture.paste(light(window), mask=window.glazed)
    ridge = ImageChops.offset(window.lead.filter(ImageFilter.GaussianBlur(5)), -3, -3)
    sheen = Image.merge("RGB", [ridge.point([i // 10 for i in range(256)])] * 3)
    lead = ImageChops.add(Image.new("RGB", (FULL, FULL), (10, 9, 13)), sheen)
    picture.paste(lead, mask=window.lead)
    picture = picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    bloom = picture.filter(ImageFilter.GaussianBlur(9)).point([i * i // 1400 for i in range(256)] * 3)
    return ImageChops.screen(picture, bloom)


def main() -> None:
    # A palette without dithering keeps the file small and its pixels the same in every decoder.
    picture = paint().quantize(160, method=Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
    TARGET.parent.mkdir(exist_ok=True)
    picture.save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
