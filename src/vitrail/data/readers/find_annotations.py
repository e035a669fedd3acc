"""Finds annotation files in a folder by their names and first bytes.

    COCO: a json that lists images and annotations, in the folder, in annotations/ or in folders named like splits
    YOLO: labels/ with text files of numbers next to images/, in the folder or in folders named like splits
    Pascal VOC: Annotations/ with XML next to JPEGImages/

A folder with several formats is refused, unless one is chosen: coco:DIR, panoptic:DIR, yolo:DIR, voc:DIR, masks:DIR.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from vitrail.core.errors import DataError
from vitrail.core.text import join_words
from vitrail.data.readers.folder import Contents, find_split_word, list_folder

HEAD: Final = 1 << 16  # first bytes of a json, which must contain the start of one of its lists
PIECE: Final = 1 << 24
LISTS: Final = re.compile(rb'"(images|annotations|categories)"\s*:\s*\[')
SEGMENTS: Final = b'"segments_info"'
MOST_FILES: Final = 64  # most files of a folder that are opened
HEAD_BYTES: Final = 4096  # first bytes of a text file that are read
LABEL_FOLDER: Final = "labels"
LABEL_LINE: Final = re.compile(rb"\s*\d+(\.0+)?([ \t]+-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?){4,}\s*")
IMAGE_FOLDERS: Final = ("images", "image", "imgs", "img")
VOC_FOLDERS: Final = ("annotations", "jpegimages")


def find_kinds(path: Path, contents: Contents) -> dict[str, str]:
    """The annotation formats in a folder, each with the file or folder that shows it."""
    found: dict[str, str] = {}
    for kind in ("coco", "panoptic"):
        if files := list_json(path, contents, kind):
            found[kind] = str(files[0].relative_to(path))
    labels = next((name for name in label_folders(path, contents) if has_label_files(path / name)), None)
    if labels is not None:
        found["yolo"] = labels or "text files next to the images"
    if folder := find_voc_folder(path, contents):
        found["voc"] = folder
    return found


def describe_kinds(path: Path, found: dict[str, str]) -> str:
    """The error for several formats: DIR holds annotations of several kinds, ...; choose one: ..."""
    kinds = [f"{kind} ({what})" for kind, what in found.items()]
    return f"{path} holds annotations of several kinds, {join_words(kinds)}; choose one: " + ", ".join(
        f"{kind}:{path}" for kind in found
    )


def list_below(path: Path, contents: Contents) -> list[str]:
    """The sources to choose from, such as coco:DIR/a, if subfolders hold annotations of images in a folder next to
    them."""
    if not any(name.lower() in IMAGE_FOLDERS for name in contents.folders):
        return []
    kinds = {name: find_kinds(path / name, list_folder(str(path / name))) for name in contents.folders}
    return [f"{kind}:{path / name}" for name, found in kinds.items() if not find_split_word(name) for kind in found]


def list_json(path: Path, contents: Contents, kind: str) -> list[Path]:
    """The COCO files of one kind in a folder, in its annotations/ or in folders named like splits."""
    places = [""] + [name for name in contents.folders if name.lower() == "annotations" or find_split_word(name)]
    for place in places:
        inside = list_folder(str(path / place)) if place else contents
        files = [path / place / name for name in islice(inside.with_suffix(".json"), MOST_FILES)]
        if files := [file for file in files if sniff_json(file) == kind]:
            if place and find_split_word(place):
                more = [name for name in places if name and find_split_word(name) and name != place]
                others = [
                    path / name / file for name in more for file in list_folder(str(path / name)).with_suffix(".json")
                ]
                files += [file for file in others if sniff_json(file) == kind]
            return files
    return []


def sniff_json(path: Path) -> str | None:
    """Detects whether a json is "coco" or "panoptic"; None for other files."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            text = head.replace(b"\0", b"").lstrip(b"\xef\xbb\xbf\xff\xfe \t\r\n")  # UTF-16 and UTF-32, too
            if not text.startswith(b"{") or not LISTS.search(text):
                return None
            rest = head
            while rest:  # the key may be anywhere, also across two pieces
                if SEGMENTS in rest:
                    return "panoptic"
                piece = file.read(PIECE)
                rest = rest[-len(SEGMENTS) :] + piece if piece else b""
    except OSError:
        return None
    return "coco"


