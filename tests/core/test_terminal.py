"""Nothing that a name contains makes a terminal do something."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pictures import encoded, noise
from vitrail.cli.app import main
from vitrail.cli.progress import Bars
from vitrail.cli.train.display import TrainingPanel
from vitrail.core.console import (
    UNSAFE,
    EscapingStream,
    escape_controls,
    escape_line,
    escape_streams,
    make_console,
    print_table,
)
from vitrail.core.errors import VitrailError

EVIL = "cat\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\r\x08\x7f"
TAMED = escape_controls(EVIL)


@given(st.text(st.characters()))
def test_what_is_unsafe_is_written_out_and_the_rest_stays(text: str) -> None:
    made = escape_controls(text)
    assert UNSAFE.search(made) is None
    made.encode("utf-8")
    assert escape_controls(made) == made
    if text.isprintable():
        assert made == text
    assert "\n" not in escape_line(text)


def test_scripts_and_emoji_stay() -> None:
    for text in ("chats été", "日本語", "नमस्ते", "می\u200cخواهم", "👩\u200d🚀", "שלום"):
        assert escape_controls(text) == text


def test_a_stream_is_guarded_and_else_itself() -> None:
    inner = io.StringIO()
    outer: Any = EscapingStream(inner)
    print(EVIL, "\tend", file=outer)
    outer.writelines(["a\x1b", "b"])
    assert inner.getvalue() == f"{TAMED} \tend\na\\x1bb"
    assert not outer.isatty()


def test_streams_are_given_back() -> None:
    before = sys.stdout, sys.stderr
    with escape_streams():
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr) == before
    main(["--version"])
    assert (sys.stdout, sys.stderr) == before


def drawn(console: Any) -> str:
    """What a console wrote, without the sequences that rich itself writes."""
    text = console.file.getvalue()
    for own in ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r"):
        text = text.replace(own, "")
    return text


def test_consoles_clean_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console(file=io.StringIO(), width=200)
    console.print(EVIL, markup=False, highlight=False)
    assert UNSAFE.search(console.file.getvalue()) is None  # type: ignore[attr-defined]
    for begin in (bar, panel):
        console = make_console(file=io.StringIO(), width=200)
        begin(console)
        assert "\\x1b[2J" in drawn(console)
        for evil in ("\x1b[2J", "\x1b]0", "\x9b", "\u202e", "\x07"):
            assert evil not in console.file.getvalue()  # type: ignore[attr-defined]


def bar(console: Any) -> None:
    times = iter(range(0, 10_000, 5))
    bars = Bars(bytes_=False, console=console, clock=lambda: next(times))
    with bars.progress:
        bars.advance(EVIL, 1, 3)
        bars.progress.refresh()


def panel(console: Any) -> None:
    with TrainingPanel(console) as shown:
        shown.log(EVIL)
        shown.advance(EVIL, 1, None)
        shown.live.refresh()


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([EVIL, "b"], [[EVIL, "1"], ["two\nlines", "2"]], title=EVIL)
    out = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(out)
    assert "two\\x0alines" in out


def test_errors_and_tracebacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    assert main(["predict", "vitrail-cifar10", f"/nowhere/{EVIL}"]) == 1
    assert main([f"pre{EVIL}"]) == 2
    said = capsys.readouterr()
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(said.out + said.err)


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise VitrailError("one\u2028two\x85three\x1b[1A")

    monkeypatch.setattr("vitrail.cli.app.dispatch", fail)
    assert main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="such names are not allowed there")
def test_class_and_file_names_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a\x1b[2Jb", "c\u202ed", "e\x9bf"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "set" / name / f"{i}\x1b]0;x\x07.png").write_bytes(encoded(noise(i)))
    (tmp_path / "set" / "c\u202ed" / "torn\x1b[1A.png").write_bytes(b"no")
    assert main(["data", str(tmp_path / "set"), "--no-sheet"]) == 0
    said = capsys.readouterr()
    assert "\\x1b[2J" in said.out
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(said.out + said.err)
