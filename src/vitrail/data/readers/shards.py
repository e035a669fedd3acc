"""Tar shards in the WebDataset layout, with random access: `read` a folder of them, one of them, or a pattern.

Members that share their name up to the first dot are one sample: KEY.jpg (or .png, .webp, ...) is the image, KEY.cls
its class as a number, KEY.json may have the number as "label" or several as "labels". KEY.seg.png (or KEY.mask.png) is
its mask, if pixel_classes.txt or pixel_classes.json next to the shards names the classes. KEY.segments.json has its
segments, if segment_classes.json defines their classes. Other members, such as KEY.txt or KEY.trimap.png, are ignored.
An index is written once, next to the shards or, if that folder is read-only, into the cache; after that opening a set
maps memory, whatever its size. Each sample is read with one `pread`.
"""

import glob
import json
import os
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError, SourceNotFound, describe_error
from vitrail.data.annotations.packed_segments import SegmentKinds, parse_segments, read_kinds
from vitrail.data.annotations.segments import Segments
from vitrail.data.dataset import Encoded, ImageDataset, number_classes, pixel_class_words
from vitrail.data.readers.annotated import refuse_repeated
from vitrail.data.readers.detect_format import expand_braces, find_files, group_by_split, refuse_suffix
from vitrail.data.readers.folder import MAX_BYTES, parse_split, read_names
from vitrail.data.readers.shard_index import Progress, ShardFile, ShardIndex, open_index
from vitrail.data.readers.tar import MASKS, SEGMENTS

OPEN_FILES: Final = 64  # per process
INDEX: Final = "vitrail.index"
DESCRIPTION: Final = "pack.json"  # written when a pack is complete
JOURNAL: Final = "pack.journal"  # exists until then
COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
PIECE: Final = 1 << 20  # values hashed at once
Names: TypeAlias = tuple[str, ...]


