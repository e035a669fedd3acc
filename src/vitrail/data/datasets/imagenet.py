"""ImageNet (ILSVRC-2012), its ReaL labels, and ImageNet-21k, from class folders or the official tar files.

ImageNet
    train    folders n01440764 and so on; or ILSVRC2012_img_train.tar, a tar file of one tar file per class
    val      the same folders; or all 50,000 images in one folder; or ILSVRC2012_img_val.tar

Class k is the k-th WordNet id in alphabetical order, as everywhere. The names of the official val images do not contain
their class: it comes from ILSVRC2012_devkit_t12.tar.gz, from the meta.bin that torchvision makes of it, from Kaggle's
LOC_val_solution.csv, or from a list of 50,000 WordNet ids, imagenet_2012_validation_synset_labels.txt.

ReaL labels: several classes per val image, or none. `real.json` is a list of lists of class numbers in the order of the
images' own numbers: ILSVRC2012_val_00000293 is entry 292.

ImageNet-21k: one tar file per class, n00004475.tar and so on, read where they lie; the paper's set has 21,843 classes
and 14,197,122 images. Optional files next to them:

    imagenet21k_wordnet_ids.txt   all WordNet ids in the order of the class numbers; without it the tar files are the
                                  classes, in alphabetical order
    multilabel.json               {"n00004475_10": ["n00004475", "n00015388"], ...}: images with further classes

In the multi-label set an image that has one name in the tar files of several classes is one sample with all of them,
and multilabel.json adds to these. Copies under other names are left to de-duplication: hashing all images would read
1.3 TB.
"""

import json
import re
import tarfile
from collections.abc import Sequence
from functools import partial
from operator import index
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError, describe_error
from vitrail.data.dataset import ImageDataset, Labels, RelabelledDataset, SubsetDataset
from vitrail.data.datasets import file_formats as formats
from vitrail.data.datasets.file_formats import ByteRangeDataset, build_index, cached_index
from vitrail.data.datasets.open_by_name import FilesMissing, find_file, read_text, refuse_damaged
from vitrail.data.readers.folder import has_image_suffix, is_folder, list_entries, read_classes
from vitrail.data.readers.tar import TarReader

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT: Final = "ILSVRC2012_devkit_t12.tar.gz"
META: Final = "meta.bin"
SYNSETS: Final = "imagenet_2012_validation_synset_labels.txt"
SOLUTION, NAMES = "LOC_val_solution.csv", "LOC_synset_mapping.txt"  # Kaggle's
KAGGLE: Final = "ILSVRC/Data/CLS-LOC"
WORDNET_IDS: Final = "imagenet21k_wordnet_ids.txt"
MULTILABEL: Final = "multilabel.json"
FOLDERS_21K: Final = ("", "winter21_whole", "fall11_whole", "train")
CLASS_TAR: Final = re.compile(r"n\d{8}\.tar")


def read_imagenet(root: Path) -> dict[str, ImageDataset]:
    """The splits that exist, at least one of train and val."""
    splits: dict[str, ImageDataset] = {}
    for where in (root, root / KAGGLE):
        if "train" not in splits and (where / "train").is_dir():
            splits["train"] = read_classes(where, "train")
        if "val" not in splits and (where / "val").is_dir():
            splits["val"] = read_val_folder(root, where)
    if "train" not in splits and (path := root / TRAIN_TAR).is_file():
        table = cached_index("imagenet-train", [path], partial(index_train_tar, path))
        splits["train"] = ByteRangeDataset([path], table, [str(name) for name in table["classes"]])
    if "val" not in splits and (path := root / VAL_TAR).is_file():
        with TarReader(path) as opened:
            members = sorted(opened.members())
        labels, classes = read_val_labels(root, [Path(member.name).name for member in members])
        table = build_index([(0, member.offset, member.size, 0) for member in members], [m.name for m in members])
        splits["val"] = ByteRangeDataset([path], table, classes, labels)
    if not splits:
        raise FilesMissing(root, ("train", "val", TRAIN_TAR, VAL_TAR))
    return name_classes(root, splits)


