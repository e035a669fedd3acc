"""What `vitrail doctor` reports, collected without torch: the machine, installed libraries, and the environment.

    python -m vitrail.cli.doctor_facts

Run as a module, it checks the libraries in a separate process, since a broken library may end the process that imports
it. Each result is printed as soon as it is known, one JSON object per line: {"of": "torch", "version": ..., ...}, or
with "error". If the process ends early, the check after the last line ended it.

The tables repeat pyproject.toml, which an installed package does not contain; a test compares them.
"""

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import vitrail
from vitrail.core.atomic_files import cache_folder
from vitrail.core.errors import ConfigError
from vitrail.core.precision import FLOAT8_CAPABILITY
from vitrail.core.processes import cpu_quota

Facts = dict[str, Any]
DRIVER_S: Final = 2.0
WALK_S: Final = 0.5  # time limit for measuring the cache
CACHES: Final = ("weights", "data", "features", "index", "shards", "dedup")


def read_processor() -> Facts:
    """The processor's name, and the cores that this process may use by affinity and by container quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pairs = [[part.strip() for part in line.split(":", 1)] for line in read_lines("/proc/cpuinfo") if ":" in line]
    named = [value for name, value in pairs if name.lower() in ("model name", "hardware") and value]
    name = named[0] if named else platform.processor() or platform.machine() or "unknown"
    return {"name": name, "cores": os.cpu_count(), "usable": allowed, "quota": cpu_quota()}


def read_memory() -> Facts:
    """Total and free bytes, and the limit of a container if there is one."""
    known = dict(line.split(":", 1) for line in read_lines("/proc/meminfo") if ":" in line)
    sizes = [known[name].split()[0] if name in known else "" for name in ("MemTotal", "MemAvailable")]
    total, free = (int(size) * 1024 if size else None for size in sizes)
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = "".join(read_lines("/sys/fs/cgroup/memory.max")).strip()
    return {"total": total, "free": free, "limit": int(limit) if limit.isdecimal() else None}


def read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def query_driver() -> list[Facts] | None:
    """GPUs as NVIDIA's driver reports them, independent of torch; None without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=DRIVER_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []
    rows = [row for line in lines if len(row := [cell.strip() for cell in line.split(",")]) == 3]
    memory = [int(size) << 20 if size.isdecimal() else None for _, size, _ in rows]
    return [{"name": row[0], "memory": size, "driver": row[2]} for row, size in zip(rows, memory, strict=True)]


def measure_caches() -> Facts:
    """The cache folder, its size by kind, and whether it is writable."""
    try:
        home = cache_folder(".").resolve()
    except ConfigError as error:
        return {"error": str(error)}
    until = time.monotonic() + WALK_S
    sizes = dict.fromkeys(CACHES, 0)
    for kind in CACHES:
        for folder, _, names in os.walk(home / kind):
            for name in names if time.monotonic() < until else ():
                with contextlib.suppress(OSError):
                    sizes[kind] += os.lstat(os.path.join(folder, name)).st_size
    counted = time.monotonic() < until
    known = {kind: size for kind, size in sizes.items() if size}
    return {"folder": str(home), "writable": is_writable(home), "bytes": known, "counted": counted}


def find_runs_folder() -> Facts:
    """The default folder of runs."""
    folder = Path("runs").absolute()
    return {"folder": str(folder), "writable": is_writable(folder), "free": free_space(folder)}


