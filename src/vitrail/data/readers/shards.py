"""Samples of tar shards by number: what lies where comes from the index, the bytes from one `pread` each."""

import glob
import json
import os
from collections import OrderedDict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError, SourceNotFound, describe_error
from vitrail.data.dataset import Encoded, ImageDataset, number_classes, pixel_class_words
from vitrail.data.readers.detect_format import expand_braces, group_by_split
from vitrail.data.readers.folder import MAX_BYTES, list_folder, parse_split
from vitrail.data.readers.shard_index import Progress, ShardFile, ShardIndex, open_index

OPEN_FILES: Final = 64  # a process
INDEX: Final = "vitrail.index"
DESCRIPTION: Final = "pack.json"  # what the packer leaves when it is done,
JOURNAL: Final = "pack.journal"  # and what it keeps until then
COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
PIECE: Final = 1 << 20  # values that are hashed at a time


class ShardDataset(ImageDataset):
    """Samples `first` to `last` of an index: one split of a set."""

    def __init__(
        self,
        root: Path,
        index: ShardIndex,
        first: int,
        last: int,
        classes: tuple[str, ...],
        pixel_classes: tuple[str, ...] = (),
    ) -> None:
        self.root, self.index, self.first, self.last = root, index, first, last
        self.classes, self.pixel_classes = classes, pixel_classes
        self.labels = index.labels(first, last)
        self.names = index.names(first, last)
        self.files = OpenFiles(root, index)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardDataset, (self.root, self.index, self.first, self.last, self.classes, self.pixel_classes)

    def shard(self, index: int) -> int:
        """The number of the tar file that a sample is in."""
        return int(np.searchsorted(self.index.ends, self.first + index, side="right"))

    def read(self, index: int) -> bytes:
        return self.member(index, "offset", "size")

    def mask(self, index: int) -> Encoded:
        if not self.pixel_classes:
            return super().mask(index)  # refuses
        return self.member(index, "mask_offset", "mask_size")

    def member(self, index: int, *columns: str) -> bytes:
        """The bytes of one of the files of a sample, by the columns that say where it lies."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset, size = (int(self.index.columns[name][self.first + index]) for name in columns)
        if size > MAX_BYTES:
            raise BadImage(f"has {size:,} bytes; more than {MAX_BYTES:,} are not read as one image")
        return self.files.read(self.shard(index), offset, size)

    def name(self, index: int) -> str:
        return f"{self.index.shards[self.shard(index)].name}:{self.names[index]}"

    def sizes(self) -> NDArray[np.int64]:
        return self.index.columns["size"][self.first : self.last]

    @cached_property
    def fingerprint(self) -> str:
        """As every source's, but of whole arrays at a time, and without the names of the tar files."""
        digest = sha256(json.dumps(["shards", len(self), *self.classes, *pixel_class_words(self)]).encode())
        starts, bytes_of = self.names.starts, self.names.bytes
        arrays: list[tuple[NDArray[Any] | None, int]] = [
            (self.labels.values, 0),
            (self.labels.starts, 0),
            (self.sizes(), 0),
            (starts, int(starts[0])),
            (bytes_of[int(starts[0]) : int(starts[-1])], 0),
        ]
        for array, less in arrays:
            digest.update(b"|")
            if array is None:
                continue
            for start in range(0, len(array), PIECE):
                digest.update((array[start : start + PIECE].astype("<i8") - less).data)
        return digest.hexdigest()