def name_classes(root: Path, splits: dict[str, ImageDataset]) -> dict[str, ImageDataset]:
    """Checks that the splits have the same classes, and names them where a file does: a line of it is "n01440764 tench,
    Tinca tinca"."""
    ids = next(iter(splits.values())).classes
    for split, source in splits.items():
        if source.classes != ids:
            odd = sorted(set(ids) ^ set(source.classes))
            raise BadLabels(f"{root}: train and {split} do not have the same classes; {', '.join(odd[:5])} differ")
    lines = read_text(root / NAMES).splitlines() if (root / NAMES).is_file() else []
    words = {wnid: names.partition(",")[0].strip() for wnid, _, names in (line.partition(" ") for line in lines)}
    classes = [words.get(wnid, wnid) for wnid in ids]
    return {split: RelabelledDataset(source, source.labels, classes) for split, source in splits.items()}


def index_train_tar(path: Path) -> formats.IndexTable:
    """Indexes the members of its members. Reading a million headers takes minutes, but only once."""
    found: list[tuple[str, str, int, int]] = []
    with refuse_damaged(path), tarfile.open(path, "r:") as outer:
        for member in outer:
            if not (member.isreg() and CLASS_TAR.fullmatch(Path(member.name).name)):
                continue
            with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                wnid, start = Path(member.name).stem, member.offset_data
                images = [image for image in inner if image.isreg()]
                found += [(wnid, Path(image.name).name, start + image.offset_data, image.size) for image in images]
    classes, labels = np.unique([wnid for wnid, *_ in found], return_inverse=True)
    rows = [(0, offset, size, int(label)) for (_, _, offset, size), label in zip(found, labels, strict=True)]
    return {**build_index(rows, [f"{wnid}/{name}" for wnid, name, *_ in found]), "classes": classes}


def read_val_folder(root: Path, where: Path) -> ImageDataset:
    """Class folders, or images in one folder whose classes come from a list."""
    entries = list_entries(str(where / "val"))
    if any(is_folder(entry) for entry in entries):
        return read_classes(where, "val")
    names = [entry.name for entry in entries if has_image_suffix(entry.name)]
    labels, classes = read_val_labels(root, names)
    return formats.FileTree(where).select([f"val/{name}" for name in names], labels, classes)


def read_val_labels(root: Path, names: Sequence[str]) -> tuple[Labels, list[str]]:
    """The classes of images called ILSVRC2012_val_00000001.JPEG and so on."""
    truth = read_val_synsets(root)
    classes, numbers = np.unique(truth, return_inverse=True)
    found = [val_number(name) for name in names]
    if beyond := [name for name, at in zip(names, found, strict=True) if not 1 <= at <= len(truth)]:
        raise DataError(f"{root}: {beyond[0]} is not numbered from 1 to {len(truth)} as the list of classes is")
    return Labels(numbers[np.array(found, np.int64) - 1]), classes.tolist()


def val_number(name: str) -> int:
    """ILSVRC2012_val_00000293.JPEG -> 293; 0 for any other name. A class before or after it does not matter."""
    found = re.search(r"ILSVRC2012_val_(\d{8})", name)
    return int(found[1]) if found else 0


def read_val_synsets(root: Path) -> list[str]:
    """The WordNet ids of val images 1, 2, ..."""
    where = find_file(root, SYNSETS, META, SOLUTION, DEVKIT)
    if where.name == SYNSETS:
        return read_text(where).split()
    if where.name == SOLUTION:
        rows = [line.partition(",") for line in read_text(where).splitlines()[1:] if line.strip()]
        return [words.split()[0] for _, _, words in sorted(rows)]
    if where.name == META:
        import torch

        try:
            return [str(wnid) for wnid in torch.load(where, weights_only=True)[1]]
        except Exception as error:
            raise DataError(f"{where} is not torchvision's meta.bin of ImageNet ({describe_error(error)})") from None
    # The ground truth of the development kit is by ILSVRC2012_ID, which meta.mat maps to WordNet ids.
    home = "ILSVRC2012_devkit_t12/data"
    with refuse_damaged(where, "the development kit of ILSVRC-2012"), tarfile.open(where) as opened:
        truth = opened.extractfile(f"{home}/ILSVRC2012_validation_ground_truth.txt").read()  # type: ignore[union-attr]
        meta: bytes = opened.extractfile(f"{home}/meta.mat").read()  # type: ignore[union-attr]
        synsets: Any = formats.read_mat(meta, where, "synsets")["synsets"]
        wnids = {int(row["ILSVRC2012_ID"].item()): str(row["WNID"].item()) for row in synsets.ravel()}
        return [wnids[int(word)] for word in truth.split()]


