"""`vitrail compare` as a person types it."""

import csv
from pathlib import Path

import pytest

from tests.evaluation.test_comparison import TOP, made
from vitrail.cli.app import main
from vitrail.evaluation.result import Measure, Result


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made("a|b").write(tmp_path / "results" / "a.json")
    made("<b>", config={"image": [160, 160]}).write(tmp_path / "results" / "b.json")
    made("<b>", kind="knn", data="cars").write(tmp_path / "results" / "c.json")
    return tmp_path


def test_it_prints_a_table_and_what_to_beware_of(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "results"]) == 0
    said = capsys.readouterr().out
    assert "pets@test: top-1" in said
    assert "70.00% (60.00–80.00)" in said
    assert "note: pets@test: image differs: 224x224 for a|b; 160x160 for <b>" in said


def test_markdown(results: Path) -> None:
    assert main(["compare", "results", "--out", "out/table.md"]) == 0
    lines = Path("out/table.md").read_text("utf-8").splitlines()
    assert lines[:2] == ["| weights | pets@test: top-1 | cars@test: top-1 |", "| --- | ---: | ---: |"]
    assert "| a\\|b | 70.00% (60.00–80.00) | – |" in lines
    assert any(line.startswith("- pets@test: image differs") for line in lines)


def test_csv_has_a_line_a_number(results: Path) -> None:
    assert main(["compare", "results", "--out", "table.csv"]) == 0
    with open("table.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert {(row["weights"], row["kind"], row["data"]) for row in rows} == {
        ("a|b", "evaluate", "pets@test"),
        ("<b>", "evaluate", "pets@test"),
        ("<b>", "knn", "cars@test"),
    }
    assert [float(rows[0][name]) for name in ("value", "low", "high", "count")] == [TOP.value, TOP.low, TOP.high, 100]


def test_html_shows_markup_and_does_not_obey_it(results: Path) -> None:
    assert main(["compare", "results", "--out", "table.html"]) == 0
    text = Path("table.html").read_text("utf-8")
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "70.00% (60.00–80.00)" in text


def test_mistakes_are_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (["results", "--out", "table.xls"], "use one of .md, .csv, .html"),
        (["nowhere.json"], "nowhere.json: No such file"),
        (["results", "--measures", "top1"], "did you mean top-1"),
    ):
        assert main(["compare", *words]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1


def test_a_wide_table_has_a_measure_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measures = tuple(Measure(name=f"{shots}-shot", value=shots / 100) for shots in range(1, 10))
    for name in ("one", "two"):
        facts = {"name": name, "hash": name}
        data = {"name": "pets", "split": "test", "fingerprint": "f", "deduplicated": None}
        Result(kind="fewshot", weights=facts, data=data, measures=measures).write(tmp_path / f"{name}.json")
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert any(line.split() == ["9-shot", "9.00%", "9.00%"] for line in out.splitlines()), out
