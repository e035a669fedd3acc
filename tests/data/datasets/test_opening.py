"""Sets by name: which folder is looked at, what is said where files are missing, and what the table promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.datasets import writers
from vitrail.core.errors import SourceNotFound, UnknownName
from vitrail.data.datasets.catalogue import SETS
from vitrail.data.datasets.open_by_name import extract, find_differences, find_set, open_named

WRITTEN = [name for name, entry in SETS.items() if entry.folder in writers.HOMES]


def test_the_table_needs_no_numpy() -> None:
    code = "import sys; from vitrail.data.datasets import catalogue; len(catalogue.SETS); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", SETS)
def test_every_entry_is_sound(name: str) -> None:
    entry = SETS[name]
    assert entry.name == name
    assert entry.classes > 1
    assert set(entry.splits) <= {"train", "val", "test"}
    for file in entry.files:
        assert file.md5 is None or re.fullmatch("[0-9a-f]{32}", file.md5)
        assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
        assert file.url is None or file.url.startswith(("https://", "http://"))
        assert file.url is None or file.optional or file.url.startswith("https://") or file.checksum, "or checked"
        assert file.url or file.note or entry.terms, "a file that cannot be fetched says how to get it"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_set_opens_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SETS[name]
    writers.HOMES[entry.folder](tmp_path / entry.folder)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    splits = open_named(name)
    assert set(splits) == set(entry.splits)
    found = find_differences(entry, splits)
    assert len([line for line in found if "samples" in line]) == len(splits), "tiny copies are not the published sets"


@pytest.mark.parametrize("name", SETS)
def test_what_is_missing_is_said_file_by_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    entry = SETS[name]
    if any(Path(path).is_dir() for path in entry.elsewhere):
        pytest.skip("this machine has the set")
    with pytest.raises(SourceNotFound) as caught:
        open_named(name)
    for file in entry.files:
        assert (str(tmp_path / "data" / entry.folder / file.path) in str(caught.value)) != file.optional
        if file.url and not file.optional:
            assert file.url in str(caught.value)
    assert ("--download fetches" in str(caught.value)) == entry.is_downloadable
    assert entry.is_downloadable or entry.page in str(caught.value)


def test_one_file_of_several_that_is_missing_is_the_one_that_is_named(tmp_path: Path) -> None:
    writers.svhn(tmp_path)
    (tmp_path / "test_32x32.mat").unlink()
    with pytest.raises(SourceNotFound):
        open_named("svhn", tmp_path)


def test_the_usual_folder_is_in_the_cache(tmp_path: Path) -> None:
    writers.mnist(tmp_path / "cache" / "data" / "mnist")
    assert len(open_named("mnist")["train"]) == 12


TORCHVISION = {  # set: (folder below torchvision's root, archives that lie unpacked there)
    "mnist": ("MNIST/raw", ()),
    "pets": ("oxford-iiit-pet", ("images.tar.gz", "annotations.tar.gz")),
    "flowers102": ("flowers-102", ("102flowers.tgz",)),
    "dtd": ("dtd", ("dtd-r1.0.1.tar.gz",)),
    "pcam": ("pcam", ()),
    "eurosat": ("eurosat", ("EuroSAT.zip",)),
    "clevr-count": ("clevr", ("CLEVR_v1.0.zip",)),
    "sun397": (".", ("SUN397.tar.gz",)),
    "cifar10": (".", ("cifar-10-python.tar.gz",)),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvisions_layout_is_found(name: str, tmp_path: Path) -> None:
    folder, archives = TORCHVISION[name]
    home = tmp_path / folder
    writers.HOMES[SETS[name].folder](home)
    for archive in archives:
        extract(home / archive, home)
        (home / archive).unlink()
    assert set(open_named(name, tmp_path)) == set(SETS[name].splits)


def test_a_misspelt_name_is_answered_with_its_neighbours() -> None:
    with pytest.raises(UnknownName):
        find_set("cifar-10")


def test_differences_from_the_published_set_are_told(tmp_path: Path) -> None:
    writers.pets(tmp_path)
    assert find_differences(SETS["pets"], open_named("pets", tmp_path)) == [
        "train: 30 of 3,680 samples",
        "test: 6 of 3,669 samples",
        "3 classes, not 37",
    ]
