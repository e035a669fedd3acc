"""Draws segmentation-scenes.webp: held-out scenes, their segments, and those that a network finds:

python docs/figures/scenes.py RUN      # of `vitrail pretrain scenes-panoptic --out RUN`
"""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.cli.train.demo import draw_comparison
from vitrail.report.image_grid import HEADER, MARGIN, draw_grid

SCENES = (4, 7, 11, 16)
WIDTH = 1000


def main() -> None:
    predictor = vitrail.Predictor(sys.argv[1])
    source = vitrail.open_collection("scenes").split("test")
    columns = [draw_comparison(source, index, predictor) for index in SCENES]
    grid = draw_grid(("",) * len(SCENES), [*zip(*columns, strict=True)])
    grid = grid.crop((MARGIN, MARGIN + HEADER, grid.width - MARGIN, grid.height - MARGIN))
    grid = grid.resize((WIDTH, grid.height * WIDTH // grid.width), Image.Resampling.LANCZOS)
    grid.save(Path(__file__).with_name("segmentation-scenes.webp"), quality=88, method=6)


if __name__ == "__main__":
    main()