def free_shared_memory() -> int | None:
    """Free shared memory, through which loader processes pass images; a container often has little."""
    return free_space(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None


def is_writable(folder: Path) -> bool:
    """Whether a folder can be written to or created."""
    above = next(place for place in (folder, *folder.parents) if place.exists())
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def free_space(folder: Path) -> int | None:
    above = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        return shutil.disk_usage(above).free
    except OSError:
        return None


PROBE_S: Final = 120.0  # a network drive may be slow, and torch has a thousand files

NEEDS = "torch>=2.10 torchvision>=0.25 numpy>=2.0 pillow>=11.3 safetensors>=0.5 rich>=13.9 jinja2>=3.1 shtab>=1.13"
NEEDED: Final = {name: least for name, _, least in (text.partition(">=") for text in NEEDS.split())}
EXTRAS: Final = {
    "data": ("Parquet, saved Hugging Face datasets, MATLAB", {"pyarrow": "20", "h5py": "3.12", "scipy": "1.15"}),
    "figures": ("the figures of vitrail inspect and cost", {"matplotlib": "3.10"}),
    "heic": ("HEIC photographs, as taken by phones", {"pillow-heif": "1.1"}),
    "export": ("vitrail export --to onnx", {"onnx": "1.19", "onnxscript": "0.5", "onnxruntime": "1.23"}),
    "serve": ("vitrail serve", {"starlette": "1.0", "uvicorn": "0.35", "python-multipart": "0.0.20"}),
    "hub": ("from_pretrained with a repository, push_to_hub", {"huggingface-hub": "1.0"}),
}
# Variables that change what vitrail does, or how fast, in display order.
VARIABLES: Final = (
    *("VITRAIL_CACHE", "VITRAIL_CHECKSUMS", "VITRAIL_DATA", "VITRAIL_HUB"),
    *("VITRAIL_OFFLINE", "VITRAIL_TOKEN", "VITRAIL_TRACEBACK"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *("PYTHONPATH", "RANK", "WORLD_SIZE"),
)
SECRET: Final = ("VITRAIL_TOKEN", "HF_TOKEN")


def installed_version(name: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_older(version: str, least: str) -> bool:
    """Whether a version precedes another; suffixes ("+cu128", "rc1") are ignored."""
    had, wanted = ([int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", v)[0])] for v in (version, least))
    return had < wanted


def run_probe() -> dict[str, Facts]:
    """Runs the checks in another process and returns their results by name. Checks that were not reached are missing;
    the one that ended the process has an error."""
    # The other process must import the same copy of vitrail.
    path = os.pathsep.join([str(Path(vitrail.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, env = [sys.executable, "-m", "vitrail.cli.doctor_facts"], {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=PROBE_S)
        status, output, complaint = done.returncode, done.stdout, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        status, output, complaint = -9, error.stdout or b"", f"did not answer within {PROBE_S:g} s"
    lines: list[Facts] = [json.loads(line) for line in output.splitlines()]
    found = {facts.pop("of"): facts for facts in lines}
    if unreached := [name for name in STAGES if name not in found]:
        known = {-number.value: f"by {number.name}" for number in signal.Signals}
        how = known.get(status, f"by signal {-status}" if status < 0 else f"with status {status}")
        last = f" ({complaint.strip().splitlines()[-1]})" if complaint.strip() else ""
        found[unreached[0]] = {"error": f"ended the interpreter {how}{last}"}
    return found


def check_extras() -> dict[str, Facts]:
    """Each extra with its installed, missing and outdated libraries, and the command that installs it."""
    found: dict[str, Facts] = {}
    clone = shlex.quote(str(Path(vitrail.__file__).parents[2]))
    install = "pip install 'vitrail[{}]'" if installed_version("vitrail") else f"cd {clone} && pip install -e '.[{{}}]'"
    for extra, (use, wanted) in EXTRAS.items():
        have = {name: installed_version(name) for name in wanted}
        versions = {name: version for name, version in have.items() if version}
        missing = [name for name in have if name not in versions]
        old = [f"{name} {version}" for name, version in versions.items() if is_older(version, wanted[name])]
        command = install.format(extra) if missing or old else None
        found[extra] = {"for": use, "versions": versions, "missing": missing, "old": old, "install": command}
    return found


def read_variables() -> dict[str, str]:
    """The relevant variables that are set, without secrets, and any unknown VITRAIL_... variable."""
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
    """Replaces the home folder by ~ in plain data, since a bug report need not name its author."""
    home = os.path.expanduser("~")
    if home in ("", "/", "~"):
        return facts
    text = re.escape(json.dumps(home)[1:-1])
    return json.loads(re.sub(rf"(?<![\w.~-]){text}(?![\w.-])", "~", json.dumps(facts)))


VERSION: Final = r"__version__ = ['\"]([^'\"]+)"


def check_import(name: str) -> Facts:
    import_module(name)
    return {}


def check_pillow() -> Facts:
    """Checks the image formats: Pillow may be built without JPEG."""
    from PIL import features

    kinds = {"JPEG": "jpg", "PNG": "zlib", "WebP": "webp"}
    return {"lacks": [kind for kind, name in kinds.items() if not features.check(name)]}


def check_torch() -> Facts:
    """Checks that torch computes correctly, also on memory shared with NumPy."""
    import numpy
    import torch

    product = torch.from_numpy(numpy.ones((64, 64), dtype=numpy.float32)) @ torch.ones(64, 64)
    if not bool((product == 64).all()):
        raise RuntimeError("a product of two matrices of ones is wrong")
    about = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    instructions = torch.backends.cpu.get_cpu_capability()
    return {**about, "threads": torch.get_num_threads(), "instructions": instructions}


def list_devices() -> Facts:
    """Accelerators that torch sees, and whether it has kernels for them, without creating a context."""
    import torch

    seen: list[Facts] = []
    built = torch.cuda.get_arch_list() if torch.cuda.is_available() else []
    for number in range(torch.cuda.device_count() if built else 0):
        about: Any = torch.cuda.get_device_properties(number)
        kernels = torch.version.hip is not None or has_kernels(about.major, about.minor, built)
        capability = f"{about.major}.{about.minor}"
        facts: Facts = {"name": about.name, "memory": about.total_memory, "capability": capability}
        seen.append(facts | {"kernels": kernels, "float8": (about.major, about.minor) >= FLOAT8_CAPABILITY})
    return {"seen": seen, "triton": installed_version("triton"), "mps": torch.backends.mps.is_available()}


def has_kernels(major: int, minor: int, built: list[str]) -> bool:
    """Whether torch's build has kernels for a compute capability. Binary code runs on the same major version from its
    own minor version on; PTX runs on all later capabilities."""
    codes = [re.fullmatch(r"([a-z]+)_(\d+)(\d)[af]*", name) for name in built]
    made = [(code[1], (int(code[2]), int(code[3]))) for code in codes if code]
    return any(of <= (major, minor) and (kind == "compute" or of[0] == major) for kind, of in made)


def check_torchvision() -> Facts:
    """Checks only torchvision's compiled library, which a mismatched torch breaks; importing the rest takes a
    second."""
    import torch

    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torchvision'")
    folder = Path(spec.submodule_search_locations[0])
    written = re.search(VERSION, (folder / "version.py").read_text("utf-8"))
    facts = {"version": written[1]} if written else {}
    library = next((path for end in ("so", "pyd", "dylib") for path in folder.glob(f"_C*.{end}")), None)
    if library is None:
        import_module("torchvision.ops")
        return facts
    torch.ops.load_library(str(library))
    kept: Any = torch.ops.torchvision.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.ones(1), 0.5)
    if kept.tolist() != [0]:
        raise RuntimeError("its operators compute wrong results")
    return facts


def check_weights() -> Facts:
    """Reads the bundled weights and verifies the checksum of every tensor."""
    from vitrail.checkpoint.files.read_weights import read_weights
    from vitrail.checkpoint.known_weights import BUNDLED, bundled_file

    files = [(name, bundled_file(name), len(read_weights(bundled_file(name)).tensors)) for name in BUNDLED]
    return {"found": {name: {"bytes": path.stat().st_size, "tensors": tensors} for name, path, tensors in files}}


# The checks in order; libraries have the names that pip uses.
STAGES: Final[dict[str, Callable[[], Facts]]] = {
    **{name: partial(check_import, name) for name in ("numpy", "safetensors", "jinja2", "shtab")},
    "rich": partial(check_import, "rich.console"),
    "pillow": check_pillow,
    "torch": check_torch,
    "devices": list_devices,
    "torchvision": check_torchvision,
    "weights": check_weights,
}


def main() -> int:
    # Libraries may print to stdout; the results go to a descriptor that nothing else writes to.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name, look in STAGES.items():
        try:
            facts = look()
        except Exception as error:  # any failure is a result
            facts = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps({"of": name, **facts}) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
