"""Draws segmentation-pets.webp: test images of Oxford-IIIT Pets, their masks, and those that a network finds:

python docs/figures/pets.py RUN FOLDER      # a run of bench/pets_segmentation.py, and the folder `pets` that it wrote
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import vitrail
from vitrail.report.image_grid import HEADER, MARGIN, draw_grid
from vitrail.tasks.segmentation.mask_drawing import blend_mask

IMAGES = (300, 1010, 1770, 2440, 3105, 3550)
PANE = 240
WIDTH = 1000


def main() -> None:
    predictor: vitrail.Predictor = vitrail.Predictor(sys.argv[1])
    test = Path(sys.argv[2]) / "test"
    columns: list[tuple[Image.Image, ...]] = []
    for path in [sorted((test / "images").iterdir())[index] for index in IMAGES]:
        photo, truth = Image.open(path).convert("RGB"), np.asarray(Image.open(test / "masks" / f"{path.stem}.png"))
        drawn = [photo, draw(photo, truth), draw(photo, predictor(photo).mask)]
        columns.append(tuple(crop(image) for image in drawn))
    grid = draw_grid(("",) * len(columns), [*zip(*columns, strict=True)])
    grid = grid.crop((MARGIN, MARGIN + HEADER, grid.width - MARGIN, grid.height - MARGIN))
    grid = grid.resize((WIDTH, grid.height * WIDTH // grid.width), Image.Resampling.LANCZOS)
    grid.save(Path(__file__).with_name("segmentation-pets.webp"), quality=88, method=6)


def draw(photo: Image.Image, mask: NDArray[np.uint8]) -> Image.Image:
    return blend_mask(mask, photo, ("background", "pet"))


def crop(image: Image.Image) -> Image.Image:
    """The middle square."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((PANE, PANE), Image.Resampling.BICUBIC)


if __name__ == "__main__":
    main()
