"""ImageNet-21k: a tar file a class, n00004475.tar and so on, read where they lie.

The paper's set has 21,843 classes and 14,197,122 pictures. Beside the tar files may lie

imagenet21k_wordnet_ids.txt   all WordNet ids in the order of the class numbers; else the tar files are the classes,
                              in alphabetical order
multilabel.json               {"n00004475_10": ["n00004475", "n00015388"], ...}: pictures with further classes

In the multi-label set a picture that lies under one name in the tar files of several classes is one sample with all of
these, and multilabel.json adds to them. Copies under other names are for de-duplication to find: a hash of all pictures
would read 1.3 TB.
"""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.folder import is_folder, listed
from vitrail.data.readers.named.kept import Tables, kept
from vitrail.data.readers.named.pieces import Pieces
from vitrail.data.readers.named.places import Absent, read_text
from vitrail.data.source import Relabelled, Source, Subset
from vitrail.data.strings import Strings

IDS: Final = "imagenet21k_wordnet_ids.txt"
FURTHER: Final = "multilabel.json"
FOLDERS: Final = ("", "winter21_whole", "fall11_whole", "train")


def imagenet21k(root: Path) -> dict[str, Source]:
    """One class a picture: that of its tar file."""
    return {"train": read(root)}


def multilabel(root: Path) -> dict[str, Source]:
    """Several classes a picture."""
    source = read(root)
    first: dict[str, int] = {}
    rows: dict[str, list[int]] = {}
    for i in range(len(source)):
        stem = PurePosixPath(source.name(i)).stem
        first.setdefault(stem, i)
        rows.setdefault(stem, []).append(int(source.labels.values[i]))
    numbers = {identity: i for i, identity in enumerate(source.classes)}
    for stem, identities in further(root).items():
        strange = [identity for identity in identities if identity not in numbers]
        if strange:
            raise BadLabels(f"{root / FURTHER}: {stem} has the class {strange[0]}, which is not there")
        if stem in rows:
            rows[stem] += [numbers[identity] for identity in identities]
    labels = Labels.several(dict.fromkeys(row) for row in rows.values())
    return {"train": Relabelled(Subset(source, list(first.values())), labels, source.classes)}


def further(root: Path) -> dict[str, list[str]]:
    path = root / FURTHER
    if not path.is_file():
        return {}
    try:
        held = json.loads(read_text(path))
        return {str(stem): [str(identity) for identity in identities] for stem, identities in held.items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f'{path} is not of the form {{"picture": ["class", ...], ...}} ({reason_of(error)})') from None


def read(root: Path) -> Source:
    home, tars = find(root)
    paths = [home / f"{identity}.tar" for identity in tars]
    tables = kept("imagenet21k", paths, lambda: index(paths))
    classes = class_ids(root, tars)
    numbers = {identity: i for i, identity in enumerate(classes)}
    file = tables["piece"].astype(np.int32)
    translated = np.array([numbers[identity] for identity in tars], np.int32)
    return Pieces(
        [str(path) for path in paths],
        file,
        tables["offset"].astype(np.int64),
        tables["length"].astype(np.int64),
        Strings.over(tables["names"].astype(np.uint8), tables["starts"].astype(np.int64)),
        Labels(translated[file]),
        classes,
    )


def find(root: Path) -> tuple[Path, list[str]]:
    """The folder with the tar files, and their classes."""
    for folder in FOLDERS:
        home = root / folder
        if not home.is_dir():
            continue
        found = [entry.name[:-4] for entry in listed(str(home)) if not is_folder(entry) and is_class(entry.name)]
        if found:
            return home, found
    raise Absent(root, ("n00004475.tar and so on",))


def is_class(name: str) -> bool:
    return re.fullmatch(r"n\d{8}\.tar", name) is not None


def class_ids(root: Path, tars: list[str]) -> list[str]:
    if not (root / IDS).is_file():
        return tars
    identities = read_text(root / IDS).split()
    strange = sorted(set(tars) - set(identities))
    if strange:
        raise BadLabels(f"{root / IDS} does not list {strange[0]}, but {strange[0]}.tar is there ({len(strange)} such)")
    return identities


def index(paths: list[Path]) -> Tables:
    """Where each picture lies. Only headers are read; 14 million of them take a while, once."""
    from vitrail.data.readers.shards.tar import Tar

    names: list[str] = []
    rows: list[tuple[int, int, int]] = []
    for i, path in enumerate(paths):
        with Tar(path) as opened:
            for member in opened.members():
                names.append(f"{path.stem}/{PurePosixPath(member.name).name}")
                rows.append((i, member.offset, member.size))
    table = np.array(rows, np.int64).reshape(-1, 3)
    packed = Strings(names)
    return {
        "names": packed.bytes,
        "starts": packed.starts,
        "piece": table[:, 0],
        "offset": table[:, 1],
        "length": table[:, 2],
    }
