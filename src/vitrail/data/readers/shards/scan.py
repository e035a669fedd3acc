"""The samples of one shard: where each picture lies, and its labels."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels, DataError
from vitrail.data.decode.support import HEIC, READ
from vitrail.data.labels import NONE
from vitrail.data.readers.shards.tar import Member, Tar

PICTURES: Final = frozenset(suffix.removeprefix(".") for suffix in (*READ, *HEIC))
MASKS: Final = ("seg.png", "mask.png")  # ends of what may be a mask; the first one counts
DIGITS: Final = 9  # of a label; the index keeps 32 bits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scanned:
    """N samples in columns, in the order of their first members."""

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int32]  # the first, or -1
    names: NDArray[np.uint8]  # those of the picture members, laid end to end
    name_length: NDArray[np.int64]
    several: NDArray[np.int32]  # all labels, laid end to end
    count: NDArray[np.int64]  # of labels a sample
    multiple: bool  # whether any sample came with a list
    mask_offset: NDArray[np.int64]
    mask_size: NDArray[np.int64]  # 0 where there is no mask

    def __len__(self) -> int:
        return len(self.offset)


@dataclass(slots=True, eq=False)
class Sample:
    """What has been seen of one key so far."""

    picture: Member | None = None
    mask: Member | None = None
    labels: tuple[int, ...] | None = None
    listed: bool = False
    ends: str = ""  # of other members, for a message


def scan(path: Path) -> Scanned:
    """All samples of a shard, by reading its headers and labels."""
    samples: dict[str, Sample] = {}
    with Tar(path) as tar:
        for member in tar.members():
            key, kind = split(member.name)
            if key:
                note(tar, samples.setdefault(key, Sample()), member, kind)
    for key, sample in samples.items():
        if sample.picture is None and sample.labels:
            found = f", only .{sample.ends}" if sample.ends else ""
            raise DataError(f"{path}: {key} has a label and no picture{found}; pictures end in {', '.join(READ)}")
    return columns([sample for sample in samples.values() if sample.picture])


def split(name: str) -> tuple[str, str]:
    """a/b.c.png -> ("a/b", "c.png"). Hidden files, such as those that macOS adds, have no key."""
    folder, slash, last = name.removeprefix("./").rpartition("/")
    key, _, kind = last.partition(".")
    return (folder + slash + key, kind.lower()) if key else ("", "")


def note(tar: Tar, sample: Sample, member: Member, kind: str) -> None:
    if kind in PICTURES:
        if sample.picture is not None:
            raise tar.wrong(
                member.offset,
                f"{member.name} is a second picture beside {sample.picture.name}; give what belongs to a picture a "
                "second dot (KEY.mask.png), and every picture a key of its own",
            )
        sample.picture = member
    elif kind == "cls":
        given(tar, sample, member, (number(tar, member, tar.text(member).decode("ascii", "replace")),))
    elif kind == "json":
        described(tar, sample, member)
    else:
        if kind == MASKS[0] or (kind in MASKS and sample.mask is None):
            sample.mask = member
        sample.ends = kind


def described(tar: Tar, sample: Sample, member: Member) -> None:
    """The labels in a JSON member, where it has any."""
    try:
        content: Any = json.loads(tar.text(member))
    except (ValueError, RecursionError) as error:
        raise tar.wrong(member.offset, f"{member.name} is no JSON: {error}") from None
    if not isinstance(content, dict):
        return
    found: Any = content.get("labels", content.get("label"))
    if isinstance(found, list):
        sample.listed = True
        given(tar, sample, member, tuple(number(tar, member, value) for value in found))
    elif found is not None:
        given(tar, sample, member, (number(tar, member, found),))


def given(tar: Tar, sample: Sample, member: Member, labels: tuple[int, ...]) -> None:
    if sample.labels is not None and sample.labels != labels:
        raise BadLabels(f"{tar.path}: {member.name} says {list(labels)}, another member {list(sample.labels)}")
    sample.labels = labels


def number(tar: Tar, member: Member, value: Any) -> int:
    """A class number from text or JSON; a name is not one."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > DIGITS:
        raise BadLabels(
            f"{tar.path}: {member.name} has the label {text[:60]!r}; labels are numbers from 0, and their names go, "
            "in that order, into classes.txt beside the shards"
        )
    return int(text)


def columns(samples: list[Sample]) -> Scanned:
    pictures = [sample.picture for sample in samples if sample.picture]
    names = [fsencode(picture.name) for picture in pictures]
    labels = [sample.labels or () for sample in samples]
    return Scanned(
        offset=whole((picture.offset for picture in pictures), len(samples)),
        size=whole((picture.size for picture in pictures), len(samples)),
        label=np.fromiter((row[0] if row else NONE for row in labels), np.int32, len(samples)),
        names=np.frombuffer(b"".join(names), np.uint8),
        name_length=whole(map(len, names), len(samples)),
        several=np.array([value for row in labels for value in row], np.int32),
        count=whole(map(len, labels), len(samples)),
        multiple=any(sample.listed for sample in samples),
        mask_offset=whole((sample.mask.offset if sample.mask else 0 for sample in samples), len(samples)),
        mask_size=whole((sample.mask.size if sample.mask else 0 for sample in samples), len(samples)),
    )


def whole(values: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, count)
