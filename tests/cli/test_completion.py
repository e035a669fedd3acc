"""Completion scripts: accepted by the shells they are for, and completing there without running vitrail."""

import shutil
import subprocess
from pathlib import Path

import pytest

from vitrail.cli.app import COMMANDS, main
from vitrail.cli.completion import build_tree, known_names
from vitrail.models.zoo import ZOO
from vitrail.recipes.registry import list_recipes


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bash's script in a file."""
    import shtab

    path = tmp_path_factory.mktemp("scripts") / "vitrail.bash"
    path.write_text(shtab.complete(build_tree(), "bash"), "utf-8")
    return path


def complete_in_bash(script: Path, *words: str, folder: Path) -> list[str]:
    """What bash offers for the last word."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    code = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 )) COMPREPLY=()
compopt() { :; }  # there is no line that is being typed
_shtab_vitrail
printf '%s\\n' "${COMPREPLY[@]}"
"""
    command = [bash, "--norc", "-c", code, "bash", str(script), "vitrail", *words]
    environment = {"PATH": "/nonexistent"}  # nothing may be run, vitrail least of all
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return [line.rstrip() for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_every_command_and_option_is_in_every_script(shell: str, tmp_path: Path, capsys) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in (*" ".join(COMMANDS).split(), "topk", "image-size", "shard-size", *list_recipes()):
        assert word in text
    program = shutil.which(shell)
    if program is not None and shell != "tcsh":
        (tmp_path / "script").write_text(text, "utf-8")
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["f"], {"fit", "finetune", "fewshot"}),
        (["fit", "--d"], {"--device", "--dev", "--download"}),
        (["fit", "--device", ""], {"auto", "cpu", "cuda", "mps"}),
        (["fit", "vitrail"], {"vitrail-cifar10"}),
        (["data", "p"], {"pack"}),
        (["data", "pack", "--s"], {"--shard-size", "--strict"}),
        (["data", "pack", "pe"], {"pets"}),
        (["pretrain", "vit-h14"], {name for name in list_recipes() if name.startswith("vit-h14")}),
        (["trace", "ViT-H"], {name for name in ZOO if name.startswith("ViT-H")}),
        (["export", "W", "--to", "t"], {"torch-export", "timm", "torchvision"}),
    ],
)
def test_bash_completes(words: list[str], offered: set[str], script: Path, tmp_path: Path) -> None:
    assert offered <= set(complete_in_bash(script, *words, folder=tmp_path))


def test_bash_offers_files_next_to_names(script: Path, tmp_path: Path) -> None:
    (tmp_path / "vitrail.safetensors").touch()
    assert set(complete_in_bash(script, "fit", "vitr", folder=tmp_path)) == {"vitrail-cifar10", "vitrail.safetensors"}


def test_names_are_words_to_every_shell() -> None:
    for names in known_names().values():
        assert not set("".join(names)) & set(" \t\n'\"\\$`;|&<>()*?[]{}~:")
