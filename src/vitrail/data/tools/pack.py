"""Any source to tar shards: the road to big sets.

    report = pack(open_source("photos"), Path("packed"), max_side=512)

Shards are cut where they reach their size, in the order of the source, so the bytes are the same for any number of
processes. A pack that was stopped goes on where it was when it is asked for again: what is finished is kept if its
checksum still fits. In the folder afterwards:

    train-00000.tar ...   KEY.jpg with KEY.cls, or KEY.json where a sample may have several labels, and KEY.seg.png
    classes.json          the names of the classes, in order
    pixel_classes.json    those of the class indices in masks
    pack.json             what was packed, how, with which versions; every shard with its range and SHA-256
    SHA256SUMS            the same checksums, for `sha256sum -c`
    unreadable.jsonl      what was left out, and why (only if there is any)
    vitrail.index         see vitrail.data.readers.shard_index
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import PIL
from PIL import features

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadLabels, ConfigError, DataError, describe_error
from vitrail.core.locks import try_lock
from vitrail.data.dataset import ImageDataset
from vitrail.data.readers.shards import DESCRIPTION, INDEX, JOURNAL, read
from vitrail.data.tools.shard_writer import Encoding, Left, Packed, Peek, Written, in_order, write_shard

KIND: Final = "vitrail pack 1"
SMALLEST: Final = 10_240  # of a shard, in bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """What is in a finished pack."""

    out: Path
    splits: dict[str, int]  # samples of each
    shards: int
    kept: int  # shards that were there already
    bytes: int
    reencoded: int  # images that were made smaller
    unreadable: int  # samples left out; see unreadable.jsonl
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

    With `max_side`, images whose longer side exceeds it are brought down to it, upright RGB: as JPEG of that
    `quality`, or as PNG if they were lossless, and their masks with them. All others keep their bytes. Pixels become
    PNG. What else belongs to a sample (a text, say) is not carried over. Every image, and every mask, is decoded
    once: one that cannot be is left out, listed in unreadable.jsonl and counted, or, with `strict`, ends the pack.
    Every shard is read back and its checksum and headers compared before it gets its name. `workers` is the number of
    processes, by default one a core. `progress` hears how many samples are done, and of how many.
    """
    began = time.monotonic()
    out = Path(out)
    options = {"shard_size": shard_size, "max_side": max_side, "quality": quality}
    check(source_splits, shard_size, max_side, quality)
    plan = planned(source_splits, options)
    if finished := complete(out, plan):
        return report(out, finished, len(finished), began)
    total = sum(len(source) for source in source_splits.values())
    encoding = Encoding(max_side=max_side, quality=quality, strict=strict)
    with journal(out, plan) as (file, kept):
        written, done = list(kept), 0
        try:
            for split, source in source_splits.items():
                mine = [shard for shard in kept if shard.split == split]
                start = mine[-1].next if mine else 0
                samples = counted(in_order(source, start, encoding, workers), done, total, progress)
                for shard in split_shards(out, split, source, len(mine), start, samples, shard_size):
                    append(file, shard.line().encode())
                    written.append(shard)
                done += len(source)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"{out}: {error.strerror}; {len(written)} shards are finished and will be kept: make room and run the "
                "same command again"
            ) from None
        written.sort(key=lambda shard: (list(source_splits).index(shard.split), shard.first))
        finish(out, plan, written)
    read(out)  # writes the index
    return report(out, written, len(kept), began)


def check(splits: Mapping[str, ImageDataset], shard_size: int, max_side: int | None, quality: int) -> None:
    if shard_size < SMALLEST:
        raise ConfigError(f"shard_size={shard_size}: a shard has at least {SMALLEST:,} bytes")
    if max_side is not None and max_side < 1:
        raise ConfigError(f"max_side={max_side} must be at least 1")
    if not 1 <= quality <= 100:
        raise ConfigError(f"quality={quality} is not between 1 and 100")
    if not splits:
        raise DataError("there is no split to pack")
    for name, source in splits.items():
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ConfigError(f"split {name!r}: letters, digits and _ can stand in the name of a shard")
        if not len(source):
            raise DataError(f"the split {name} has no samples")
        if source.classes:
            source.labels.check(len(source.classes), name)
    if len({source.classes for source in splits.values() if source.classes}) > 1:
        raise BadLabels(f"the splits {', '.join(splits)} have different classes; pack them into different folders")
    if len({source.pixel_classes for source in splits.values() if source.pixel_classes}) > 1:
        raise BadLabels(f"the masks of {', '.join(splits)} have different classes; pack them into different folders")


