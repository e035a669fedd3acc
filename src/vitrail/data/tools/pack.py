"""Packs any data set as tar shards, the format for large sets.

    report = pack(open_collection("photos").splits, Path("packed"), max_side=512)

Shards end where they reach their size, in the order of the data set, so the bytes are the same for any number of
processes. The same call resumes an interrupted pack: finished shards are kept if their checksum still matches. The
folder then holds:

    train-00000.tar ...   KEY.jpg with KEY.cls, or KEY.json where a sample may have several labels, and KEY.seg.png
    classes.json          the names of the classes, in order
    pixel_classes.json    the names of the class indices in masks
    segment_classes.json  the classes of the segments in KEY.segments.json
    pack.json             the sources, options and versions; every shard with its range and SHA-256
    SHA256SUMS            the same checksums, for `sha256sum -c`
    unreadable.jsonl      the skipped samples, and why (only if there are any)
    vitrail.index         see vitrail.data.readers.shard_index
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import PIL
from PIL import features

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadLabels, ConfigError, DataError, describe_error
from vitrail.core.locks import try_lock
from vitrail.data.annotations.packed_segments import SegmentKinds
from vitrail.data.dataset import ImageDataset
from vitrail.data.readers.shards import DESCRIPTION, INDEX, JOURNAL, read
from vitrail.data.tools.shard_writer import SampleEncoder, ShardInfo, encode_samples, write_shards

KIND: Final = "vitrail pack 1"
SMALLEST: Final = 10_240  # of a shard, in bytes


@dataclass(frozen=True, slots=True)
class PackReport:
    """The contents of a finished pack."""

    out: Path
    splits: dict[str, int]  # samples of each
    shards: int
    kept: int  # shards from an earlier, interrupted pack
    bytes: int
    reencoded: int  # images that were shrunk
    unreadable: int  # samples skipped; see unreadable.jsonl
    seconds: float


def pack(
    source_splits: Mapping[str, ImageDataset],
    out: Path | str,
    *,
    shard_size: int = 256 * 10**6,
    max_side: int | None = None,
    quality: int = 92,
    workers: int | None = None,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Writes the splits of a source as tar shards of at most `shard_size` bytes, with their index, into `out`.

    With `max_side`, images whose longer side exceeds it are shrunk to upright RGB, as JPEG of the given `quality`, or
    as PNG if they were lossless; their masks and segments shrink with them. All others keep their bytes. Pixels become
    PNG. Other parts of a sample, such as text, are not packed. Every image and its annotations are decoded once: an
    unreadable sample is skipped, listed in unreadable.jsonl and counted, or, with `strict`, ends the pack. Every shard
    is read back and its checksum and headers compared before it gets its name. `workers` is the number of processes, by
    default one per core. `progress` is called with the number of finished samples and the total.
    """
    began, out = time.monotonic(), Path(out)
    options = {"shard_size": shard_size, "max_side": max_side, "quality": quality}
    check_options(source_splits, shard_size, max_side, quality)
    plan = make_plan(source_splits, options)
    if finished := read_finished(out, plan):
        return make_report(out, finished, len(finished), began)
    total = sum(len(source) for source in source_splits.values())
    encoder = SampleEncoder(max_side=max_side, quality=quality, strict=strict)
    with open_journal(out, plan) as (file, kept):
        written, done = list(kept), 0
        try:
            for split, source in source_splits.items():
                mine = [shard for shard in kept if shard.split == split]
                start = mine[-1].next if mine else 0
                heard = partial(lambda done, index: progress and progress(done + index + 1, total), done)
                samples = encode_samples(source, start, encoder, workers, heard)
                for shard in write_shards(out, split, len(mine), start, len(source), samples, shard_size):
                    append(file, shard.line().encode())
                    written.append(shard)
                done += len(source)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            state = f"{len(written)} shards are finished and stay"
            raise DataError(f"{out}: {error.strerror}; {state}: free space and run the same command again") from None
        written.sort(key=lambda shard: (list(source_splits).index(shard.split), shard.first))
        write_description(out, plan, written)
    read(out)  # writes the index
    return make_report(out, written, len(kept), began)


def check_options(splits: Mapping[str, ImageDataset], shard_size: int, max_side: int | None, quality: int) -> None:
    if shard_size < SMALLEST:
        raise ConfigError(f"shard_size={shard_size}: must be at least {SMALLEST:,} bytes")
    if max_side is not None and max_side < 1:
        raise ConfigError(f"max_side={max_side} must be at least 1")
    if not 1 <= quality <= 100:
        raise ConfigError(f"quality={quality} must be between 1 and 100")
    if not splits:
        raise DataError("no split to pack")
    for name, source in splits.items():
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ConfigError(f"split {name!r}: the name of a shard may contain letters, digits and _")
        if not len(source):
            raise DataError(f"the split {name} has no samples")
        if source.classes:
            source.labels.check(len(source.classes), name)
    for kind, what in (("classes", "splits"), ("pixel_classes", "masks of"), ("segment_classes", "segments of")):
        if len({getattr(source, kind) for source in splits.values()} - {()}) > 1:
            raise BadLabels(f"the {what} {', '.join(splits)} have different classes; pack them into different folders")


