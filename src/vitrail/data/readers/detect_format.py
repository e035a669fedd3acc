"""Detects which reader a path needs, and refuses ambiguous ones with the ways to choose.

The split of a file is in its name: train-00000.tar, imagenet-val-000.tar, test-00000-of-00005.parquet.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePath
from typing import Final

from vitrail.core.errors import DataError, SourceNotFound, unknown_name
from vitrail.core.text import join_words, pluralise
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import is_unsupported
from vitrail.data.readers import find_annotations, folder, manifest, masks
from vitrail.data.readers.folder import Contents, find_split_word, list_folder, parse_split, read_classes, read_flat

MANIFESTS: Final = (".csv", ".tsv", ".jsonl")
SAVED: Final = ("dataset_info.json", "dataset_dict.json", "state.json")
SPLIT_ORDER: Final = ("train", "trainval", "val", "test")

READINGS: Final = {  # what a path may be read as, and what that is called
    "classes": "class folders",
    "splits": "folders",  # those named after train, val or test; others are skipped
    "masks": "images and masks",
    "coco": "COCO",
    "panoptic": "COCO panoptic",
    "yolo": "YOLO",
    "voc": "Pascal VOC",
    "flat": "flat folder",  # all images below it, without labels
    "shards": "tar shards",
    "parquet": "Parquet",
    "saved": "Hugging Face dataset",
    "manifest": "manifest",
    "arrays": "arrays",
}
BINARIES: Final = {".tar": "shards", ".parquet": "parquet", ".npz": "arrays", ".npy": "arrays"}
SUFFIXES: Final = BINARIES | dict.fromkeys(MANIFESTS, "manifest") | {".json": "coco"}
MODULES: Final = {"saved": ("parquet", "read_saved"), "panoptic": ("coco_panoptic", "read")}  # of other names

ReadResult = tuple[str, dict[str, ImageDataset]]  # the kind of the data set, and its splits


def read_path(path: Path) -> ReadResult:
    """Reads a path by its suffix or contents."""
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise SourceNotFound(f"{path} is neither a file nor a folder")
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: a file that is a source ends in {', '.join(SUFFIXES)}; for images, give their folder")
    if kind == "coco":
        kind = find_annotations.sniff_json(path) or kind
    return read_as(kind, path)


def read_as(kind: str, path: Path, *choice: Mapping[str, str]) -> ReadResult:
    """Reads a path as the given kind, whatever else it might be; of a list or table perhaps with chosen columns."""
    if not path.exists() and not is_pattern(str(path)):
        raise SourceNotFound(f"{path}: no such file or folder")
    match kind:
        case "classes":
            return READINGS[kind], {"train": read_classes(path)}
        case "splits":
            splits = {name: split for name in list_folder(str(path)).folders if (split := find_split_word(name))}
            if not splits:
                raise DataError(f"splits:{path}: no folder here is named after train, val or test")
            return read_splits(path, splits, sure=True)
        case "flat":
            return READINGS[kind], {"train": read_flat(path)}
        case other if other in READINGS:  # the module is imported on first use
            module, function = MODULES.get(other, (other, "read"))
            return READINGS[other], getattr(import_module(f"{__package__}.{module}"), function)(path, *choice)
        case other:
            raise unknown_name("reading", other, READINGS)


def read_columns(path: Path, text: str) -> ReadResult:
    """A list or a Parquet file with chosen columns: image=COLUMN,label=COLUMN."""
    choice = manifest.parse_choice(str(path), text)
    if not path.is_file():
        raise SourceNotFound(f"{path}: no such file")
    return read_as("parquet" if path.suffix.lower() == ".parquet" else "manifest", path, choice)


def is_pattern(text: str) -> bool:
    """Whether a text stands for several tar files: set/train-{00000..00146}.tar, set/*.tar."""
    return text.endswith(".tar") and any(sign in text for sign in "{*?[")


def read_folder(path: Path) -> ReadResult:
    """A folder of splits, of one kind of file, or of class folders."""
    contents = list_folder(str(path))
    if any(name in SAVED for name in contents.others):
        return read_as("saved", path)
    if annotated := find_annotations.find_kinds(path, contents):
        if len(annotated) > 1:
            raise DataError(find_annotations.describe_kinds(path, annotated))
        return read_as(next(iter(annotated)), path)
    kind = detect_kind(path, contents)
    if kind == "flat":
        if places := masks.find_adjacent(path, {"train": ""}):
            return masks.KIND, masks.read_places(path, places)
        return "flat folder", {"train": read_flat_folder(path)}
    if kind != "folders":
        return read_as(kind, path)
    if contents.folders == ("data",) and list_folder(str(path / "data")).with_suffix(".parquet"):
        return read_as("parquet", path)  # the layout of the Hugging Face hub
    if ways := find_annotations.list_below(path, contents):
        raise DataError(f"{path} holds folders of annotations; choose one: {', '.join(ways)}")
    if places := masks.find_masks(path):
        return masks.KIND, masks.read_places(path, places)
    if (splits := folder.find_splits(path, contents.folders)) is not None:
        return read_splits(path, splits)
    refuse_wrapper(path, contents)
    folder.refuse_same_subfolders(path, contents.folders, f"classes:{path}")
    return read_as("classes", path)


def read_flat_folder(path: Path, inside: str = "") -> ImageDataset:
    """All images of a folder, with a note where some of them look like masks."""
    source = read_flat(path, inside)
    source.note = masks.note_unpaired(path, inside)
    return source


def detect_kind(path: Path, contents: Contents) -> str:
    """The one kind of content of a folder: "folders", "flat", "shards" or "parquet"."""
    found: dict[str, tuple[str, Sequence[str]]] = {
        "folders": ("folder", contents.folders),
        "flat": ("image", contents.images),
        "shards": ("tar file", contents.with_suffix(".tar")),
        "parquet": ("Parquet file", contents.with_suffix(".parquet")),
        "manifest": ("manifest", [n for n in contents.with_suffix(*MANIFESTS) if manifest.has_paths(path / n)]),
    }
    kinds = [kind for kind, (_, names) in found.items() if names]
    if len(kinds) == 1 and kinds != ["manifest"]:
        return kinds[0]
    if not kinds:
        if unread := [name for name in contents.others if is_unsupported(name)]:
            raise DataError(f"{path}: no images in a readable format, but {folder.describe_unread(unread)}")
        other = f" but {count_names(contents.others, 'other file')}" if contents.others else ""
        raise DataError(f"{path}: no images here{other}; a folder of class folders or of images is expected")
    ways = [f"{path / name}" for name in found["manifest"][1][:1]]
    ways += [f"{'classes' if kind == 'folders' else kind}:{path}" for kind in kinds if kind != "manifest"]
    ways += [f"masks:{path}"] if masks.find_folder_pair(path, contents.folders) else []
    counts = " and ".join(count_names(found[kind][1], found[kind][0]) for kind in kinds)
    raise DataError(f"{path} holds {counts}; choose one: {', '.join(ways)}")


def count_names(names: Sequence[str], word: str) -> str:
    """3 folders (cats, dogs and cows)"""
    return f"{pluralise(len(names), word)} ({join_words(names, limit=3)})"


def refuse_wrapper(path: Path, contents: Contents) -> None:
    """A single folder that only holds folders is more likely one level too high than one class."""
    if len(contents.folders) != 1:
        return
    inner = path / contents.folders[0]
    inside = list_folder(str(inner))
    if not inside.images and (inside.folders or inside.with_suffix(".tar", ".parquet")):
        what = count_names(inside.folders, "folder") if inside.folders else count_names(inside.others, "file")
        ways = f"write {inner} to go one level down, or classes:{path} if {inner.name} is the only class"
        raise DataError(f"{path} holds one folder, {inner.name}, which holds {what}; {ways}")


def read_splits(path: Path, names: Mapping[str, "str | None"], *, sure: bool = False) -> ReadResult:
    """Folders named after train, val and test, each of class folders, of images or of shards. Where the user is `sure`
    that they are splits, their contents are not questioned."""
    folders = {name: split for name, split in names.items() if split}
    if strange := [name for name in names if name not in folders]:
        what = f"{count_names(list(folders), 'split')} next to {count_names(strange, 'other folder')}"
        ways = f"splits:{path} to read only the splits, or classes:{path} if all of them are classes"
        raise DataError(f"{path} holds {what}; write {ways}")
    if len(set(folders.values())) < len(folders):
        remedy = f"keep one of them, or write classes:{path} if they are classes"
        raise DataError(f"{path} holds {', '.join(names)}: two names for one split; {remedy}")
    if places := masks.find_masks_in_splits(path, {split: name for name, split in folders.items()}):
        return masks.KIND, masks.read_places(path, places)
    tops = [list_folder(str(path / name)).folders for name in folders]
    classes = {name for top in tops if len(top) > 1 for name in top}
    inside = {name: folder.unwrap_split(path, name, classes) for name in folders}
    found = {name: detect_kind(path / inner, list_folder(str(path / inner))) for name, inner in inside.items()}
    if set(found.values()) == {"shards"} and all(parse_split(name) for name in folders):
        return read_as("shards", path)  # one index for all
    splits: dict[str, ImageDataset] = {}
    kinds: list[str] = []
    for name, split in folders.items():
        if found[name] == "folders":
            if not sure:
                contents = list_folder(str(path / inside[name]))
                folder.refuse_nested_splits(path / inside[name], contents, f"splits:{path}")
                folder.refuse_same_subfolders(path / inside[name], contents.folders, f"splits:{path}")
            splits[split], kind = read_classes(path, inside[name]), "class folders"
        elif found[name] == "flat":
            splits[split], kind = read_flat_folder(path, inside[name]), "flat folders"
        else:
            kind, inner = read_as(found[name], path / inside[name])
            if len(inner) != 1:
                raise DataError(f"{path / name} is a split by its name, but has splits of its own: {', '.join(inner)}")
            splits[split] = next(iter(inner.values()))
        kinds.append(kind)
    renamed = [f"{name} is {split}" for name, split in folders.items() if not parse_split(name)]
    return ", ".join(dict.fromkeys(kinds)) + (f" ({', '.join(renamed)})" if renamed else ""), splits


def name_words(name: str) -> list[str]:
    """train-00000-of-00005.parquet -> ["train"]: the words before the suffix, without the numbers of a series."""
    stem = name.partition(".")[0]
    return [word for word in re.split(r"[-_]", stem) if word and word != "of" and not word.isdigit()]


def split_of_file(name: str) -> str | None:
    """The split in a file's name; some sets call everything that is for training "trainval"."""
    words = name_words(name.lower())
    found = {word if word == "trainval" else parse_split(word) for word in words} - {None}
    if len(found) > 1:
        raise DataError(f"{name} names two splits, {' and '.join(sorted(str(split) for split in found))}; rename it")
    return found.pop() if found else None


def group_by_split(where: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Sorted file names by split. Where no name contains one, all are "train", as in every source without splits.

    "trainval" becomes "train", unless that exists as well. Files of several sets in one folder, or files of which only
    some name their split, are refused.
    """
    found = {name: split_of_file(PurePath(name).name) for name in sorted(names)}
    silent = [name for name, split in found.items() if split is None]
    if len(silent) == len(found):
        return {"train": silent}
    if silent:
        other = next(name for name, split in found.items() if split)
        raise DataError(f"{where}: {other} names its split and {silent[0]} does not; rename it, or give one file")
    words = {name: name_words(PurePath(name).name) for name in found}
    sets = {" ".join(word for word in words[name] if not split_of_file(word)): name for name in found}
    if len(sets) > 1:
        one, other = list(sets.values())[:2]
        raise DataError(f"{where}: {one} and {other} look like parts of two sets; give one file, or a pattern")
    splits: dict[str, list[str]] = {}
    for name, split in found.items():
        splits.setdefault(str(split), []).append(name)
    if "trainval" in splits and "train" not in splits:
        splits["train"] = splits.pop("trainval")
    return {split: splits[split] for split in SPLIT_ORDER if split in splits}


def find_files(path: Path, suffix: str, refused: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """The files of a folder, or of its folders named like splits, by split; names are relative to the folder."""

    def list_files(folder: Path) -> tuple[str, ...]:
        contents = list_folder(str(folder))
        for name in contents.others:
            refuse_suffix(folder / name, refused)
        return contents.with_suffix(suffix)

    if names := list_files(path):
        return group_by_split(str(path), names)
    inner = {name: split for name in list_folder(str(path)).folders if (split := parse_split(name))}
    if len(set(inner.values())) < len(inner):
        raise DataError(f"{path} holds {', '.join(inner)}: two names for one split; keep one of them")
    found = {split: [f"{name}/{file}" for file in list_files(path / name)] for name, split in inner.items()}
    return {split: files for split, files in found.items() if files}


def refuse_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    if path.name.lower().endswith(suffixes):
        raise DataError(f"{path} is compressed, so its images cannot be read one by one; unpack it to a plain .tar")


def expand_braces(pattern: str) -> list[str]:
    """The names that braces stand for: a-{000..002}.tar, {train,val}.tar. Stars are left to the file system."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    parts = found[1].split(",")
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", found[1]):
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + 1_000_000:
            raise DataError(f"{pattern}: {{{found[1]}}} is not a rising range of at most a million files")
        parts = [f"{number:0{len(span[1])}d}" for number in range(first, last + 1)]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [name for part in parts for name in expand_braces(before + part + after)]
