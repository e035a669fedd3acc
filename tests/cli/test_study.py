"""`vitrail study`: what it lists, prints and answers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tests.studies.tiny_study import TINY, cells, quick
from vitrail.cli.app import main
from vitrail.cli.evaluate import study as command
from vitrail.studies.definition import Scale
from vitrail.train.grid.plan import Cell, CellOutcome

QUICK = ["--device", "cpu", "--jobs", "1"]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The tiny study, under any name; what was handed to be presented."""
    calls: list[tuple[str, ...]] = []

    def write(study: Any, outcomes: Sequence[CellOutcome], out: Path, *, scale: str, data: str) -> None:
        (out / "report.html").write_text("a page")
        calls.append((study.name, str(out), scale, data, *(outcome.cell for outcome in outcomes)))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.studies.study_report.write_report", write)
    monkeypatch.setattr(command, "find_study", lambda name: TINY)
    return calls


@pytest.mark.slow
def test_a_study_to_its_end(written: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "tiny", *QUICK]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("start ")] == ["first-0", "second-0", "third-0"]
    assert sum(line.startswith("end   ") and "accuracy" in line for line in lines) == 3
    assert "3 cells have ended." in lines
    assert any(line.startswith("The paper has no such study.") for line in lines)
    assert lines[-1] == "page: runs/study-tiny-tiny/report.html"
    names = ("first-0", "second-0", "third-0")
    assert written == [("tiny", "runs/study-tiny-tiny", "tiny", "", *names)]
    assert main(["study", "tiny", *QUICK]) == 0
    again = capsys.readouterr().out
    assert "3 of 3 cells are already finished" in again
    assert "start " not in again
    assert main(["study", "tiny", "--list", *QUICK]) == 0
    listed = capsys.readouterr().out
    assert listed.count("finished") == 4
    assert "3 cells, 3 finished in runs/study-tiny-tiny; left: 0 exaFLOPs" in listed


@pytest.mark.slow
def test_a_failing_cell_gives_status_1_and_the_rest_is_shown(
    written: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(scale: Scale, source: str) -> Sequence[Cell]:
        first, second, third = cells(scale, source)
        return replace(first, run=replace(quick(), data=replace(quick().data, source="nowhere"))), second, third

    monkeypatch.setattr(command, "find_study", lambda name: replace(TINY, cells=broken))
    assert main(["study", "tiny", "--out", "out", *QUICK]) == 1
    out = capsys.readouterr().out
    assert "failed: first-0: " in out
    assert "failed: third-0: not run: first-0, from whose weights it starts, failed" in out
    assert "3 cells have ended." in out
    assert written[-1][-3:] == ("first-0", "second-0", "third-0")
    monkeypatch.setattr(command, "find_study", lambda name: TINY)
    assert main(["study", "tiny", "--out", "out", *QUICK]) == 0
    assert "start second-0" not in capsys.readouterr().out


def test_a_list_costs_nothing_and_writes_nothing(written: list[tuple[str, ...]], capsys: Any) -> None:
    assert main(["study", "tiny", "--list", "--seeds", "2", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "third-1" in out
    assert "after first-1" in out
    assert "6 cells, 0 finished" in out
    assert "Times are estimates" in out
    assert not Path("runs").exists()
    assert not written


@pytest.mark.slow
def test_the_papers_scale_is_listed_without_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    from vitrail.studies import STUDIES

    for name in STUDIES:
        assert main(["study", name, "--scale", "paper", "--list", "--device", "cpu"]) == 0, name
        out = capsys.readouterr().out
        assert "on one H200" in out
        assert "exaFLOPs" in out
        assert " ? " not in out, f"{name}: a cost that is not known\n{out}"


def test_mistakes_are_answered_in_a_line(written: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in [
        (["study"], "which study?"),
        (["study", "tiny", "--jobs", "-2"], "--jobs -2"),
        (["study", "tiny", "--seeds", "-1"], "--seeds -1"),
        (["study", "tiny", "--scale", "huge"], "invalid choice"),
        (["study", "tiny", "--data", "nowhere"], "'nowhere' is neither a path nor a known set"),
    ]:
        assert main(words) == 2
        assert told in capsys.readouterr().err


def test_the_command_that_goes_on_is_the_one_that_was_typed() -> None:
    from vitrail.cli.app import parse_options
    from vitrail.cli.options.grammar import format_command

    typed = ["head", "--scale", "small", "--data", "my set", "--out", "o", "--jobs", "3", "--seeds", "2"]
    options = parse_options("study", typed)
    assert format_command("study", options) == "vitrail study head 'my set' --scale small --out o --jobs 3 --seeds 2"


def test_help_and_the_list_of_studies_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from vitrail.cli.app import main; "
        "main(['study', '--list']); main(['study', '--help']); sys.exit('torch' in sys.modules)"
    )
    path = str(Path(vitrail.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "positions" in done.stdout
    assert "D.4" in done.stdout
