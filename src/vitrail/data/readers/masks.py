"""Reads folders of images with one mask each: a PNG of class indices (grey or palette, 1 to 16 bits); 255 is ignored.

    train/images  train/masks  val/images ...    one folder of images and one of masks per split
    images/train  masks/train  images/val ...    the same, the other way round
    images  masks                                no splits
    semantic/masks/train  images/train           masks:semantic: the images are shared with other annotations
    a.jpg  a.png    or    a.jpg  a_mask.png      next to each other, in one folder or in one per split

Names and contents decide whether such folders are images with masks, or classes. Masks are matched to images by name.
The first bytes of every mask are read; all masks are decoded only if no file names the classes.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import BadImage, DataError
from vitrail.core.text import join_words, pluralise
from vitrail.data.dataset import ImageDataset, StringArray, hash_parts
from vitrail.data.decode.headers import detect_format
from vitrail.data.decode.image import read_mask
from vitrail.data.readers import folder
from vitrail.data.readers.annotated import refuse_repeated
from vitrail.data.readers.folder import FileDataset, find_split_word, list_below, list_folder, parse_split, read_file

KIND: Final = "images and masks"
FOLDERS: Final = "images/a.jpg with masks/a.png (also inside train, val and test, or around them)"
LAYOUTS: Final = f"{FOLDERS}, or a.jpg with a_mask.png in one folder; a mask is a PNG of class indices"
IMAGE_FOLDERS: Final = ("images", "image", "imgs", "img")
MASK_FOLDERS: Final = tuple(word + end for word in ("mask", "annotation", "label", "segmentation") for end in ("", "s"))
MARKS: Final = ("_mask", ".mask")  # a_mask.png, a.mask.png
HEADER: Final = 33  # bytes of a PNG up to the end of its first chunk
COLOUR_TYPE: Final = 25  # offset of the colour type in a PNG
COLOURS: Final = {2: "RGB", 4: "grey with alpha", 6: "RGBA"}
NAMES: Final = ("classes.txt", "labels.txt", "classes.json")
IGNORED: Final = 255
MANY: Final = 1000  # number of masks from which the indices found in them are cached
SAMPLE: Final = 32  # most masks that are read if the classes have names
BLACK_AND_WHITE: Final = "the masks hold only 0 and 255, and 255 is ignored; store the classes as 0, 1, 2, ..."


class UnpairedMasks(DataError):
    """Images and masks that do not correspond one to one."""


class MaskedFileDataset(FileDataset):
    """Files with one mask each; the names of both are relative to `root`."""

    def __init__(self, root: str, names: Iterable[str], masks: Iterable[str]) -> None:
        super().__init__(root, names)
        self.masks = StringArray(masks)

    def mask_path(self, index: int) -> str:
        return os.path.join(self.root, self.masks[index])

    def mask(self, index: int) -> bytes:
        return read_file(self.mask_path(index))

    @cached_property
    def fingerprint(self) -> str:
        """Covers the sizes of the mask files as well."""
        sizes = np.fromiter((folder.file_size(self.mask_path(i)) for i in range(len(self))), np.int64, len(self))
        return hash_parts("masks", [super().fingerprint], [sizes])


class MaskFolders(NamedTuple):
    """The folders of one split, relative to the folder of the set. If both are the same, masks lie next to images."""

    images: str
    masks: str | None  # None if the split has no masks
    shared: bool = False  # whether the images are shared with other annotations; those without a mask are left out


def stem(name: str) -> str:
    """a/b.c.png -> a/b.c"""
    return os.path.splitext(name)[0]


def remove_mark(name: str) -> str:
    """Removes _mask or .mask from the end of a stem."""
    return next((name.removesuffix(mark) for mark in MARKS if name.endswith(mark)), name)


def separate_masks(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the files of one folder into images and masks. Masks are the PNG files marked as such or, if there are
    none, those with the name of an image of another format."""
    png = [name for name in names if name.lower().endswith(".png")]
    masks = {name for name in png if stem(name).endswith(MARKS)}
    if not masks:
        others = {stem(name) for name in set(names).difference(png)}
        masks = {name for name in png if stem(name) in others}
    return [name for name in names if name not in masks], [name for name in names if name in masks]


