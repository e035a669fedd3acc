"""torch.export: writes the network as one graph of torch's operations (.pt2), to run with torch but without vitrail.

`trace_network` makes the graph, which is saved as a .pt2 file, or converted to ONNX by onnx_file.py.
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vitrail import __version__
from vitrail.checkpoint.bundle import describe
from vitrail.checkpoint.weights import build_network
from vitrail.core.text import Pair
from vitrail.export.exportable import Weights, load_bundle, make_references, source_path, to_exportable
from vitrail.export.output import ExportResult, atomic_output, check_target, list_files
from vitrail.export.verify import check_export
from vitrail.models.family import ImageSizes, ModelConfig

SPECULATIVE: Final = 2  # a batch or grid of one would be taken for a constant


def trace_network(
    form: nn.Module, image: Pair, channels: int, sizes: ImageSizes, *, pixels: bool = False
) -> ExportedProgram:
    """Traces an exportable network with an open batch size and, if `sizes` have a step, image sizes in multiples of
    it."""
    shapes: dict[int, Any] = {0: Dim("batch")}
    if sizes.step is not None:
        for axis, name, step in ((2, "rows", sizes.step[0]), (3, "columns", sizes.step[1])):
            count: Any = Dim(name, min=SPECULATIVE)
            shapes[axis] = step * count if step > 1 else count
        image = (SPECULATIVE * sizes.step[0], (SPECULATIVE + 1) * sizes.step[1])
    example = torch.zeros(SPECULATIVE, channels, *image, dtype=torch.uint8 if pixels else torch.float32)
    with silence_exporter():
        program = torch.export.export(form, (example,), dynamic_shapes=(shapes,), strict=False)
    program.example_inputs = None  # otherwise it would be saved with the file
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # holds the paths of this machine
    return program


@contextlib.contextmanager
def silence_exporter() -> Generator[None]:
    """Silences warnings of torch's exporter about its own internals: a class that will change, torchvision's operators
    without annotations, and the read-only buffer that it loads weights from."""
    schemas = logging.getLogger("torch.onnx._internal.exporter._schemas")
    before = schemas.level
    schemas.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # from loading a file
            yield
    finally:
        schemas.setLevel(before)


DESCRIPTION: Final = "vitrail.json"  # in the archive: config, preprocessing, labels, provenance and version


def to_torch_export(
    weights: Weights, target: str | Path, *, fixed_size: bool = False, image_size: int | Pair | None = None
) -> ExportResult:
    """Writes an ExportedProgram with an open batch size and, if the network allows it, open image sizes. The file is
    loaded and compared with the network before it gets its name."""
    target = Path(target)
    check_target(target, suffixes=(".pt2",), source=source_path(weights))
    bundle = load_bundle(weights, image_size, exact=True)
    config, replaced = bundle.config, target.exists()
    sizes = replace(choose_sizes(config, fixed_size), any=False)  # torch accepts only the multiples that it traced
    if sizes.step is not None and any(side % step for side, step in zip(config.image, sizes.step, strict=True)):
        sizes = ImageSizes(step=None, why=f"{config.image} is not a multiple of the stride {sizes.step[0]}")
    with atomic_output(target) as draft:
        form = to_exportable(build_network(bundle), dynamic=sizes.step is not None)
        program = trace_network(form, config.image, config.channels, sizes)
        about = json.dumps({"vitrail": __version__, **describe(config, bundle.card.abridge())})
        with silence_exporter():
            torch.export.save(program, draft, extra_files={DESCRIPTION: about})
            loaded: Any = torch.export.load(draft).module()
        references = make_references(bundle, sizes)
        report = check_export(bundle, references, loaded, target.name, f"torch {torch.__version__}")
    use = f'torch.export.load("{target}").module()(images)'
    return ExportResult(
        target=target,
        to="torch-export",
        files=list_files(target),
        report=report,
        use=use,
        notes=note_fixed_size(sizes),
        replaced=replaced,
    )


def choose_sizes(config: ModelConfig, fixed: bool) -> ImageSizes:
    """The image sizes that the file accepts."""
    return ImageSizes(step=None, why="a fixed size was requested") if fixed else config.open_sizes


def note_fixed_size(sizes: ImageSizes) -> tuple[str, ...]:
    return () if sizes.step is not None else (f"one image size only: {sizes.why}",)
