"""What `vitrail doctor` does."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import vitrail
from vitrail.cli.doctor_findings import Finding, find_problems
from vitrail.cli.doctor_machine import measure_caches, query_driver, read_memory, read_processor, find_runs_folder, free_shared_memory
from vitrail.cli.doctor_software import NEEDED, anonymise, check_extras, run_probe, read_variables, installed_version
from vitrail.cli.options.doctor import DoctorOptions

Facts = dict[str, Any]


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
    """All that there is to know, as plain data."""
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
    """For a person; without rich, which may be what is broken."""
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
        print("To fix")
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
    return about["version"] or "there, of an unknown version"


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


WORDS = {"total": "in all", "free": "free", "limit": "at most here"}


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
        return f"All is well. Not installed, where you need them: {', '.join(absent)}"
    return "All is well."