def pair_masks(images: Sequence[str], masks: Iterable[str], image_folder: str, mask_folder: str) -> list[str]:
    """Finds the mask of each image: the one with its name, or with its name and _mask or .mask. Names are relative to
    the two folders. UnpairedMasks if an image or a mask is left over or shared."""
    owners, found, strange = dict[str, str](), dict[str, str](), list[str]()
    for name in images:
        if other := owners.get(stem(name)):
            both = f"{os.path.join(image_folder, name)} and {os.path.basename(other)}"
            raise UnpairedMasks(f"{both} share one mask; give every image and its mask a unique name")
        owners[stem(name)] = name
    for name in masks:
        key = stem(name) if stem(name) in owners else remove_mark(stem(name))
        if key not in owners:
            strange.append(name)
        elif other := found.get(key):
            both = f"{os.path.join(mask_folder, name)} and {os.path.basename(other)}"
            raise UnpairedMasks(f"{both} are two masks for one image, {owners[key]}; keep one of them")
        else:
            found[key] = name
    alone = f"{pluralise(len(strange), 'mask')} without an image"
    if missing := [name for key, name in owners.items() if key not in found]:
        expected = os.path.join(mask_folder, f"{stem(missing[0])}{'_mask' if image_folder == mask_folder else ''}.png")
        count = f"{len(missing):,} of {pluralise(len(images), 'image')} {'has' if len(missing) == 1 else 'have'} none"
        what = f"has no mask ({count}{f'; {alone}: {strange[0]}' if strange else ''})"
        raise UnpairedMasks(f"{os.path.join(image_folder, missing[0])} {what}; add {expected}, or remove the image")
    if strange:
        remedy = f"add the image to {image_folder}, or remove the mask"
        raise UnpairedMasks(f"{os.path.join(mask_folder, strange[0])} has no image with its name ({alone}); {remedy}")
    return [found[key] for key in owners]


def explain_not_mask(path: Path | str) -> str | None:
    """Explains, by its first bytes, why a file is not a PNG of class indices; empty if it is one, None if it is
    unreadable or not an image."""
    try:
        header = read_file(str(path), HEADER)
        kind = detect_format(header)
    except (BadImage, OSError):
        return None
    if kind != "PNG":
        return f"is a {kind} file, but a mask is a PNG of class indices; save it again as PNG from the original"
    colours = COLOURS.get(header[COLOUR_TYPE]) if len(header) == HEADER else None
    remedy = "but a mask holds one class index per pixel; save it as a grey or palette PNG of indices"
    return f"is a PNG in colour ({colours}), {remedy}" if colours else ""


def find_masks(path: Path, *, sure: bool = False) -> dict[str, MaskFolders] | None:
    """Finds the folders of images and masks in a folder that is not itself divided into splits, by split; None if there
    are none. With `sure` (the user wrote masks:PATH) other folders are skipped."""
    folders = list_folder(str(path)).folders
    names = find_folder_pair(path, folders)
    if names is None:
        return None
    images, masks = names
    others = [name for name in folders if name not in names and has_images(path / name)]
    if others and not sure:
        stems = {stem(name) for name in list_below(str(path / images), "")[0]}
        candidates = list_below(str(path / masks), "")[0]
        if not any(stem(name) in stems and explain_not_mask(path / masks / name) == "" for name in candidates):
            return None
        ways = f"masks:{path} if they are images and their masks, or classes:{path} if all of them are classes"
        raise DataError(f"{path} holds {images} and {masks} and {join_words(others, limit=3)}; write {ways}")
    return find_inner_splits(path, images, masks) or {"train": MaskFolders(images, masks)}


