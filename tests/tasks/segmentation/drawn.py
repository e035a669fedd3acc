"""A folder of drawn images with masks: discs and bars that differ in colour, 16 rows and 20 columns."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ground", "disc", "bar")
SIZE = (16, 20)
COUNTS = {"train": 24, "test": 8}


def draw_folder(folder: Path) -> Path:
    for split, count in COUNTS.items():
        for part in ("images", "masks"):
            (folder / split / part).mkdir(parents=True)
        for at in range(count):
            rng = np.random.default_rng([at, split == "test"])
            row, column = rng.integers(0, 8, 2)
            mask = np.zeros(SIZE, np.uint8)
            mask[row : row + 6, column : column + 8] = 1 + at % 2
            pixels = rng.integers(0, 60, (*SIZE, 3), dtype=np.uint8)
            pixels[mask == 1, 0] += 180
            pixels[mask == 2, 2] += 180
            mask[[0, -1]] = 255
            Image.fromarray(pixels).save(folder / split / "images" / f"{at:02}.png")
            Image.fromarray(mask).save(folder / split / "masks" / f"{at:02}.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    return folder
