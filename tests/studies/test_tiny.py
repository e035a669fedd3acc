"""Every study at its smallest: a grid that two cores finish in a minute or two, and all that a study leaves."""

from pathlib import Path

import pytest

from vitrail.cli.app import main
from vitrail.studies import STUDIES, find_study
from vitrail.train.run_folder.files import read_json


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
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
    assert len(told["cells"]) == len(find_study(name).grid("tiny"))
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
