"""Damaged annotations are read or refused in one line, never more: no other exception, no crash, hang or blow-up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.readers.annotation_fuzzing import KINDS, attempt, damage_file

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_damaged_files(tmp_path: Path, kind: str) -> None:
    _, write, other = KINDS[kind]
    file = write(tmp_path)
    file = tmp_path / other if other else file
    for content in [damage_file(file, f"quick {kind} {at}")[1] for at in range(10)]:
        file.write_bytes(content)
        outcome, words = attempt(kind, tmp_path)
        assert outcome in ("refused", "unreadable", "read"), words


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory by /proc and RLIMIT_AS")
def test_two_thousand_damaged_files(tmp_path: Path) -> None:
    """In a process of its own, which may fork."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.data.readers.annotation_fuzzing", "--files", "200", "--seed", "1"]
    done = subprocess.run(
        [*command, "--keep", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused, unreadable, read = map(int, done.stdout.split("\nall ")[1].split()[:3])
    assert refused + unreadable + read == 2000
    assert min(refused, unreadable, read) > 200
