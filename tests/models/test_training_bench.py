"""The script behind the training table runs, small and on a CPU, and what it compares is the same network."""

import json
from pathlib import Path

import pytest

from tests.lanes import rest_slow

pytest.importorskip("timm", exc_type=ImportError)


@pytest.mark.parametrize("precision", rest_slow(["bfloat16", "autocast", "float32"]))
def test_bench_runs_on_a_cpu(tmp_path: Path, precision: str) -> None:
    from bench.training import main

    out = tmp_path / "training.json"
    size = ["--models", "Ti/16", "--image-size", "32", "--depth", "2", "--batch", "2"]
    short = ["--rounds", "1", "--steps", "1", "--warmup", "1", "--compile", "off", "--lock", str(tmp_path / "lock")]
    main(["--device", "cpu", "--precision", precision, "--out", str(out), *size, *short])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["precision"] == precision
    for library in ("vitrail", "timm"):
        assert row[library]["images_per_s"] > 0
    assert row["vitrail"]["first_loss"] == pytest.approx(row["timm"]["first_loss"], rel=1e-3)
