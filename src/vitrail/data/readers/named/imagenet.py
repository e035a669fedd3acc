"""ImageNet (ILSVRC-2012): class folders, or the official tar files as they are.

root/train    folders n01440764 and so on; or ILSVRC2012_img_train.tar, a tar file of a tar file a class
root/val      the same folders; or all 50,000 pictures side by side; or ILSVRC2012_img_val.tar

Class k is the k-th WordNet id in alphabetical order, as everywhere. The official val pictures do not say their class in
their names: that comes from ILSVRC2012_devkit_t12.tar.gz, from the meta.bin that torchvision makes of it, from Kaggle's
LOC_val_solution.csv, or from a list of 50,000 WordNet ids, imagenet_2012_validation_synset_labels.txt.
"""

import re
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.folder import is_folder, is_picture, listed, read_classes
from vitrail.data.readers.named.kept import Tables, kept
from vitrail.data.readers.named.mat import read_mat
from vitrail.data.readers.named.pieces import Pieces
from vitrail.data.readers.named.places import Absent, present, read_text
from vitrail.data.readers.named.trees import Folder
from vitrail.data.source import Relabelled, Source
from vitrail.data.strings import Strings

TRAIN_TAR: Final = "ILSVRC2012_img_train.tar"
VAL_TAR: Final = "ILSVRC2012_img_val.tar"
DEVKIT: Final = "ILSVRC2012_devkit_t12.tar.gz"
META: Final = "meta.bin"
SOLUTION: Final = "LOC_val_solution.csv"
SYNSETS: Final = "imagenet_2012_validation_synset_labels.txt"
NAMES: Final = "LOC_synset_mapping.txt"
KAGGLE: Final = "ILSVRC/Data/CLS-LOC"


def imagenet(root: Path) -> dict[str, Source]:
    """The splits that are there, at least one of train and val."""
    splits: dict[str, Source] = {}
    for where in (root, root / KAGGLE):
        if "train" not in splits and (where / "train").is_dir():
            splits["train"] = read_classes(where, "train")
        if "val" not in splits and (where / "val").is_dir():
            splits["val"] = val_folder(root, where)
    if "train" not in splits and (root / TRAIN_TAR).is_file():
        splits["train"] = train_tar(root / TRAIN_TAR)
    if "val" not in splits and (root / VAL_TAR).is_file():
        splits["val"] = val_tar(root)
    if not splits:
        raise Absent(root, ("train", "val", TRAIN_TAR, VAL_TAR))
    return named(root, splits)


def named(root: Path, splits: dict[str, Source]) -> dict[str, Source]:
    """With the same classes in each, and with words for them where a file gives some."""
    ids = next(iter(splits.values())).classes
    for split, source in splits.items():
        if source.classes != ids:
            odd = sorted(set(ids) ^ set(source.classes))
            raise BadLabels(f"{root}: train and {split} do not have the same classes; {', '.join(odd[:5])} differ")
    words = class_words(root)
    classes = [words.get(identity, identity) for identity in ids]
    return {split: Relabelled(source, source.labels, classes) for split, source in splits.items()}


def class_words(root: Path) -> dict[str, str]:
    """ "n01440764 tench, Tinca tinca" -> tench"""
    if not (root / NAMES).is_file():
        return {}
    lines = (line.partition(" ") for line in read_text(root / NAMES).splitlines() if line.strip())
    return {identity: words.partition(",")[0].strip() for identity, _, words in lines}


def train_tar(path: Path) -> Source:
    """The members of its members. Reading a million headers takes minutes, once."""
    tables = kept("imagenet-train", [path], lambda: nested(path))
    classes = [str(name) for name in tables["classes"]]
    return Pieces(
        [str(path)],
        np.zeros(len(tables["offset"]), np.int32),
        tables["offset"],  # type: ignore[arg-type]
        tables["length"],  # type: ignore[arg-type]
        Strings.over(tables["names"], tables["starts"]),  # type: ignore[arg-type]
        Labels(tables["label"]),  # type: ignore[arg-type]
        classes,
    )


