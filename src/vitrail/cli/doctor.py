"""`vitrail doctor`: checks the installation and says what to fix."""

import difflib
import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import vitrail
from vitrail.cli.doctor_facts import (
    NEEDED,
    VARIABLES,
    anonymise,
    check_extras,
    find_runs_folder,
    free_shared_memory,
    installed_version,
    is_older,
    measure_caches,
    query_driver,
    read_memory,
    read_processor,
    read_variables,
    run_probe,
)
from vitrail.cli.options.look import DoctorOptions

Facts = dict[str, Any]
LITTLE_DISK: Final = 2_000_000_000
LITTLE_SHARED: Final = 256_000_000
PYTHON: Final = ("3.11", "3.14")  # from, and up to but without
AGAIN: Final = "install vitrail again, or clone it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem; a fault keeps vitrail from working, anything else is a note."""

    what: str
    remedy: str
    fault: bool = False


def find_problems(facts: Facts) -> list[Finding]:
    """Faults first."""
    found = [
        *find_broken(facts),
        *find_mismatched(facts),
        *find_hidden_devices(facts),
        *find_untested(facts),
        *find_full_places(facts),
        *find_unknown_variables(facts),
    ]
    return sorted(found, key=lambda finding: not finding.fault)


def find_broken(facts: Facts) -> Iterator[Finding]:
    """Required libraries, and the package's own files."""
    libraries = facts["libraries"]
    for name, about in libraries.items():
        wanted = f"pip install '{name}>={NEEDED[name]}'"
        if about["version"] is None and "error" in about:
            yield Finding(what=f"{name} is not installed", remedy=wanted, fault=True)
        elif "error" in about:
            remedy = f"pip install --force-reinstall '{name}>={NEEDED[name]}'"
            yield Finding(what=f"{name} {about['version']} cannot be used: {about['error']}", remedy=remedy, fault=True)
        elif about["version"] and is_older(about["version"], NEEDED[name]):
            what = f"{name} {about['version']} is too old: {NEEDED[name]} is the first that vitrail works with"
            yield Finding(what=what, remedy=wanted, fault=True)
    if lacks := libraries["pillow"].get("lacks"):
        what = f"this Pillow reads no {', '.join(lacks)}"
        yield Finding(what=what, remedy="pip install --force-reinstall pillow", fault=True)
    weights = facts["weights"]
    if weights is not None and "error" in weights and "error" not in libraries["torch"]:
        yield Finding(what=f"the bundled weights: {weights['error']}", remedy=AGAIN, fault=True)
    version = facts["python"]["version"]
    if is_older(version, PYTHON[0]) or not is_older(version, PYTHON[1]):
        what = f"Python {version} is not one that vitrail is tested with ({PYTHON[0]} and later, before {PYTHON[1]})"
        yield Finding(what=what, remedy="make a virtual environment with one of those")
    mine = facts["vitrail"]
    if mine["installed"] not in (None, mine["version"]):
        what = f"vitrail {mine['version']} is run, but {mine['installed']} is what pip has installed"
        yield Finding(
            what=what, remedy="see PYTHONPATH and the folder above; pip install -e . in the clone that you mean"
        )


def find_mismatched(facts: Facts) -> Iterator[Finding]:
    """A torch and a torchvision that were not built for each other."""
    torch, vision = (facts["libraries"][name]["version"] for name in ("torch", "torchvision"))
    if torch is None or vision is None:
        return
    partner = matching_torchvision(torch)
    if partner is not None and not re.match(rf"{re.escape(partner)}(\.|$)", vision):
        what = f"torchvision {vision} does not belong to torch {torch}, whose is {partner}"
        base = torch.partition("+")[0]
        yield Finding(what=what, remedy=f"pip install 'torch=={base}' 'torchvision=={partner}.*'")
        return
    builds = [version.partition("+")[2] for version in (torch, vision)]
    if all(builds) and builds[0] != builds[1]:
        what = f"torch is built for {builds[0]} and torchvision for {builds[1]}"
        yield Finding(what=what, remedy="install both from the same index, in one command")


def matching_torchvision(torch: str) -> str | None:
    """The torchvision of a torch: 0.15 with 2.0, 0.25 with 2.10; unknown for a torch 3."""
    found = re.match(r"2\.(\d+)", torch)
    return f"0.{int(found[1]) + 15}" if found else None