def find_masks_in_splits(path: Path, splits: Mapping[str, str]) -> dict[str, MaskFolders] | None:
    """Does what `find_masks` does for folders that are splits, each with its own folders of images and masks, or with
    masks next to the images. `splits` are the folders by split. Some splits may lack masks."""
    folders = {split: list_folder(str(path / name)).folders for split, name in splits.items()}
    pairs = {split: find_folder_pair(path / name, folders[split]) for split, name in splits.items()}
    if not any(pairs.values()):
        return find_adjacent(path, splits)
    places: dict[str, MaskFolders] = {}
    for split, name in splits.items():
        if names := pairs[split]:
            places[split] = MaskFolders(f"{name}/{names[0]}", f"{name}/{names[1]}")
            continue
        inside = folders[split]
        if any(folder.lower() not in IMAGE_FOLDERS for folder in inside) or len(inside) > 1:
            known, (images, masks) = next((splits[split], names) for split, names in pairs.items() if names)
            what = f"holds {join_words(inside, limit=3)}, but not images and masks as {path / known}"
            remedy = f"put images into {path / name / images} and masks into {path / name / masks}, or only images"
            raise DataError(f"{path / name} {what}; {remedy}")
        masks = name if has_adjacent_masks(path, name) else None
        places[split] = MaskFolders(f"{name}/{inside[0]}" if inside else name, masks)
    return places


def find_adjacent(path: Path, splits: Mapping[str, str]) -> dict[str, MaskFolders] | None:
    """Finds splits with masks next to the images. A split needs exactly one mask per image, or no masks at all."""
    states = {split: has_adjacent_masks(path, name) for split, name in splits.items()}
    if True not in states.values() or None in states.values():
        return None
    return {split: MaskFolders(name, name if states[split] else None) for split, name in splits.items()}


def has_adjacent_masks(path: Path, inside: str = "") -> bool | None:
    """Whether every image of a flat folder has exactly one mask next to it; None if only some do."""
    contents = list_folder(str(path / inside))
    if contents.folders:
        return None
    images, masks = separate_masks(contents.images)
    if not masks:
        return False
    try:
        pair_masks(images, masks, str(path / inside), str(path / inside))
    except UnpairedMasks:
        return None
    certain = stem(masks[0]).endswith(MARKS) or not any(explain_not_mask(path / inside / name) for name in masks)
    return True if certain else None  # a.jpg and a.png may be one image in two formats


def note_unpaired(path: Path, inside: str = "") -> str:
    """A note on a folder in which only some images have a mask next to them."""
    names = list_folder(str(path / inside)).images
    images, masks = separate_masks(names)
    owners = {stem(name) for name in images}
    matched = [name for name in masks if stem(name).endswith(MARKS) and remove_mark(stem(name)) in owners]
    count = f"{len(matched):,} of {len(names):,} files look like masks ({join_words(matched, limit=3)})"
    reason = f"but are read as images, because not every image has exactly one; masks:{path} lists those"
    return f"{count} {reason}" if matched else ""


def find_folder_pair(path: Path, folders: Sequence[str]) -> tuple[str, str] | None:
    """The folder of images and the folder of masks, by their names, if both contain image files."""
    images = [name for name in folders if name.lower() in IMAGE_FOLDERS and has_images(path / name)]
    masks = [name for name in folders if name.lower() in MASK_FOLDERS and has_images(path / name)] if images else []
    if len(masks) > 1:
        remedy = f"keep only the folder of masks, or write classes:{path} if they are classes"
        raise DataError(f"{path} holds {join_words(masks)} next to {images[0]}; {remedy}")
    return (images[0], masks[0]) if len(images) == 1 and masks else None


def has_images(path: Path) -> bool:
    return bool(list_folder(str(path)).images) or bool(list_below(str(path), "")[0])


def find_inner_splits(path: Path, images: str, masks: str) -> dict[str, MaskFolders] | None:
    """Finds the splits inside a folder of images and inside one of masks; None if there are none."""
    inside = list_split_folders(path / images)
    if inside is None:
        return None
    others = list_split_folders(path / masks) or {}
    if strange := [folder for split, folder in others.items() if split not in inside]:
        raise DataError(f"{path / masks / strange[0]}: masks of a split that {path / images} lacks; add its images")
    if not others:
        splits = join_words(inside.values())
        raise DataError(f"{path / images} holds splits ({splits}), {path / masks} none; make the same folders there")
    mask_folders = {split: f"{masks}/{folder}" for split, folder in others.items()}
    return {split: MaskFolders(f"{images}/{name}", mask_folders.get(split)) for split, name in inside.items()}


