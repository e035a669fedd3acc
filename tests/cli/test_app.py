"""What the command line promises whichever command is asked for."""

import os
import subprocess
import sys
import tomllib
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitrail.cli import app
from vitrail.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Puts a command `probe` on the command line that does what the test says."""

    def install(run) -> None:
        module = SimpleNamespace(
            __doc__="A probe.",
            run=run,
            add_arguments=lambda parser: parser.add_argument("--n", type=int, default=1),
            OPTIONS=make_dataclass("ProbeOptions", [("n", int)]),
        )
        monkeypatch.setitem(app.COMMANDS, "probe", app.Command("Tests", "a probe", "probe"))
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


def test_every_command_has_its_own_module() -> None:
    for name, command in app.COMMANDS.items():
        file = name.replace(" ", "_")
        assert command.module == f"vitrail.cli.{file}"
        assert (ROOT / "src" / "vitrail" / "cli" / f"{file}.py").is_file()
        assert command.options == f"vitrail.cli.options.{file}"
        assert (ROOT / "src" / "vitrail" / "cli" / "options" / f"{file}.py").is_file()


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


@pytest.mark.parametrize("writer", ["print", "rich.print"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(writer: str, lines: int) -> None:
    """`vitrail models | head -1`, with as much output as a pipe holds and with more."""
    code = f"""
import sys, time, rich
from dataclasses import make_dataclass
from types import SimpleNamespace
from vitrail.cli import app
def run(options):
    time.sleep(0.2)
    for i in range({lines}):
        {writer}(i)
    return 0
module = SimpleNamespace(__doc__="", run=run, add_arguments=lambda parser: None, OPTIONS=make_dataclass("Options", []))
app.import_module = lambda name: module
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
