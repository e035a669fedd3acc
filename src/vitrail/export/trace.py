"""From a network to torch's own graph of it, which is saved as it is (.pt2) or turned into ONNX."""

import contextlib
import logging
import warnings
from collections.abc import Generator
from typing import Any, Final

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vitrail.core.shapes import Pair
from vitrail.models.family import ImageSizes

SPECULATIVE: Final = 2  # a batch or grid of one would be taken for a constant


def traced(form: nn.Module, image: Pair, channels: int, sizes: ImageSizes, *, pixels: bool = False) -> ExportedProgram:
    """The graph of a shipped network, with an open batch and, where sizes have a step, multiples of it as image."""
    shapes: dict[int, Any] = {0: Dim("batch")}
    if sizes.step is not None:
        for axis, name, step in ((2, "rows", sizes.step[0]), (3, "columns", sizes.step[1])):
            count: Any = Dim(name, min=SPECULATIVE)
            shapes[axis] = step * count if step > 1 else count
        image = (SPECULATIVE * sizes.step[0], (SPECULATIVE + 1) * sizes.step[1])
    kind = torch.uint8 if pixels else torch.float32
    example = torch.zeros(SPECULATIVE, channels, *image, dtype=kind)
    with hushed():
        program = torch.export.export(form, (example,), dynamic_shapes=(shapes,), strict=False)
    program.example_inputs = None  # else it would travel in the file
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # holds the paths of this machine
    return program


@contextlib.contextmanager
def hushed() -> Generator[None]:
    """Without what torch's exporter says about itself: a class of its own that is going to change, operators of
    torchvision's that have no annotations, bytes that it reads weights from."""
    schemas = logging.getLogger("torch.onnx._internal.exporter._schemas")
    before = schemas.level
    schemas.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # of a file it reads
            yield
    finally:
        schemas.setLevel(before)
