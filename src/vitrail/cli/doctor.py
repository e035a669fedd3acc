"""What `vitrail doctor` does."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import vitrail
from vitrail.cli.doctor_findings import Finding, findings
from vitrail.cli.doctor_machine import caches, driver, memory, processor, runs, shared_memory
from vitrail.cli.doctor_software import NEEDED, anonymous, extras, probed, variables, version_of
from vitrail.cli.options.doctor import DoctorOptions

Facts = dict[str, Any]


def run(options: DoctorOptions) -> int:
    facts = examined()
    found = findings(facts)
    usable = not any(finding.fault for finding in found)
    if options.json:
        told = [{"fault": finding.fault, "what": finding.what, "remedy": finding.remedy} for finding in found]
        print(json.dumps({**facts, "findings": told, "usable": usable}, indent=2))
    else:
        show(facts, found)
    return 0 if usable else 1


def examined() -> Facts:
    """All that there is to know, as plain data."""
    probe = probed()
    libraries: dict[str, Facts] = {
        name: {"version": probe.get(name, {}).get("version") or version_of(name), **probe.get(name, {})}
        for name in NEEDED
    }
    facts = {
        "vitrail": {
            "version": vitrail.__version__,
            "installed": version_of("vitrail"),
            "folder": str(Path(vitrail.__file__).parent),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "libraries": libraries,
        "extras": extras(),
        "processor": processor(),
        "memory": memory(),
        "shared_memory": shared_memory(),
        "driver": driver(),
        "devices": probe.get("devices"),
        "cache": caches(),
        "runs": runs(),
        "weights": probe.get("weights"),
        "environment": variables(),
    }
    return anonymous(facts)


def show(facts: Facts, found: list[Finding]) -> None:
    """For a person; without rich, which may be what is broken."""
    mine, python = facts["vitrail"], facts["python"]
    lines(
        "Versions",
        {
            "vitrail": f"{mine['version']}  {mine['folder']}",
            "Python": f"{python['version']}  {python['executable']}",
            "platform": facts["platform"],
            **{name: library(about) for name, about in facts["libraries"].items()},
        },
    )
    lines("Extras", {name: extra(about) for name, about in facts["extras"].items()})
    lines("Machine", machine(facts))
    lines("Places", places(facts))
    if facts["environment"]:
        lines("Environment", facts["environment"])
    if found:
        print("To fix")
        for finding in found:
            print(f"  {'fault' if finding.fault else 'note'}: {finding.what}\n    {finding.remedy}")
        print()
    print(verdict(facts, found))


def lines(title: str, rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    print(title)
    for name, text in rows.items():
        print(f"  {name:<{width}}  {text}".rstrip())
    print()


def library(about: Facts) -> str:
    if "error" in about:
        return f"{about['version'] or 'missing'}  BROKEN: {about['error'][:200]}"
    return about["version"] or "there, of an unknown version"


def extra(about: Facts) -> str:
    there = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lacking = [*about["missing"], *about["old"]]
    if not lacking:
        return there
    word = "too old" if not about["missing"] else "missing"
    return f"{word}: {', '.join(lacking)}; for {about['for']}: {about['install']}"


def machine(facts: Facts) -> dict[str, str]:
    cpu, memory, torch = facts["processor"], facts["memory"], facts["libraries"]["torch"]
    threads = f"; torch uses {torch['threads']} thread(s), {torch['instructions']}" if "threads" in torch else ""
    share = f", {cpu['quota']:g} by quota" if cpu["quota"] else ""
    sizes = [f"{gigabytes(memory[name])} {word}" for name, word in WORDS.items() if memory[name]]
    seen = (facts["devices"] or {}).get("seen", [])
    gpus = [f"{gpu['name']}, {gigabytes(gpu['memory'])}, capability {gpu['capability']}" for gpu in seen]
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


def places(facts: Facts) -> dict[str, str]:
    cache, made, weights = facts["cache"], facts["runs"], facts["weights"] or {}
    kept = "; ".join(f"{kind} {gigabytes(size)}" for kind, size in cache.get("bytes", {}).items())
    counted = "" if cache.get("counted", True) else ", at least"
    rows = {
        "cache": cache.get("error") or f"{cache['folder']}  {kept or 'empty'}{counted}",
        "runs": f"{made['folder']}  {'?' if made['free'] is None else gigabytes(made['free'])} free",
    }
    for name, about in weights.get("found", {}).items():
        rows[name] = f"whole: {about['bytes'] / 1e6:.1f} MB, {about['tensors']} tensors, every checksum right"
    return rows


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def verdict(facts: Facts, found: list[Finding]) -> str:
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
