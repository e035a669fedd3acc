"""int8 quantisation of ONNX files: matrix products and convolutions in eight bits, at a quarter of the size.

Matrix products of a Transformer are quantised dynamically: weights once, with one scale per output; activations at
every call, with one scale per batch. In the MLP's second product only the weights are quantised: of all kinds of
layers, keeping this one's activations in float helped most. On 1,000 ImageNet images, DeiT-Ti's logits are 8.2 % off
this way, and 10.9 % with that product fully quantised (root mean square; 3.6 % with all weights and no activations).
Convolutions are quantised statically, with ranges calibrated on images, except for the first one and the patch
projection.

Weights of integer products have seven bits: with eight, the runtime's products can overflow on x86 without VNNI.

`ExportImages` are the images that an export is scored on and that calibrate int8.
"""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle
from vitrail.core.errors import DataError
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.unreadable_log import UnreadableLog

CALIBRATION: Final = 128  # images


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportImages:
    """Images to score an export on (`source`) and to calibrate int8 with (`calibration`, or else the same ones).
    `has_targets` says whether `source` has targets of the network's task, numbered like its outputs."""

    source: ImageDataset
    has_targets: bool = False
    calibration: ImageDataset | None = None
    batch: int = 64
    workers: int = 0
    progress: Callable[[str, int, int | None], None] = lambda what, done, total: None
    ledger: UnreadableLog = field(default_factory=UnreadableLog)

    def batches(self, preprocessing: Preprocessing, targets: Targets = CLASS_LABELS) -> Iterator[Batch]:
        """Yields every image once."""
        size = min(self.batch, max(len(self.source), 1))
        options: Any = {"workers": self.workers, "ledger": self.ledger, "targets": targets}
        every = eval_batches(self.source, preprocessing, batch=size, **options)
        for done, batch in enumerate(every, start=1):
            yield batch
            self.progress("images", min(done * size, len(self.source)), len(self.source))

    def for_calibration(self, preprocessing: Preprocessing) -> Iterator[Tensor]:
        """Yields bytes [B, 3, H, W] of evenly spaced images of the set."""
        source = self.source if self.calibration is None else self.calibration
        if not len(source):
            raise DataError("there are no images to calibrate int8 with")
        places = np.unique(np.linspace(0, len(source) - 1, min(CALIBRATION, len(source))).astype(np.int64))
        some = SubsetDataset(source, places)
        for batch in eval_batches(some, preprocessing, batch=min(8, len(places)), ledger=self.ledger):
            if bool(batch.valid.any()):
                yield batch.pixels[batch.valid]


KEPT: Final = "mlp.contract"  # layers whose activations stay in float
# Layers to quantise. Resampling of positions is a matrix product, too, but stays in float.
LAYERS: Final = ("qkv", "out", "expand", "contract", "hidden", "classifier", "head")


def quantise(
    plain: Path, path: Path, bundle: Bundle, scoring_images: ExportImages | None, *, pixels: bool
) -> tuple[str, ...]:
    """Writes an int8 file from a float one; returns notes on which layers are in int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model: Any = onnx.load(str(plain))
    props = {prop.key: prop.value for prop in model.metadata_props}
    convolutions, notes = 0, list[str]()
    with silence_quantiser():
        if bundle.config.has_convolutions and scoring_images is not None:
            prepare = bundle.card.preprocessing
            images = scoring_images.for_calibration(prepare)
            images = images if pixels else map(prepare.normalise, images)
            model, convolutions = quantise_convolutions(model, path, images)
        alone = quantise_weights([node for node in find_products(model) if KEPT in node.name], model)
        if integer := [node.name for node in find_products(model)]:
            notes.append(f"{len(integer)} matrix products in int8")
            quantize_dynamic(
                model,
                str(path),
                op_types_to_quantize=["MatMul", "Gemm"],
                nodes_to_quantize=[*integer, *(f"{name}_MatMul" for name in integer)],  # its names for a Gemm
                per_channel=True,
                reduce_range=True,
                weight_type=QuantType.QInt8,
            )
            model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {**props, "quantisation": "int8"})
    model.producer_name = "vitrail"
    onnx.save(model, str(path))
    onnx.checker.check_model(str(path))
    if convolutions:
        notes.append(f"{convolutions} convolutions in int8, with ranges from up to {CALIBRATION} images")
    if alone:
        notes.append(f"{alone} products after GELU with int8 weights and float activations, for accuracy")
    kept = "the first convolution and norms" if convolutions and not alone else "patches, norms, softmax and positions"
    return (*notes, f"{kept} stay float32")


def find_products(model: Any) -> list[Any]:
    """The matrix products of linear layers."""
    held = {tensor.name for tensor in model.graph.initializer}
    found = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in held]
    return [node for node in found if node.name.partition("/")[0].rpartition(".")[2] in LAYERS]


def quantise_weights(nodes: list[Any], model: Any) -> int:
    """Stores the weights [K, N] of products in eight bits with one scale per column; the graph dequantises them."""
    import onnx
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    places = {id(node): place for place, node in enumerate(model.graph.node)}
    for node in sorted(nodes, key=lambda node: places[id(node)], reverse=True):
        name = node.input[1]
        weight = numpy_helper.to_array(tensors[name])
        # A Gemm may hold its weights as [N, K].
        across = int(any(attribute.name == "transB" and attribute.i for attribute in node.attribute))
        largest = np.abs(weight).max(axis=across, keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        bits = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
        model.graph.initializer.remove(tensors[name])
        for end, values in (("int8", bits), ("scale", scale.reshape(-1))):
            model.graph.initializer.append(numpy_helper.from_array(values, f"{name}_{end}"))
        inputs, label = [f"{name}_int8", f"{name}_scale"], f"{node.name}/weights"
        wide = onnx.helper.make_node("DequantizeLinear", inputs, [name], name=label, axis=1 - across)
        model.graph.node.insert(places[id(node)], wide)
    return len(nodes)


def quantise_convolutions(model: Any, path: Path, images: Iterator[Tensor]) -> tuple[Any, int]:
    """Quantises all convolutions to int8 with fixed ranges, except for the first and the patch projection."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    name = model.graph.input[0].name

    class Reader(CalibrationDataReader):
        def get_next(self) -> Any:
            shown = next(images, None)
            return None if shown is None else {name: shown.numpy()}

    nodes = [node.name for node in model.graph.node if node.op_type == "Conv"]
    chosen = [node for node in nodes[1:] if "projection" not in node]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        out = Path(scratch) / "static.onnx"
        quantize_static(
            model,
            str(out),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_quantize=chosen,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(str(out)), len(chosen)


@contextlib.contextmanager
def silence_quantiser() -> Generator[None]:
    """Silences the quantiser, which logs advice to the root logger and thereby installs a handler on it."""
    root, quiet, nothing = logging.getLogger(), logging.NullHandler(), logging.Filter("passes nothing")
    root.addFilter(nothing)
    root.addHandler(quiet)
    try:
        yield
    finally:
        root.removeHandler(quiet)
        root.removeFilter(nothing)
