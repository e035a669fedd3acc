"""The machine as `vitrail doctor` tells it, without torch: processor, memory, GPUs by their driver, places to write."""

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from vitrail.core.atomic_files import cache_folder
from vitrail.core.errors import ConfigError

Facts = dict[str, Any]
DRIVER_S: Final = 2.0
WALK_S: Final = 0.5  # a cache with very many files is not counted to its end
CACHES: Final = ("weights", "data", "features", "index", "shards", "dedup")


def read_processor() -> Facts:
    """Its name and the cores that this process may use, by affinity and by the quota of a container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"name": processor_name(), "cores": os.cpu_count(), "usable": allowed, "quota": read_quota()}


def processor_name() -> str:
    for line in read_lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip().lower() in ("model name", "hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def read_quota() -> float | None:
    """Cores' worth of time that a control group leaves; none where nothing is set."""
    words = " ".join(read_lines("/sys/fs/cgroup/cpu.max")).split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return int(words[0]) / int(words[1])


def read_memory() -> Facts:
    """Bytes in all and still to be had, within the limit of a container where there is one."""
    known = {
        name.strip(): value.split() for name, _, value in (line.partition(":") for line in read_lines("/proc/meminfo"))
    }
    total, free = (int(known[name][0]) * 1024 if name in known else None for name in ("MemTotal", "MemAvailable"))
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
    """GPUs as NVIDIA's driver names them, whatever torch thinks; none where there is no such driver to ask."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=DRIVER_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = (
        [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()] if not done.returncode else []
    )
    return [
        {"name": row[0], "memory": int(row[1]) << 20 if row[1].isdecimal() else None, "driver": row[2]}
        for row in rows
        if len(row) == 3
    ]


def measure_caches() -> Facts:
    """Where what is kept between commands lies, how much it is, and whether more can be put there."""
    try:
        home = cache_folder(".").resolve()
    except ConfigError as error:
        return {"error": str(error)}
    until = time.monotonic() + WALK_S
    sizes: dict[str, int] = {}
    whole = True
    for kind in CACHES:
        size, counted = folder_size(home / kind, until)
        whole &= counted
        if size:
            sizes[kind] = size
    return {"folder": str(home), "writable": is_writable(home), "bytes": sizes, "counted": whole}


def folder_size(folder: Path, until: float) -> tuple[int, bool]:
    """Bytes of the files below a folder, and whether all of them were counted in time."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
        if time.monotonic() > until:
            return size, False
    return size, True


def find_runs_folder() -> Facts:
    """The folder that runs go to by default."""
    folder = Path("runs").absolute()
    return {"folder": str(folder), "writable": is_writable(folder), "free": free_space(folder)}


def free_shared_memory() -> int | None:
    """Free bytes of the memory that loader processes pass images through; a container often has little."""
    return free_space(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None


def is_writable(folder: Path) -> bool:
    """Whether it can be written to, or made."""
    above = next(place for place in (folder, *folder.parents) if place.exists())
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def free_space(folder: Path) -> int | None:
    above = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        return shutil.disk_usage(above).free
    except OSError:
        return None
