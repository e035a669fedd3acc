"""Tables on a terminal and in a pipe."""

import pytest

from vitrail.core.console import giga, millions, print_table


@pytest.mark.parametrize(
    ("count", "text"), [(86_567_656, "86.57M"), (0, "0.00M"), (4_999, "0.00M"), (1_107_299_923, "1,107.30M")]
)
def test_millions(count: int, text: str) -> None:
    assert millions(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(17_563_828_224, "17.56"), (4_409_000_000, "4.41"), (1_016_720_000_000, "1,016.72")]
)
def test_giga(count: int, text: str) -> None:
    assert giga(count) == text


def test_text_stands_left_and_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
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