def find_hidden_devices(facts: Facts) -> Iterator[Finding]:
    """GPUs that cannot be used."""
    seen = (facts["devices"] or {}).get("seen", [])
    torch = facts["libraries"]["torch"]
    for gpu in seen:
        if not gpu["kernels"]:
            what = f"this torch has no kernels for {gpu['name']} (capability {gpu['capability']})"
            yield Finding(what=what, remedy="install a torch built for it, or give --device cpu")
    if seen or not facts["driver"] or "error" in torch:
        return
    name = facts["driver"][0]["name"]
    if torch.get("cuda") is None:
        remedy = "install a torch that is built for CUDA, if it is to be used"
        yield Finding(what=f"{name} is there, but this torch is built for CPUs", remedy=remedy)
    elif "CUDA_VISIBLE_DEVICES" in facts["environment"]:
        what = f"{name} is hidden by CUDA_VISIBLE_DEVICES={facts['environment']['CUDA_VISIBLE_DEVICES']}"
        yield Finding(what=what, remedy="unset CUDA_VISIBLE_DEVICES, if it is to be used")
    else:
        what = f"{name} is there with driver {facts['driver'][0]['driver']}, but torch cannot use it"
        yield Finding(what=what, remedy=f"install a driver for CUDA {torch['cuda']}, or a torch for an older CUDA")


def find_untested(facts: Facts) -> Iterator[Finding]:
    """Systems and devices on which vitrail is untested."""
    if facts["platform"].startswith("Windows"):
        yield Finding(what="vitrail has not been tested on Windows", remedy="where something fails, use WSL")
    if (facts["devices"] or {}).get("mps"):
        remedy = "compare with --device cpu; where an operator is missing, set PYTORCH_ENABLE_MPS_FALLBACK=1"
        yield Finding(what="vitrail has not been tested on Apple's GPUs (mps)", remedy=remedy)


def find_full_places(facts: Facts) -> Iterator[Finding]:
    cache, made, shared = facts["cache"], facts["runs"], facts["shared_memory"]
    if "error" in cache:
        yield Finding(what=cache["error"], remedy="set VITRAIL_CACHE to a folder that can be written to")
    elif not cache["writable"]:
        what = f"the cache {cache['folder']} cannot be written to, so that nothing is kept and nothing downloaded"
        yield Finding(what=what, remedy="set VITRAIL_CACHE to a folder that can be")
    if not made["writable"]:
        what = f"{made['folder']} cannot be written to, where runs go by default"
        yield Finding(what=what, remedy="change to another folder, or give --out")
    elif made["free"] is not None and made["free"] < LITTLE_DISK:
        what = f"{made['folder']} has {made['free'] / 1e9:.1f} GB left, where runs go by default"
        yield Finding(what=what, remedy="make room, or give --out on another disk")
    if shared is not None and shared < LITTLE_SHARED:
        what = f"/dev/shm has {shared / 1e6:.0f} MB left, which loader processes pass images through"
        yield Finding(what=what, remedy="give a container more (docker run --shm-size 1g), or the commands --workers 0")


def find_unknown_variables(facts: Facts) -> Iterator[Finding]:
    set_ = facts["environment"]
    for name in set_:
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, [known for known in VARIABLES if known.startswith("VITRAIL_")], n=1)
            meant = f"rename it to {near[0]}, if you meant that" if near else "unset it"
            yield Finding(what=f"nothing reads {name}", remedy=meant)
    threads, cores = set_.get("OMP_NUM_THREADS", ""), facts["processor"]["usable"]
    if threads.isdecimal() and int(threads) > cores:
        what = f"OMP_NUM_THREADS={threads} asks for more threads than the {cores} cores there are"
        yield Finding(what=what, remedy="unset it, or set it to the number of cores")


def run_doctor(options: DoctorOptions) -> int:
    facts = collect_facts()
    found = find_problems(facts)
    usable = not any(finding.fault for finding in found)
    if options.json:
        told = [{"fault": finding.fault, "what": finding.what, "remedy": finding.remedy} for finding in found]
        print(json.dumps({**facts, "findings": told, "usable": usable}, indent=2))
    else:
        show_facts(facts, found)
    return 0 if usable else 1


