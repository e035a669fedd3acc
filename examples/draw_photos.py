"""Draws a small folder of images to experiment with: `photos/train` and `photos/test`, one subfolder per class.

    python examples/draw_photos.py

The classes are eight colours. Each image shows a star, a ring, an arrow or another shape in one colour, of any size,
anywhere in the image. They are the same every time. To use your own images, replace these: only the layout matters.
"""

from pathlib import Path

import vitrail

COUNTS = {"train": 120, "test": 80}


def main() -> None:
    shapes = vitrail.open_collection("shapes/colour")  # drawn on request; nothing is downloaded
    for name, count in COUNTS.items():
        split = shapes.split(name)
        for at in range(count):
            folder = Path("photos", name, shapes.classes[split.labels[at][0]])
            folder.mkdir(parents=True, exist_ok=True)
            split.open_image(at).rgb().save(folder / f"{at}.png")
    print(f"photos: {COUNTS['train']} images to learn from, {COUNTS['test']} to test, {len(shapes.classes)} classes")


if __name__ == "__main__":
    main()
