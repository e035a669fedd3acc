"""Which split a file belongs to, by its name: train-00000.tar, imagenet-val-000.tar, test-00000-of-00005.parquet."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from vitrail.core.errors import DataError
from vitrail.data.readers.folder import split_name


def words(name: str) -> list[str]:
    """train-00000-of-00005.parquet -> ["train"]: the words before the suffix, without the numbers of a series."""
    stem = name.partition(".")[0]
    return [word for word in re.split(r"[-_]", stem) if word and word != "of" and not word.isdigit()]


def said_split(name: str) -> str | None:
    """The split that a file's name speaks of; "trainval" is how some sets call all that one may train on."""
    found = {split_name(word) or (word if word == "trainval" else None) for word in words(name.lower())} - {None}
    if len(found) > 1:
        raise DataError(f"{name} names two splits, {' and '.join(sorted(str(split) for split in found))}; rename it")
    return found.pop() if found else None


def by_split(where: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Sorted file names by split. Where no name speaks of one, all are "train", as for every source without splits.

    "trainval" becomes "train", unless that is there as well. Files of several sets in one folder, or files of which
    only some say their split, are refused.
    """
    said = {name: said_split(PurePath(name).name) for name in sorted(names)}
    silent = [name for name, split in said.items() if split is None]
    if len(silent) == len(said):
        return {"train": silent}
    if silent:
        loud = next(name for name, split in said.items() if split)
        raise DataError(f"{where}: {loud} names its split and {silent[0]} does not; rename it, or give one file")
    sets = {" ".join(word for word in words(PurePath(name).name) if not said_split(word)): name for name in said}
    if len(sets) > 1:
        one, other = list(sets.values())[:2]
        raise DataError(f"{where}: {one} and {other} look like parts of two sets; give one file, or a pattern")
    splits: dict[str, list[str]] = {}
    for name, split in said.items():
        splits.setdefault(str(split), []).append(name)
    if "trainval" in splits and "train" not in splits:
        splits["train"] = splits.pop("trainval")
    order = {"train": 0, "trainval": 1, "val": 2, "test": 3}
    return dict(sorted(splits.items(), key=lambda item: order[item[0]]))


def expand(pattern: str) -> list[str]:
    """The names that braces stand for: a-{000..002}.tar, {train,val}.tar. Stars are left to the file system."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span:
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + 1_000_000:
            raise DataError(f"{pattern}: {{{found[1]}}} is no rising range of at most a million files")
        middles = [f"{number:0{len(span[1])}d}" for number in range(first, last + 1)]
    else:
        middles = found[1].split(",")
    return [name for middle in middles for name in expand(pattern[: found.start()] + middle + pattern[found.end() :])]
