"""Completion scripts: taken by the shells they are for, and completing there, without running vitrail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.cli import completion
from vitrail.cli.app import COMMANDS, main
from vitrail.cli.completion import WANTED, check_words, completed
from vitrail.cli.completion_scripts import SCRIPTS
from vitrail.models.zoo import SLUGS, ZOO
from vitrail.recipes.registry import recipes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each shell's script in a file."""
    folder, commands = tmp_path_factory.mktemp("scripts"), completed()
    paths = {shell: folder / f"vitrail.{shell}" for shell in SCRIPTS}
    for shell, write in SCRIPTS.items():
        paths[shell].write_text(write(commands), "utf-8")
    return paths


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    return found


def bash(script: Path, *words: str, folder: Path) -> list[str]:
    """What bash would offer for the last word."""
    code = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 )) COMPREPLY=()
compopt() { :; }  # there is no line that is being typed
_vitrail
printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        [shell("bash"), "--norc", "-c", code, "bash", str(script), "vitrail", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={"PATH": "/nonexistent"},  # nothing may be run, vitrail least of all
    )
    assert not done.stderr
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_syntax(name: str, scripts: dict[str, Path]) -> None:
    done = subprocess.run([shell(name), "-n", str(scripts[name])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_the_command_prints_the_script(name: str, scripts: dict[str, Path], capsys) -> None:
    assert main(["completion", name]) == 0
    assert capsys.readouterr().out == scripts[name].read_text("utf-8")


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_every_command_and_option_is_in_every_script(name: str, scripts: dict[str, Path]) -> None:
    text = scripts[name].read_text("utf-8")
    for command in completed():
        assert command.name in text
        for flag in command.flags:
            assert (flag if name != "fish" else flag.lstrip("-")) in text
    for word in (*recipes(), *ZOO, *SLUGS, "vitrail-cifar10"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["f"], ["fit", "finetune", "fewshot"]),
        (["--v"], ["--version"]),
        (["fit", "--d"], ["--device", "--dev", "--download"]),
        (["fit", "--device", ""], ["auto", "cpu", "cuda", "mps"]),
        (["fit", "--device", "="], ["auto", "cpu", "cuda", "mps"]),
        (["fit", "--device", "=", "c"], ["cpu", "cuda"]),
        (["fit", "--image-size", ""], []),
        (["fit", "--device", "cpu", "vitrail"], ["vitrail-cifar10"]),
        (["fit", "W", "vitrail"], ["vitrail-cifar10"]),
        (["data", "p"], ["pack", "pets", "pcam"]),
        (["data", "pack", "--s"], ["--shard-size", "--strict"]),
        (["data", "pack", "p"], ["pets", "pcam"]),
        (["pretrain", "vit-h14"], [name for name in recipes() if name.startswith("vit-h14")]),
        (["finetune", "--recipe", "finetune-"], [name for name in recipes() if name.startswith("finetune-")]),
        (["trace", "ViT-H"], [name for name in ZOO if name.startswith("ViT-H")]),
        (["cost", "ViT-B/16", "vit_h"], [name for name in SLUGS if name.startswith("vit_h")]),
        (["export", "W", "--to", "t"], ["torch-export", "timm", "torchvision"]),
        (["vtab", "W", "--tasks", "cifar100", "pe"], ["pets"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["nonsense", ""], []),
    ],
)
def test_bash_completes(words: list[str], offered: list[str], scripts: dict[str, Path], tmp_path: Path) -> None:
    assert sorted(bash(scripts["bash"], *words, folder=tmp_path)) == sorted(offered)


def test_bash_offers_every_command_and_no_second_word(scripts: dict[str, Path], tmp_path: Path) -> None:
    offered = bash(scripts["bash"], "", folder=tmp_path)
    assert set(offered) == {*(name for name in COMMANDS if " " not in name), "--help", "--version"}


def test_bash_offers_files_beside_names(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "vitrail mine.safetensors").touch()
    (tmp_path / "others").mkdir()
    assert bash(scripts["bash"], "fit", "vitr", folder=tmp_path) == ["vitrail-cifar10", "vitrail mine.safetensors"]
    assert bash(scripts["bash"], "fit", "oth", folder=tmp_path) == []  # readline looks for files by itself


@pytest.mark.skipif(shutil.which("bash") is None or os.name != "posix", reason="no bash here")
def test_bash_completes_a_line_that_is_typed(scripts: dict[str, Path], tmp_path: Path) -> None:
    """Through readline, on a terminal: a command, an option, a recipe, and a file with a blank in its name."""
    import pty

    (tmp_path / "my cat.jpg").touch()
    typed = (
        "vitrail pred\t--att\tlooked my\t\n"
        + "vitrail pretrain vit-h1\t --see\t3\n"
        + "vitrail fit --image-size my\t\n"
    )
    start = f"""PS1='> '; bind 'set bell-style none'
vitrail() {{ printf '<%s>' "$@"; echo; }}
source '{scripts["bash"]}'
"""
    terminal, end = pty.openpty()
    command = [shell("bash"), "--norc", "--noprofile", "-i"]
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb"}
    with (
        os.fdopen(terminal, "r+b", buffering=0) as line,
        subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, cwd=tmp_path, env=environment, start_new_session=True
        ),
    ):
        os.close(end)
        line.write((start + typed + "exit\n").encode())
        seen = b""
        try:
            while more := line.read(4096):
                seen += more
        except OSError:  # the shell has left
            pass
    text = seen.decode("utf-8", "replace")
    assert "<predict><--attention><looked><my cat.jpg>" in text
    assert "<pretrain><vit-h14-jft><--seed><3>" in text
    assert "<fit><--image-size><my>" in text, "a number is not a file"


def test_fish_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    fish = shell("fish")

    def offered(line: str) -> set[str]:
        code = f"source '{scripts['fish']}'; complete -C '{line}'"
        done = subprocess.run(
            [fish, "--no-config", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return {word.split("\t")[0] for word in done.stdout.splitlines()}

    assert offered("vitrail f") == {"fit", "finetune", "fewshot"}
    assert offered("vitrail data pack --s") == {"--shard-size", "--strict"}
    assert offered("vitrail export W --to t") == {"torch-export", "timm", "torchvision"}
    assert "vit-h14-jft" in offered("vitrail pretrain vit-h")


def test_places_that_are_named_are_there() -> None:
    """A row of the table whose value was renamed would complete nothing, unnoticed."""
    found: set[str] = set()
    for name in COMMANDS:
        for action in vars(completion.parser_of(name))["_actions"]:
            found |= {f"{name} {action.dest}", f"{name} {action.metavar}", str(action.metavar), action.dest}
    assert set(WANTED) <= found


def test_a_name_that_a_shell_would_take_apart_is_refused() -> None:
    with pytest.raises(AssertionError):
        check_words(["two words"])


def test_printing_needs_no_terminal_and_says_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "completion", "tcsh"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 2
    assert "invalid choice: 'tcsh'" in done.stderr
    assert not done.stdout
