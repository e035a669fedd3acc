"""The index of a set of shards: one file of plain arrays, mapped into memory.

    magic (16 bytes), length of the header (8), its SHA-256 (32), header (JSON), then columns at multiples of 64 bytes

The header lists every shard with its size and modification time, and every column with its type, offset and SHA-256.
Only shards that changed are scanned again; a damaged index is rebuilt. The checksums of columns are compared where
that takes no time, up to 64 MB in all.
"""

import errno
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import DataError, SourceNotFound
from vitrail.data.dataset import NONE, Labels, StringArray
from vitrail.data.readers.folder import map_threads
from vitrail.data.readers.tar import ShardColumns, scan_shard

MAGIC: Final = b"vitrail shards 1"
PREAMBLE: Final = len(MAGIC) + 8 + 32
ALIGN: Final = 64
CHECKED: Final = 64 << 20  # bytes of columns whose checksums are compared on opening
SCANS: Final = 8  # at once: a mounted store answers many requests in the time of one

PARTS: Final = ("mask_offset", "mask_size", "segments_offset", "segments_size")  # what a sample has besides its image
SAMPLES: Final = ("offset", "size", "label", *PARTS)  # columns with one value per sample
LONGS: Final = ("offset", "size", "name_starts", "several_starts", *PARTS)
DTYPES: Final[dict[str, str]] = {"label": "<i4", "several": "<i4", "names": "|u1", **dict.fromkeys(LONGS, "<i8")}

Progress: TypeAlias = Callable[[int, int], None]  # shards done, shards in all


class ShardFile(NamedTuple):
    """One tar file, as scanned."""

    name: str  # relative to the folder of the set
    size: int
    changed: int  # nanoseconds
    samples: int = 0
    highest: int = -1  # the highest label in it
    multiple: bool = False
    masks: int = -1  # samples with a mask; -1 in an index of an earlier version, which ignored masks
    segments: int = -1  # samples with segments; -1 likewise

    @property
    def is_whole(self) -> bool:
        """Whether all was looked for that this version knows of."""
        return self.masks >= 0 and self.segments >= 0

    def is_same_file(self, other: "ShardFile") -> bool:
        return self[:3] == other[:3]


Scanner: TypeAlias = Callable[[ShardFile], ShardColumns]


class ShardIndex:
    """A mapped index file. Another process receives its path."""

    def __init__(self, path: Path) -> None:
        """OSError where it is unreadable, ValueError where it is not an index or damaged."""
        self.path = path
        with open(path, "rb") as file:
            start = file.read(PREAMBLE)
            length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 8], "little")
            size = os.fstat(file.fileno()).st_size
            if not start.startswith(MAGIC) or PREAMBLE + length > size:
                raise ValueError("not an index")
            header = file.read(length)
            self.digest = sha256(header).hexdigest()
            if bytes.fromhex(self.digest) != start[-32:]:
                raise ValueError("its header is damaged")
            self.header: dict[str, Any] = json.loads(header)
            if self.header["length"] != size:
                raise ValueError("cut short")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.shards = tuple(ShardFile(*row) for row in self.header["shards"])
        self.ends: NDArray[np.int64] = np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)
        self.columns: dict[str, NDArray[Any]] = {}
        for name, place in self.header["columns"].items():
            self.columns[name] = column = np.frombuffer(memory, DTYPES[name], place["count"], place["offset"])
            if size <= CHECKED and sha256(column.data).hexdigest() != place["sha256"]:
                raise ValueError(f"its column {name} is damaged")

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen_index, (self.path, self.digest)

    def __len__(self) -> int:
        return len(self.columns["offset"])

    @property
    def highest(self) -> int:
        """The highest label of all."""
        return max((shard.highest for shard in self.shards), default=-1)

    def names(self, first: int, last: int) -> StringArray:
        return StringArray.from_arrays(self.columns["names"], self.columns["name_starts"][first : last + 1])

    def labels(self, first: int, last: int) -> Labels:
        if "several" not in self.columns:
            return Labels(self.columns["label"][first:last])
        starts = self.columns["several_starts"][first : last + 1]
        values = self.columns["several"][int(starts[0]) : int(starts[-1])]
        return Labels(values, starts - starts[0] if starts[0] else starts)

    def rows(self, shard: int) -> ShardColumns:
        """The columns of one shard, as they were scanned."""
        last = int(self.ends[shard])
        first = last - self.shards[shard].samples
        none, names, labels = np.zeros(last - first, np.int64), self.names(first, last), self.labels(first, last)
        part = {name: self.columns[name][first:last] if name in self.columns else none for name in SAMPLES}
        part |= {"names": names.bytes[names.starts[0] : names.starts[-1]], "name_length": np.diff(names.starts)}
        if labels.starts is None:
            known = part["label"] != NONE
            return part | {"several": part["label"][known], "count": known, "listed": none}
        multiple = none + self.shards[shard].multiple
        return part | {"several": labels.values, "count": np.diff(labels.starts), "listed": multiple}


