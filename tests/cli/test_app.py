"""What the command line promises whichever command is asked for."""

import os
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitrail.cli import app
from vitrail.cli.options.grammar import command_options, option
from vitrail.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


@command_options
class CountOptions:
    """Count."""

    n: int = option(1, help="a number")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Puts a command `probe` on the command line that does what the test says."""

    def install(run) -> None:
        module = SimpleNamespace(run_probe=run, ProbeOptions=CountOptions)
        monkeypatch.setattr(app, "import_module", lambda name: module)

    return install


def raising(error: BaseException):
    def run(options: object) -> int:
        raise error

    return run


def test_help_lists_every_command_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert app.main([]) == 0
    assert capsys.readouterr().out == text
    for name, command in app.COMMANDS.items():
        assert text.index(f"{command.group}:") < text.index(f"  {name} ")
        assert command.help in text


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["modles"]) == 2
    seen = capsys.readouterr()
    assert not seen.out
    assert seen.err.startswith("vitrail: error: unknown command 'modles'; did you mean models")
    assert seen.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--verson"], "unknown option --verson; did you mean --version? see vitrail --help"),
        (["probe", "--m", "3"], "unknown option --m; did you mean --n? see vitrail probe --help"),
        (["probe", "--n", "x"], "argument --n: invalid int value: 'x'; see vitrail probe --help"),
    ],
)
def test_bad_arguments_are_one_line(argv, complaint, command, capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda options: 0)
    assert app.main(argv) == 2
    assert capsys.readouterr().err == f"vitrail: error: {complaint}\n"


def test_arguments_reach_the_command_and_its_status_comes_back(command) -> None:
    command(lambda options: options.n)
    assert app.main(["probe", "--n", "7"]) == 7


def test_advice_from_the_compiler_is_not_shown(command) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        command(lambda options: 0)
        app.main(["probe"])
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=1)
        warnings.warn("anything else", stacklevel=1)
    assert [str(one.message) for one in shown] == ["anything else"]


def test_own_error_is_one_line_without_traceback(command, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITRAIL_TRACEBACK", raising=False)
    command(raising(ConfigError("heads=5 does not\ndivide width=768")))
    assert app.main(["probe"]) == 2
    assert capsys.readouterr().err == "vitrail: error: heads=5 does not divide width=768\n"


def test_traceback_is_shown_when_asked_for(command, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    command(raising(ConfigError("no")))
    assert app.main(["probe"]) == 2
    seen = capsys.readouterr().err
    assert "Traceback" in seen
    assert seen.endswith("vitrail: error: no\n")


def test_foreign_errors_are_not_hidden(command) -> None:
    command(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        app.main(["probe"])


def test_interrupt(command, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(KeyboardInterrupt()))
    assert app.main(["probe"]) == 130
    assert capsys.readouterr().err == "vitrail: interrupted\n"


@pytest.mark.parametrize(
    ("writer", "lines"),
    [
        ("rich.print", 1),
        ("print", 100_000),
        pytest.param("print", 1, marks=pytest.mark.slow),
        pytest.param("rich.print", 100_000, marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_leaves_is_no_error(writer: str, lines: int) -> None:
    """`vitrail models | head -1`, with as much output as a pipe holds and with more."""
    code = f"""
import sys, time, rich
from types import SimpleNamespace
from vitrail.cli import app
from vitrail.cli.options.look import ModelsOptions
from vitrail.cli.options.grammar import command_options, option
def run(options):
    time.sleep(0.2)
    for i in range({lines}):
        {writer}(i)
    return 0
app.import_module = lambda name: SimpleNamespace(run_models=run, ModelsOptions=ModelsOptions)
sys.exit(app.main(["models"]))
"""
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True) as process:
        os.close(write)
        os.close(read)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 141
    assert complaint == ""


def test_console_script_and_module_are_the_same_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"vitrail": "vitrail.cli:main"}
    done = subprocess.run([sys.executable, "-m", "vitrail", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"vitrail {project['version']}\n"


def test_an_error_of_another_process_than_the_first_says_of_which(
    command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(ConfigError("depth=0 must be at least 1")))
    for rank, said in (("0", "vitrail: error: depth=0"), ("3", "vitrail: error (rank 3): depth=0")):
        monkeypatch.setenv("RANK", rank)
        assert app.main(["probe"]) == 2
        assert capsys.readouterr().err.startswith(said)


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


def examples_of(name: str) -> list[str]:
    lines = (app.options_type(name).__doc__ or "").partition("examples:\n")[2].splitlines()
    return [line.strip().removeprefix("vitrail ") for line in lines if line.strip()]


def test_examples_parse() -> None:
    for name in app.COMMANDS:
        examples = examples_of(name)
        assert examples
        for line in examples:
            words = shlex.split(line.partition(" > ")[0])
            assert " ".join(words).startswith(name)
            app.parse_options(name, words[len(name.split()) :])


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_help_of_a_command_ends_with_its_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    shown = text.partition("\nexamples:\n")[2].splitlines()
    assert shown == [f"  vitrail {line}" for line in examples_of(name)]


def test_paragraphs_of_a_description_stay_apart(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app.main(["fit", "--help"])
    text = capsys.readouterr().out
    assert "a CPU will do.\n\nThe network's features" in text
    assert max(map(len, text.partition("\nexamples:")[0].splitlines())) <= 80


# Imports of heavy libraries fail, as in an environment without them.
REFUSE = """
import contextlib, io, shlex, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "numpy", "PIL"):
            raise ImportError(name + " is refused")

sys.meta_path.insert(0, Refuse())
from vitrail.cli.app import COMMANDS, main, options_type
"""


def run_refusing(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REFUSE + code], capture_output=True, text=True, timeout=100)


def test_help_and_mistakes_need_no_heavy_library() -> None:
    done = run_refusing("""
for name in ("", *COMMANDS):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = main([*name.split(), "--help"])
    assert status == 0, name
    assert "usage: vitrail " + name in text.getvalue(), name
for name in COMMANDS:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        words = options_type(name).__doc__.partition("examples:\\n")[2].strip().splitlines()[0].partition(" > ")[0]
        status = main([*shlex.split(words)[1:], "--no-such-option"])
    assert status == 2, name
    assert "--no-such-option" in text.getvalue(), name
print(len(COMMANDS))
""")
    assert done.stdout == f"{len(app.COMMANDS)}\n", done.stderr


def test_the_refusal_works() -> None:
    assert "numpy is refused" in run_refusing("import numpy").stderr
