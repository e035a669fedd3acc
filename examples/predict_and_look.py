"""What is on an image, and where the network looked: the network that comes with vitrail, on a drawn ship.

    python examples/predict_and_look.py

Prints the likeliest classes and writes looked.png: the image as the network sees it (32x32 px), next to it the image
lit by attention rollout (Figure 6 of the paper).
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail import inspection

SHIP = Path(__file__).with_name("ship.png")


def main() -> None:
    predictor = vitrail.predictor("vitrail-cifar10")
    for answer in predictor(SHIP, topk=3).top:
        print(f"{answer.probability:6.1%}  {answer.label}")

    pixels = predictor.prepare(SHIP)  # uint8 [3, 32, 32]: resized as the weights want it
    images = predictor.normalise(pixels[None])
    with torch.inference_mode():
        seen = inspection.rollout(predictor.network, images)[0]  # [8, 8], a number for each patch

    picture = Image.open(SHIP).convert("RGB")
    small = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize(picture.size, Image.Resampling.NEAREST)
    lit = Image.fromarray(inspection.overlay(np.asarray(picture), seen))
    both = Image.new("RGB", (2 * picture.width, picture.height))
    both.paste(small, (0, 0))
    both.paste(lit, (picture.width, 0))
    both.save("looked.png")
    row, column = divmod(int(seen.argmax()), seen.shape[1])
    print(
        f"looked.png: the brightest patch is in row {row + 1}, column {column + 1} of {seen.shape[0]}x{seen.shape[1]}"
    )


if __name__ == "__main__":
    main()
