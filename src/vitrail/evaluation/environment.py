"""What a run ran on: versions, machine, devices, and the commit of the working tree."""

import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import torch

from vitrail import __version__

GIT_SECONDS: Final = 5.0


def environment() -> dict[str, Any]:
    """As plain data."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    other = "mps" if torch.backends.mps.is_available() else "cpu"
    return {
        "vitrail": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "devices": [torch.cuda.get_device_name(number) for number in range(devices)] or [other],
        "git": working_tree(Path.cwd()),
    }


def working_tree(folder: Path) -> dict[str, Any] | None:
    """The commit that a folder is at and whether anything in it differs; none where there is no git, or no answer."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # looking must not touch the tree
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
