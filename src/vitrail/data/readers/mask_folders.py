"""Where the images of a folder and their masks lie, by split.

    train/images  train/masks  val/images ...    a folder of images and one of masks in each split
    images/train  masks/train  images/val ...    the same, the other way round
    images  masks                                no splits
    a.jpg  a.png    or    a.jpg  a_mask.png      next to each other, in one folder or in one per split

Whether folders with such names are images with masks or classes is decided by names and by what lies in them. One file
per image that is not a mask at all is left to the readers of class folders.

Which mask belongs to which image, by their names, and whether it holds class indices, by its first bytes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vitrail.core.errors import BadImage, DataError
from vitrail.data.decode.headers import detect_format
from vitrail.data.readers.folder import below, brief, look, read_file, split_in_name, split_name

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
    """Whether a file may hold class indices; none where it cannot be read, or is not an image at all."""
    try:
        return not why_no_mask(path)
    except (BadImage, OSError):
        return None


def why_no_mask(path: Path | str) -> str:
    """What a file is that is no PNG of class indices, by its first bytes; nothing where it is one. BadImage where it
    is not an image, OSError where it cannot be read."""
    header = read_file(str(path), HEADER)
    kind = detect_format(header)
    if kind != "PNG":
        return f"is a {kind} file, but a mask is a PNG of class indices; save it again as PNG from where it came from"
    colours = IN_COLOUR.get(header[COLOUR_TYPE]) if len(header) == HEADER else None
    if colours:
        return (
            f"is a PNG in colour ({colours}), but a mask holds one class index per pixel; save it as a grey or palette "
            "PNG of indices"
        )
    return ""


IMAGES: Final = ("images", "image", "imgs", "img")
MASKS: Final = ("masks", "mask", "annotations", "annotation", "labels", "label", "segmentation", "segmentations")
LAYOUTS: Final = (
    "images/a.jpg with masks/a.png (also inside train, val and test, or around them), or a.jpg with a_mask.png in one "
    "folder; a mask is a PNG of class indices"
)


@dataclass(frozen=True, slots=True)
class SplitFolders:
    """Folders of one split, relative to the folder of the set. Where both are the same, masks lie next to images."""

    images: str
    masks: str | None  # none where the split has no masks


def find_masks(path: Path, *, sure: bool = False) -> dict[str, SplitFolders] | None:
    """The folders of images and masks in a folder without splits of its own, by split; none where there are no such
    folders. `sure` is whoever said that these are masks: then other folders are left out."""
    folders = look(str(path)).folders
    names = find_pair(path, folders)
    if names is None:
        return None
    images, masks = names
    others = [name for name in folders if name not in names and has_images(path / name)]
    if others and not sure:
        if not is_likely(path, images, masks):
            return None
        raise DataError(
            f"{path} holds {images} and {masks} and {brief(others)}; write masks:{path} if they are images and "
            f"their masks, or classes:{path} if all of them are classes"
        )
    return inner_splits(path, images, masks) or {"train": SplitFolders(images, masks)}


def find_masks_in_splits(path: Path, splits: Mapping[str, str]) -> dict[str, SplitFolders] | None:
    """The same for folders that are splits, each with its own folders of images and masks or with masks next to the
    images; `splits` are the folders by split. A split without masks may stand next to others."""
    pairs = {split: find_pair(path / name, look(str(path / name)).folders) for split, name in splits.items()}
    if not any(pairs.values()):
        return find_adjacent(path, splits)
    places: dict[str, SplitFolders] = {}
    for split, name in splits.items():
        names = pairs[split]
        if names is not None:
            places[split] = SplitFolders(f"{name}/{names[0]}", f"{name}/{names[1]}")
            continue
        inside = look(str(path / name)).folders
        if any(folder.lower() not in IMAGES for folder in inside) or len(inside) > 1:
            known, (images, masks) = next((splits[split], names) for split, names in pairs.items() if names)
            raise DataError(
                f"{path / name} holds {brief(inside)}, but no images and masks as {path / known} does; put images into "
                f"{path / name / images} and masks into {path / name / masks}, or images alone where there are no masks"
            )
        masks = name if adjacent(path, name) else None
        places[split] = SplitFolders(f"{name}/{inside[0]}" if inside else name, masks)
    return places


def find_adjacent(path: Path, splits: Mapping[str, str]) -> dict[str, SplitFolders] | None:
    """Splits that have masks next to the images: each image exactly one, or no file of a split looks like a mask."""
    states = {split: adjacent(path, name) for split, name in splits.items()}
    if True not in states.values() or None in states.values():
        return None
    return {split: SplitFolders(name, name if states[split] else None) for split, name in splits.items()}


def adjacent(path: Path, inside: str = "") -> bool | None:
    """Whether every image of a flat folder has exactly one mask next to it; none where only some of them do."""
    contents = look(str(path / inside))
    if contents.folders:
        return None
    images, masks = separate(contents.pictures)
    if not masks:
        return False
    try:
        pair(images, masks, str(path / inside), str(path / inside))
    except Unpaired:
        return None
    plain = is_marked(masks[0]) or all(is_index_png(path / inside / name) is not False for name in masks)
    return True if plain else None  # a.jpg and a.png may be one image in two formats


def note_unpaired(path: Path, inside: str = "") -> str:
    """A note on a folder in which some images have a mask next to them and others have none."""
    pictures = look(str(path / inside)).pictures
    images, masks = separate(pictures)
    owners = {stem(name) for name in images}
    matched = [name for name in masks if is_marked(name) and unmark(stem(name)) in owners]
    if not matched:
        return ""
    return (
        f"{len(matched):,} of {len(pictures):,} files look like masks ({brief(matched)}) but are read as images, "
        f"because not every image has exactly one; masks:{path} says which"
    )


def find_pair(path: Path, folders: Sequence[str]) -> tuple[str, str] | None:
    """The one folder called like images and the one called like masks, both with image files in them."""
    images = [name for name in folders if name.lower() in IMAGES and has_images(path / name)]
    masks = [name for name in folders if name.lower() in MASKS and has_images(path / name)] if images else []
    if len(masks) > 1 and images:
        raise DataError(
            f"{path} holds {brief(masks)} next to {images[0]}: which of them are the masks? Keep one of them here, or "
            f"write classes:{path} if they are classes"
        )
    return (images[0], masks[0]) if len(images) == 1 and masks else None


def has_images(path: Path) -> bool:
    return bool(look(str(path)).pictures) or bool(below(str(path), "")[0])


def is_likely(path: Path, images: str, masks: str) -> bool:
    """Whether any file in a folder of images has a PNG of class indices of the same name in one of masks."""
    names = {stem(name) for name in below(str(path / images), "")[0]}
    return any(stem(name) in names and is_index_png(path / masks / name) for name in below(str(path / masks), "")[0])


def inner_splits(path: Path, images: str, masks: str) -> dict[str, SplitFolders] | None:
    """The splits inside a folder of images and inside one of masks; none where there are none."""
    inside = split_folders(path / images)
    if inside is None:
        return None
    others = split_folders(path / masks) or {}
    if strange := [folder for split, folder in others.items() if split not in inside]:
        raise DataError(f"{path / masks / strange[0]}: masks of a split that {path / images} lacks; add its images")
    if not others:
        raise DataError(
            f"{path / images} holds splits ({brief(list(inside.values()))}), {path / masks} has none; make the same "
            "folders there"
        )
    return {
        split: SplitFolders(f"{images}/{folder}", f"{masks}/{others[split]}" if split in others else None)
        for split, folder in inside.items()
    }


def split_folders(path: Path) -> dict[str, str] | None:
    """The folders of a folder by split, where all of them are splits."""
    contents = look(str(path))
    splits = {name: split_in_name(name) for name in contents.folders}
    if not splits or contents.pictures or not all(splits.values()):
        if any(split_name(name) for name in splits):
            others = [name for name, split in splits.items() if not split] or list(contents.pictures)
            raise DataError(
                f"{path} holds splits ({brief([name for name in splits if split_name(name)])}) and {brief(others)}; "
                "move the others away, or into a split"
            )
        return None
    if len(set(splits.values())) < len(splits):
        raise DataError(f"{path} holds {', '.join(splits)}: two names for one split; keep one of them")
    return {split: name for name, split in splits.items() if split}
