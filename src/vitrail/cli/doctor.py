"""`vitrail doctor`: checks the installation and says what to fix."""

import difflib
import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import vitrail
from vitrail.cli import doctor_facts
from vitrail.cli.doctor_facts import NEEDED, VARIABLES, is_older
from vitrail.cli.options.look import DoctorOptions
from vitrail.core.text import format_bytes, pluralise

Facts = dict[str, Any]
LITTLE_DISK: Final = 2_000_000_000
LITTLE_SHARED: Final = 256_000_000
PYTHON: Final = ("3.11", "3.14")  # first version, and the one after the last


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem. A fault keeps vitrail from working; anything else is a note."""

    what: str
    remedy: str
    fault: bool = False


def find_problems(facts: Facts) -> list[Finding]:
    """All problems, faults first."""
    rules = (find_broken, find_mismatched, find_hidden_devices, find_full_places, find_unknown_variables)
    return sorted((finding for rule in rules for finding in rule(facts)), key=lambda finding: not finding.fault)


def find_broken(facts: Facts) -> Iterator[Finding]:
    """Problems with required libraries and with the package's own files."""
    libraries = facts["libraries"]
    for name, about in libraries.items():
        wanted = f"'{name}>={NEEDED[name]}'"
        if about["version"] is None and "error" in about:
            yield Finding(f"{name} is not installed", f"pip install {wanted}", True)
        elif "error" in about:
            what = f"{name} {about['version']} cannot be used: {about['error']}"
            yield Finding(what, f"pip install --force-reinstall {wanted}", True)
        elif about["version"] and is_older(about["version"], NEEDED[name]):
            yield Finding(f"{name} {about['version']} is too old, before {NEEDED[name]}", f"pip install {wanted}", True)
    if lacks := libraries["pillow"].get("lacks"):
        yield Finding(f"this Pillow reads no {', '.join(lacks)}", "pip install --force-reinstall pillow", True)
    weights = facts["weights"] or {}
    if "error" in weights and "error" not in libraries["torch"]:
        yield Finding(f"the bundled weights: {weights['error']}", "install vitrail again, or clone it again", True)
    version = facts["python"]["version"]
    if is_older(version, PYTHON[0]) or not is_older(version, PYTHON[1]):
        what = f"Python {version} is untested; vitrail is tested with {PYTHON[0]} and later, before {PYTHON[1]}"
        yield Finding(what, "use one of those in a virtual environment")
    mine = facts["vitrail"]
    if mine["installed"] not in (None, mine["version"]):
        what = f"vitrail {mine['version']} is running, but pip has installed {mine['installed']}"
        yield Finding(what, "check PYTHONPATH and the folder above, or run pip install -e . in the clone that you want")
    if facts["platform"].startswith("Windows"):
        yield Finding("vitrail has not been tested on Windows", "if something fails, use WSL")


def find_mismatched(facts: Facts) -> Iterator[Finding]:
    """Whether torch and torchvision were built for different versions of each other or of CUDA."""
    torch, vision = (facts["libraries"][name]["version"] for name in ("torch", "torchvision"))
    if torch is None or vision is None:
        return
    partner = matching_torchvision(torch)
    if partner is not None and not re.match(rf"{re.escape(partner)}(\.|$)", vision):
        remedy = f"pip install 'torch=={torch.partition('+')[0]}' 'torchvision=={partner}.*'"
        yield Finding(f"torchvision {vision} does not match torch {torch}, which needs {partner}", remedy)
        return
    builds = [version.partition("+")[2] for version in (torch, vision)]
    if all(builds) and builds[0] != builds[1]:
        yield Finding(f"torch is built for {builds[0]} and torchvision for {builds[1]}", "install both in one command")


def matching_torchvision(torch: str) -> str | None:
    """The torchvision release that matches a torch release: 0.15 for 2.0, 0.25 for 2.10; None for torch 3."""
    found = re.match(r"2\.(\d+)", torch)
    return f"0.{int(found[1]) + 15}" if found else None


