"""The help of every command: in groups that follow what a person wants, with lines to type that parse."""

import shlex

import pytest

from vitrail.cli import app
from vitrail.cli.examples import EXAMPLES
from vitrail.core.errors import VitrailError


def test_groups_stand_in_the_order_in_which_a_newcomer_meets_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == 0
    heads = [line[:-1] for line in capsys.readouterr().out.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads == [
        "options",
        "Start here",
        "Use a model",
        "Train",
        "Evaluate",
        "Look at networks",
        "Look at data",
        "Ship it",
        "Your shell",
    ]
    groups = [command.group for command in app.COMMANDS.values()]
    assert groups == sorted(groups, key=heads.index), "the commands of a group stand together"
    assert next(iter(app.COMMANDS)) == "demo"


def test_no_line_of_the_overview_is_too_long_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    app.main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_every_command_has_examples_and_no_other_has() -> None:
    assert set(EXAMPLES) == set(app.COMMANDS)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines])
def test_examples_parse(name: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    assert " ".join(words).startswith(name)
    app.parser_of(name).parse_intermixed_args(words[len(name.split()) :])


def test_an_example_that_does_not_parse_would_be_noticed() -> None:
    with pytest.raises(VitrailError, match="unknown option --epochs"):
        app.parser_of("demo").parse_intermixed_args(["--epochs", "3"])


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_help_of_a_command_ends_with_its_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    shown = text.partition("\nexamples:\n")[2].splitlines()
    assert shown == [f"  vitrail {line}" for line in EXAMPLES[name]]


def test_paragraphs_of_a_description_stay_apart(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app.main(["fit", "--help"])
    text = capsys.readouterr().out
    assert "a CPU will do.\n\nThe features" in text
    assert max(map(len, text.partition("\nexamples:")[0].splitlines())) <= 80
