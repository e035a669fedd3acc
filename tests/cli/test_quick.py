"""Help and mistakes are answered at once: no command imports torch before its options are parsed."""

import subprocess
import sys

from vitrail.cli.app import COMMANDS

HEAVY = ("torch", "torchvision", "numpy", "PIL")
REFUSE = f"""
import contextlib, io, shlex, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(name + " is imported")

sys.meta_path.insert(0, Refuse())
from vitrail.cli.app import COMMANDS, main
from vitrail.cli.examples import EXAMPLES
"""


def python(code: str) -> str:
    """What a fresh interpreter prints that refuses to import the heavy libraries."""
    done = subprocess.run([sys.executable, "-c", REFUSE + code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_refusal_works() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE + "import numpy"], capture_output=True, text=True, timeout=100)
    assert "numpy is imported" in done.stderr


def test_every_command_shows_its_help_without_the_heavy_libraries() -> None:
    said = python("""
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = main([*name.split(), "--help"])
    print(name, status, "usage: vitrail " + name in text.getvalue(), sep="|")
""")
    assert said.splitlines() == [f"{name}|0|True" for name in COMMANDS]


def test_every_command_rejects_a_misspelt_option_without_the_heavy_libraries() -> None:
    said = python("""
for name in COMMANDS:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        status = main([*shlex.split(EXAMPLES[name][0].partition(" > ")[0]), "--no-such-option"])
    print(name, status, "--no-such-option" in text.getvalue(), sep="|")
""")
    assert said.splitlines() == [f"{name}|2|True" for name in COMMANDS]