class ShardDataset(ImageDataset):
    """Samples `first` to `last` of an index: one split of a set."""

    def __init__(
        self,
        root: Path,
        index: ShardIndex,
        first: int,
        last: int,
        classes: Names,
        pixel_classes: Names = (),
        kinds: SegmentKinds | None = None,
    ) -> None:
        self.root, self.index, self.first, self.last = root, index, first, last
        self.classes, self.pixel_classes, self.kinds = classes, pixel_classes, kinds
        if kinds is not None:
            self.segment_classes, self.segments_overlap, self.boxes_only = kinds
        self.labels = index.labels(first, last)
        self.names = index.names(first, last)
        # The most recently read tar files stay open. Processes and threads may share them: reads have an offset.
        self.open_shard = lru_cache(OPEN_FILES)(OpenShard)

    def __reduce__(self) -> tuple[Any, ...]:
        part = self.root, self.index, self.first, self.last
        return ShardDataset, (*part, self.classes, self.pixel_classes, self.kinds)

    def shard(self, index: int) -> int:
        """The number of the tar file that a sample is in."""
        return int(np.searchsorted(self.index.ends, self.first + index, side="right"))

    def read(self, index: int) -> bytes:
        return self.read_member(index, "offset", "size")

    def mask(self, index: int) -> Encoded:
        if not self.pixel_classes:
            return super().mask(index)  # refuses
        return self.read_member(index, "mask_offset", "mask_size")

    def segments(self, index: int) -> Segments:
        if self.kinds is None:
            return super().segments(index)  # refuses
        return parse_segments(self.read_member(index, "segments_offset", "segments_size"), self.kinds)

    def read_member(self, index: int, *columns: str) -> bytes:
        """The bytes of one file of a sample, by its columns of offset and size."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset, size = (int(self.index.columns[name][self.first + index]) for name in columns)
        if size > MAX_BYTES:
            raise BadImage(f"has {size:,} bytes; the limit for one image is {MAX_BYTES:,}")
        shard = self.index.shards[self.shard(index)]
        file = self.open_shard(self.root / shard.name, shard)
        data = os.pread(file.number, size, offset)
        while len(data) < size:  # a mounted store may return less than requested
            more = os.pread(file.number, size - len(data), offset + len(data))
            if not more:
                raise BadImage(f"the tar file was cut short: {len(data):,} of {size:,} bytes are left")
            data += more
        return data

    def name(self, index: int) -> str:
        return f"{self.index.shards[self.shard(index)].name}:{self.names[index]}"

    def sizes(self) -> NDArray[np.int64]:
        return self.index.columns["size"][self.first : self.last]

    @cached_property
    def fingerprint(self) -> str:
        """As for every data set, but hashed array by array, and without the names of the tar files."""
        digest = sha256(json.dumps(["shards", len(self), *self.classes, *pixel_class_words(self)]).encode())
        starts, labels = self.names.starts, self.labels
        names = self.names.bytes[int(starts[0]) : int(starts[-1])]
        several = names[:0] if labels.starts is None else labels.starts
        for array in (labels.values, several, self.sizes(), starts, names):
            digest.update(b"|")
            for start in range(0, len(array), PIECE):
                piece = array[start : start + PIECE].astype("<i8")
                digest.update((piece - starts[0] if array is starts else piece).data)
        return digest.hexdigest()


class OpenShard:
    """A tar file that closes with its last reference, so that a thread never reads from a closed one."""

    __slots__ = ("number",)

    def __init__(self, path: Path, shard: ShardFile) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)
        status = os.fstat(self.number)
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.changed):
            raise DataError(f"{path} changed since it was indexed; open the set again")

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def read(path: Path | str, *, progress: Progress | None = None) -> dict[str, ImageDataset]:
    """The splits of a set of tar shards: a folder, one .tar, or a pattern such as set/train-{00000..00146}.tar.

    Splits are folders called train, val or test, or these words in the names of the files (imagenet-val-000.tar);
    without them all is "train". Class names come from classes.txt (one per line) or classes.json next to the shards;
    without them the numbers are the names. `progress` is called with the number of indexed shards and the total.
    """
    path = Path(path)
    root, splits, place = locate_shards(path)
    if not any(splits.values()):
        raise SourceNotFound(f"{path}: no .tar files here")
    listed = find_names(root, path, "pixel_classes")
    pixel_classes = () if listed is None else read_names(listed)
    refuse_repeated(pixel_classes, str(listed))
    names = [name for names in splits.values() for name in names]
    kinds = find_kinds(root, path)
    index = open_index(root, names, place, progress, masks=listed is not None, segments=kinds is not None)
    if not len(index):
        raise DataError(f"{path}: no images in {len(index.shards)} tar files; are their names like KEY.jpg?")
    classes = find_class_names(root, path, index)
    sources: dict[str, ImageDataset] = {}
    shards = first = 0
    for split, names in splits.items():
        shards += len(names)
        last = int(index.ends[shards - 1])
        if first == last:
            raise DataError(f"{path}: the split {split} has no images")
        masked, marked = (
            names is not None and has_parts(index, first, last, names, kind)
            for names, kind in ((listed, "mask"), (kinds and kinds[0], "segments"))
        )
        how = pixel_classes if masked else (), kinds[1] if kinds and marked else None
        sources[split] = ShardDataset(root, index, first, last, classes, *how)
        first = last
    return sources


def locate_shards(path: Path) -> tuple[Path, dict[str, list[str]], Path]:
    """The folder that names are relative to, the tar files by split, and the path of the index."""
    if (path / JOURNAL).exists():
        raise DataError(f"{path} holds a pack that was not finished; run the same `vitrail data pack` again")
    if path.is_dir():
        packed = (path / DESCRIPTION).exists()
        return path, read_description(path) if packed else find_files(path, ".tar", refused=COMPRESSED), path / INDEX
    if path.is_file():
        refuse_suffix(path, COMPRESSED)
        return path.parent, group_by_split(str(path), [path.name]), path.with_name(path.name + ".index")
    if not any(sign in str(path) for sign in "{*?"):
        raise SourceNotFound(f"{path}: no such file or folder")
    names = expand_braces(str(path))
    files = sorted({file for name in names for file in (glob.glob(name) if glob.has_magic(name) else [name])})
    if not files:
        raise SourceNotFound(f"{path}: no file has such a name")
    root = Path(os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files]))
    names = [os.path.relpath(os.path.abspath(file), root) for file in files]
    mark = sha256(os.fsencode(str(path.absolute()))).hexdigest()[:16]
    return root, group_by_split(str(path), names), root / f".vitrail-{mark}.index"


def read_description(path: Path) -> dict[str, list[str]]:
    """The shards by split, from a pack's description."""
    try:
        splits: dict[str, list[str]] = {}
        for row in json.loads((path / DESCRIPTION).read_text("utf-8"))["shards"]:
            splits.setdefault(str(row["split"]), []).append(os.path.basename(row["name"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = f"is damaged ({describe_error(error)})"
        raise DataError(f"{path / DESCRIPTION} {damage}; remove it to read the shards by name") from None
    return splits


def find_class_names(root: Path, path: Path, index: ShardIndex) -> tuple[str, ...]:
    """K names from a file next to the shards, or the numbers; empty where no sample has a label."""
    if index.highest < 0:
        return ()
    worst = next(shard.name for shard in index.shards if shard.highest == index.highest)
    if listed := find_names(root, path, "classes"):
        names = read_names(listed)
        if index.highest >= len(names):
            named = f"{listed} names {len(names)} classes, 0 to {len(names) - 1}"
            raise BadLabels(f"{root / worst} has the label {index.highest}, but {named}")
        return names
    remedy = f"classes.txt in {root}, one name per line, defines the numbers"
    return number_classes(str(root / worst), [index.labels(0, len(index)).values], remedy)


def find_names(root: Path, path: Path, called: str) -> Path | None:
    """The file with class names next to the shards, or above a folder that is a split; that of a single tar file may
    begin with its name."""
    folders = [root, root.parent] if parse_split(root.name) else [root]
    stems = [f"{path.stem}.{called}", called] if path.is_file() else [called]
    files = (folder / f"{stem}{end}" for folder in folders for stem in stems for end in (".txt", ".json"))
    return next((file for file in files if file.is_file()), None)


def find_kinds(root: Path, path: Path) -> tuple[Path, SegmentKinds] | None:
    """Reads segment_classes.json, which describes the segments in the shards: its path and content; None if absent."""
    listed = find_names(root, path, "segment_classes")
    if listed is None or listed.suffix != ".json":
        return None
    try:
        return listed, read_kinds(listed.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = f"does not describe the segments ({describe_error(error)})"
        raise DataError(f"{listed} {reason}; remove it to read the images without segments") from None


def has_parts(index: ShardIndex, first: int, last: int, listed: Path, kind: str) -> bool:
    """Whether the samples of a split have masks (or segments), whose classes the file `listed` names. DataError if only
    some have them."""
    column = f"{kind}_size"
    if column not in index.columns or not index.columns[column][first:last].any():
        return False
    without = np.flatnonzero(index.columns[column][first:last] == 0)
    if without.size:
        where = index.shards[int(np.searchsorted(index.ends, first + without[0], side="right"))].name
        what = f"has no mask, KEY.{MASKS[0]}" if kind == "mask" else f"has no segments, KEY.{SEGMENTS}"
        missing = f"{what} ({without.size:,} of {last - first:,} images have none)"
        remedy = f"add it, or remove {listed} to read the images without {'masks' if kind == 'mask' else kind}"
        raise DataError(f"{where}: {index.names(first, last)[int(without[0])]} {missing}; {remedy}")
    return True
