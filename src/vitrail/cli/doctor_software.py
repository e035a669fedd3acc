"""What is installed, as `vitrail doctor` tells it: libraries that vitrail needs, extras, and what the environment says.

The tables repeat pyproject.toml, which an installed package does not have with it; a test holds them together.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import vitrail

Facts = dict[str, Any]
PROBE_S: Final = 120.0  # a network drive may be slow; torch is a thousand files

NEEDED: Final = {
    "torch": "2.10",
    "torchvision": "0.25",
    "numpy": "2.0",
    "pillow": "11.3",
    "safetensors": "0.5",
    "rich": "13.9",
    "jinja2": "3.1",
}
EXTRAS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "data": ("Parquet and Hugging Face's saved sets, Patch Camelyon", {"pyarrow": "20", "h5py": "3.12"}),
    "figures": ("the figures of vitrail inspect and cost", {"matplotlib": "3.10"}),
    "heic": ("HEIC photographs, as phones take them", {"pillow-heif": "1.1"}),
    "export": ("vitrail export --to onnx", {"onnx": "1.19", "onnxscript": "0.5", "onnxruntime": "1.23"}),
    "serve": ("vitrail serve", {"starlette": "1.0", "uvicorn": "0.35", "python-multipart": "0.0.20"}),
    "hub": ("from_pretrained of a repository, push_to_hub", {"huggingface-hub": "1.0"}),
}
# Those that change what vitrail does, or how fast, in the order in which they are shown.
VARIABLES: Final = (
    "VITRAIL_CACHE",
    "VITRAIL_CHECKSUMS",
    "VITRAIL_DATA",
    "VITRAIL_HUB",
    "VITRAIL_OFFLINE",
    "VITRAIL_TOKEN",
    "VITRAIL_TRACEBACK",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTHONPATH",
    "RANK",
    "WORLD_SIZE",
)
SECRET: Final = ("VITRAIL_TOKEN", "HF_TOKEN")


def installed_version(name: str) -> str | None:
    """As it was installed; none where it was not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_older(version: str, least: str) -> bool:
    """Whether a version comes before another; what follows the numbers ("+cu128", "rc1") is left out."""
    had, wanted = (
        tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])) for text in (version, least)
    )
    return had < wanted


def run_probe() -> dict[str, Facts]:
    """What `doctor_probe` found, a library at a time. What it did not come to is not there; what ended it has an
    error."""
    from vitrail.cli.doctor_probe import STAGES

    # Where this copy of vitrail is must be found by the other process, too, however it is found here.
    path = os.pathsep.join([str(Path(vitrail.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "vitrail.cli.doctor_probe"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            said, complaint = process.communicate(timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, complaint = process.communicate()
            complaint = f"gave no answer within {PROBE_S:g} s"
    found: dict[str, Facts] = {}
    for line in said.splitlines():
        facts: Facts = json.loads(line)
        found[facts.pop("of")] = facts
    unreached = [name for name in STAGES if name not in found]
    if unreached:
        found[unreached[0]] = {"error": describe_exit(process.returncode, complaint)}
    return found


def describe_exit(status: int, complaint: str) -> str:
    """How a process ended that should not have."""
    last = (complaint.strip().splitlines() or [""])[-1]
    if status < 0:
        known = status in {-number for number in signal.Signals}
        how = f"ended the interpreter by {signal.Signals(-status).name if known else f'signal {-status}'}"
    else:
        how = f"ended the interpreter with status {status}"
    return f"{how}{f' ({last})' if last else ''}"


def pip_extra(extra: str) -> str:
    """The command that installs one; where vitrail itself is not installed, into the clone that it runs from."""
    if installed_version("vitrail") is not None:
        return f"pip install 'vitrail[{extra}]'"
    return f"cd {shlex.quote(str(Path(vitrail.__file__).parents[2]))} && pip install -e '.[{extra}]'"


def check_extras() -> dict[str, Facts]:
    """Each with what is there of it, and what is missing or too old."""
    found: dict[str, Facts] = {}
    for extra, (use, wanted) in EXTRAS.items():
        have = {name: installed_version(name) for name in wanted}
        missing = [name for name, version in have.items() if version is None]
        old = [f"{name} {version}" for name, version in have.items() if version and is_older(version, wanted[name])]
        found[extra] = {
            "for": use,
            "versions": {name: version for name, version in have.items() if version},
            "missing": missing,
            "old": old,
            "install": pip_extra(extra) if missing or old else None,
        }
    return found


def read_variables() -> dict[str, str]:
    """Those that are set and matter, without secrets; any other VITRAIL_..., which nothing reads."""
    mine = [name for name in sorted(os.environ) if name.startswith("VITRAIL_") and name not in VARIABLES]
    return {name: mask_value(name, os.environ[name]) for name in (*VARIABLES, *mine) if name in os.environ}


def mask_value(name: str, value: str) -> str:
    if name in SECRET or name not in VARIABLES:
        return "(set)" if value else ""
    parts = urlsplit(value) if "://" in value else None
    if parts is not None and "@" in parts.netloc:
        value = value.replace(parts.netloc.rpartition("@")[0] + "@", "", 1)
    return value


def anonymise(facts: Any) -> Any:
    """Plain data with ~ for the home folder: a bug report need not name its author."""
    home = os.path.expanduser("~")
    if home in ("", "/", "~"):
        return facts
    mine = re.compile(r"(?<![\w.~-])" + re.escape(home) + r"(?![\w.-])")

    def without(value: Any) -> Any:
        if isinstance(value, str):
            return mine.sub("~", value)
        if isinstance(value, dict):
            return {name: without(inner) for name, inner in cast(Facts, value).items()}
        if isinstance(value, list):
            return [without(inner) for inner in cast(list[Any], value)]
        return value

    return without(facts)
