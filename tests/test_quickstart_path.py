"""A stranger's path: a fresh clone, `make demo`, then docs/quickstart.md from its first command to its last.

The commands are the page's own: every `$` line of its ```console blocks and every ```python block, in order, by a shell
in the clone. What is not: the folder of images, which is the stranger's own and drawn here; the port, which is a free
one; and blocks that download. Nothing is installed that is there already: `make demo` makes its .venv in the clone and
finds the libraries of this interpreter, or, where that cannot be done without a network, `vitrail demo` is run by this
interpreter. The time of each step is printed.
"""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[1]
PAGE = Path("docs", "quickstart.md")
FOLDER = "photos"  # what the page calls the stranger's images
DRAW = "python examples/draw_photos.py"  # for those who have none
PORT = 8000  # what the page's server listens on
SHAPES = ("circle", "square", "triangle")
LIMIT_S = 15 * 60
INSTALL_S = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.name != "posix" or shutil.which("curl") is None, reason="a shell and curl are needed"),
    pytest.mark.skipif(not (ROOT / PAGE).is_file(), reason=f"no {PAGE} here"),
]


def test_a_strangers_path(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stranger = Stranger(tmp_path, capfd)
    with stranger.step("git clone"):
        cloned(stranger.clone)
    try:
        demonstrated(stranger)
        with stranger.step(f"drew {FOLDER}"):
            drawn(stranger.clone / FOLDER)
        for line in lines_of(stranger.clone / PAGE):
            stranger.types(line)
        checked(stranger)
    finally:
        stranger.leaves()
    total = sum(stranger.times.values())
    stranger.says(f"{total:7.1f} s  in all")
    assert total < LIMIT_S


class Stranger:
    """Somebody at a terminal in the clone, who does what the page says."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.clone, self.tools, self.capfd = folder / "vitrail", folder / "bin", capfd
        self.times: dict[str, float] = {}
        self.answers: dict[str, str] = {}
        self.server: subprocess.Popen[str] | None = None
        self.port = free_port()
        here = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(self.tools), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(self.clone / "src"), *here])),
            "VITRAIL_CACHE": str(folder / "cache"),
            "VITRAIL_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def says(self, text: str) -> None:
        with self.capfd.disabled():
            sys.stdout.write(f"\n{text}")
            sys.stdout.flush()

    def step(self, name: str) -> "Step":
        return Step(self, name)

    def uses(self, *, environment: bool) -> None:
        """What `vitrail` and `python` are: those of the clone's .venv, or this interpreter."""
        self.tools.mkdir()
        python = str(self.clone / ".venv" / "bin" / "python") if environment else sys.executable
        for name, command in {"python": python, "vitrail": f"{python} -m vitrail"}.items():
            (self.tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (self.tools / name).chmod(0o755)

    def types(self, line: str) -> None:
        """One command, which must end well. A server stays, and is asked where it really is."""
        if line == DRAW:
            return  # has images
        with self.step(line):
            line = line.replace(f":{PORT}", f":{self.port}").replace(f"--port {PORT}", f"--port {self.port}")
            if line.startswith("vitrail serve"):
                self.starts(line)
                return
            self.answers[line] = self.run(line)

    def run(self, line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line], cwd=self.clone, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def starts(self, line: str) -> None:
        """The server, until it says where it is."""
        assert self.server is None
        self.server = subprocess.Popen(
            ["sh", "-c", f"exec {line}"], cwd=self.clone, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        said = self.server.stdout.readline()
        assert f"http://127.0.0.1:{self.port}" in said, f"{line} said {said!r}"

    def leaves(self) -> None:
        """By what Ctrl-C sends; the server says goodbye with 0."""
        if self.server is None:
            return
        self.server.send_signal(signal.SIGINT)
        try:
            self.server.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.server.kill()
            raise
        assert self.server.returncode == 0


class Step:
    """Takes the time of something and prints it."""

    def __init__(self, stranger: Stranger, name: str) -> None:
        self.stranger, self.name = stranger, name

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *error: object) -> None:
        taken = time.monotonic() - self.begun
        self.stranger.times[self.name] = self.stranger.times.get(self.name, 0.0) + taken
        self.stranger.says(f"{taken:7.1f} s  {' '.join(self.name.split())[:110]}")


def cloned(target: Path) -> None:
    """A clone, and what is not committed yet."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no repository to clone")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True, capture_output=True)

    def listed(*arguments: str) -> list[str]:
        command = ["git", "-C", str(ROOT), "ls-files", "-z", *arguments]
        return [
            name
            for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
            if name
        ]

    for name in listed("--deleted"):
        (target / name).unlink(missing_ok=True)
    for name in listed("--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def demonstrated(stranger: Stranger) -> None:
    """`make demo`, and what its last lines say to do."""
    with stranger.step("make demo"):
        said = made(stranger)
    if said is None:
        stranger.uses(environment=False)
        with stranger.step("vitrail demo, for no .venv could be made"):
            said = stranger.run("vitrail demo")
    else:
        stranger.uses(environment=True)
    last = dict(re.findall(r"^(Open the report|Try it in a browser|Predict with it): +(.+)$", said, flags=re.MULTILINE))
    assert (stranger.clone / "runs" / "demo" / "finetune" / "report.html").as_uri() == last["Open the report"]
    assert last["Try it in a browser"].endswith("vitrail serve runs/demo/finetune")
    with stranger.step(last["Predict with it"]):
        answer = stranger.run(last["Predict with it"])
    assert re.search(r": 7 \d\d\.\d %", answer), answer


def made(stranger: Stranger) -> str | None:
    """What `make demo` prints; nothing where its .venv cannot be made, which takes hatchling from the index."""
    if shutil.which("make") is None:
        return None
    patience = {"PIP_RETRIES": "0", "PIP_TIMEOUT": "10", "PIP_NO_INPUT": "1"}
    command = ["make", "demo", f"PYTHON={sys.executable}", "CONSTRAINTS=", "SYSTEM_SITE=1"]
    done = subprocess.run(
        command,
        cwd=stranger.clone,
        env=stranger.environment | patience,
        capture_output=True,
        text=True,
        timeout=INSTALL_S + LIMIT_S,
    )
    if done.returncode and "vitrail demo" not in done.stdout:
        stranger.says(f"make demo could not install: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return None
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def drawn(folder: Path) -> None:
    """Ninety images of 48 px: three shapes of any colour, size and place, a fifth of them for the test."""
    chance = random.Random(0)
    for shape in SHAPES:
        for number in range(30):
            image = Image.new("RGB", (48, 48), tuple(chance.randrange(100) for _ in range(3)))
            side = chance.uniform(10, 18)
            x, y = (chance.uniform(side + 1, 47 - side) for _ in range(2))
            corners = {"circle": 40, "square": 4, "triangle": 3}[shape]
            turn = chance.uniform(0, math.tau)
            around = [turn + math.tau * corner / corners for corner in range(corners)]
            points = [(x + side * math.cos(angle), y + side * math.sin(angle)) for angle in around]
            ImageDraw.Draw(image).polygon(points, fill=tuple(chance.randrange(150, 256) for _ in range(3)))
            path = folder / ("test" if number % 5 == 0 else "train") / shape / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


def lines_of(page: Path) -> Iterator[str]:
    """What is to be typed, in order; a block that needs the network says so in its comment."""
    fence = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for comment, language, text in fence.findall(page.read_text("utf-8")):
        if re.search("download|network", comment):
            continue
        if language == "python":
            yield f"python -c {shlex.quote(text)}"
        else:
            yield from re.findall(r"^\$ (.+)$", text.replace("\\\n", ""), flags=re.MULTILINE)


def checked(stranger: Stranger) -> None:
    """The page had every part of the path in it, and each left what it was for."""
    typed = [name for name in stranger.times if not name.startswith("python -c")]
    for part in ("predict", "fit", "finetune", "evaluate", "inspect", "export", "serve"):
        assert any(line.startswith(f"vitrail {part} ") for line in typed), f"{PAGE} has no vitrail {part}"
    assert any("--to onnx" in line for line in typed)
    asked = [json.loads(answer) for line, answer in stranger.answers.items() if line.startswith("curl ")]
    assert asked, f"{PAGE} asks the server nothing"
    labels = {answer["label"] for found in asked for one in found["predictions"] for answer in one["top"]}
    assert labels <= set(SHAPES)
    assert (stranger.clone / "runs" / FOLDER / "report.html").is_file()
    assert list(stranger.clone.glob("*.onnx"))
    assert list(stranger.clone.glob("*/report.html"))
    # A network that had learnt nothing would get a third of them right.
    stranger.run(f"vitrail evaluate runs/{FOLDER} --data {FOLDER}@test --out score.json")
    result = json.loads((stranger.clone / "score.json").read_text("utf-8"))
    right = next(measure["value"] for measure in result["measures"] if measure["name"] == "top-1")
    stranger.says(f"{right:9.1%}  of the test images right")
    assert right > 0.6


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
