"""Which reader a path calls for: found by looking at it, and refused with what was found where that is not plain.

Which split a file belongs to, by its name: train-00000.tar, imagenet-val-000.tar, test-00000-of-00005.parquet.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from vitrail.core.errors import DataError, SourceNotFound, unknown_name
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import is_unsupported
from vitrail.data.readers.folder import (
    Contents,
    find_splits,
    look,
    read_classes,
    read_flat,
    refuse_nested_splits,
    refuse_same_subfolders,
    split_in_name,
    split_name,
    unread_files,
    unwrap,
)
from vitrail.data.readers.mask_folders import (
    SplitFolders,
    find_adjacent,
    find_masks,
    find_masks_in_splits,
    find_pair,
    note_unpaired,
)

MANIFESTS: Final = (".csv", ".tsv", ".jsonl")
ARRAYS: Final = (".npz", ".npy")
SAVED: Final = ("dataset_info.json", "dataset_dict.json", "state.json")

READINGS: Final = {
    "classes": "folders are classes",
    "splits": "folders named after train, val or test are splits, other folders are left out",
    "masks": "images with a mask each, a PNG of class indices",
    "flat": "all images below it, without labels",
    "shards": "tar shards",
    "parquet": "Parquet files",
    "saved": "a saved Hugging Face dataset",
    "manifest": "a list of paths and labels",
    "arrays": "arrays",
}

Found = tuple[str, dict[str, ImageDataset]]  # the kind of the source, and its splits


def read_path(path: Path) -> Found:
    """What is at a path, recognised by its suffix or by what lies in it."""
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise SourceNotFound(f"{path} is neither a file nor a folder")
    suffix = path.suffix.lower()
    kind = {".tar": "shards", ".parquet": "parquet", **dict.fromkeys(MANIFESTS, "manifest")}.get(suffix)
    kind = "arrays" if suffix in ARRAYS else kind
    if kind is None:
        raise DataError(
            f"{path}: a file that is a source ends in .tar, .parquet, {', '.join((*MANIFESTS, *ARRAYS))}; "
            f"for images, give the folder they are in"
        )
    return read_as(kind, path)


def read_as(kind: str, path: Path) -> Found:
    """What is at a path, read as the given kind whatever else it might be. Readers are loaded when they are needed."""
    if not path.exists() and not is_pattern(str(path)):
        raise SourceNotFound(f"{path}: no such file or folder")
    match kind:
        case "classes":
            return "class folders", {"train": read_classes(path)}
        case "splits":
            return read_splits(path, chosen_splits(path), sure=True)
        case "flat":
            return "flat folder", {"train": read_flat(path)}
        case "masks":
            from vitrail.data.readers import masks

            return masks.KIND, masks.read(path)
        case "manifest":
            from vitrail.data.readers import manifest

            return "manifest", manifest.read(path)
        case "shards":
            from vitrail.data.readers import shards

            return "tar shards", shards.read(path)
        case "parquet":
            from vitrail.data.readers import parquet

            return "Parquet", parquet.read(path)
        case "saved":
            from vitrail.data.readers import parquet

            return "Hugging Face dataset", parquet.read_saved(path)
        case "arrays":
            from vitrail.data.readers import arrays

            return "arrays", arrays.read(path)
        case other:
            raise unknown_name("reading", other, READINGS)


def read_columns(path: Path, text: str) -> Found:
    """A list or a Parquet file whose columns are chosen: image=COLUMN,label=COLUMN."""
    from vitrail.data.readers.parquet import parse_choice

    choice = parse_choice(str(path), text)
    if not path.is_file():
        raise SourceNotFound(f"{path}: no such file")
    if path.suffix.lower() == ".parquet":
        from vitrail.data.readers import parquet

        return "Parquet", parquet.read(path, image=choice.get("image"), label=choice.get("label"))
    from vitrail.data.readers import manifest

    return "manifest", manifest.read(path, choice)


def is_pattern(text: str) -> bool:
    """Whether a text stands for several tar files: set/train-{00000..00146}.tar, set/*.tar."""
    return text.endswith(".tar") and any(sign in text for sign in "{*?[")


def read_folder(path: Path) -> Found:
    """A folder: of splits, of one kind of file, or of class folders."""
    contents = look(str(path))
    if any(name in SAVED for name in contents.others):
        return read_as("saved", path)
    kind = kind_of(path, contents)
    if kind == "flat":
        found = read_pairs(path, find_adjacent(path, {"train": ""}))
        return found or ("flat folder", {"train": flat_folder(path)})
    if kind != "folders":
        return read_as(kind, path)
    if contents.folders == ("data",) and look(str(path / "data")).with_suffix(".parquet"):
        return read_as("parquet", path)  # as the Hugging Face hub lays it out
    if found := read_pairs(path, find_masks(path)):
        return found
    splits = find_splits(path, contents.folders)
    if splits is not None:
        return read_splits(path, splits)
    refuse_wrapper(path, contents)
    refuse_same_subfolders(path, contents.folders, f"classes:{path}")
    return read_as("classes", path)


def read_pairs(path: Path, places: Mapping[str, SplitFolders] | None) -> Found | None:
    """Images and masks, where folders of such were found."""
    if not places:
        return None
    from vitrail.data.readers import masks

    return masks.KIND, masks.read_places(path, places)


def flat_folder(path: Path, inside: str = "") -> ImageDataset:
    """All images of a folder, with a note where some of them look like masks."""
    source = read_flat(path, inside)
    source.note = note_unpaired(path, inside)
    return source


def kind_of(path: Path, contents: Contents) -> str:
    """The one kind of thing that is in a folder: "folders", "flat", "shards" or "parquet"."""
    found: dict[str, tuple[str, ...]] = {
        "folders": contents.folders,
        "flat": contents.pictures,
        "shards": contents.with_suffix(".tar"),
        "parquet": contents.with_suffix(".parquet"),
    }
    kinds = [kind for kind, names in found.items() if names]
    lists = [name for name in contents.with_suffix(*MANIFESTS) if is_manifest(path / name)]
    if len(kinds) == 1 and not lists:
        return kinds[0]
    words = {"folders": "folder", "flat": "image", "shards": "tar file", "parquet": "Parquet file"}
    said = [counted(found[kind], words[kind]) for kind in kinds] + ([counted(lists, "manifest")] if lists else [])
    unread = [name for name in contents.others if is_unsupported(name)]
    if not kinds and not lists and unread:
        raise DataError(f"{path}: no images that are read, but {unread_files(unread)}")
    if not kinds and not lists:
        other = f" but {counted(contents.others, 'other file')}" if contents.others else ""
        raise DataError(f"{path}: no images here{other}; a folder of class folders or of images is expected")
    ways = [f"{path / name}" for name in lists[:1]]
    ways += [f"{'classes' if kind == 'folders' else kind}:{path}" for kind in kinds]
    ways += [f"masks:{path}"] if find_pair(path, contents.folders) else []
    raise DataError(f"{path} holds {' and '.join(said)}; say which is meant: {', '.join(ways)}")


def counted(names: "tuple[str, ...] | list[str]", word: str) -> str:
    """3 folders (cats, dogs, ...)"""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} {word}{'' if len(names) == 1 else 's'} ({some})"


def is_manifest(path: Path) -> bool:
    """Whether the first line names a column of paths; another table next to the images is none of our business."""
    from vitrail.data.readers.manifest import has_paths

    return has_paths(path)


def refuse_wrapper(path: Path, contents: Contents) -> None:
    """A single folder that only holds folders is more likely one level too high than one class."""
    if len(contents.folders) != 1:
        return
    inner = path / contents.folders[0]
    inside = look(str(inner))
    if not inside.pictures and (inside.folders or inside.with_suffix(".tar", ".parquet")):
        what = counted(inside.folders, "folder") if inside.folders else counted(inside.others, "file")
        raise DataError(
            f"{path} holds one folder, {inner.name}, and that one {what}; write {inner} to go one level down, "
            f"or classes:{path} if {inner.name} is the only class"
        )


def chosen_splits(path: Path) -> dict[str, str | None]:
    """The folders of `splits:PATH`, without those that are named after no split."""
    splits = {name: split for name in look(str(path)).folders if (split := split_in_name(name))}
    if not splits:
        raise DataError(f"splits:{path}: no folder here is named after train, val or test")
    return dict(splits)


def read_splits(path: Path, names: Mapping[str, "str | None"], *, sure: bool = False) -> Found:
    """Folders named after train, val and test, each of class folders, of images or of shards. Where the user is
    `sure` that they are splits, what lies in them is not questioned."""
    strange = [name for name, split in names.items() if split is None]
    if strange:
        split = [name for name, split in names.items() if split]
        raise DataError(
            f"{path} holds {counted(split, 'split')} next to {counted(strange, 'other folder')}; write splits:{path} "
            f"to leave {'it' if len(strange) == 1 else 'them'} out, or classes:{path} if all of them are classes"
        )
    chosen = [split for split in names.values() if split]
    if len(set(chosen)) < len(chosen):
        raise DataError(
            f"{path} holds {', '.join(names)}: two names for one split; keep one of them, or write classes:{path} if "
            "they are classes"
        )
    if found := read_pairs(path, find_masks_in_splits(path, {split: name for name, split in names.items() if split})):
        return found
    tops = [look(str(path / name)).folders for name in names]
    classes = {folder for folders in tops if len(folders) > 1 for folder in folders}
    inside = {name: unwrap(path, name, classes) for name in names}
    found = {name: kind_of(path / inner, look(str(path / inner))) for name, inner in inside.items()}
    if set(found.values()) == {"shards"} and all(split_name(name) for name in names):
        return read_as("shards", path)  # one index for all
    splits: dict[str, ImageDataset] = {}
    kinds: list[str] = []
    for name, split in names.items():
        assert split is not None
        match found[name]:
            case "folders":
                if not sure:
                    question(path / inside[name], f"splits:{path}")
                splits[split], kind = read_classes(path, inside[name]), "class folders"
            case "flat":
                splits[split], kind = flat_folder(path, inside[name]), "flat folders"
            case other:
                kind, inner = read_as(other, path / inside[name])
                splits[split] = only(path / name, inner)
        kinds.append(kind)
    renamed = [f"{name} is {split}" for name, split in names.items() if not split_name(name)]
    return ", ".join(dict.fromkeys(kinds)) + (f" ({', '.join(renamed)})" if renamed else ""), splits


def question(path: Path, as_classes: str) -> None:
    """Refuses what lies in a split where it is splits again, or may be."""
    contents = look(str(path))
    refuse_nested_splits(path, contents, as_classes)
    refuse_same_subfolders(path, contents.folders, as_classes)


def only(path: Path, splits: dict[str, ImageDataset]) -> ImageDataset:
    if len(splits) != 1:
        raise DataError(f"{path} is a split by its name, but has splits of its own: {', '.join(splits)}")
    return next(iter(splits.values()))


def words(name: str) -> list[str]:
    """train-00000-of-00005.parquet -> ["train"]: the words before the suffix, without the numbers of a series."""
    stem = name.partition(".")[0]
    return [word for word in re.split(r"[-_]", stem) if word and word != "of" and not word.isdigit()]


def said_split(name: str) -> str | None:
    """The split that a file's name speaks of; "trainval" is how some sets call all that one may train on."""
    found = {split_name(word) or (word if word == "trainval" else None) for word in words(name.lower())} - {None}
    if len(found) > 1:
        raise DataError(f"{name} names two splits, {' and '.join(sorted(str(split) for split in found))}; rename it")
    return found.pop() if found else None


def by_split(where: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Sorted file names by split. Where no name speaks of one, all are "train", as for every source without splits.

    "trainval" becomes "train", unless that is there as well. Files of several sets in one folder, or files of which
    only some say their split, are refused.
    """
    said = {name: said_split(PurePath(name).name) for name in sorted(names)}
    silent = [name for name, split in said.items() if split is None]
    if len(silent) == len(said):
        return {"train": silent}
    if silent:
        loud = next(name for name, split in said.items() if split)
        raise DataError(f"{where}: {loud} names its split and {silent[0]} does not; rename it, or give one file")
    sets = {" ".join(word for word in words(PurePath(name).name) if not said_split(word)): name for name in said}
    if len(sets) > 1:
        one, other = list(sets.values())[:2]
        raise DataError(f"{where}: {one} and {other} look like parts of two sets; give one file, or a pattern")
    splits: dict[str, list[str]] = {}
    for name, split in said.items():
        splits.setdefault(str(split), []).append(name)
    if "trainval" in splits and "train" not in splits:
        splits["train"] = splits.pop("trainval")
    order = {"train": 0, "trainval": 1, "val": 2, "test": 3}
    return dict(sorted(splits.items(), key=lambda item: order[item[0]]))


def expand(pattern: str) -> list[str]:
    """The names that braces stand for: a-{000..002}.tar, {train,val}.tar. Stars are left to the file system."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span:
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + 1_000_000:
            raise DataError(f"{pattern}: {{{found[1]}}} is not a rising range of at most a million files")
        middles = [f"{number:0{len(span[1])}d}" for number in range(first, last + 1)]
    else:
        middles = found[1].split(",")
    return [name for middle in middles for name in expand(pattern[: found.start()] + middle + pattern[found.end() :])]