class Descriptor:
    """A file that closes when the last one who reads it lets go, so that a thread never reads from a closed one."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class OpenFiles:
    """The tar files that were read last, open. Reads give their place, so processes and threads may share them."""

    def __init__(self, root: Path, index: ShardIndex) -> None:
        self.root, self.index, self.lock = root, index, Lock()
        self.open: OrderedDict[int, Descriptor] = OrderedDict()

    def descriptor(self, shard: int) -> Descriptor:
        with self.lock:
            found = self.open.get(shard)
            if found is None:
                found = self.open[shard] = self.opened(self.index.shards[shard])
                if len(self.open) > OPEN_FILES:
                    self.open.popitem(last=False)
            else:
                self.open.move_to_end(shard)
            return found

    def opened(self, shard: ShardFile) -> Descriptor:
        file = Descriptor(self.root / shard.name)
        status = os.fstat(file.number)
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.changed):
            raise DataError(f"{self.root / shard.name} changed since it was indexed; start again")
        return file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        file = self.descriptor(shard)
        data = os.pread(file.number, size, offset)
        while len(data) < size:  # a mounted store may give less than was asked for
            more = os.pread(file.number, size - len(data), offset + len(data))
            if not more:
                raise BadImage(f"{len(data):,} of {size:,} bytes are there; the tar file was cut short")
            data += more
        return data


def read(path: Path | str, *, progress: Progress | None = None) -> dict[str, ImageDataset]:
    """The splits of a set of tar shards: a folder, one .tar, or a pattern such as set/train-{00000..00146}.tar.

    Splits are recognised by folders called train, val or test, or by these words in the names of the files
    (imagenet-val-000.tar); where there are none, all is "train". Class names come from classes.txt (one a line) or
    classes.json next to the shards; without them the numbers are the names. Masks are read where pixel_classes.txt or
    pixel_classes.json names their classes. `progress` hears how many are indexed.
    """
    path = Path(path)
    root, splits, place = found(path)
    if not any(splits.values()):
        raise SourceNotFound(f"{path}: no .tar files here")
    listed = find_names(root, path, "pixel_classes")
    pixel_classes = () if listed is None else read_names(listed)
    names = [name for names in splits.values() for name in names]
    index = open_index(root, names, place, progress, masks=listed is not None)
    if not len(index):
        raise DataError(f"{path}: no images in {len(index.shards)} tar files; are their names like KEY.jpg?")
    classes = class_names(root, path, index)
    sources: dict[str, ImageDataset] = {}
    shards = first = 0
    for split, names in splits.items():
        shards += len(names)
        last = int(index.ends[shards - 1])
        if first == last:
            raise DataError(f"{path}: the split {split} has no images")
        masked = has_masks(index, first, last, listed)
        sources[split] = ShardDataset(root, index, first, last, classes, pixel_classes if masked else ())
        first = last
    return sources


def found(path: Path) -> tuple[Path, dict[str, list[str]], Path]:
    """The folder that names are relative to, the tar files by split, and where an index would lie."""
    if path.is_dir():
        return path, in_folder(path), path / INDEX
    if path.is_file():
        if path.name.lower().endswith(COMPRESSED):
            raise compressed(path)
        return path.parent, group_by_split(str(path), [path.name]), path.with_name(path.name + ".index")
    if not any(sign in str(path) for sign in "{*?"):
        raise SourceNotFound(f"{path}: no such file or folder")
    files = sorted(
        {file for name in expand_braces(str(path)) for file in (glob.glob(name) if glob.has_magic(name) else [name])}
    )
    if not files:
        raise SourceNotFound(f"{path}: no file has such a name")
    root = Path(os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files]))
    names = [os.path.relpath(os.path.abspath(file), root) for file in files]
    mark = sha256(os.fsencode(str(path.absolute()))).hexdigest()[:16]
    return root, group_by_split(str(path), names), root / f".vitrail-{mark}.index"


def in_folder(path: Path) -> dict[str, list[str]]:
    """The tar files of a folder, or of folders in it that are called like splits; a pack says itself what it has."""
    if (path / JOURNAL).exists():
        raise DataError(f"{path} holds a pack that was not finished; run the same `vitrail data pack` again")
    if (path / DESCRIPTION).exists():
        return described(path)
    contents = list_folder(str(path))
    refuse_compressed(path, contents.others)
    tars = contents.with_suffix(".tar")
    inner = {name: split for name in contents.folders if (split := parse_split(name))}
    if tars:
        return group_by_split(str(path), tars)
    if len(set(inner.values())) < len(inner):
        raise DataError(f"{path} holds {', '.join(inner)}: two names for one split; keep one of them")
    splits: dict[str, list[str]] = {}
    for name, split in inner.items():
        inside = list_folder(str(path / name))
        refuse_compressed(path / name, inside.others)
        if shards := inside.with_suffix(".tar"):
            splits[split] = [f"{name}/{shard}" for shard in shards]
    return splits


def described(path: Path) -> dict[str, list[str]]:
    """What a pack's own description says."""
    try:
        splits: dict[str, list[str]] = {}
        for row in json.loads((path / DESCRIPTION).read_text("utf-8"))["shards"]:
            splits.setdefault(str(row["split"]), []).append(os.path.basename(row["name"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path / DESCRIPTION} is damaged ({describe_error(error)}); remove it to read the shards by name"
        ) from None
    return splits


def refuse_compressed(path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if name.lower().endswith(COMPRESSED):
            raise compressed(path / name)


def compressed(path: Path) -> DataError:
    return DataError(f"{path} is compressed, so its images cannot be reached one by one; unpack it to a plain .tar")


def class_names(root: Path, path: Path, index: ShardIndex) -> tuple[str, ...]:
    """K names from a file next to the shards, or the numbers; none where nothing has a label."""
    if index.highest < 0:
        return ()
    worst = next(shard.name for shard in index.shards if shard.highest == index.highest)
    if listed := find_names(root, path, "classes"):
        names = read_names(listed)
        if index.highest >= len(names):
            raise BadLabels(
                f"{root / worst} has the label {index.highest}, but {listed} names {len(names)} classes, 0 to "
                f"{len(names) - 1}"
            )
        return names
    remedy = f"classes.txt in {root}, one name a line, says which numbers there are"
    return number_classes(str(root / worst), [index.labels(0, len(index)).values], remedy)


def find_names(root: Path, path: Path, called: str) -> Path | None:
    """The file next to the shards, or above a folder that is a split, that names classes; one of a single tar file may
    bear its name."""
    folders = [root, root.parent] if parse_split(root.name) else [root]
    stems = [f"{path.stem}.{called}", called] if path.is_file() else [called]
    files = (folder / f"{stem}{end}" for folder in folders for stem in stems for end in (".txt", ".json"))
    return next((file for file in files if file.is_file()), None)


def has_masks(index: ShardIndex, first: int, last: int, listed: Path | None) -> bool:
    """Whether the samples of a split have masks, and their classes have names. Masks for some of them are refused."""
    without = np.flatnonzero(index.masks("mask_size", first, last) == 0)
    if listed is None or len(without) == last - first:
        return False
    if without.size:
        where = index.shards[int(np.searchsorted(index.ends, first + without[0], side="right"))].name
        raise DataError(
            f"{where}: {index.names(first, last)[int(without[0])]} has no mask, KEY.seg.png ({without.size:,} of "
            f"{last - first:,} images have none); add it, or remove {listed} to read the images without masks"
        )
    return True


def read_names(path: Path) -> tuple[str, ...]:
    """Class names in order: a line each, a JSON list, or a JSON object from numbers to names."""
    try:
        text = path.read_text("utf-8", "surrogatepass")
        if path.suffix == ".txt":
            names = tuple(line.rstrip() for line in text.rstrip().splitlines())
            if "" in names:
                raise DataError(f"{path}: line {names.index('') + 1} is empty; the lines name the classes 0, 1, 2, ...")
            return names
        content: Any = json.loads(text)
        if isinstance(content, dict):
            content = [content[str(number)] for number in range(len(content))]
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise TypeError("a list of names is expected")
        return tuple(content)
    except UnicodeDecodeError:
        raise DataError(f"{path}: the class names are not UTF-8 text; save the file again as UTF-8") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no class names: {error!r}") from None
