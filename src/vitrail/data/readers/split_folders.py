"""Whether folders are splits or classes, from their names and from what lies in them.

Training Set/cat  Test Set/cat      splits: the names contain train, val or test as a word
cat/1.jpg  train/1.jpg  car/1.jpg   classes: the vehicle among others
A/cat  A/dog  B/cat  B/dog          either: refused with the way to choose
"""

import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Final

from vitrail.core.errors import DataError
from vitrail.data.readers.folder import Contents, look, split_name

WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")  # "trainingSet2" -> training, Set
ENDINGS: Final = ("set", "data", "images", "imgs")  # trainset, testdata
CONTAINERS: Final = {"images", "image", "imgs", "img", "photos", "pictures", "jpg", "jpeg", "png", "jpegimages", "data"}
VEHICLE: Final = "train"  # the one usual word for a split that is also a usual class


def split_in_name(name: str) -> str | None:
    """The split that a folder's name contains as a word: "Training Set", "seg_train", "test-images", "TRAIN 2".
    "train_val" is what one may train on; any other two splits in one name are none."""
    if exact := split_name(name):
        return exact
    if name.lower() == "trainval":
        return "train"
    words = [word.lower() for word in WORD.findall(name)]
    stems = [next((word.removesuffix(end) for end in ENDINGS if word.endswith(end)), word) for word in words]
    found = {split for word, stem in zip(words, stems, strict=True) if (split := split_name(word) or split_name(stem))}
    if found == {"train", "val"}:
        return "train"
    return found.pop() if len(found) == 1 else None


def find_splits(path: Path, folders: Sequence[str]) -> dict[str, str | None] | None:
    """Each folder with its split, or none where they are classes. Folders that belong to no split are left to the
    caller to refuse."""
    splits = {name: split_in_name(name) for name in folders}
    named = [name for name, split in splits.items() if split]
    if not named:
        return None
    distinct = {split for split in splits.values() if split}
    if len(named) == len(folders):
        alone = len(folders) == 1 or all(split_name(name) for name in folders)
        return splits if len(distinct) > 1 or alone else None
    if any(split_name(name) for name in named):
        return None if is_vehicle(path, folders) else splits
    if len(distinct) < 2:
        return None
    inside = [set(look(str(path / name)).folders) for name in named]
    alike = all(inside) and bool(set.intersection(*inside))
    flat = not any(inside) and 2 * len(named) >= len(folders)
    return splits if alike or flat else None


def is_vehicle(path: Path, folders: Sequence[str]) -> bool:
    """Whether a folder called train is a class like the others: three or more folders, each with images in it."""
    if [name.lower() for name in folders if split_name(name)] != [VEHICLE] or len(folders) < 3:
        return False
    return all(contents.pictures and not contents.folders for name in folders if (contents := look(str(path / name))))


def refuse_same_subfolders(path: Path, folders: Sequence[str], as_classes: str) -> None:
    """Refuses to guess which of two levels are the classes: folders that all hold the same subfolders, unless all of
    them hold images as well, or their only subfolder is a usual container such as images/. `as_classes` is what to
    write where the upper level is meant."""
    shared: set[str] | None = None
    direct = True
    for name in folders:
        contents = look(str(path / name))
        if not contents.folders or (shared is not None and shared != set(contents.folders)):
            return
        shared, direct = set(contents.folders), direct and bool(contents.pictures)
    if len(folders) < 2 or not shared or direct or (len(shared) == 1 and next(iter(shared)).lower() in CONTAINERS):
        return
    inner = sorted(shared)
    raise DataError(
        f"{path}: all {len(folders)} folders ({brief(folders)}) hold the same subfolders ({brief(inner)}); "
        f"if {brief(inner)} are the classes, write {path / folders[0]}, or name the folders train, val and test; "
        f"if {brief(folders)} are the classes, write {as_classes}"
    )


def refuse_nested_splits(path: Path, contents: Contents, as_classes: str) -> None:
    """A folder called like a split that itself holds splits is one level too high."""
    inner = {split for name in contents.folders if (split := split_in_name(name))}
    if len(inner) > 1 and all(split_in_name(name) for name in contents.folders):
        raise DataError(
            f"{path} is called like a split and holds splits itself ({brief(contents.folders)}); "
            f"write {path} to read those, or {as_classes} if they are classes"
        )


def unwrap(path: Path, name: str, classes: Set[str]) -> str:
    """The folder inside a split that holds its classes or images: training_set/training_set/cats, train/images/cats.
    A lone folder counts as a wrapper where it repeats the split's name or holds only folders, unless it is one of the
    `classes` that other splits have."""
    inside = name
    while True:
        contents = look(str(path / inside))
        if len(contents.folders) != 1 or contents.pictures or contents.folders[0] in classes:
            return inside
        deeper = f"{inside}/{contents.folders[0]}"
        within = look(str(path / deeper))
        repeated = split_in_name(contents.folders[0]) == split_in_name(name)
        if not (within.folders and not within.pictures) and not (repeated and within.pictures):
            return inside
        inside = deeper


def brief(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
