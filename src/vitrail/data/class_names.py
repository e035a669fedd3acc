"""Class names bundled with the package, in the order of the class numbers: ImageNet-1k, CIFAR-10 and CIFAR-100.

ImageNet is ordered by WordNet id, as in timm, torchvision, Hugging Face and Google's npz files.
"""

from functools import cache
from importlib import resources
from typing import Final

BUNDLED_SETS: Final = ("imagenet", "cifar10", "cifar100")


@cache
def read_class_names(name: str) -> tuple[str, ...]:
    """Reads the class names of a bundled set."""
    lines = read_lines(name)
    return tuple(line.split(maxsplit=1)[1] for line in lines) if name == "imagenet" else lines


@cache
def read_imagenet_ids() -> tuple[str, ...]:
    """Reads the sorted WordNet ids of ImageNet-1k, which are the names of its folders."""
    return tuple(line.split()[0] for line in read_lines("imagenet"))


def read_lines(name: str) -> tuple[str, ...]:
    text = resources.files("vitrail").joinpath("assets", "classes", f"{name}.txt").read_text("utf-8")
    return tuple(text.splitlines())