def planned(splits: Mapping[str, ImageDataset], options: dict[str, Any]) -> dict[str, Any]:
    """What makes two packs the same."""
    sources = {name: {"fingerprint": source.fingerprint, "samples": len(source)} for name, source in splits.items()}
    classes = next((list(source.classes) for source in splits.values() if source.classes), [])
    plan = {"kind": KIND, "options": options, "sources": sources, "classes": classes}
    masked = next((list(source.pixel_classes) for source in splits.values() if source.pixel_classes), None)
    return plan if masked is None else {**plan, "pixel_classes": masked}


def complete(out: Path, plan: dict[str, Any]) -> list[Written] | None:
    """The shards, where all of this was packed here before. A folder with anything else in it is refused."""
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
        shards = [Written.of(row) for row in description["shards"]] if same else []
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{out} holds other files ({min(there)}, ...); name a new or an empty folder") from None
    if not same:
        raise DataError(f"{out} holds a pack of another source or with other options; name another folder")
    return shards


@contextmanager
def journal(out: Path, plan: dict[str, Any]) -> Generator[tuple[IO[bytes], list[Written]]]:
    """The open list of finished shards, and those an earlier run left. One at a time may write here."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / JOURNAL
    with open(path, "ab+") as file:
        lock(file, out)
        kept = resumed(out, file, plan)
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


def lock(file: IO[bytes], out: Path) -> None:
    with suppress(OSError):  # a file system without locks
        if not try_lock(file.fileno()):
            raise DataError(f"{out}: another process is packing into this folder")


def resumed(out: Path, file: IO[bytes], plan: dict[str, Any]) -> list[Written]:
    """The shards that can be kept: of each split those from the start on that are intact."""
    file.seek(0)
    lines = file.read().split(b"\n")[:-1]  # a line that was cut short has no end
    if not lines:
        return []
    try:
        if json.loads(lines[0]) != plan:
            raise DataError(
                f"{out} holds the beginning of a pack of another source or with other options; finish that one, "
                "remove the folder or name another"
            )
        shards = [Written.of(json.loads(line)) for line in lines[1:]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{out / JOURNAL} is damaged ({describe_error(error)}); remove the folder and pack again"
        ) from None
    kept: list[Written] = []
    reached: dict[str, int] = {}
    for shard in shards:
        if shard.first == reached.get(shard.split, 0) and shard.intact(out):
            kept.append(shard)
            reached[shard.split] = shard.next
    return kept


def split_shards(
    out: Path, split: str, source: ImageDataset, number: int, start: int, samples: Iterator[Packed | Left], size: int
) -> Iterator[Written]:
    """One shard after the other, from sample `start` on."""
    if start == len(source):
        return
    stream = Peek(samples)
    while stream.head is not None:
        shard = write_shard(out, split, number, start, len(source), stream, size)
        number, start = number + 1, shard.next
        yield shard


def counted(
    samples: Iterator[Packed | Left], before: int, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[Packed | Left]:
    for sample in samples:
        if progress:
            progress(before + sample.index + 1, total)
        yield sample


def finish(out: Path, plan: dict[str, Any], shards: list[Written]) -> None:
    """The files that describe the pack; the description last, for it says that all is there."""
    missing = [{"split": shard.split, **asdict(left)} for shard in shards for left in shard.unreadable]
    description = {
        **plan,
        "versions": {"pillow": PIL.__version__, "jpeg": features.version("jpg")},  # what the encoded bytes depend on
        "splits": samples_of(shards),
        "unreadable": len(missing),
        "shards": [asdict(shard) for shard in shards],
    }
    files = {
        **{
            f"{kind}.json": json.dumps(plan[kind], ensure_ascii=False, indent=0) if plan.get(kind) else ""
            for kind in ("classes", "pixel_classes")
        },
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


def samples_of(shards: list[Written]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for shard in shards:
        counts[shard.split] = counts.get(shard.split, 0) + shard.samples
    return counts


def report(out: Path, shards: list[Written], kept: int, began: float) -> PackReport:
    return PackReport(
        out=out,
        splits=samples_of(shards),
        shards=len(shards),
        kept=kept,
        bytes=sum(shard.bytes for shard in shards),
        reencoded=sum(shard.reencoded for shard in shards),
        unreadable=sum(len(shard.unreadable) for shard in shards),
        seconds=time.monotonic() - began,
    )