def find_json(path: Path, kind: str) -> dict[str, Path]:
    """Finds the json of each split; a single file is one split."""
    if path.is_file():
        return {split_of_json(path.parent, path) or "train": path}
    files = list_json(path, list_folder(str(path)), kind)
    if not files:
        parts = "images, annotations and categories"
        other = "panoptic" if kind == "coco" else "coco"
        if list_json(path, list_folder(str(path)), other):
            kinds = "panoptic annotations" if other == "panoptic" else "annotations of objects, not panoptic ones"
            raise DataError(f"{path} has {kinds}; use {other}:{path}")
        raise DataError(f"{kind}:{path}: no json with {parts} here or in {path / 'annotations'}; give the json itself")
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of_json(path, file) or "", []).append(file)
    if "" in splits and len(splits) > 1:
        silent = splits.pop("")
        known = next(iter(splits.values()))[0]
        raise DataError(f"{known} names its split and {silent[0]} does not; give one json, or name the split in both")
    found: dict[str, Path] = {}
    for split, some in splits.items():
        instances = [file for file in some if "instances" in file.name.lower()]
        chosen = instances if len(instances) == 1 else some
        if len(chosen) > 1:
            ways = f"give one of them: {kind}:{chosen[0]}"
            raise DataError(f"{path} has {join_words([file.name for file in some], limit=4)} for one split; {ways}")
        found[split or "train"] = chosen[0]
    return found


def split_of_json(root: Path, file: Path) -> str | None:
    """The split in the name of a file, or else in that of its folder."""
    inside = file.parent.name if file.parent != root or find_split_word(root.name) else ""
    return find_split_word(file.stem) or (find_split_word(inside) if inside else None)


def label_folders(path: Path, contents: Contents) -> list[str]:
    """Folders that may hold YOLO's text files; "" is the folder itself."""
    inside = {name: list_folder(str(path / name)) for name in contents.folders if find_split_word(name)}
    places = [name for name in contents.folders if name.lower() == LABEL_FOLDER]
    for name, inner in inside.items():
        places += [f"{name}/{one}" for one in inner.folders if one.lower() == LABEL_FOLDER]
        places += [name] if inner.images and not inner.folders else []
    return [*places, *([""] if contents.images else [])]


def has_label_files(folder: Path) -> bool:
    """Whether a folder, or the folders in it, hold YOLO's text files. A folder called labels must not hold images."""
    contents = list_folder(str(folder))
    some = [folder / name for name in label_names(contents)]
    if not some and folder.name.lower() == LABEL_FOLDER:
        inner = [(folder / name, list_folder(str(folder / name))) for name in contents.folders]
        if contents.images or any(inside.images for _, inside in inner):
            return False
        some = [place / name for place, inside in inner for name in label_names(inside)]
    elif folder.name.lower() != LABEL_FOLDER:
        stems = {name.rpartition(".")[0] for name in contents.images}
        some = [file for file in some if file.stem in stems]
    heads = [read_head(file) for file in some[:MOST_FILES]]
    full = [is_label_text(head) for head in heads if head.strip()]
    # Other text files are faults, which are listed by name. In a folder called labels, one YOLO file is enough.
    return any(full) and (folder.name.lower() == LABEL_FOLDER or 2 * sum(full) >= len(full))


def is_label_text(head: bytes) -> bool:
    """Whether at least half of the first lines of a file look like YOLO labels."""
    if len(head) == HEAD_BYTES:  # the last number may be cut off
        head = head[: max(head.rfind(b" "), head.rfind(b"\n"))]
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    return bool(lines) and 2 * sum(bool(LABEL_LINE.fullmatch(line)) for line in lines) >= len(lines)


def label_names(contents: Contents) -> Sequence[str]:
    known = ("classes.txt", "names.txt", "labels.txt", "train.txt", "val.txt", "test.txt")
    return [name for name in contents.with_suffix(".txt") if name.lower() not in known]


def read_head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def find_voc_folder(path: Path, contents: Contents) -> str | None:
    """The folder of XML files that identifies Pascal VOC."""
    folders = {name.lower(): name for name in contents.folders}
    if not all(name in folders for name in VOC_FOLDERS):
        return None
    name = folders[VOC_FOLDERS[0]]
    return name if list_folder(str(path / name)).with_suffix(".xml") else None
