"""Numpy files: .npz with images and labels, .npy next to .npy. Nothing in them can run: pickles are refused.

1,797 real handwritten digits of 8x8 pixels, inside the package: the smallest honest set of images.

They are scikit-learn's `load_digits`, the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0). docs/figures/digits.py took them out of there; a test
compares the two where scikit-learn is installed.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data.dataset import (
    ArrayDataset,
    Encoded,
    ImageDataset,
    Labels,
    number_classes,
    refuse_negative,
    refuse_sparse,
)
from vitrail.data.readers.folder import parse_split

PICTURES: Final = ("images", "image", "x", "data", "pictures", "arr_0")
LABELS: Final = ("labels", "label", "y", "targets", "target", "arr_1")
CLASSES: Final = ("classes", "class_names", "names")
REMEDY: Final = "An array called classes with the names of all classes says which numbers there are"
HIGHEST: Final = 2**62  # what an unsigned label beyond it counts as


class Mapped:
    """A .npy file in memory-mapped form; another process opens it again instead of being sent it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.array = opened(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapped, (self.path,)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Encoded:
        return np.asarray(self.array[index])


class Pictures(ArrayDataset):
    """Images of an array. Those with three channels first, or with a single one, are turned as they are read."""

    def read(self, index: int) -> Encoded:
        picture = np.asarray(self.pictures[index])
        if picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[2] not in (1, 3, 4):
            return np.ascontiguousarray(picture.transpose(1, 2, 0))
        return picture[:, :, 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture


def read(path: Path | str) -> dict[str, ImageDataset]:
    """The splits of an .npz file, of an .npy file or of a folder of .npy files.

    Arrays are told apart by their names: images or x, labels or y, with train, val or test before or after where there
    are splits (x_train, test_labels). For images.npy the labels are labels.npy next to it. Images are uint8
    [N, H, W], [N, H, W, 3] or [N, 3, H, W]; labels are [N], or 0 and 1 as [N, K] for several a sample. Class names may
    be an array called classes. An .npy file is mapped, an .npz file is read into memory.
    """
    path = Path(path)
    files: Mapping[str, Any]
    if path.is_dir():
        files = {file.stem: file for file in sorted(path.glob("*.npy"))}
    elif path.suffix.lower() == ".npy":
        beside = [path.with_name(f"{name}.npy") for name in partners(path.stem)]
        files = {file.stem: file for file in (path, *beside) if file == path or file.is_file()}
    else:
        files = loaded(path)
    if not files:
        raise SourceNotFound(f"{path}: no .npy files here")
    return built(path, files)


def partners(stem: str) -> list[str]:
    """images_train -> labels_train: what the labels of an array of images may be called."""
    names = [(stem, re.sub(rf"(^|[_-]){p}($|[_-])", rf"\g<1>{y}\g<2>", stem)) for p in PICTURES for y in LABELS]
    return [renamed for old, renamed in names if renamed != old] + ["classes"]


def role(name: str) -> tuple[str, str] | None:
    """("x", "train") for x_train: what an array is, and of which split."""
    words = [word for word in re.split(r"(?<!arr)[_-]", name.lower()) if word]
    splits = {split for word in words if (split := parse_split(word))}
    rest = "_".join(word for word in words if not parse_split(word))
    if len(splits) > 1:
        return None
    split = splits.pop() if splits else "train"
    for kind, names in (("x", PICTURES), ("y", LABELS), ("classes", CLASSES)):
        if rest in names:
            return kind, split
    return None


def built(path: Path, files: Mapping[str, Any]) -> dict[str, ImageDataset]:
    found: dict[tuple[str, str], str] = {}
    for name in files:
        part = ("x", "train") if len(files) == 1 else role(name)
        if part in found:
            raise DataError(f"{path}: {found[part]} and {name} both look like {part[0]} of {part[1]}; rename one")
        if part:
            found[part] = name
    splits = [split for kind, split in found if kind == "x"]
    if not splits:
        raise DataError(f"{path} has {', '.join(files)}; images are called images or x, or x_train and x_test")
    targets = {s: labels(f"{path}: {found['y', s]}", files[found["y", s]]) for s in splits if ("y", s) in found}
    named = found.get(("classes", "train"))
    if named:
        classes = tuple(str(name) for name in array(files[named]).ravel())
    elif widths := {array(files[found["y", s]]).shape[1] for s, t in targets.items() if t.multiple}:
        classes = tuple(str(number) for number in range(max(widths)))
    else:
        classes = number_classes(str(path), [t.values for t in targets.values()], REMEDY)
    sources: dict[str, ImageDataset] = {}
    for split in (s for s in ("train", "val", "test") if s in splits):
        name = found["x", split]
        called = f"{path.name}:{name}" if path.suffix == ".npz" else name
        if split in targets:
            targets[split].check(len(classes), f"{path} ({split})")
        sources[split] = Pictures(
            checked(f"{path}: {name}", files[name]), targets.get(split), classes if targets else (), called=called
        )
    return sources


def array(of: Any) -> NDArray[Any]:
    return opened(of) if isinstance(of, Path) else of


def checked(where: str, of: Any) -> Any:
    """Images of a shape and a type that can be read."""
    pixels = array(of)
    if pixels.dtype != np.uint8:
        raise DataError(f"{where} is {pixels.dtype}; images are uint8, 0 to 255: convert them when saving")
    channels = pixels.ndim == 4 and (pixels.shape[3] in (1, 3, 4) or pixels.shape[1] == 3)
    if not (pixels.ndim == 3 or channels) or 0 in pixels.shape:
        raise DataError(f"{where} has shape {list(pixels.shape)}; [N, H, W], [N, H, W, 3] or [N, 3, H, W] is expected")
    return Mapped(of) if isinstance(of, Path) else pixels


def labels(where: str, of: Any) -> Labels:
    values = array(of)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if not (np.issubdtype(values.dtype, np.integer) or values.dtype == np.bool_) or values.ndim not in (1, 2):
        raise BadLabels(
            f"{where} is {values.dtype} {list(values.shape)}; labels are whole numbers [N] or 0 and 1 [N, K]"
        )
    if values.ndim == 1:
        whole = np.minimum(values, HIGHEST).astype(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
        refuse_negative(where, whole)
        return Labels(whole)
    if not np.isin(values, (0, 1)).all():
        raise BadLabels(f"{where} has shape {list(values.shape)} and other values than 0 and 1")
    found = Labels.several(np.flatnonzero(row) for row in values)
    refuse_sparse(where, values.shape[1] - 1, len(np.unique(found.values)), REMEDY)
    return found


def opened(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}") from None


def loaded(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file that have a name we know."""
    from zipfile import BadZipFile

    try:
        with np.load(path, allow_pickle=False) as archive:
            names: Iterable[str] = archive.files
            return {name: archive[name] for name in names if role(name)} or {n: archive[n] for n in names}
    except (OSError, ValueError, EOFError, AttributeError, MemoryError, BadZipFile) as error:
        raise DataError(f"{path} cannot be read as arrays: {error}") from None
