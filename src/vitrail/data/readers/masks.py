"""Images in folders with a mask each: a PNG whose values are class indices (grey, palette, 1 or 16 bits), 255 ignored.

Where they lie is found in `mask_folders`, which belongs to which in `mask_pairs`. Of every mask the first bytes are
read; all of it only where nothing says how many classes there are.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ImageDataset, StringArray, hash_parts
from vitrail.data.decode.image import read_mask
from vitrail.data.readers.folder import Files, below, find_splits, look, read_file, size_of, split_name
from vitrail.data.readers.mask_folders import (
    LAYOUTS,
    SplitFolders,
    Unpaired,
    count,
    find_masks,
    find_masks_in_splits,
    pair,
    separate,
    why_no_mask,
)
from vitrail.data.readers.shards import read_names

KIND: Final = "images and masks"
NAMES: Final = ("classes.txt", "labels.txt", "classes.json")
IGNORED: Final = 255
READERS: Final = 8  # files read at once
BLOCK: Final = 4096  # files that wait to be read
KEPT: Final = 1000  # masks from which on what was found in them is kept
SAMPLE: Final = 32  # masks, at most, that are looked at where the classes have names
BLACK_AND_WHITE: Final = "the masks hold no value but 0 and 255, and 255 is ignored; store the classes as 0, 1, 2, ..."

T = TypeVar("T")


class MaskedFiles(Files):
    """Files with a mask each; the names of both are relative to `root`."""

    def __init__(self, root: str, names: Iterable[str], masks: Iterable[str]) -> None:
        super().__init__(root, names)
        self.masks = StringArray(masks)

    def mask_path(self, index: int) -> str:
        return os.path.join(self.root, self.masks[index])

    def mask(self, index: int) -> bytes:
        return read_file(self.mask_path(index))

    @cached_property
    def fingerprint(self) -> str:
        """Another when masks change in size, too."""
        sizes = np.fromiter((size_of(self.mask_path(i)) for i in range(len(self))), np.int64, len(self))
        return hash_parts("masks", [super().fingerprint], [sizes])


def read(path: Path) -> dict[str, ImageDataset]:
    """The splits of a folder that is said to hold images and masks, in any of the layouts."""
    places = find_masks(path, sure=True)
    if places is None:
        folders = look(str(path)).folders
        splits = {split: name for name, split in (find_splits(path, folders) or {}).items() if split}
        places = find_masks_in_splits(path, splits) if splits else None
        places = (
            places
            or {split: SplitFolders(name, name) for split, name in splits.items()}
            or {"train": SplitFolders("", "")}
        )
    return read_places(path, places)


def read_places(path: Path, places: Mapping[str, SplitFolders]) -> dict[str, ImageDataset]:
    """The splits, all with the same classes of pixels."""
    adjacent = all(place.masks == place.images for place in places.values() if place.masks is not None)
    other = f"flat:{path} reads all files as images" if adjacent else f"classes:{path} reads the folders as classes"
    try:
        sources = {split: read_place(path, place) for split, place in places.items()}
    except Unpaired as error:
        raise Unpaired(f"{error} ({other})") from None
    masked = [source for source in sources.values() if isinstance(source, MaskedFiles)]
    paths = [source.mask_path(index) for source in masked for index in range(len(source))]
    refuse_other_files(paths, other)
    classes, note = class_names(path, paths, other)
    for source in masked:
        source.pixel_classes, source.note = classes, note
    return dict(sources)


def read_place(path: Path, place: SplitFolders) -> Files:
    """One split; its masks, where it has any, still without the names of their classes."""
    pictures, others = below(str(path / place.images), "")
    if place.masks is None:
        source = Files(str(path), inside(place.images, pictures))
        source.leave_out(others)
        return source
    if place.masks == place.images:
        images, masks = separate(pictures)
        if not masks:
            raise DataError(f"masks:{path / place.images}: no masks here; they are given like this: {LAYOUTS}")
    else:
        images, (masks, more) = pictures, below(str(path / place.masks), "")
        others += more
    matched = pair(images, masks, str(path / place.images), str(path / place.masks))
    source = MaskedFiles(str(path), inside(place.images, images), inside(place.masks, matched))
    source.leave_out(others)
    return source


def inside(folder: str, names: Iterable[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names] if folder else list(names)


def refuse_other_files(paths: Sequence[str], other: str) -> None:
    """Refuses masks that are no PNG of class indices, by their first bytes, with the other way to read the set. A
    damaged file is found when it is read."""
    wrong = [(file, reason) for file, reason in zip(paths, each(reason_against, paths), strict=True) if reason]
    if wrong:
        file, reason = wrong[0]
        verb = "is" if len(wrong) == 1 else "are"
        raise DataError(f"{file} {reason} ({len(wrong):,} of {count(paths, 'mask')} {verb} like this; {other})")


def reason_against(file: str) -> str:
    try:
        return why_no_mask(file)
    except (BadImage, OSError):
        return ""


def class_names(path: Path, paths: Sequence[str], other: str) -> tuple[tuple[str, ...], str]:
    """The names of the class indices from a file in the folder of the set, or from the indices themselves; and what is
    worth a note."""
    folders = [path, path.parent] if split_name(path.name) else [path]
    found = next((file for folder in folders for name in NAMES if (file := folder / name).is_file()), None)
    if found is not None:
        names = read_names(found)
        if not 0 < len(names) <= IGNORED:
            raise DataError(
                f"{found} names {len(names):,} classes; masks have between 1 and {IGNORED}, one name a line"
            )
        top, ignored = survey(paths[:: -(-len(paths) // SAMPLE)])
        return names, BLACK_AND_WHITE if len(names) > 1 and top == 0 and ignored else ""
    top, ignored = survey_once(paths)
    if top is None:
        raise DataError(f"{paths[0]}: none of {count(paths, 'mask')} can be read as class indices")
    if top < 1:
        why = BLACK_AND_WHITE if ignored else "the masks hold no class but 0; store the others as 1, 2, ..."
        raise DataError(f"{paths[0]}: {why}, or name the classes in {path / NAMES[0]}, one per line")
    return tuple(f"class {index}" for index in range(top + 1)), (
        f'"class 0" to "class {top}" are the indices found in the masks; name them in {path / NAMES[0]}, one per line '
        f"({other})"
    )


def survey_once(paths: Sequence[str]) -> tuple[int | None, bool]:
    """The same as `survey`; of many files the answer is kept in the cache until one of them changes."""
    if len(paths) < KEPT:
        return survey(paths)
    times = np.fromiter((changed(path) for path in paths), np.int64, len(paths))
    sizes = np.fromiter(map(size_of, paths), np.int64, len(paths))
    place = cache_folder("masks") / f"{hash_parts('indices', map(os.path.abspath, paths), [sizes, times])[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        top, ignored = json.loads(place.read_text())
        return top, ignored
    found = survey(paths)
    with suppress(OSError):  # the cache may be read-only
        place.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(place) as file:
            file.write(json.dumps(found).encode())
    return found


def changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def survey(paths: Sequence[str]) -> tuple[int | None, bool]:
    """The highest class index in masks, 0 where all is ignored and none where none can be read; and whether any pixel
    is ignored."""
    seen = [found for found in each(highest_index, paths) if found is not None]
    return max((top for top, _ in seen), default=None), any(ignored for _, ignored in seen)


def highest_index(file: str) -> tuple[int, bool] | None:
    try:
        values = read_mask(read_file(file))
    except (BadImage, OSError):
        return None
    ignored = values == IGNORED
    return int(values[~ignored].max(initial=0)), bool(ignored.any())


def each(ask: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """An answer for each file, some files at once."""
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(paths), BLOCK):
            yield from pool.map(ask, paths[start : start + BLOCK])
