"""The 19 tasks of VTAB as a table: what set each is made of, how its splits are cut, how large they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vitrail.data.datasets.catalogue import SETS

Group = Literal["natural", "specialized", "structured"]
Plan = Mapping[str, tuple[str, int, int]]  # split -> (official split, from, to), in hundredths

OFFICIAL: Final[Plan] = {"train": ("train", 0, 100), "val": ("val", 0, 100), "test": ("test", 0, 100)}
NINETY: Final[Plan] = {"train": ("train", 0, 90), "val": ("train", 90, 100), "test": ("test", 0, 100)}
EIGHTY: Final[Plan] = {"train": ("train", 0, 80), "val": ("train", 80, 100), "test": ("test", 0, 100)}
SIXTY: Final[Plan] = {"train": ("train", 0, 60), "val": ("train", 60, 80), "test": ("train", 80, 100)}
TENTHS: Final[Plan] = {"train": ("train", 0, 80), "val": ("train", 80, 90), "test": ("train", 90, 100)}
SCENES: Final[Plan] = {"train": ("train", 0, 90), "val": ("train", 90, 100), "test": ("val", 0, 100)}
HALVES: Final[Plan] = {"train": ("train", 0, 100), "val": ("test", 0, 50), "test": ("test", 50, 100)}


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabTask:
    """A task: the set it is made of, how its splits are cut, and whether a random crop or flip leaves the label."""

    name: str
    title: str
    group: Group
    source: str  # a name of the catalogue
    plan: Plan
    sizes: tuple[int, int, int]  # train, val, test
    label: str = "class"
    crop: bool = True
    flip: bool = True

    @property
    def classes(self) -> int:
        return SETS[self.source].classes


TABLE: Final = (
    VtabTask(
        name="caltech101",
        title="Caltech101",
        group="natural",
        source="caltech101",
        plan=NINETY,
        sizes=(2754, 306, 6084),
    ),
    VtabTask(
        name="cifar100", title="CIFAR-100", group="natural", source="cifar100", plan=NINETY, sizes=(45000, 5000, 10000)
    ),
    VtabTask(name="dtd", title="DTD", group="natural", source="dtd", plan=OFFICIAL, sizes=(1880, 1880, 1880)),
    VtabTask(
        name="flowers102",
        title="Flowers102",
        group="natural",
        source="flowers102",
        plan=OFFICIAL,
        sizes=(1020, 1020, 6149),
    ),
    VtabTask(name="pets", title="Pets", group="natural", source="pets", plan=EIGHTY, sizes=(2944, 736, 3669)),
    VtabTask(
        name="sun397", title="Sun397", group="natural", source="sun397", plan=OFFICIAL, sizes=(76128, 10875, 21750)
    ),
    VtabTask(name="svhn", title="SVHN", group="natural", source="svhn", plan=NINETY, sizes=(65931, 7326, 26032)),
    VtabTask(
        name="pcam",
        title="Patch Camelyon",
        group="specialized",
        source="pcam",
        plan=OFFICIAL,
        sizes=(262144, 32768, 32768),
    ),
    VtabTask(
        name="eurosat", title="EuroSAT", group="specialized", source="eurosat", plan=SIXTY, sizes=(16200, 5400, 5400)
    ),
    VtabTask(
        name="resisc45", title="Resisc45", group="specialized", source="resisc45", plan=SIXTY, sizes=(18900, 6300, 6300)
    ),
    VtabTask(
        name="retinopathy",
        title="Retinopathy",
        group="specialized",
        source="retinopathy-300",
        plan=OFFICIAL,
        sizes=(35126, 10906, 42670),
        label="stage, 0 to 4",
    ),
    VtabTask(
        name="clevr-count",
        title="Clevr-Count",
        group="structured",
        source="clevr-count",
        plan=SCENES,
        sizes=(63000, 7000, 15000),
        label="objects less 3",
        crop=False,
    ),
    VtabTask(
        name="clevr-distance",
        title="Clevr-Dist",
        group="structured",
        source="clevr-distance",
        plan=SCENES,
        sizes=(63000, 7000, 15000),
        label="depth of the nearest object, cut at 8, 8.5, 9, 9.5, 10",
        crop=False,
    ),
    VtabTask(
        name="dmlab",
        title="DMLab",
        group="structured",
        source="dmlab",
        plan=OFFICIAL,
        sizes=(65550, 22628, 22735),
        label="{near, far, very far} x {good, bad object}",
        crop=False,
    ),
    VtabTask(
        name="dsprites-location",
        title="dSpr-Loc",
        group="structured",
        source="dsprites-location",
        plan=TENTHS,
        sizes=(589824, 73728, 73728),
        label="x position, floor(x / 2)",
        crop=False,
        flip=False,
    ),
    VtabTask(
        name="dsprites-orientation",
        title="dSpr-Ori",
        group="structured",
        source="dsprites-orientation",
        plan=TENTHS,
        sizes=(589824, 73728, 73728),
        label="orientation, floor(o / 2.5)",
        flip=False,
    ),
    VtabTask(
        name="kitti-distance",
        title="KITTI-Dist",
        group="structured",
        source="kitti-distance",
        plan=OFFICIAL,
        sizes=(6347, 423, 711),
        label="nearest car, van or truck: up to 8 m, up to 20 m, beyond, none",
        crop=False,
    ),
    VtabTask(
        name="smallnorb-azimuth",
        title="sNORB-Azim",
        group="structured",
        source="smallnorb-azimuth",
        plan=HALVES,
        sizes=(24300, 12150, 12150),
        label="azimuth, 20 degrees a step",
        flip=False,
    ),
    VtabTask(
        name="smallnorb-elevation",
        title="sNORB-Elev",
        group="structured",
        source="smallnorb-elevation",
        plan=HALVES,
        sizes=(24300, 12150, 12150),
        label="elevation, 5 degrees a step",
    ),
)

TASKS: Final[Mapping[str, VtabTask]] = {task.name: task for task in TABLE}
