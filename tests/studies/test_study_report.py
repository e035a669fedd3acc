"""Whatever came of a study, its files are written whole, and the page shows what is there."""

import csv
import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.studies.fake_outcomes import noisy, outcomes
from vitrail.core.errors import ConfigError
from vitrail.report.figure_style import DARK, LIGHT
from vitrail.studies import find_study, study_report
from vitrail.studies.definition import Findings, ResultTable
from vitrail.studies.study_report import CAUTION, format_markdown, to_dark, write_report
from vitrail.train.grid.plan import CellOutcome, Coordinate

STUDY = find_study("positions")
FILES = ["figure.png", "figure.svg", "report.html", "table.csv", "table.md"]


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second, and not every test looks at it."""
    monkeypatch.setattr(study_report, "draw_figure", lambda findings: {})


def values(at: Mapping[str, Coordinate]) -> dict[str, float]:
    return {"accuracy": noisy(0.8, at), "fewshot-5": 0.7, "exaflops": 0.25, "device_hours": 0.5, "images": 1000.0}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_report(STUDY, outcomes(STUDY, "tiny", values), folder, scale="tiny", data="")
    return folder


def test_all_files_are_written(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == FILES
    assert (written / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (written / "report.html").read_text()
    said = STUDY.findings(outcomes(STUDY, "tiny", values)).summary
    for text in ("Position embeddings (D.4, Table 8)", "16 of 16 cells are done", said, "Next to the paper"):
        assert text in page
    assert "vitrail study positions --scale tiny" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert ">4<" in page.replace("\n", "")  # 16 times a quarter of an exaFLOP


@pytest.mark.slow
def test_the_same_outcomes_make_the_same_files(written: Path, tmp_path: Path) -> None:
    write_report(STUDY, outcomes(STUDY, "tiny", values), tmp_path, scale="tiny", data="")
    for file in FILES:
        assert (written / file).read_bytes() == (tmp_path / file).read_bytes()


def test_the_table_is_the_same_in_both_forms(written: Path) -> None:
    with (written / "table.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    lines = [line for line in (written / "table.md").read_text().splitlines() if line.startswith("|")]
    assert [line.strip("| ").split(" | ") for line in (lines[0], *lines[2:])] == rows


def test_empty_columns_are_dropped_and_bars_are_escaped() -> None:
    table = ResultTable(columns=("a", "b", "c"), rows=(("1", "–", "–"), ("2", "–", "x|y")))
    made = Findings(table=table, panels=(), summary="", paper="", claims=())
    found = replace(STUDY, analyse=lambda _: made).findings(())
    assert found.table == ResultTable(columns=("a", "c"), rows=(("1", "–"), ("2", "x|y")))
    assert "| x\\|y |" in format_markdown(STUDY, found)
    empty = replace(made, table=ResultTable(columns=("a", "b"), rows=()))
    assert replace(STUDY, analyse=lambda _: empty).findings(()).table.columns == ("a", "b")


@pytest.mark.usefixtures("no_figure")
def test_failed_and_missing_cells_are_shown(tmp_path: Path) -> None:
    some = outcomes(STUDY, "tiny", values, failed=["relative-stem-seed0"])[-6:]
    write_report(STUDY, some, tmp_path, scale="tiny", data="my <set>")
    page = (tmp_path / "report.html").read_text()
    assert "5 of 16 cells are done, 1 failed" in page
    assert "relative-stem-seed0: the loss is not finite" in page
    assert page.count(">waiting<") == 10
    assert "vitrail study positions &#39;my &lt;set&gt;&#39; --scale tiny" in page


@pytest.mark.usefixtures("no_figure")
def test_nothing_yet(tmp_path: Path) -> None:
    write_report(STUDY, [], tmp_path, scale="tiny", data="")
    assert "0 of 16 cells are done" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("no_figure")
def test_the_folder_knows_its_cells_and_its_command(tmp_path: Path) -> None:
    """A study of fewer seeds has fewer cells than its own grid; one that was stopped says how to go on."""
    done = CellOutcome(
        cell="none-stem-seed0", at={"positions": "none", "placed": "stem", "seed": 0}, values={"accuracy": 0.5}
    )
    cells = {"none-stem-seed0": {"state": "done", "seconds": 12.3}, "learned-stem-seed0": {"state": "stopped"}}
    held = {"state": "stopped", "go_on": "vitrail study positions --seeds 1", "cells": cells}
    (tmp_path / "study.json").write_text(json.dumps(held))
    write_report(STUDY, [done], tmp_path, scale="tiny", data="")
    page = (tmp_path / "report.html").read_text()
    assert "1 of 2 cells are done" in page
    assert "interrupted" in page
    assert "To resume:" in page
    assert "vitrail study positions --seeds 1<" in page
    assert ">12<" in page


def test_without_matplotlib_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigError("figures need matplotlib")

    monkeypatch.setattr(study_report, "load_matplotlib", missing)
    write_report(STUDY, outcomes(STUDY, "tiny", values), tmp_path, scale="tiny", data="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "table.csv", "table.md"]
    assert "figures need matplotlib" in (tmp_path / "report.html").read_text()


def test_a_dark_screen_gets_its_own_colours() -> None:
    svg = f'<path style="fill: {LIGHT.paper}; stroke: {LIGHT.cobalt}"/><text style="fill: {LIGHT.ink}"/>'.encode()
    expected = f'<path style="fill: {DARK.paper}; stroke: {DARK.cobalt}"/><text style="fill: {DARK.ink}"/>'.encode()
    assert to_dark(svg) == expected


@pytest.mark.usefixtures("no_figure")
def test_the_page_leads_to_its_cells_and_says_what_tiny_decides(tmp_path: Path) -> None:
    made = outcomes(STUDY, "tiny", values)
    for one in made[:3]:
        folder = tmp_path / "cells" / one.cell
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("a run")
    write_report(STUDY, made, tmp_path, scale="tiny", data="")
    page = (tmp_path / "report.html").read_text()
    links = re.findall(r'<td class="text"><a href="([^"]+)">([^<]+)</a>', page)
    assert [name for _, name in links] == [one.cell for one in made[:3]]  # the others have no page to lead to
    assert all((tmp_path / unquote(link)).read_text() == "a run" for link, _ in links)
    assert html.escape(CAUTION) in page
    assert CAUTION in (tmp_path / "table.md").read_text()
    write_report(STUDY, made, tmp_path, scale="small", data="")
    assert html.escape(CAUTION) not in (tmp_path / "report.html").read_text()