def find_shared(path: Path) -> dict[str, MaskFolders] | None:
    """Finds masks whose images are in a folder one or two levels above; None if there are none."""
    folders = list_folder(str(path)).folders
    masks = [name for name in folders if name.lower() in MASK_FOLDERS and has_images(path / name)]
    if len(masks) != 1 or any(name.lower() in IMAGE_FOLDERS for name in folders):
        return None
    for above in path.absolute().parents[:2]:
        for name in [name for name in list_folder(str(above)).folders if name.lower() in IMAGE_FOLDERS]:
            images = os.path.relpath(above / name, path.absolute()).replace(os.sep, "/")
            inner = list_split_folders(path / masks[0])
            others = list_split_folders(above / name) or {}
            if inner is None:
                return {"train": MaskFolders(images, masks[0], shared=True)}
            both = {split: folder for split, folder in inner.items() if split in others}
            return {
                split: MaskFolders(f"{images}/{others[split]}", f"{masks[0]}/{folder}", shared=True)
                for split, folder in both.items()
            } or None
    return None


def list_split_folders(path: Path) -> dict[str, str] | None:
    """The subfolders of a folder by split, if all of them are splits; else None."""
    contents = list_folder(str(path))
    splits = {name: find_split_word(name) for name in contents.folders}
    if not splits or contents.images or not all(splits.values()):
        if known := [name for name in splits if parse_split(name)]:
            others = [name for name, split in splits.items() if not split] or list(contents.images)
            what = f"holds splits ({join_words(known)}) and {join_words(others, limit=3)}"
            raise DataError(f"{path} {what}; move the others away or into a split")
        return None
    if len(set(splits.values())) < len(splits):
        raise DataError(f"{path} holds {', '.join(splits)}: two names for one split; keep one of them")
    return {split: name for name, split in splits.items() if split}


def read(path: Path) -> dict[str, ImageDataset]:
    """Reads the splits of a folder that, as the user says, holds images and masks, in any of the layouts."""
    places = find_masks(path, sure=True) or find_shared(path)
    if places is None:
        folders = list_folder(str(path)).folders
        splits = {split: name for name, split in (folder.find_splits(path, folders) or {}).items() if split}
        places = find_masks_in_splits(path, splits) if splits else {"train": MaskFolders("", "")}
        places = places or {split: MaskFolders(name, name) for split, name in splits.items()}
    return read_places(path, places)


def read_places(path: Path, places: Mapping[str, MaskFolders]) -> dict[str, ImageDataset]:
    """Reads the splits, all with the same pixel classes."""
    adjacent = all(place.masks == place.images for place in places.values() if place.masks is not None)
    other = f"flat:{path} reads all files as images" if adjacent else f"classes:{path} reads the folders as classes"
    try:
        sources = {split: read_split(path, place) for split, place in places.items()}
    except UnpairedMasks as error:
        raise UnpairedMasks(f"{error} ({other})") from None
    masked = [source for source in sources.values() if isinstance(source, MaskedFileDataset)]
    paths = [source.mask_path(index) for source in masked for index in range(len(source))]
    # Only the first bytes are read here; a damaged file is found when it is read.
    reasons = folder.map_threads(explain_not_mask, paths)
    if wrong := [f"{file} {reason}" for file, reason in zip(paths, reasons, strict=True) if reason]:
        raise DataError(f"{wrong[0]} ({len(wrong):,} of {pluralise(len(paths), 'mask')} like this; {other})")
    classes, note = name_pixel_classes(path, paths, other)
    for source in masked:
        source.pixel_classes, source.note = classes, "; ".join(part for part in (source.note, note) if part)
    return dict(sources)


