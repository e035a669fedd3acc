"""What `vitrail doctor` asks in a process of its own: a library may be broken in ways that end the one that imports it.

    python -m vitrail.cli.doctor_probe

A JSON object a line, as soon as it is known: {"of": "torch", "version": ..., ...}, or with "error" where it failed.
What would come after the last line is what ended the process. torch is imported last but for what needs it.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

Facts = dict[str, Any]
VERSION: Final = r"__version__ = ['\"]([^'\"]+)"


def check_import(name: str) -> Callable[[], Facts]:
    """A library of which it is enough that it can be imported."""

    def look() -> Facts:
        import_module(name)
        return {}

    return look


def check_pillow() -> Facts:
    """With the images it can read: a Pillow that was built without JPEG is of little use."""
    from PIL import features

    kinds = {"JPEG": "jpg", "PNG": "zlib", "WebP": "webp"}
    return {"lacks": [kind for kind, name in kinds.items() if not features.check(name)]}


def check_torch() -> Facts:
    """Whether it computes, also from NumPy's memory, and how."""
    import numpy
    import torch

    product = torch.from_numpy(numpy.ones((64, 64), dtype=numpy.float32)) @ torch.ones(64, 64)
    if not bool((product == 64).all()):
        raise RuntimeError("a product of two matrices of ones is wrong")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def list_devices() -> Facts:
    """Accelerators that torch sees, and whether it has kernels for them. No context is made: that takes seconds."""
    import torch

    seen: list[Facts] = []
    built = torch.cuda.get_arch_list() if torch.cuda.is_available() else []
    for number in range(torch.cuda.device_count() if built else 0):
        about: Any = torch.cuda.get_device_properties(number)
        kernels = torch.version.hip is not None or has_kernels(about.major, about.minor, built)
        capability = f"{about.major}.{about.minor}"
        seen.append({"name": about.name, "memory": about.total_memory, "capability": capability, "kernels": kernels})
    return {"seen": seen, "mps": torch.backends.mps.is_available()}


def has_kernels(major: int, minor: int, built: list[str]) -> bool:
    """Code for one compute capability runs on later ones of its major number; intermediate code on all later ones."""
    for name in built:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdecimal():
            continue
        made = (int(digits[:-1]), int(digits[-1]))
        if made <= (major, minor) and (kind == "compute" or made[0] == major):
            return True
    return False


def check_torchvision() -> Facts:
    """Loads its compiled part alone, which is what another torch than its own breaks; the rest would take a second."""
    import torch

    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torchvision'")
    folder = Path(spec.submodule_search_locations[0])
    told = (
        {"version": written[1]} if (written := re.search(VERSION, (folder / "version.py").read_text("utf-8"))) else {}
    )
    library = next((path for end in ("so", "pyd", "dylib") for path in folder.glob(f"_C*.{end}")), None)
    if library is None:
        import_module("torchvision.ops")
        return told
    torch.ops.load_library(str(library))
    kept: Any = torch.ops.torchvision.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.ones(1), 0.5)
    if kept.tolist() != [0]:
        raise RuntimeError("its operators give wrong results")
    return told


def check_weights() -> Facts:
    """Reads those that come with the package; the checksum of every tensor is compared."""
    from vitrail.checkpoint.bundled_weights import SHIPPED, shipped_file
    from vitrail.checkpoint.files.read_weights import read_weights

    found: Facts = {}
    for name in SHIPPED:
        path = shipped_file(name)
        found[name] = {"bytes": path.stat().st_size, "tensors": len(read_weights(path).tensors)}
    return {"found": found}


# In this order; libraries are called what pip calls them.
STAGES: Final[dict[str, Callable[[], Facts]]] = {
    "numpy": check_import("numpy"),
    "pillow": check_pillow,
    "safetensors": check_import("safetensors"),
    "rich": check_import("rich.console"),
    "jinja2": check_import("jinja2"),
    "torch": check_torch,
    "devices": list_devices,
    "torchvision": check_torchvision,
    "weights": check_weights,
}


def main() -> int:
    # What libraries print of themselves is not an answer: answers have a descriptor that nothing else writes to.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name, look in STAGES.items():
        try:
            facts = look()
        except Exception as error:  # whatever it is, it is the answer
            facts = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps({"of": name, **facts}) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
