"""Google's `.npz` files of BiT ResNets (`BiT-M-R50x1.npz` and its kin), with the numerics of the original code."""

import re
from functools import singledispatch

from vitrail.checkpoint.formats.google import conv
from vitrail.checkpoint.formats.table import Entry, Shapes, Tensors, same
from vitrail.core.errors import ExportRefused
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig

NAME = "npz-bit"
ROOT = "resnet/root_block/standardized_conv2d/kernel"


def recognises(names: set[str]) -> bool:
    return any("standardized_conv2d" in name for name in names)


def modern(tensors: Tensors) -> Tensors:
    """Some files number the convolutions (`standardized_conv2d_7`) or store norm vectors as [1, 1, 1, C]."""
    out = {re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+/", r"\1/", name): t for name, t in tensors.items()}
    return {name: t.flatten() if name.endswith(("/gamma", "/beta")) else t for name, t in out.items()}


def infer(shapes: Shapes) -> ModelConfig:
    unit = "resnet/block{}/unit{:02d}/a/standardized_conv2d/kernel"
    blocks: list[int] = []
    while unit.format(len(blocks) + 1, 1) in shapes:
        count = 0
        while unit.format(len(blocks) + 1, count + 1) in shapes:
            count += 1
        blocks.append(count)
    channels, width = shapes.of(ROOT, 4)[2:]
    classes = shapes.of("resnet/head/conv2d/kernel", 4)[3] if "resnet/head/conv2d/kernel" in shapes else 0
    return ResNetConfig(
        blocks=tuple(blocks), factor=width / 64, channels=channels, classes=classes, image=shapes.image or (224, 224)
    )


@singledispatch
def table(config: ModelConfig) -> list[Entry]:
    raise ExportRefused(f"{NAME} holds BiT ResNets; this network is a {config.title}")


@table.register
def _(c: ResNetConfig) -> list[Entry]:
    if (c.unit, c.root, c.mixing) != ("preactivation", "7x7", "convolution"):
        raise ExportRefused(f"{NAME} has no place for field unit={c.unit!r}, root={c.root!r} or mixing={c.mixing!r}")
    rows = [conv("trunk.root.weight", ROOT)]
    for stage, count in enumerate(c.blocks):
        for unit in range(count):
            here, there = f"trunk.stages.{stage}.{unit}.", f"resnet/block{stage + 1}/unit{unit + 1:02d}/"
            for part, letter in enumerate("abc", start=1):
                rows += [conv(f"{here}conv{part}.weight", f"{there}{letter}/standardized_conv2d/kernel")]
                rows += norm(f"{here}norm{part}", f"{there}{letter}/group_norm")
            if unit == 0:
                rows += [conv(f"{here}project.weight", f"{there}a/proj/standardized_conv2d/kernel")]
    rows += norm("norm", "resnet/group_norm")
    return rows + (_head() if c.classes else [])


def norm(ours: str, theirs: str) -> list[Entry]:
    return [same(f"{ours}.weight", f"{theirs}/gamma"), same(f"{ours}.bias", f"{theirs}/beta")]


def _head() -> list[Entry]:
    """A matrix [K, F] here, a 1x1 convolution [1, 1, F, K] there."""
    kernel = Entry(
        "head.weight", ("resnet/head/conv2d/kernel",), lambda t: (t.T[None, None],), lambda ts: ts[0].flatten(0, 2).T
    )
    return [kernel, same("head.bias", "resnet/head/conv2d/bias")]