def read_split(path: Path, place: MaskFolders) -> FileDataset:
    """Reads one split, with its masks if it has any. Their classes are named later."""

    def join(inside: str, names: Iterable[str]) -> list[str]:
        return [f"{inside}/{name}" for name in names] if inside else list(names)

    images, others = list_below(str(path / place.images), "")
    if place.masks is None:
        source = FileDataset(str(path), join(place.images, images))
    else:
        if place.masks == place.images:
            images, masks = separate_masks(images)
            if not masks:
                raise DataError(f"masks:{path / place.images}: no masks here; the layout is {LAYOUTS}")
        else:
            masks, more = list_below(str(path / place.masks), "")
            others += more
        total = len(images)
        if place.shared:
            known = {name for mask in masks for name in (stem(mask), remove_mark(stem(mask)))}
            images, others = [name for name in images if stem(name) in known], []
        matched = pair_masks(images, masks, str(path / place.images), str(path / place.masks))
        source = MaskedFileDataset(str(path), join(place.images, images), join(place.masks, matched))
        if total > len(images):
            source.note = f"{pluralise(total - len(images), 'image')} of {path / place.images} without a mask left out"
    source.note_skipped(others)
    return source


def name_pixel_classes(path: Path, paths: Sequence[str], other: str) -> tuple[tuple[str, ...], str]:
    """Names the class indices, from a file in the folder of the set or from the indices themselves. Returns the names
    and a note, which may be empty."""
    folders = [path, path.parent] if parse_split(path.name) else [path]
    found = next((file for folder in folders for name in NAMES if (file := folder / name).is_file()), None)
    if found is not None:
        names = folder.read_names(found)
        if not 0 < len(names) <= IGNORED:
            raise DataError(f"{found} names {len(names):,} classes; masks can have 1 to {IGNORED}, one name per line")
        refuse_repeated(names, str(found))
        top, ignored = survey_indices(paths[:: -(-len(paths) // SAMPLE)])
        return names, BLACK_AND_WHITE if len(names) > 1 and top == 0 and ignored else ""
    top, ignored = survey_indices_once(paths)
    if top is None:
        raise DataError(f"{paths[0]}: none of {pluralise(len(paths), 'mask')} can be read as class indices")
    if top < 1:
        why = BLACK_AND_WHITE if ignored else "the masks have no class other than 0; store the others as 1, 2, ..."
        raise DataError(f"{paths[0]}: {why}, or name the classes in {path / NAMES[0]}, one per line")
    note = f'"class 0" to "class {top}" are the indices in the masks; name them in {path / NAMES[0]}, one per line'
    return tuple(f"class {index}" for index in range(top + 1)), f"{note} ({other})"


def survey_indices_once(paths: Sequence[str]) -> tuple[int | None, bool]:
    """Like `survey_indices`; for many files the result is cached until one of them changes."""
    if len(paths) < MANY:
        return survey_indices(paths)
    times = np.fromiter((os.stat(path).st_mtime_ns if os.path.exists(path) else -1 for path in paths), np.int64)
    sizes = np.fromiter(map(folder.file_size, paths), np.int64, len(paths))
    place = cache_folder("masks") / f"{hash_parts('indices', map(os.path.abspath, paths), [sizes, times])[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        top, ignored = json.loads(place.read_text())
        return top, ignored
    found = survey_indices(paths)
    with suppress(OSError):  # the cache may be read-only
        place.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(place) as file:
            file.write(json.dumps(found).encode())
    return found


def survey_indices(paths: Sequence[str]) -> tuple[int | None, bool]:
    """Finds the highest class index in masks (0 if all pixels are ignored, None if all masks are unreadable), and
    whether any pixel is ignored."""

    def find_highest(file: str) -> tuple[int, bool] | None:
        try:
            values = read_mask(read_file(file))
        except (BadImage, OSError):
            return None
        ignored = values == IGNORED
        return int(values[~ignored].max(initial=0)), bool(ignored.any())

    found = [one for one in folder.map_threads(find_highest, paths) if one is not None]
    return max((top for top, _ in found), default=None), any(ignored for _, ignored in found)
