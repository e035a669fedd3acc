"""`vitrail embed`: what it prints and writes, how it goes on, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.cli.test_frozen import folder
from tests.models.tiny import VIT
from vitrail.checkpoint.weights import build_fresh, save
from vitrail.cli.app import main

Run = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save(build_fresh(VIT), "weights.safetensors")
    folder(tmp_path / "photos", {"train": 12, "test": 9})
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*more: str, data: str = "photos", out: str = "out.parquet", status: int = 0) -> str:
        words = ["embed", "weights.safetensors", data, out, "--workers", "0", "--device", "cpu", *more]
        assert main(words) == status
        said = capsys.readouterr()
        return said.err if status == 2 else said.out

    return run


def test_a_collection_becomes_a_table(here: Path, run: Run) -> None:
    said = run()
    assert "weights.safetensors: ViT, 0.00M parameters, 6x12 px, float32" in said
    assert "photos: 63 images of train, test" in said
    assert "63 rows of 16 float32 features" in said
    table = pq.read_table("out.parquet")
    assert table.num_rows == 63
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["split"], first["sample"], first["label"]) == ("train", 0, "blue")
    assert first["name"].endswith("blue/0.png")
    assert "nothing to do" in run()


@pytest.mark.slow
def test_one_split_and_one_array(here: Path, run: Run) -> None:
    assert "27 images of test" in run("--split", "test", out="a.npz")
    assert "27 images of test" in run(data="photos@test", out="b.npz")
    with np.load("a.npz") as one, np.load("b.npz") as other:
        assert np.array_equal(one["features"], other["features"])
        assert one["features"].shape == (27, 16)
    run("--type", "float16", out="h.npz")
    with np.load("h.npz") as half:
        assert half["features"].dtype == np.float16


def test_bad_pictures_are_named_and_listed(here: Path, run: Run) -> None:
    (here / "photos" / "train" / "red" / "3.png").write_bytes(b"no image")
    said = run()
    assert "note: skipped 1 unreadable image, see out.parquet.unreadable.txt: " in said
    assert "62 rows" in said
    assert "red/3.png" in (here / "out.parquet.unreadable.txt").read_text()
    for path in (here / "photos").rglob("*.png"):
        path.write_bytes(b"no image")
    assert "0 rows" in run(out="none.parquet", status=1)


def test_what_is_refused_says_what_to_do(here: Path, run: Run) -> None:
    assert "embeddings are written as .parquet or .npz" in run(out="out.csv", status=2)
    assert "has no split 'dev'; it has train, test" in run("--split", "dev", status=2)
    assert "--batch -1 must be at least 1" in run("--batch=-1", status=2)
    assert "neither a path nor a known set" in run(data="nowhere", status=2)
    run()
    assert "type: float32 -> float16" in run("--type", "float16", status=2)
    assert "float16" in run("--type", "float16", "--force")
    (here / "other.parquet").write_bytes(b"something else")
    assert "was not written by `vitrail embed`" in run(out="other.parquet", status=2)
    assert (here / "other.parquet").read_bytes() == b"something else"
