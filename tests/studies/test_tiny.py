"""Every study at its smallest: a grid that two cores finish in a minute or two, and all that a study leaves."""

from pathlib import Path

import pytest

from vitrail.cli.app import main
from vitrail.studies.framework.cost_estimate import Pace, prices
from vitrail.studies.framework.definition import grid
from vitrail.studies.framework.registry import STUDIES, study
from vitrail.train.run_folder.files import read_json

CORE = Pace(device="a slow core", peak=40e9, step_s=5e-3, start_s=0.5)
SECONDS = 60.0  # of training on such a core, by the estimate that `--list` shows: the same on every machine
QUICK = "optimizer"  # the one that every `make test` runs


@pytest.mark.parametrize("name", STUDIES)
def test_a_tiny_grid_is_short(name: str) -> None:
    hours = [price.hours for price in prices(grid(study(name), "tiny"), CORE).values()]
    assert 3600 * sum(each for each in hours if each is not None) < SECONDS
    assert None not in hours


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in STUDIES]
)
def test_a_tiny_study_ends_with_table_figure_and_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    status = main(["study", name, "--scale", "tiny", "--device", "cpu", "--jobs", "1"])
    said, out = capsys.readouterr().out, Path(f"runs/study-{name}-tiny")
    assert status == 0, said
    told = read_json(out / "study.json")
    assert told["state"] == "done"
    assert len(told["cells"]) == len(grid(study(name), "tiny"))
    assert all(cell["values"] for cell in told["cells"].values())
    table = (out / "table.md").read_text("utf-8")
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) >= 3, table  # a heading, a rule and what came out
    sentence = next(line for line in table.splitlines()[len(rows) :] if line and line[0] not in "|#")
    assert sentence in said
    assert (out / "table.csv").read_text("utf-8").count("\n") >= 2
    assert (out / "figure.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "</svg>" in (out / "figure.svg").read_text("utf-8")
    assert sentence.split(".")[0].split("%")[0][:20] in (out / "report.html").read_text("utf-8")
