"""ImageNet (ILSVRC-2012): class folders, or the official tar files as they are.

root/train    folders n01440764 and so on; or ILSVRC2012_img_train.tar, a tar file of a tar file a class
root/val      the same folders; or all 50,000 images side by side; or ILSVRC2012_img_val.tar

Class k is the k-th WordNet id in alphabetical order, as everywhere. The official val images do not say their class in
their names: that comes from ILSVRC2012_devkit_t12.tar.gz, from the meta.bin that torchvision makes of it, from Kaggle's
LOC_val_solution.csv, or from a list of 50,000 WordNet ids, imagenet_2012_validation_synset_labels.txt.

ReaL: what is really on the 50,000 validation images of ImageNet, several classes each or none.

`real.json` is a list of lists of class numbers, in the order of the images' own numbers: ILSVRC2012_val_00000293 is
entry 292.

ImageNet-21k: a tar file a class, n00004475.tar and so on, read where they lie.

The paper's set has 21,843 classes and 14,197,122 images. Next to the tar files may lie

imagenet21k_wordnet_ids.txt   all WordNet ids in the order of the class numbers; else the tar files are the classes,
                              in alphabetical order
multilabel.json               {"n00004475_10": ["n00004475", "n00015388"], ...}: images with further classes

In the multi-label set an image that lies under one name in the tar files of several classes is one sample with all of
these, and multilabel.json adds to them. Copies under other names are for de-duplication to find: a hash of all images
would read 1.3 TB.
"""

import json
import re
import tarfile
import zlib
from collections.abc import Sequence
from operator import index
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError, reason_of
from vitrail.data.dataset import ImageDataset, Labels, RelabelledDataset, Strings, Subset
from vitrail.data.datasets.file_formats import Folder, Pieces, Tables, kept
from vitrail.data.datasets.matlab import read_mat
from vitrail.data.datasets.open_by_name import Absent, present, read_text
from vitrail.data.readers.folder import is_folder, is_picture, listed, read_classes

TRAIN_TAR: Final = "ILSVRC2012_img_train.tar"
VAL_TAR: Final = "ILSVRC2012_img_val.tar"
DEVKIT: Final = "ILSVRC2012_devkit_t12.tar.gz"
META: Final = "meta.bin"
SOLUTION: Final = "LOC_val_solution.csv"
SYNSETS: Final = "imagenet_2012_validation_synset_labels.txt"
NAMES: Final = "LOC_synset_mapping.txt"
KAGGLE: Final = "ILSVRC/Data/CLS-LOC"


def imagenet(root: Path) -> dict[str, ImageDataset]:
    """The splits that are there, at least one of train and val."""
    splits: dict[str, ImageDataset] = {}
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


def named(root: Path, splits: dict[str, ImageDataset]) -> dict[str, ImageDataset]:
    """With the same classes in each, and with words for them where a file gives some."""
    ids = next(iter(splits.values())).classes
    for split, source in splits.items():
        if source.classes != ids:
            odd = sorted(set(ids) ^ set(source.classes))
            raise BadLabels(f"{root}: train and {split} do not have the same classes; {', '.join(odd[:5])} differ")
    words = class_words(root)
    classes = [words.get(identity, identity) for identity in ids]
    return {split: RelabelledDataset(source, source.labels, classes) for split, source in splits.items()}


def class_words(root: Path) -> dict[str, str]:
    """ "n01440764 tench, Tinca tinca" -> tench"""
    if not (root / NAMES).is_file():
        return {}
    lines = (line.partition(" ") for line in read_text(root / NAMES).splitlines() if line.strip())
    return {identity: words.partition(",")[0].strip() for identity, _, words in lines}


def train_tar(path: Path) -> ImageDataset:
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


def val_folder(root: Path, where: Path) -> ImageDataset:
    """Class folders, or images side by side whose classes a list says."""
    entries = listed(str(where / "val"))
    if any(is_folder(entry) for entry in entries):
        return read_classes(where, "val")
    names = [entry.name for entry in entries if is_picture(entry.name)]
    labels, classes = val_labels(root, names)
    return Folder(where).source([f"val/{name}" for name in names], labels, classes)


def val_tar(root: Path) -> ImageDataset:
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
    """The classes of images called ILSVRC2012_val_00000001.JPEG and so on."""
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
    """The WordNet ids of val images 1, 2, ..."""
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


def read_real(path: Path) -> list[tuple[int, ...]]:
    """The classes of validation image 1, 2, ..."""
    try:
        held = json.loads(path.read_text("utf-8"))
        rows = [tuple(int(np.int64(index(label))) for label in row) for row in held]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a list of lists of class numbers ({reason_of(error)})") from None
    return rows


def real_rows(source: ImageDataset, path: Path) -> list[tuple[int, ...]]:
    """The ReaL labels of every image of a source, by its name; an empty row where an image has none."""
    rows = read_real(path)
    found = np.array([val_number(source.name(i)) for i in range(len(source))], np.int64)
    wrong = np.flatnonzero((found < 1) | (found > len(rows)))
    if wrong.size:
        name = source.name(int(wrong[0]))
        raise BadLabels(f"{name}: no validation image of ImageNet by its name (ILSVRC2012_val_00000001 to {len(rows)})")
    return [rows[number - 1] for number in found.tolist()]


def real_labels(source: ImageDataset, path: Path) -> ImageDataset:
    """Validation images of ImageNet with their ReaL labels. Those that have none are left out of the count."""
    rows = real_rows(source, path)
    kept = np.array([i for i, row in enumerate(rows) if row], np.int64)
    labels = Labels.several(rows[i] for i in kept.tolist())
    labels.check(len(source.classes), str(path))
    return RelabelledDataset(Subset(source, kept), labels, source.classes)


IDS: Final = "imagenet21k_wordnet_ids.txt"
FURTHER: Final = "multilabel.json"
FOLDERS: Final = ("", "winter21_whole", "fall11_whole", "train")


def imagenet21k(root: Path) -> dict[str, ImageDataset]:
    """One class an image: that of its tar file."""
    return {"train": read(root)}


def multilabel(root: Path) -> dict[str, ImageDataset]:
    """Several classes an image."""
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
    return {"train": RelabelledDataset(Subset(source, list(first.values())), labels, source.classes)}


def further(root: Path) -> dict[str, list[str]]:
    path = root / FURTHER
    if not path.is_file():
        return {}
    try:
        held = json.loads(read_text(path))
        return {str(stem): [str(identity) for identity in identities] for stem, identities in held.items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f'{path} is not of the form {{"image": ["class", ...], ...}} ({reason_of(error)})') from None


def read(root: Path) -> ImageDataset:
    home, tars = find(root)
    paths = [home / f"{identity}.tar" for identity in tars]
    tables = kept("imagenet21k", paths, lambda: index_archives(paths))
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


def index_archives(paths: list[Path]) -> Tables:
    """Where each image lies. Only headers are read; 14 million of them take a while, once."""
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