def find_hidden_devices(facts: Facts) -> Iterator[Finding]:
    """GPUs that cannot be used, or are untested."""
    devices, torch = facts["devices"] or {}, facts["libraries"]["torch"]
    seen = devices.get("seen", [])
    for gpu in seen:
        if not gpu["kernels"]:
            what = f"this torch has no kernels for {gpu['name']} (capability {gpu['capability']})"
            yield Finding(what, "install a torch built for it, or give --device cpu")
    if devices.get("mps"):
        remedy = "compare with --device cpu; if an operator is missing, set PYTORCH_ENABLE_MPS_FALLBACK=1"
        yield Finding("vitrail has not been tested on Apple's GPUs (mps)", remedy)
    if seen or not facts["driver"] or "error" in torch:
        return
    name = facts["driver"][0]["name"]
    if torch.get("cuda") is None:
        yield Finding(f"{name} is present, but this torch is built for CPUs", "to use it, install a torch for CUDA")
    elif "CUDA_VISIBLE_DEVICES" in facts["environment"]:
        what = f"{name} is hidden by CUDA_VISIBLE_DEVICES={facts['environment']['CUDA_VISIBLE_DEVICES']}"
        yield Finding(what, "to use it, unset CUDA_VISIBLE_DEVICES")
    else:
        what = f"{name} is present with driver {facts['driver'][0]['driver']}, but torch cannot use it"
        yield Finding(what, f"install a driver for CUDA {torch['cuda']}, or a torch for an older CUDA")


def find_full_places(facts: Facts) -> Iterator[Finding]:
    cache, made, shared = facts["cache"], facts["runs"], facts["shared_memory"]
    if "error" in cache:
        yield Finding(cache["error"], "set VITRAIL_CACHE to a writable folder")
    elif not cache["writable"]:
        yield Finding(f"the cache {cache['folder']} cannot be written to", "set VITRAIL_CACHE to a writable folder")
    if not made["writable"]:
        yield Finding(f"{made['folder']} cannot be written to", "runs go there by default; give --out")
    elif made["free"] is not None and made["free"] < LITTLE_DISK:
        what = f"{made['folder']} has {made['free'] / 1e9:.1f} GB left"
        yield Finding(what, "runs go there by default; make room, or give --out on another disk")
    if shared is not None and shared < LITTLE_SHARED:
        what = f"/dev/shm, through which loader processes pass images, has {shared / 1e6:.0f} MB left"
        yield Finding(what, "give the container more (docker run --shm-size 1g), or use --workers 0")


def find_unknown_variables(facts: Facts) -> Iterator[Finding]:
    environment, mine = facts["environment"], [name for name in VARIABLES if name.startswith("VITRAIL_")]
    for name in environment:
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, mine, n=1)
            yield Finding(f"{name} has no effect", f"rename it to {near[0]}, if you meant that" if near else "unset it")
    threads, cores = environment.get("OMP_NUM_THREADS", ""), facts["processor"]["usable"]
    if threads.isdecimal() and int(threads) > cores:
        yield Finding(f"OMP_NUM_THREADS={threads} asks for more threads than {cores} cores", "unset or lower it")


def run_doctor(options: DoctorOptions) -> int:
    facts = collect_facts()
    found = find_problems(facts)
    usable = not any(finding.fault for finding in found)
    if options.json:
        print(json.dumps({**facts, "findings": [asdict(finding) for finding in found], "usable": usable}, indent=2))
    else:
        show_facts(facts, found)
    return 0 if usable else 1


def collect_facts() -> Facts:
    """Collects all facts, as plain data."""
    probe, version = doctor_facts.run_probe(), doctor_facts.installed_version
    libraries = {name: {"version": version(name), **probe.get(name, {})} for name in NEEDED}
    folder = str(Path(vitrail.__file__).parent)
    facts = {
        "vitrail": {"version": vitrail.__version__, "installed": version("vitrail"), "folder": folder},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "libraries": libraries,
        "extras": doctor_facts.check_extras(),
        "processor": doctor_facts.read_processor(),
        "memory": doctor_facts.read_memory(),
        "shared_memory": doctor_facts.free_shared_memory(),
        "driver": doctor_facts.query_driver(),
        "devices": probe.get("devices"),
        "cache": doctor_facts.measure_caches(),
        "runs": doctor_facts.find_runs_folder(),
        "weights": probe.get("weights"),
        "environment": doctor_facts.read_variables(),
    }
    return doctor_facts.anonymise(facts)


