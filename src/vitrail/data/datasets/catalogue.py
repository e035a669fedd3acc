"""The data sets that have a name: classes, sizes, files and what reads them.

Only a table: importing it loads no numpy. `opening.open_named` opens a set, `vtab.open_vtab` a task of VTAB.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vitrail.data.datasets import download_list as files
from vitrail.data.datasets.download_list import File

HERE: Final = "vitrail.data.readers.named"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSet:
    """A data set. `reader` is "module:function", a function of a folder that gives the splits."""

    name: str
    title: str
    classes: int
    splits: Mapping[str, int]  # official sizes
    files: tuple[File, ...]
    reader: str
    page: str  # where a person reads about it and its terms
    home: str = ""  # the folder under $VITRAIL_DATA, where it is not the name: sets made of the same files share it
    folders: tuple[str, ...] = ()  # where below the folder others put the files: torchvision's layout
    elsewhere: tuple[str, ...] = ()  # whole paths to look at as well
    terms: str = ""  # what has to be done before the files may be had
    note: str = ""

    @property
    def fetchable(self) -> bool:
        """Whether all that is needed can be downloaded by a program."""
        return not self.terms and all(file.url or file.optional for file in self.files)

    @property
    def folder(self) -> str:
        return self.home or self.name


NORB_SPLITS: Final = {"train": 24300, "test": 24300}
CLEVR_SPLITS: Final = {"train": 70000, "val": 15000}
RETINOPATHY_SPLITS: Final = {"train": 35126, "val": 10906, "test": 42670}
CLEVR_PAGE: Final = "https://cs.stanford.edu/people/jcjohns/clevr/"
DSPRITES_PAGE: Final = "https://github.com/google-deepmind/dsprites-dataset"
KAGGLE_PAGE: Final = "https://www.kaggle.com/c/diabetic-retinopathy-detection/data"
IMAGENET_PAGE: Final = "https://image-net.org/download-images"
KAGGLE_TERMS: Final = "needs a Kaggle account that has accepted the rules of the competition"
IMAGENET_TERMS: Final = "needs an account at image-net.org and its terms of access"

TABLE: Final = (
    NamedSet(
        name="cifar10",
        title="CIFAR-10",
        classes=10,
        splits={"train": 50000, "test": 10000},
        files=files.CIFAR10,
        reader=f"{HERE}.cifar:cifar10",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        note="cifar-10-binary.tar.gz and either folder unpacked will do as well",
    ),
    NamedSet(
        name="cifar100",
        title="CIFAR-100",
        classes=100,
        splits={"train": 50000, "test": 10000},
        files=files.CIFAR100,
        reader=f"{HERE}.cifar:cifar100",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        note="cifar-100-binary.tar.gz and either folder unpacked will do as well",
    ),
    NamedSet(
        name="mnist",
        title="MNIST",
        classes=10,
        splits={"train": 60000, "test": 10000},
        files=files.MNIST,
        reader=f"{HERE}.idx:mnist",
        page="http://yann.lecun.com/exdb/mnist/",
        folders=("MNIST/raw",),
        note="plain idx files will do as well",
    ),
    NamedSet(
        name="fashion-mnist",
        title="Fashion-MNIST",
        classes=10,
        splits={"train": 60000, "test": 10000},
        files=files.FASHION,
        reader=f"{HERE}.idx:fashion_mnist",
        page="https://github.com/zalandoresearch/fashion-mnist",
        folders=("FashionMNIST/raw",),
        elsewhere=("/usr/share/datasets/fashion-mnist",),
        note="plain idx files will do as well; Debian's package dataset-fashion-mnist is found where it installs them",
    ),
    NamedSet(
        name="pets",
        title="Oxford-IIIT Pets",
        classes=37,
        splits={"train": 3680, "test": 3669},
        files=files.PETS,
        reader=f"{HERE}.oxford:pets",
        page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        folders=("oxford-iiit-pet",),
        note="train is the official trainval",
    ),
    NamedSet(
        name="flowers102",
        title="Oxford Flowers-102",
        classes=102,
        splits={"train": 1020, "val": 1020, "test": 6149},
        files=files.FLOWERS,
        reader=f"{HERE}.oxford:flowers102",
        page="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        folders=("flowers-102",),
    ),
    NamedSet(
        name="caltech101",
        title="Caltech-101",
        classes=102,
        splits={"train": 3060, "test": 6084},
        files=files.CALTECH,
        reader=f"{HERE}.caltech:caltech101",
        page="https://data.caltech.edu/records/mzrjq-6wc02",
        folders=("caltech101",),
        note="with the background as a class; train is 30 images a class, drawn by a fixed order of our own",
    ),
    NamedSet(
        name="dtd",
        title="Describable Textures",
        classes=47,
        splits={"train": 1880, "val": 1880, "test": 1880},
        files=files.DTD,
        reader=f"{HERE}.oxford:dtd",
        page="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        folders=("dtd",),
        note="the first of ten folds",
    ),
    NamedSet(
        name="svhn",
        title="Street View House Numbers",
        classes=10,
        splits={"train": 73257, "test": 26032},
        files=files.SVHN,
        reader=f"{HERE}.svhn:svhn",
        page="http://ufldl.stanford.edu/housenumbers/",
        note="cropped digits; the extra images are not used",
    ),
    NamedSet(
        name="sun397",
        title="SUN397",
        classes=397,
        splits={"train": 76128, "val": 10875, "test": 21750},
        files=files.SUN,
        reader=f"{HERE}.sun:sun397",
        page="https://vision.princeton.edu/projects/2010/SUN/",
        note="without the three lists the splits are drawn by a fixed order of our own, in the same sizes",
    ),
    NamedSet(
        name="pcam",
        title="PatchCamelyon",
        classes=2,
        splits={"train": 262144, "val": 32768, "test": 32768},
        files=files.PCAM,
        reader=f"{HERE}.pcam:pcam",
        page="https://github.com/basveeling/pcam",
        folders=("pcam",),
        note="needs h5py; the .gz files are unpacked next to themselves",
    ),
    NamedSet(
        name="eurosat",
        title="EuroSAT (RGB)",
        classes=10,
        splits={"train": 27000},
        files=files.EUROSAT,
        reader=f"{HERE}.aerial:eurosat",
        page="https://github.com/phelber/EuroSAT",
        folders=("eurosat",),
        note="no official splits; VTAB's are a task's",
    ),
    NamedSet(
        name="resisc45",
        title="NWPU-RESISC45",
        classes=45,
        splits={"train": 31500},
        files=files.RESISC45,
        reader=f"{HERE}.aerial:resisc45",
        page="https://gcheng-nwpu.github.io/#Datasets",
        note="no official splits; VTAB's are a task's",
    ),
    NamedSet(
        name="retinopathy",
        title="Diabetic Retinopathy",
        classes=5,
        splits=RETINOPATHY_SPLITS,
        files=files.RETINOPATHY,
        reader=f"{HERE}.retinopathy:original",
        page=KAGGLE_PAGE,
        terms=KAGGLE_TERMS,
        note="val and test are the public and the private part of the competition's test set",
    ),
    NamedSet(
        name="retinopathy-300",
        title="Diabetic Retinopathy, btgraham-300",
        classes=5,
        splits=RETINOPATHY_SPLITS,
        files=files.RETINOPATHY,
        reader=f"{HERE}.retinopathy:prepared",
        page=KAGGLE_PAGE,
        terms=KAGGLE_TERMS,
        home="retinopathy",
        note="brought to a radius of 300 pixels and even brightness when read, as VTAB has them",
    ),
    NamedSet(
        name="clevr-count",
        title="CLEVR, number of objects",
        classes=8,
        splits=CLEVR_SPLITS,
        files=files.CLEVR,
        reader=f"{HERE}.clevr:count",
        page=CLEVR_PAGE,
        home="clevr",
        folders=("clevr",),
        note="3 to 10 objects; the official test scenes have no labels",
    ),
    NamedSet(
        name="clevr-distance",
        title="CLEVR, nearest object",
        classes=6,
        splits=CLEVR_SPLITS,
        files=files.CLEVR,
        reader=f"{HERE}.clevr:distance",
        page=CLEVR_PAGE,
        home="clevr",
        folders=("clevr",),
        note="the depth of the nearest object, cut at 8, 8.5, 9, 9.5 and 10",
    ),
    NamedSet(
        name="dmlab",
        title="DMLab frames",
        classes=6,
        splits={"train": 65550, "val": 22628, "test": 22735},
        files=files.DMLAB,
        reader=f"{HERE}.dmlab:dmlab",
        page="https://github.com/google-research/task_adaptation",
    ),
    NamedSet(
        name="dsprites-location",
        title="dSprites, place across",
        classes=16,
        splits={"train": 737280},
        files=files.DSPRITES,
        reader=f"{HERE}.dsprites:location",
        page=DSPRITES_PAGE,
        home="dsprites",
        note="x in 16 steps of 2",
    ),
    NamedSet(
        name="dsprites-orientation",
        title="dSprites, orientation",
        classes=16,
        splits={"train": 737280},
        files=files.DSPRITES,
        reader=f"{HERE}.dsprites:orientation",
        page=DSPRITES_PAGE,
        home="dsprites",
        note="orientation in 16 steps of 2.5",
    ),
    NamedSet(
        name="kitti-distance",
        title="KITTI, nearest vehicle",
        classes=4,
        splits={"train": 6347, "val": 423, "test": 711},
        files=files.KITTI,
        reader=f"{HERE}.kitti:distance",
        page="http://www.cvlibs.net/datasets/kitti/eval_object.php",
        home="kitti",
        folders=("Kitti",),
        note="the nearest car, van or truck: up to 8 m, up to 20 m, beyond, none; split by drive as VTAB does",
    ),
    NamedSet(
        name="smallnorb",
        title="smallNORB, kind of toy",
        classes=5,
        splits=NORB_SPLITS,
        files=files.SMALLNORB,
        reader=f"{HERE}.norb:category",
        page=files.NORB,
        note="the first camera",
    ),
    NamedSet(
        name="smallnorb-azimuth",
        title="smallNORB, azimuth",
        classes=18,
        splits=NORB_SPLITS,
        files=files.SMALLNORB,
        reader=f"{HERE}.norb:azimuth",
        page=files.NORB,
        home="smallnorb",
        note="the first camera",
    ),
    NamedSet(
        name="smallnorb-elevation",
        title="smallNORB, elevation",
        classes=9,
        splits=NORB_SPLITS,
        files=files.SMALLNORB,
        reader=f"{HERE}.norb:elevation",
        page=files.NORB,
        home="smallnorb",
        note="the first camera",
    ),
    NamedSet(
        name="imagenet",
        title="ImageNet (ILSVRC-2012)",
        classes=1000,
        splits={"train": 1281167, "val": 50000},
        files=files.IMAGENET,
        reader=f"{HERE}.imagenet:imagenet",
        page=IMAGENET_PAGE,
        terms=IMAGENET_TERMS,
        note="class folders in train/ and val/, or the tar files as they are",
    ),
    NamedSet(
        name="imagenet21k",
        title="ImageNet-21k",
        classes=21843,
        splits={"train": 14197122},
        files=files.IMAGENET21K,
        reader=f"{HERE}.imagenet21k:imagenet21k",
        page=IMAGENET_PAGE,
        terms=IMAGENET_TERMS,
        note="read from the tar files as they are; an index is made once",
    ),
    NamedSet(
        name="imagenet21k-multilabel",
        title="ImageNet-21k, several labels",
        classes=21843,
        splits={"train": 14197122},
        files=files.IMAGENET21K,
        reader=f"{HERE}.imagenet21k:multilabel",
        page=IMAGENET_PAGE,
        terms=IMAGENET_TERMS,
        home="imagenet21k",
        note="an image that lies in several tar files under one name has all their classes",
    ),
)

SETS: Final[Mapping[str, NamedSet]] = {entry.name: entry for entry in TABLE}
