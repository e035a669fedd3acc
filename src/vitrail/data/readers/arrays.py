"""Numpy files: .npz with images and labels, .npy next to .npy. Nothing in them can run: pickles are refused."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data import dataset
from vitrail.data.dataset import ArrayDataset, Encoded, ImageDataset, Labels
from vitrail.data.readers.folder import parse_split

IMAGES: Final = ("images", "image", "x", "data", "pictures", "arr_0")
LABELS: Final = ("labels", "label", "y", "targets", "target", "arr_1")
ROLES: Final = {"x": IMAGES, "y": LABELS, "classes": ("classes", "class_names", "names")}
REMEDY: Final = "An array called classes, with the names of all classes, defines the numbers"
HIGHEST: Final = 2**62  # unsigned labels are cut to this value


class MappedArray:
    """A memory-mapped .npy file; another process opens it itself instead of receiving a copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.array = open_array(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedArray, (self.path,)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Encoded:
        return np.asarray(self.array[index])


class OrientedArrayDataset(ArrayDataset):
    """Images of an array. Channels-first and single-channel images are rearranged when they are read."""

    def read(self, index: int) -> Encoded:
        image = np.asarray(self.pictures[index])
        if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] not in (1, 3, 4):
            return np.ascontiguousarray(image.transpose(1, 2, 0))
        return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image


def read(path: Path | str) -> dict[str, ImageDataset]:
    """The splits of an .npz file, of an .npy file or of a folder of .npy files.

    Arrays are recognised by name: images or x, labels or y, with train, val or test before or after where there
    are splits (x_train, test_labels). For images.npy the labels are labels.npy next to it. Images are uint8
    [N, H, W], [N, H, W, 3] or [N, 3, H, W]; labels are [N], or 0 and 1 as [N, K] for several per sample. An array
    called classes may have the class names. An .npy file is mapped, an .npz file is read into memory.
    """
    path = Path(path)
    if path.is_dir():
        files: Mapping[str, Any] = {file.stem: file for file in sorted(path.glob("*.npy"))}
    elif path.suffix.lower() == ".npy":  # images_train.npy: its labels may be labels_train.npy
        stems = {re.sub(rf"(^|[_-]){p}($|[_-])", rf"\g<1>{y}\g<2>", path.stem) for p in IMAGES for y in LABELS}
        partners = [path.with_name(f"{stem}.npy") for stem in (*sorted(stems - {path.stem}), "classes")]
        files = {file.stem: file for file in (path, *partners) if file == path or file.is_file()}
    else:  # the arrays with known names, or all of them where there are none
        try:
            with np.load(path, allow_pickle=False) as archive:
                names: Iterable[str] = archive.files
                files = {name: archive[name] for name in names if parse_role(name)} or {n: archive[n] for n in names}
        except (OSError, ValueError, EOFError, AttributeError, MemoryError, BadZipFile) as error:
            raise DataError(f"{path} cannot be read as arrays: {error}") from None
    if not files:
        raise SourceNotFound(f"{path}: no .npy files here")
    return build_splits(path, files)


def parse_role(name: str) -> tuple[str, str] | None:
    """("x", "train") for x_train: the role of an array, and its split."""
    words = [word for word in re.split(r"(?<!arr)[_-]", name.lower()) if word]
    splits = {split for word in words if (split := parse_split(word))} or {"train"}
    rest = "_".join(word for word in words if not parse_split(word))
    kind = next((kind for kind, names in ROLES.items() if rest in names), None)
    return (kind, splits.pop()) if kind and len(splits) == 1 else None


def build_splits(path: Path, files: Mapping[str, Any]) -> dict[str, ImageDataset]:
    found: dict[tuple[str, str], str] = {}
    for name in files:
        part = ("x", "train") if len(files) == 1 else parse_role(name)
        if part in found:
            raise DataError(f"{path}: {found[part]} and {name} both look like {part[0]} of {part[1]}; rename one")
        if part:
            found[part] = name
    splits = [split for kind, split in found if kind == "x"]
    if not splits:
        raise DataError(f"{path} has {', '.join(files)}; images are called images or x, or x_train and x_test")
    targets = {s: read_labels(f"{path}: {found['y', s]}", files[found["y", s]]) for s in splits if ("y", s) in found}
    named = found.get(("classes", "train"))
    if named:
        classes = tuple(str(name) for name in as_array(files[named]).ravel())
    elif widths := {as_array(files[found["y", s]]).shape[1] for s, t in targets.items() if t.multiple}:
        classes = tuple(str(number) for number in range(max(widths)))
    else:
        classes = dataset.number_classes(str(path), [t.values for t in targets.values()], REMEDY)
    sources: dict[str, ImageDataset] = {}
    for split in (s for s in ("train", "val", "test") if s in splits):
        name = found["x", split]
        called = f"{path.name}:{name}" if path.suffix == ".npz" else name
        if split in targets:
            targets[split].check(len(classes), f"{path} ({split})")
        images, labels = check_images(f"{path}: {name}", files[name]), targets.get(split)
        sources[split] = OrientedArrayDataset(images, labels, classes if targets else (), called=called)
    return sources


def as_array(value: Any) -> NDArray[Any]:
    return open_array(value) if isinstance(value, Path) else value


def check_images(where: str, value: Any) -> Any:
    """Refuses images of a shape or type that cannot be read."""
    pixels = as_array(value)
    if pixels.dtype != np.uint8:
        raise DataError(f"{where} is {pixels.dtype}; images are uint8, 0 to 255: convert them when saving")
    channels = pixels.ndim == 4 and (pixels.shape[3] in (1, 3, 4) or pixels.shape[1] == 3)
    if not (pixels.ndim == 3 or channels) or 0 in pixels.shape:
        raise DataError(f"{where} has shape {list(pixels.shape)}; [N, H, W], [N, H, W, 3] or [N, 3, H, W] is expected")
    return MappedArray(value) if isinstance(value, Path) else pixels


def read_labels(where: str, value: Any) -> Labels:
    values = as_array(value)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if not (np.issubdtype(values.dtype, np.integer) or values.dtype == np.bool_) or values.ndim not in (1, 2):
        raise BadLabels(f"{where} is {values.dtype} {list(values.shape)}; labels are integers [N] or 0 and 1 [N, K]")
    if values.ndim == 1:
        whole = np.minimum(values, HIGHEST).astype(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
        dataset.refuse_negative(where, whole)
        return Labels(whole)
    if not np.isin(values, (0, 1)).all():
        raise BadLabels(f"{where} has shape {list(values.shape)} and other values than 0 and 1")
    found = Labels.several(np.flatnonzero(row) for row in values)
    dataset.refuse_sparse(where, values.shape[1] - 1, len(np.unique(found.values)), REMEDY)
    return found


def open_array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}") from None
