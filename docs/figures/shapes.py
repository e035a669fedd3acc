"""Draws shapes.webp, the contact sheet of the rendered shapes:  python docs/figures/shapes.py"""

from pathlib import Path

from PIL import Image

from vitrail.data.collection import open_collection
from vitrail.data.tools.overview import make_sheet


def main() -> None:
    sheet = make_sheet(open_collection("shapes"), "train")
    small = sheet.resize((sheet.width * 5 // 7, sheet.height * 5 // 7), Image.Resampling.LANCZOS)
    small.save(Path(__file__).with_suffix(".webp"), quality=90, method=6)


if __name__ == "__main__":
    main()
