"""Tiny copies of VTAB's sets in the formats of their files, and tiny weights to start from."""

from pathlib import Path

import pytest
import torch

from tests.data.datasets import writers
from vitrail.checkpoint.weights import build_fresh, save
from vitrail.data.datasets.open_by_name import open_vtab
from vitrail.models.vit_config import ViTConfig

TINY = ViTConfig(width=16, depth=1, mlp_width=32, heads=2, patch=(4, 4), image=(8, 8), classes=10)
QUICK = ("steps=6", "batch=8", "schedule.warmup=1", "log=2", "data.workers=0", "compile=off")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAIL_DATA", raising=False)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save(build_fresh(TINY), path)
    return str(path)


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-100 and dSprites, large enough for their thousand."""
    root = tmp_path_factory.mktemp("sets")
    writers.tar(root / "cifar100" / "cifar-100-python.tar.gz", writers.cifar100_members(2000, 24))
    writers.dsprites(root / "dsprites", 2000)
    return root


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, of a few images each."""
    root = tmp_path_factory.mktemp("few")
    for name, write in writers.HOMES.items():
        write(root / name)
    return root


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """VTAB-10: eight and two images in the place of 800 and 200."""
    defaults = open_vtab.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "first", (8, 2))
