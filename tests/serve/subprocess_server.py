"""A server of its own process, as `vitrail serve` starts it, and what the system says of it."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that has said where it is."""

    process: "subprocess.Popen[str]"
    port: int
    said: list[str]

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu(self) -> float:
        """Seconds of processor time so far."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: int = signal.SIGTERM, patience: float = 20.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(patience)


@contextlib.contextmanager
def running(
    *words: str, cwd: Path | None = None, environment: dict[str, str] | None = None, program: Sequence[str] = ()
) -> Generator[Running]:
    """`vitrail serve WORDS --port 0`, ready; killed at the end where it still runs."""
    command = [sys.executable, *(program or ("-m", "vitrail", "serve")), *words, "--port", "0"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []

    listener = threading.Thread(target=lambda: listen_to(process, said), daemon=True)
    listener.start()
    try:
        yield Running(process, port_of(process, said), said)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        listener.join(5)
        if process.stdout is not None:
            process.stdout.close()


def listen_to(process: "subprocess.Popen[str]", said: list[str]) -> None:
    """To the end, so that a full pipe never stops it."""
    assert process.stdout is not None
    said.extend(line.rstrip("\n") for line in process.stdout)  # one by one, as they come


def port_of(process: "subprocess.Popen[str]", said: list[str]) -> int:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if any(line.startswith("limits:") for line in said):
            address = next(line for line in said if line.startswith("http"))
            found = re.search(r":(\d+)\b(?!.*:\d)", address.split()[0])
            assert found, said
            return int(found[1])
        if process.poll() is not None:
            time.sleep(0.2)
            raise AssertionError(f"the server ended with {process.returncode}: {said}")
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {said}")
