"""Damaged images are read or refused, never more: no crash, no hang, no blow-up, no other exception, no warning."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.data.decode.fuzzing import mutate, table
from tests.data.decode.hostile import samples

ROOT = Path(__file__).parents[3]
KINDS = len(samples())


def fuzz(files: int, seed: int, keep: Path) -> str:
    """The table that the run prints; in a process of its own, which may fork."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.data.decode.fuzzing", "--files", str(files), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--keep", str(keep)],
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def totals(printed: str) -> tuple[int, int, int]:
    """Files, refused ones and read ones, from the line for all kinds."""
    files, refused, read = next(line for line in printed.splitlines() if line.startswith("all ")).split()[1:4]
    return int(files), int(refused), int(read)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory by /proc and RLIMIT_AS")
@pytest.mark.parametrize("files", [35, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_files_of_every_kind(files: int, tmp_path: Path) -> None:
    count, refused, read = totals(fuzz(files, files, tmp_path / "kept"))
    assert count == files * KINDS >= 1000
    assert min(refused, read) > count // 5  # the damage is neither always fatal nor never felt


def test_damage_is_a_function_of_the_seed() -> None:
    content, other = samples()["png"], samples()["gif"]
    assert mutate("png", content, other, "a") == mutate("png", content, other, "a")
    assert len({mutate("png", content, other, str(seed))[1] for seed in range(50)}) > 40


def test_table_counts_what_failed() -> None:
    lines = table({"png": Counter(read=3, crash=1), "gif": Counter(refused=2)}, 2.0).splitlines()
    named = dict(zip(lines[0].split(), lines[-2].split()[1:], strict=True))
    assert {name: count for name, count in named.items() if count != "0"} == {
        "files": "6",
        "refused": "2",
        "read": "3",
        "crash": "1",
    }
