"""Draws a small folder of images to try things on: `photos/train` and `photos/test`, one subfolder per class.

    python examples/draw_photos.py

The classes are eight colours; what has the colour is a star, a ring, an arrow ... of any size, anywhere. The same
images come out every time. Put your own in place of them: the layout is all that matters.
"""

from pathlib import Path

import vitrail

COUNTS = {"train": 120, "test": 80}


def main() -> None:
    shapes = vitrail.open_collection("shapes/colour")  # drawn when asked for; nothing is downloaded
    for name, count in COUNTS.items():
        split = shapes.split(name)
        for at in range(count):
            folder = Path("photos", name, shapes.classes[split.labels[at][0]])
            folder.mkdir(parents=True, exist_ok=True)
            split.open_image(at).rgb().save(folder / f"{at}.png")
    print(f"photos: {COUNTS['train']} images to learn from, {COUNTS['test']} to test, {len(shapes.classes)} classes")


if __name__ == "__main__":
    main()
