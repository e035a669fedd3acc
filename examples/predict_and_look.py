"""What does an image show, and where does the network look? The bundled model on a drawing of a ship.

    python examples/predict_and_look.py

Prints the most probable classes and writes looked.png: on the left the image as the network sees it (32x32 px), on the
right the image lit by attention rollout (Figure 6 of the paper).
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
    for prediction in predictor(SHIP, topk=3).top:
        print(f"{prediction.probability:6.1%}  {prediction.label}")

    pixels = predictor.prepare(SHIP)  # uint8 [3, 32, 32]: resized as the weights require
    images = predictor.normalise(pixels[None])
    with torch.inference_mode():
        seen = inspection.rollout(predictor.network, images)[0]  # [8, 8], one number per patch

    image = Image.open(SHIP).convert("RGB")
    small = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize(image.size, Image.Resampling.NEAREST)
    lit = Image.fromarray(inspection.overlay(np.asarray(image), seen))
    both = Image.new("RGB", (2 * image.width, image.height))
    both.paste(small, (0, 0))
    both.paste(lit, (image.width, 0))
    both.save("looked.png")
    row, column = divmod(int(seen.argmax()), seen.shape[1])
    print(
        f"looked.png: the brightest patch is in row {row + 1}, column {column + 1} of {seen.shape[0]}x{seen.shape[1]}"
    )


if __name__ == "__main__":
    main()