def nested(path: Path) -> Tables:
    names: list[str] = []
    rows: list[tuple[int, int, str]] = []
    try:
        with tarfile.open(path, "r:") as outer:
            for member in outer:
                if not (member.isreg() and re.fullmatch(r"n\d{8}\.tar", Path(member.name).name)):
                    continue
                identity = Path(member.name).stem
                with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                    for one in inner:
                        if one.isreg():
                            rows.append((member.offset_data + one.offset_data, one.size, identity))
                            names.append(f"{identity}/{Path(one.name).name}")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged or cut short ({reason_of(error)}); download it again") from None
    classes = sorted({identity for _, _, identity in rows})
    numbers = {identity: i for i, identity in enumerate(classes)}
    packed = Strings(names)
    return {
        "names": packed.bytes,
        "starts": packed.starts,
        "offset": np.array([row[0] for row in rows], np.int64),
        "length": np.array([row[1] for row in rows], np.int64),
        "label": np.array([numbers[row[2]] for row in rows], np.int32),
        "classes": np.array(classes),
    }


def val_folder(root: Path, where: Path) -> Source:
    """Class folders, or pictures side by side whose classes a list says."""
    entries = listed(str(where / "val"))
    if any(is_folder(entry) for entry in entries):
        return read_classes(where, "val")
    names = [entry.name for entry in entries if is_picture(entry.name)]
    labels, classes = val_labels(root, names)
    return Folder(where).source([f"val/{name}" for name in names], labels, classes)


def val_tar(root: Path) -> Source:
    from vitrail.data.readers.shards.tar import Tar

    path = root / VAL_TAR
    with Tar(path) as opened:
        members = sorted(opened.members())
    labels, classes = val_labels(root, [Path(member.name).name for member in members])
    return Pieces(
        [str(path)],
        np.zeros(len(members), np.int32),
        np.array([member.offset for member in members], np.int64),
        np.array([member.size for member in members], np.int64),
        Strings(member.name for member in members),
        labels,
        classes,
    )


def val_labels(root: Path, names: Sequence[str]) -> tuple[Labels, list[str]]:
    """The classes of pictures called ILSVRC2012_val_00000001.JPEG and so on."""
    truth = val_synsets(root)
    classes = sorted(set(truth))
    numbers = {identity: i for i, identity in enumerate(classes)}
    found = [val_number(name) for name in names]
    beyond = [name for name, at in zip(names, found, strict=True) if not 1 <= at <= len(truth)]
    if beyond:
        raise DataError(f"{root}: {beyond[0]} is not numbered from 1 to {len(truth)} as the list of classes is")
    return Labels(np.array([numbers[truth[at - 1]] for at in found], np.int64)), classes


def val_number(name: str) -> int:
    """ILSVRC2012_val_00000293.JPEG -> 293; 0 for any other name. A class in front or behind does not matter."""
    found = re.search(r"ILSVRC2012_val_(\d{8})", name)
    return int(found[1]) if found else 0


def val_synsets(root: Path) -> list[str]:
    """The WordNet ids of val pictures 1, 2, ..."""
    where = present(root, SYNSETS, META, SOLUTION, DEVKIT)
    if where.name == SYNSETS:
        return read_text(where).split()
    if where.name == META:
        return from_meta(where)
    if where.name == SOLUTION:
        rows = [line.partition(",") for line in read_text(where).splitlines()[1:] if line.strip()]
        return [words.split()[0] for _, _, words in sorted(rows)]
    return from_devkit(where)


def from_meta(path: Path) -> list[str]:
    import torch

    try:
        _, synsets = torch.load(path, weights_only=True)
        return [str(identity) for identity in synsets]
    except Exception as error:
        raise DataError(f"{path} is not torchvision's meta.bin of ImageNet ({reason_of(error)})") from None


def from_devkit(path: Path) -> list[str]:
    """Ground truth by ILSVRC2012_ID, which meta.mat translates."""
    home = "ILSVRC2012_devkit_t12/data"
    from tempfile import TemporaryDirectory

    try:
        with tarfile.open(path) as opened, TemporaryDirectory() as folder:
            truth = opened.extractfile(f"{home}/ILSVRC2012_validation_ground_truth.txt").read()  # type: ignore[union-attr]
            meta = Path(folder) / "meta.mat"
            meta.write_bytes(opened.extractfile(f"{home}/meta.mat").read())  # type: ignore[union-attr]
            synsets: list[dict[str, Any]] = read_mat(meta, "synsets")["synsets"]
        translated = {int(one["ILSVRC2012_ID"].ravel()[0]): str(one["WNID"]) for one in synsets}
        return [translated[int(word)] for word in truth.split()]
    except (tarfile.TarError, zlib.error, OSError, EOFError, KeyError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged, or not the development kit of ILSVRC-2012 ({reason_of(error)})") from None
