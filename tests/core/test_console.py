"""Tables on a terminal and in a pipe; they keep every cell, however narrow the terminal."""

import io
from contextlib import redirect_stdout

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.cli.app import main
from vitrail.core.console import format_giga, format_millions, print_table

COMMANDS = (
    "models",
    "recipes",
    "recipes digits",
    "study --list",
    "trace ViT-L/32",
    "data",
    "data digits --no-sheet",
    "cost ViT-L/16 BiT-R50x1",
)
WIDTHS = (60, 80, 100)
words = st.text("abcXYZ019.,/-_", min_size=1, max_size=14)
cells = st.lists(words, max_size=5).map(" ".join)


def printed(width: int | None, heads: list[str], rows: list[list[str]], left: int) -> str:
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(text):
        patch.delenv("COLUMNS", raising=False)
        if width is not None:
            patch.setenv("COLUMNS", str(width))
        print_table(heads, rows, left=left)
    return text.getvalue()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from(WIDTHS), st.data())
def test_no_word_of_a_table_is_lost(columns: int, left: int, width: int, data: st.DataObject) -> None:
    heads = data.draw(st.lists(words, min_size=columns, max_size=columns))
    rows = data.draw(st.lists(st.lists(cells, min_size=columns, max_size=columns), min_size=1, max_size=9))
    found = printed(width, heads, rows, left)
    assert {word for row in rows for cell in row for word in cell.split()} <= set(found.split())
    assert "…" not in found


@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_of_a_command_is_lost(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(command.split()) == 0
    wide = set(capsys.readouterr().out.split())
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(command.split()) == 0
        narrow = capsys.readouterr().out
        rules = {word for word in wide if set(word) == {"─"}}
        assert wide - rules <= set(narrow.split()), width
        assert "…" not in narrow


def test_a_table_is_as_wide_as_it_may_be() -> None:
    rows = [["vit_b_16", "a network that is known to many people by this name", "86,567,656", "17.56"]] * 8
    heads = ["network", "what", "parameters", "multiply accumulates"]
    for width in (50, *WIDTHS):
        assert max(map(len, printed(width, heads, rows, 2).splitlines())) <= width
    one = printed(None, heads, rows, 2).splitlines()
    assert sum("86,567,656" in line and "people by this name" in line for line in one) == 8


def test_a_short_row_is_filled_up() -> None:
    assert "x" in printed(80, ["a", "b", "c"], [["x"], ["y", "1", "2"]], 1).split()


def test_few_wide_rows_are_turned_on_their_side() -> None:
    heads = ["split", *(f"measure-{i}" for i in range(10))]
    lines = printed(80, heads, [["train", *"0123456789"], ["test", *"9876543210"]], 1).splitlines()
    assert ["measure-3", "3", "6"] in [line.split() for line in lines]


@pytest.mark.parametrize(
    ("count", "text"), [(86_567_656, "86.57M"), (0, "0.00M"), (4_999, "0.00M"), (1_107_299_923, "1,107.30M")]
)
def test_millions(count: int, text: str) -> None:
    assert format_millions(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(17_563_828_224, "17.56"), (4_409_000_000, "4.41"), (1_016_720_000_000, "1,016.72")]
)
def test_giga(count: int, text: str) -> None:
    assert format_giga(count) == text


def test_text_stands_left_and_numbers_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(["name", "what", "n"], [["a", "b", "7"], ["long name", "c", "1,234"]], left=2, title="Things")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Things"
    first, second = (line for line in lines if line.endswith(("7", "1,234")))
    assert first.index("a") == second.index("long name")
    assert first.index("b") == second.index("c")
    assert len(first) == len(second)


def test_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "x" * 150
    print_table(["name", "n"], [[wide, "1"]])
    assert wide in capsys.readouterr().out


def test_cells_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name"], [["[red]not a colour[/red]"], ["[B, 3, 224, 224]"]], title="[bold]")
    out = capsys.readouterr().out
    assert "[red]not a colour[/red]" in out
    assert "[B, 3, 224, 224]" in out
    assert "[bold]" in out