def show_facts(facts: Facts, found: list[Finding]) -> None:
    """Prints the facts without rich, which may be broken itself."""
    mine, python = facts["vitrail"], facts["python"]
    versions = {"vitrail": f"{mine['version']}  {mine['folder']}"}
    versions |= {"Python": f"{python['version']}  {python['executable']}", "platform": facts["platform"]}
    versions |= {name: describe_library(about) for name, about in facts["libraries"].items()}
    sections = {
        "Versions": versions,
        "Extras": {name: describe_extra(about) for name, about in facts["extras"].items()},
        "Machine": describe_machine(facts),
        "Places": describe_places(facts),
        "Environment": facts["environment"],
    }
    for title, rows in sections.items():
        if rows:
            width = max(map(len, rows))
            print(title, *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows.items()), "", sep="\n")
    if found:
        lines = [f"  {'fault' if one.fault else 'note'}: {one.what}\n    {one.remedy}" for one in found]
        print("Problems", *lines, "", sep="\n")
    absent = [name for name, about in facts["extras"].items() if about["install"]]
    if faults := sum(finding.fault for finding in found):  # they come first
        print(f"Broken: {pluralise(faults, 'fault')}. First: {found[0].remedy}")
    elif found:
        print(f"Usable. Worth a look: {found[0].what}")
    else:
        print("Everything is fine." + (f" Optional and not installed: {', '.join(absent)}" if absent else ""))


def describe_library(about: Facts) -> str:
    if "error" in about:
        return f"{about['version'] or 'missing'}  BROKEN: {about['error'][:200]}"
    return about["version"] or "installed, version unknown"


def describe_extra(about: Facts) -> str:
    if lacking := [*about["missing"], *about["old"]]:
        word = "missing" if about["missing"] else "too old"
        return f"{word}: {', '.join(lacking)}; for {about['for']}: {about['install']}"
    return ", ".join(f"{name} {version}" for name, version in about["versions"].items())


def describe_machine(facts: Facts) -> dict[str, str]:
    cpu, memory, torch = facts["processor"], facts["memory"], facts["libraries"]["torch"]
    threads = f"; torch uses {torch['threads']} thread(s), {torch['instructions']}" if "threads" in torch else ""
    share = f", {cpu['quota']:g} by quota" if cpu["quota"] else ""
    words = {"total": "in total", "free": "free", "limit": "limit"}
    sizes = [f"{format_bytes(memory[name])} {word}" for name, word in words.items() if memory[name]]
    devices, drivers = facts["devices"] or {}, facts["driver"] or []
    seen = devices.get("seen", [])
    gpus = [f"{gpu['name']}, {format_bytes(gpu['memory'])}, capability {gpu['capability']}" for gpu in seen]
    if devices.get("mps"):
        gpus.append("Apple's (mps), which --device auto uses; untested with vitrail")
    if not seen:
        gpus += [f"{gpu['name']}, driver {gpu['driver']}, not seen by torch" for gpu in drivers]
    version = f" (driver {drivers[0]['driver']}, torch's CUDA {torch.get('cuda')})" if drivers and seen else ""
    return {
        "CPU": f"{cpu['name']}, {cpu['usable']} of {cpu['cores']} cores{share}{threads}",
        "memory": ", ".join(sizes) or "unknown",
        "GPU": "; ".join(gpus) + version if gpus else "none",
        **({"kernels": describe_kernels(devices)} if seen else {}),
    }


def describe_kernels(devices: Facts) -> str:
    """Whether vitrail's own kernels and fp8 products run on the GPUs."""
    if not devices.get("triton"):
        return "torch's own only, since Triton is not installed"
    eight = all(gpu.get("float8") for gpu in devices["seen"])
    return f"vitrail's own, with Triton {devices['triton']}; precision=fp8 {'can' if eight else 'cannot'} be used"


def describe_places(facts: Facts) -> dict[str, str]:
    cache, runs, weights = facts["cache"], facts["runs"], facts["weights"] or {}
    kinds = "; ".join(f"{kind} {format_bytes(size)}" for kind, size in cache.get("bytes", {}).items())
    at_least = "" if cache.get("counted", True) else ", at least"
    return {
        "cache": cache.get("error") or f"{cache['folder']}  {kinds or 'empty'}{at_least}",
        "runs": f"{runs['folder']}  {'?' if runs['free'] is None else format_bytes(runs['free'])} free",
    } | {
        name: f"intact: {format_bytes(about['bytes'])}, {about['tensors']} tensors, all checksums correct"
        for name, about in weights.get("found", {}).items()
    }