def read_real(path: Path) -> list[tuple[int, ...]]:
    """The ReaL classes of validation image 1, 2, ..."""
    with refuse_damaged(path, "a list of lists of class numbers"):
        held = json.loads(path.read_text("utf-8"))
        return [tuple(int(np.int64(index(label))) for label in row) for row in held]


def match_real_labels(source: ImageDataset, path: Path) -> list[tuple[int, ...]]:
    """The ReaL labels of every image of a data set, by its name; an empty row where an image has none."""
    rows = read_real(path)
    found = np.array([val_number(source.name(i)) for i in range(len(source))], np.int64)
    wrong = np.flatnonzero((found < 1) | (found > len(rows)))
    if wrong.size:
        rule = f"is not the name of a validation image of ImageNet, ILSVRC2012_val_00000001 to {len(rows):08d}"
        raise BadLabels(f"{source.name(int(wrong[0]))} {rule}")
    return [rows[number - 1] for number in found.tolist()]


def read_imagenet21k(root: Path) -> dict[str, ImageDataset]:
    """One class per image: that of its tar file."""
    homes = [root / folder for folder in FOLDERS_21K if (root / folder).is_dir()]
    names = ([home / entry.name for entry in list_entries(str(home)) if not is_folder(entry)] for home in homes)
    found = ([path for path in several if CLASS_TAR.fullmatch(path.name)] for several in names)
    paths = next(filter(None, found), None)  # of the first folder that has some
    if paths is None:
        raise FilesMissing(root, ("n00004475.tar and so on",))
    tars = [path.stem for path in paths]
    table = cached_index("imagenet21k", paths, partial(index_class_tars, paths))
    classes = read_text(root / WORDNET_IDS).split() if (root / WORDNET_IDS).is_file() else tars
    if strange := sorted(set(tars) - set(classes)):
        raise BadLabels(f"{root / WORDNET_IDS} does not list {strange[0]}, whose tar exists ({len(strange)} such)")
    numbers = {wnid: i for i, wnid in enumerate(classes)}
    labels = np.array([numbers[wnid] for wnid in tars], np.int32)[table["archive"]]
    return {"train": ByteRangeDataset(paths, table, classes, Labels(labels))}


def read_multilabel_imagenet21k(root: Path) -> dict[str, ImageDataset]:
    """Several classes per image."""
    source = read_imagenet21k(root)["train"]
    first: dict[str, int] = {}
    rows: dict[str, list[int]] = {}
    for i in range(len(source)):
        stem = PurePosixPath(source.name(i)).stem
        first.setdefault(stem, i)
        rows.setdefault(stem, []).append(int(source.labels.values[i]))
    numbers = {wnid: i for i, wnid in enumerate(source.classes)}
    further: dict[str, list[str]] = {}
    if (path := root / MULTILABEL).is_file():
        with refuse_damaged(path, 'of the form {"image": ["class", ...], ...}'):
            further = {str(stem): list(map(str, wnids)) for stem, wnids in json.loads(read_text(path)).items()}
    for stem, wnids in further.items():
        if strange := [wnid for wnid in wnids if wnid not in numbers]:
            raise BadLabels(f"{path}: {stem} has the class {strange[0]}, which the data set does not have")
        if stem in rows:
            rows[stem] += [numbers[wnid] for wnid in wnids]
    labels = Labels.several(dict.fromkeys(row) for row in rows.values())
    return {"train": RelabelledDataset(SubsetDataset(source, list(first.values())), labels, source.classes)}


def index_class_tars(paths: list[Path]) -> formats.IndexTable:
    """Indexes all images. Only headers are read; 14 million of them take a while, but only once."""
    names: list[str] = []
    rows: list[tuple[int, int, int, int]] = []
    for i, path in enumerate(paths):
        with TarReader(path) as opened:
            for member in opened.members():
                names.append(f"{path.stem}/{PurePosixPath(member.name).name}")
                rows.append((i, member.offset, member.size, 0))
    return build_index(rows, names)
