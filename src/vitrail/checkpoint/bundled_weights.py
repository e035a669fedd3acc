"""Weights that come inside the package, by name: no network, no training.

`vitrail-cifar10` is a small ViT that knows CIFAR-10's ten classes. The name stands for it wherever one is; a file or
folder of one's own that is called so is ./vitrail-cifar10.
"""

from importlib import resources
from pathlib import Path
from typing import Final

from vitrail.core.errors import WeightsNotFound

DEFAULT: Final = "vitrail-cifar10"
SHIPPED: Final = {DEFAULT: "vitrail-cifar10.safetensors"}


def is_shipped(name: str | Path) -> bool:
    return str(name) in SHIPPED


def shipped_file(name: str) -> Path:
    """Where the weights of a name lie in this installation."""
    path = Path(str(resources.files("vitrail"))) / "assets" / SHIPPED[name]
    if not path.is_file():
        raise WeightsNotFound(
            f"{name}: {path} is not there, so this copy of vitrail is not whole; install it again, or name weights of "
            "your own"
        )
    return path
