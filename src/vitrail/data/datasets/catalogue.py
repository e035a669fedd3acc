"""The data sets with a name, their original files, and the 19 tasks of VTAB: tables read from the TOML files next to
this module when they are first needed. Importing it loads no numpy.

`open_by_name.open_named` opens a data set, `open_by_name.open_vtab` a task of VTAB.
"""

import tomllib
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Final, Literal, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """An original file of a data set: its path below the set's folder, its address and its checksum."""

    path: str
    url: str | None = None  # None if a program cannot or may not download it
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None
    optional: bool = False
    note: str = ""

    @property
    def checksum(self) -> str:
        """The strongest known checksum with its algorithm; empty where none is known."""
        return f"sha256 {self.sha256}" if self.sha256 else f"md5 {self.md5}" if self.md5 else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSet:
    """A data set. `reader` is "module:function" in this package, a function from a folder to the splits."""

    name: str
    title: str
    classes: int
    splits: Mapping[str, int]  # official sizes
    files: tuple[DataFile, ...]
    reader: str
    page: str  # describes the set and its terms
    home: str = ""  # folder under $VITRAIL_DATA, if not the name: sets with the same files share it
    folders: tuple[str, ...] = ()  # subfolders where other libraries put the files
    elsewhere: tuple[str, ...] = ()  # absolute paths that are searched as well
    terms: str = ""  # what to do before the files may be downloaded
    note: str = ""

    @property
    def is_downloadable(self) -> bool:
        """Whether a program can download every file that is needed."""
        return not self.terms and all(file.url or file.optional for file in self.files)

    @property
    def folder(self) -> str:
        return self.home or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabTask:
    """A task of VTAB: its data set, how its splits are cut, and whether a random crop or flip keeps the label."""

    name: str
    title: str
    group: Literal["natural", "specialized", "structured"]
    source: str  # a name of the catalogue
    plan: Mapping[str, tuple[str, int, int]]  # split -> official split, first and last percentage
    sizes: tuple[int, int, int]  # train, val, test
    label: str = "class"
    crop: bool = True
    flip: bool = True

    @property
    def classes(self) -> int:
        return SETS[self.source].classes


class TomlTable(UserDict[str, Row]):
    """A TOML file of this package as a mapping from names to rows, parsed on first use."""

    def __init__(self, file: str, build: Callable[..., Row]) -> None:
        self.file, self.build = file, build

    @cached_property
    def data(self) -> dict[str, Row]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {name: self.build(name=name, **fields) for name, fields in read_toml(self.file).items()}


@cache
def read_toml(file: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("vitrail.data.datasets").joinpath(file).read_text("utf-8"))


def build_set(*, files: str, folders: tuple[str, ...] = (), elsewhere: tuple[str, ...] = (), **fields: Any) -> NamedSet:
    downloads = tuple(DataFile(**row) for row in read_toml("downloads.toml")[files])
    return NamedSet(files=downloads, folders=tuple(folders), elsewhere=tuple(elsewhere), **fields)


def build_task(*, plan: dict[str, list[Any]], sizes: list[int], **fields: Any) -> VtabTask:
    train, val, test = sizes
    cuts = {split: (official, first, last) for split, (official, first, last) in plan.items()}
    return VtabTask(plan=cuts, sizes=(train, val, test), **fields)


SETS: Final[Mapping[str, NamedSet]] = TomlTable("catalogue.toml", build_set)
VTAB_TASKS: Final[Mapping[str, VtabTask]] = TomlTable("vtab.toml", build_task)