def reopen_index(path: Path, digest: str) -> ShardIndex:
    """The same index in another process."""
    try:
        index = ShardIndex(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the index cannot be opened again: {error}") from None
    if index.digest != digest:
        raise DataError(f"{path}: the shards changed while they were in use; open the set again")
    return index


def open_index(
    root: Path,
    names: Sequence[str],
    place: Path,
    progress: Progress | None = None,
    *,
    masks: bool = False,
    segments: bool = False,
) -> ShardIndex:
    """The index of these shards, in this order; built or updated where needed. With `masks` an index that ignored masks
    is out of date, and with `segments` one that ignored those."""
    try:
        found = [(name, os.stat(root / name)) for name in names]
    except OSError as error:
        raise SourceNotFound(f"{error.filename}: {error.strerror}") from None
    shards = [ShardFile(name, status.st_size, status.st_mtime_ns) for name, status in found]
    places = (place, cache_folder("shards") / f"{sha256(os.fsencode(place.absolute())).hexdigest()[:32]}.index")
    old: ShardIndex | None = None
    for place in places:
        try:
            index = ShardIndex(place)
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: it can always be rebuilt
            continue
        if any((masks and shard.masks < 0) or (segments and shard.segments < 0) for shard in index.shards):
            continue
        if len(index.shards) == len(shards) and all(map(ShardFile.is_same_file, index.shards, shards)):
            return index
        old = old or index
    known = {} if old is None else {shard.name: at for at, shard in enumerate(old.shards)}

    def rows(shard: ShardFile) -> ShardColumns:
        at = known.get(shard.name)
        if old is not None and at is not None and old.shards[at].is_same_file(shard) and old.shards[at].is_whole:
            return old.rows(at)
        return scan_shard(root / shard.name)

    with ExitStack() as stack:
        place, spools = open_spools(places, stack)
        done = write_columns(shards, rows, spools, progress)
        try:
            return write_index(place, done, spools)
        except OSError as error:
            raise DataError(f"{place}: the index cannot be written: {error.strerror}") from None


def open_spools(places: Sequence[Path], stack: ExitStack) -> tuple[Path, dict[str, IO[bytes]]]:
    """The first writable place, and temporary files there that collect the columns."""
    refused: list[str] = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if not os.stat(place.parent).st_mode & 0o222:  # root could write there, but should not
                raise PermissionError(errno.EACCES, "marked as read-only")
            open_file = partial(tempfile.TemporaryFile, dir=place.parent, prefix=".vitrail-")
            return place, {name: stack.enter_context(open_file()) for name in DTYPES}
        except OSError as error:
            refused.append(f"{place.parent}: {error.strerror}")
    raise DataError(f"no writable place for the index ({'; '.join(refused)}); set VITRAIL_CACHE to a folder")


def write_columns(
    shards: list[ShardFile], rows: Scanner, spools: dict[str, IO[bytes]], progress: Progress | None = None
) -> list[ShardFile]:
    """Appends the columns of one shard after another. `rows` returns them, for several shards at once."""
    done: list[ShardFile] = []
    names = several = 0
    for name in ("name_starts", "several_starts"):
        spools[name].write(np.zeros(1, "<i8").tobytes())
    for shard, part in zip(shards, map_threads(rows, shards, block=SCANS), strict=True):
        name_starts, several_starts = names + np.cumsum(part["name_length"]), several + np.cumsum(part["count"])
        pieces = part | {"name_starts": name_starts, "several_starts": several_starts}
        names, several = names + len(part["names"]), several + len(part["several"])
        for name, spool in spools.items():
            spool.write(np.ascontiguousarray(pieces[name], DTYPES[name]).tobytes())
        others = (int((part[f"{kind}_size"] > 0).sum()) for kind in ("mask", "segments"))
        facts = len(part["offset"]), int(part["several"].max(initial=-1)), bool(part["listed"].any()), *others
        done.append(ShardFile(*shard[:3], *facts))
        if progress:
            progress(len(done), len(shards))
    return done


def write_index(place: Path, shards: Sequence[ShardFile], spools: dict[str, IO[bytes]]) -> ShardIndex:
    """Writes the header and the collected columns atomically; of two concurrent writers, the later wins."""
    unused = () if any(shard.multiple for shard in shards) else ("several",)  # the first label is the only one
    unused += () if any(shard.masks > 0 for shard in shards) else ("mask",)
    unused += () if any(shard.segments > 0 for shard in shards) else ("segments",)
    spools = {name: spool for name, spool in spools.items() if not name.startswith(unused)}
    columns: dict[str, dict[str, Any]] = {}
    for name, spool in spools.items():
        count = spool.tell() // np.dtype(DTYPES[name]).itemsize
        spool.seek(0)
        columns[name] = {"count": count, "offset": 0, "sha256": file_digest(cast("Any", spool), "sha256").hexdigest()}
    header: dict[str, Any] = {"shards": shards, "columns": columns, "length": 2**62}
    room = len(json.dumps(header)) + 24 * len(columns)  # offsets are filled in below, and take less
    at = align(PREAMBLE + room)
    for name, column in columns.items():
        column["offset"] = at
        header["length"] = at + column["count"] * np.dtype(DTYPES[name]).itemsize
        at = align(header["length"])
    text = json.dumps(header).encode().ljust(room)
    with replace_on_success(place) as file:
        file.write(MAGIC + len(text).to_bytes(8, "little") + sha256(text).digest() + text)
        for name, spool in spools.items():
            file.write(bytes(columns[name]["offset"] - file.tell()))
            spool.seek(0)
            copyfileobj(spool, file, 1 << 20)
        file.flush()
        index = ShardIndex(Path(file.name))  # before it gets its name, when another process may replace it
    index.path = place
    return index


def align(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
