"""bench/flexible_patches.py runs anywhere, and reads the sheets that CIFAR-10 comes in."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.flexible_patches import has_sheets, main, read_sheets
from vitrail.data.collection import open_collection


@pytest.mark.slow
def test_it_trains_scores_and_writes_a_table(tmp_path: Path) -> None:
    assert main(["--smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["fixed-4-seed0", "fixed-8-seed0", "flexible-8-seed0"]
    assert all(set(run["accuracy"]) == {"4", "8"} for run in found["runs"])
    assert len((tmp_path / "table.md").read_text().splitlines()) == 5


@pytest.mark.parametrize(("form", "suffix"), [("rows", "png"), ("grid", "png"), ("grid", "webp")])
def test_sheets_are_read(tmp_path: Path, form: str, suffix: str) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "sheets"
    folder.mkdir()
    every = {name: rng.integers(0, 256, (6, 32, 32, 3), np.uint8) for name in ("test_batch", *SHEETS)}
    for name, images in every.items():
        rows = images.reshape(6, 1024, 3)
        grid = images.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
        Image.fromarray(rows if form == "rows" else grid).save(folder / f"{name}.{suffix}", lossless=True)
    (folder / "train_lables.json").write_text(json.dumps([number % 10 for number in range(30)]))
    (folder / "test_lables.json").write_text(json.dumps([3, 1, 4, 1, 5, 9]))
    assert has_sheets(folder)
    collection = open_collection(read_sheets(folder, tmp_path))
    assert collection.classes[3] == "cat"
    assert collection.split("test").labels.values.tolist() == [3, 1, 4, 1, 5, 9]
    found = np.asarray(collection.split("train").open_image(13).rgb())
    assert np.array_equal(found, every["data_batch_3"][1])


SHEETS = tuple(f"data_batch_{number}" for number in range(1, 6))
