"""Draws examples/ship.png, an image of a class that the bundled model knows:  python docs/figures/ship.py"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

TARGET = Path(__file__).parents[2] / "examples" / "ship.png"
WIDTH, HEIGHT, FINER = 480, 360, 2


def shaded(top: tuple[int, int, int], low: tuple[int, int, int], rows: int) -> np.ndarray:
    """From one colour to another, row by row: [rows, 1, 3]."""
    down = np.linspace(0, 1, rows)[:, None, None]
    return np.array(top) * (1 - down) + np.array(low) * down


def ship() -> Image.Image:
    width, height = FINER * WIDTH, FINER * HEIGHT
    horizon = round(0.62 * height)
    scene = np.zeros((height, width, 3))
    scene[:horizon] = shaded((120, 170, 225), (225, 232, 238), horizon)
    scene[horizon:] = shaded((70, 110, 150), (25, 55, 95), height - horizon)
    image = Image.fromarray(scene.astype(np.uint8))
    draw = ImageDraw.Draw(image)

    def at(*points: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x * width, y * height) for x, y in points]

    draw.polygon(at((0.10, 0.56), (0.90, 0.52), (0.83, 0.72), (0.19, 0.72)), (150, 30, 38))  # hull
    draw.polygon(at((0.10, 0.56), (0.90, 0.52), (0.885, 0.57), (0.115, 0.60)), (240, 238, 232))
    draw.rectangle(at((0.26, 0.42), (0.68, 0.575)), (248, 246, 240))  # two decks with their windows
    draw.rectangle(at((0.32, 0.33), (0.58, 0.42)), (236, 233, 226))
    for left, top, count in ((0.29, 0.46, 8), (0.35, 0.36, 5)):
        for x in (left + 0.046 * number for number in range(count)):
            draw.rectangle(at((x, top), (x + 0.02, top + 0.03)), (40, 60, 90))
    draw.polygon(at((0.40, 0.18), (0.49, 0.18), (0.50, 0.33), (0.39, 0.33)), (200, 60, 40))  # funnel
    draw.polygon(at((0.395, 0.18), (0.495, 0.18), (0.495, 0.215), (0.395, 0.215)), (30, 30, 34))
    draw.line(at((0.76, 0.20), (0.76, 0.53)), (60, 60, 64), 4 * FINER)  # mast and stays
    draw.line(at((0.62, 0.42), (0.76, 0.22), (0.88, 0.52)), (90, 90, 94), FINER)
    draw.polygon(at((0.05, 0.74), (0.19, 0.70), (0.83, 0.70), (0.95, 0.74), (0.5, 0.76)), (205, 220, 232))  # foam
    soft = image.filter(ImageFilter.GaussianBlur(0.7 * FINER))
    return soft.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    ship().save(TARGET, optimize=True)