def collect_facts() -> Facts:
    """All facts, as plain data."""
    probe = run_probe()
    libraries: dict[str, Facts] = {
        name: {"version": probe.get(name, {}).get("version") or installed_version(name), **probe.get(name, {})}
        for name in NEEDED
    }
    facts = {
        "vitrail": {
            "version": vitrail.__version__,
            "installed": installed_version("vitrail"),
            "folder": str(Path(vitrail.__file__).parent),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "libraries": libraries,
        "extras": check_extras(),
        "processor": read_processor(),
        "memory": read_memory(),
        "shared_memory": free_shared_memory(),
        "driver": query_driver(),
        "devices": probe.get("devices"),
        "cache": measure_caches(),
        "runs": find_runs_folder(),
        "weights": probe.get("weights"),
        "environment": read_variables(),
    }
    return anonymise(facts)


def show_facts(facts: Facts, found: list[Finding]) -> None:
    """Prints the facts without rich, which may be what is broken."""
    mine, python = facts["vitrail"], facts["python"]
    print_section(
        "Versions",
        {
            "vitrail": f"{mine['version']}  {mine['folder']}",
            "Python": f"{python['version']}  {python['executable']}",
            "platform": facts["platform"],
            **{name: describe_library(about) for name, about in facts["libraries"].items()},
        },
    )
    print_section("Extras", {name: describe_extra(about) for name, about in facts["extras"].items()})
    print_section("Machine", describe_machine(facts))
    print_section("Places", describe_places(facts))
    if facts["environment"]:
        print_section("Environment", facts["environment"])
    if found:
        print("Problems")
        for finding in found:
            print(f"  {'fault' if finding.fault else 'note'}: {finding.what}\n    {finding.remedy}")
        print()
    print(summarise(facts, found))


def print_section(title: str, rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    print(title)
    for name, text in rows.items():
        print(f"  {name:<{width}}  {text}".rstrip())
    print()


def describe_library(about: Facts) -> str:
    if "error" in about:
        return f"{about['version'] or 'missing'}  BROKEN: {about['error'][:200]}"
    return about["version"] or "installed, version unknown"


def describe_extra(about: Facts) -> str:
    there = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lacking = [*about["missing"], *about["old"]]
    if not lacking:
        return there
    word = "too old" if not about["missing"] else "missing"
    return f"{word}: {', '.join(lacking)}; for {about['for']}: {about['install']}"


def describe_machine(facts: Facts) -> dict[str, str]:
    cpu, memory, torch = facts["processor"], facts["memory"], facts["libraries"]["torch"]
    threads = f"; torch uses {torch['threads']} thread(s), {torch['instructions']}" if "threads" in torch else ""
    share = f", {cpu['quota']:g} by quota" if cpu["quota"] else ""
    sizes = [f"{format_gigabytes(memory[name])} {word}" for name, word in WORDS.items() if memory[name]]
    seen = (facts["devices"] or {}).get("seen", [])
    gpus = [f"{gpu['name']}, {format_gigabytes(gpu['memory'])}, capability {gpu['capability']}" for gpu in seen]
    drivers = facts["driver"] or []
    unseen = [f"{gpu['name']}, driver {gpu['driver']}, not seen by torch" for gpu in drivers] if not seen else []
    version = f" (driver {drivers[0]['driver']}, torch's CUDA {torch.get('cuda')})" if drivers and seen else ""
    if (facts["devices"] or {}).get("mps"):
        gpus.append("Apple's (mps), which --device auto uses; untested with vitrail")
    return {
        "CPU": f"{cpu['name']}, {cpu['usable']} of {cpu['cores']} cores{share}{threads}",
        "memory": ", ".join(sizes) or "unknown",
        "GPU": "; ".join([*gpus, *unseen]) + version if gpus or unseen else "none",
    }


WORDS = {"total": "in total", "free": "free", "limit": "limit"}


def describe_places(facts: Facts) -> dict[str, str]:
    cache, made, weights = facts["cache"], facts["runs"], facts["weights"] or {}
    kept = "; ".join(f"{kind} {format_gigabytes(size)}" for kind, size in cache.get("bytes", {}).items())
    counted = "" if cache.get("counted", True) else ", at least"
    rows = {
        "cache": cache.get("error") or f"{cache['folder']}  {kept or 'empty'}{counted}",
        "runs": f"{made['folder']}  {'?' if made['free'] is None else format_gigabytes(made['free'])} free",
    }
    for name, about in weights.get("found", {}).items():
        rows[name] = f"whole: {about['bytes'] / 1e6:.1f} MB, {about['tensors']} tensors, every checksum right"
    return rows


def format_gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def summarise(facts: Facts, found: list[Finding]) -> str:
    """The last line."""
    faults = [finding for finding in found if finding.fault]
    if faults:
        return f"Broken: {len(faults)} fault{'s' if len(faults) > 1 else ''}. First: {faults[0].remedy}"
    if found:
        return f"Usable. Worth a look: {found[0].what}"
    absent = [name for name, about in facts["extras"].items() if about["install"]]
    if absent:
        return f"Everything is fine. Optional and not installed: {', '.join(absent)}"
    return "Everything is fine."