def make_plan(splits: Mapping[str, ImageDataset], options: dict[str, Any]) -> dict[str, Any]:
    """Describes everything that determines the contents of a pack."""
    sources = {name: {"fingerprint": source.fingerprint, "samples": len(source)} for name, source in splits.items()}
    classes = next((list(source.classes) for source in splits.values() if source.classes), [])
    plan = {"kind": KIND, "options": options, "sources": sources, "classes": classes}
    masked = next((list(source.pixel_classes) for source in splits.values() if source.pixel_classes), None)
    marked = next((source for source in splits.values() if source.segment_classes), None)
    plan |= {} if masked is None else {"pixel_classes": masked}
    if marked is None:
        return plan
    kinds = SegmentKinds(marked.segment_classes, marked.segments_overlap, marked.boxes_only)
    return {**plan, "segment_classes": kinds.to_dict()}


def read_finished(out: Path, plan: dict[str, Any]) -> list[ShardInfo] | None:
    """Returns the shards of an identical, complete pack, or None for a new or interrupted one. Refuses a folder with
    other contents."""
    try:
        there = {name for name in os.listdir(out) if not re.fullmatch(r"\.vitrail-.*\.tmp", name)}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{out}: {error.strerror}") from None
    if JOURNAL in there or not there:
        return None
    try:
        description: dict[str, Any] = json.loads((out / DESCRIPTION).read_text("utf-8"))
        same = all(description[key] == value for key, value in plan.items())
        shards = [ShardInfo.from_json(row) for row in description["shards"]] if same else []
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{out} holds other files ({min(there)}, ...); name a new or an empty folder") from None
    if not same:
        raise DataError(f"{out} holds a pack of another source or with other options; name another folder")
    return shards


@contextmanager
def open_journal(out: Path, plan: dict[str, Any]) -> Generator[tuple[IO[bytes], list[ShardInfo]]]:
    """Opens the journal of finished shards and yields it with the shards of an earlier run. Locks the folder, so that
    only one process at a time writes to it."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / JOURNAL
    with open(path, "ab+") as file:
        with suppress(OSError):  # a file system without locks
            if not try_lock(file.fileno()):
                raise DataError(f"{out}: another process is packing into this folder")
        kept = read_journal(out, file, plan)
        for stray in out.glob(".vitrail-*.tmp"):
            stray.unlink()
        text = (json.dumps(plan) + "\n" + "".join(shard.line() for shard in kept)).encode()
        file.seek(0)
        if file.read() != text:
            file.truncate(0)
            append(file, text)
        yield file, kept


def append(file: IO[bytes], text: bytes) -> None:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def read_journal(out: Path, file: IO[bytes], plan: dict[str, Any]) -> list[ShardInfo]:
    """Reads the shards to keep: of each split, the intact ones up to the first gap."""
    file.seek(0)
    lines = file.read().split(b"\n")[:-1]  # an incomplete line has no end
    if not lines:
        return []
    try:
        if json.loads(lines[0]) != plan:
            fault = f"{out} holds an unfinished pack of another source or with other options"
            raise DataError(f"{fault}; finish that one, remove the folder or name another")
        shards = [ShardInfo.from_json(json.loads(line)) for line in lines[1:]]
    except (ValueError, KeyError, TypeError) as error:
        fault = f"{out / JOURNAL} is damaged ({describe_error(error)})"
        raise DataError(f"{fault}; remove the folder and pack again") from None
    kept: list[ShardInfo] = []
    reached: dict[str, int] = {}
    for shard in shards:
        if shard.first == reached.get(shard.split, 0) and shard.is_intact(out):
            kept.append(shard)
            reached[shard.split] = shard.next
    return kept


def write_description(out: Path, plan: dict[str, Any], shards: list[ShardInfo]) -> None:
    """Writes the files that describe the pack, pack.json last, because it marks the pack as complete."""
    missing = [{"split": shard.split, **asdict(skipped)} for shard in shards for skipped in shard.unreadable]
    description = {
        **plan,
        "versions": {"pillow": PIL.__version__, "jpeg": features.version("jpg")},  # what the encoded bytes depend on
        "splits": count_samples(shards),
        "unreadable": len(missing),
        "shards": [asdict(shard) for shard in shards],
    }
    names = {kind: plan[kind] for kind in ("classes", "pixel_classes", "segment_classes") if plan.get(kind)}
    files = {
        **{f"{kind}.json": json.dumps(listed, ensure_ascii=False, indent=0) for kind, listed in names.items()},
        "SHA256SUMS": "".join(f"{shard.sha256}  {shard.name}\n" for shard in shards),
        "unreadable.jsonl": "".join(json.dumps(row) + "\n" for row in missing),
        DESCRIPTION: json.dumps(description, indent=1),
    }
    for name, text in files.items():
        if text:
            with replace_on_success(out / name) as file:
                file.write(text.encode("utf-8", "surrogatepass"))
    (out / INDEX).unlink(missing_ok=True)
    (out / JOURNAL).unlink()


def count_samples(shards: list[ShardInfo]) -> dict[str, int]:
    splits = dict.fromkeys(shard.split for shard in shards)
    return {split: sum(shard.samples for shard in shards if shard.split == split) for split in splits}


def make_report(out: Path, shards: list[ShardInfo], kept: int, began: float) -> PackReport:
    size, reencoded = sum(shard.bytes for shard in shards), sum(shard.reencoded for shard in shards)
    unreadable, seconds = sum(len(shard.unreadable) for shard in shards), time.monotonic() - began
    return PackReport(out, count_samples(shards), len(shards), kept, size, reencoded, unreadable, seconds)
