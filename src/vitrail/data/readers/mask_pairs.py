"""Which mask belongs to which image, by their names, and whether it holds class indices, by its first bytes."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from vitrail.core.errors import BadPicture, DataError
from vitrail.data.decode.headers import format_of
from vitrail.data.readers.folder import read_file

MARKS: Final = ("_mask", ".mask")  # a_mask.png, a.mask.png
HEADER: Final = 33  # bytes of a PNG up to the end of its first chunk
COLOUR_TYPE: Final = 25  # where a PNG says what its values are
IN_COLOUR: Final = {2: "RGB", 4: "grey with alpha", 6: "RGBA"}


class Unpaired(DataError):
    """Images and masks of which not every one has exactly one partner."""


def stem(name: str) -> str:
    """a/b.c.png -> a/b.c"""
    return os.path.splitext(name)[0]


def unmark(name: str) -> str:
    """A stem without what says that it is a mask."""
    return next((name.removesuffix(mark) for mark in MARKS if name.endswith(mark)), name)


def is_marked(name: str) -> bool:
    """Whether a file is called like a mask."""
    return stem(name).endswith(MARKS)


def separate(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The images and the masks among the files of one folder: masks are the PNG files that are marked as such or, where
    none is, those with the name of an image of another format."""
    png = [name for name in names if name.lower().endswith(".png")]
    masks = {name for name in png if is_marked(name)}
    if not masks:
        others = {stem(name) for name in set(names).difference(png)}
        masks = {name for name in png if stem(name) in others}
    return [name for name in names if name not in masks], [name for name in names if name in masks]


def pair(images: Sequence[str], masks: Iterable[str], image_folder: str, mask_folder: str) -> list[str]:
    """The mask of each image: the one with its name, or with its name and _mask or .mask. Names are relative to the two
    folders. Unpaired, with the first name and the remedy, where an image or a mask is left over or shared."""
    owners: dict[str, str] = {}
    for name in images:
        if other := owners.get(stem(name)):
            raise Unpaired(
                f"{os.path.join(image_folder, name)} and {os.path.basename(other)} have one mask between them; give "
                "each image, and its mask, a name of its own"
            )
        owners[stem(name)] = name
    found: dict[str, str] = {}
    strange: list[str] = []
    for name in masks:
        key = stem(name) if stem(name) in owners else unmark(stem(name))
        if key not in owners:
            strange.append(name)
        elif other := found.get(key):
            raise Unpaired(
                f"{os.path.join(mask_folder, name)} and {os.path.basename(other)} are two masks for one image, "
                f"{owners[key]}; keep one of them"
            )
        else:
            found[key] = name
    missing = [name for key, name in owners.items() if key not in found]
    if missing:
        expected = f"{stem(missing[0])}{'_mask' if image_folder == mask_folder else ''}.png"
        more = f"; {count(strange, 'mask')} without an image: {strange[0]}" if strange else ""
        raise Unpaired(
            f"{os.path.join(image_folder, missing[0])} has no mask ({len(missing):,} of {count(images, 'image')} "
            f"{'has' if len(missing) == 1 else 'have'} none{more}); add "
            f"{os.path.join(mask_folder, expected)}, or take the image away"
        )
    if strange:
        raise Unpaired(
            f"{os.path.join(mask_folder, strange[0])}: no image has the name of this mask ({count(strange, 'mask')} "
            f"without an image); add the image to {image_folder}, or take the mask away"
        )
    return [found[key] for key in owners]


def count(names: Sequence[str], word: str) -> str:
    return f"{len(names):,} {word}{'' if len(names) == 1 else 's'}"


def is_index_png(path: Path | str) -> bool | None:
    """Whether a file may hold class indices; none where it cannot be read, or is no image at all."""
    try:
        return not why_no_mask(path)
    except (BadPicture, OSError):
        return None


def why_no_mask(path: Path | str) -> str:
    """What a file is that is no PNG of class indices, by its first bytes; nothing where it is one. BadPicture where it
    is no image, OSError where it cannot be read."""
    header = read_file(str(path), HEADER)
    kind = format_of(header)
    if kind != "PNG":
        return f"is a {kind} file, but a mask is a PNG of class indices; save it again as PNG from where it came from"
    colours = IN_COLOUR.get(header[COLOUR_TYPE]) if len(header) == HEADER else None
    if colours:
        return (
            f"is a PNG in colour ({colours}), but a mask holds one class index per pixel; save it as a grey or palette "
            "PNG of indices"
        )
    return ""
