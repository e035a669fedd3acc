"""int8: matrix products and convolutions in eight bits, a quarter of the file.

Products of a Transformer are quantised as they come: weights once, with a scale for each output; activations at every
call, with a scale for the batch. Of the MLP's second product it is the weights alone: of the kinds of layers, sparing
this one's activations helped most. On 1,000 ImageNet images DeiT-Ti's logits are 8.2 % off this way and 10.9 % with
that product quantised whole (root mean square; 3.6 % with all weights and no activations). Convolutions get the ranges
that images show; the first one, and the one that cuts the patches, stay.

Weights of integer products have seven bits: with eight, the runtime's products can overflow on x86 without VNNI.

Images that an export is given: to score both sides on, and to calibrate int8 with.
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
    """`source` is scored on; `has_targets` where the network's task finds its targets there, numbered as the outputs
    are. `calibration` is where int8 finds its ranges, the same images unless there are others."""

    source: ImageDataset
    has_targets: bool = False
    calibration: ImageDataset | None = None
    batch: int = 64
    workers: int = 0
    progress: Callable[[str, int, int | None], None] = lambda what, done, total: None
    ledger: UnreadableLog = field(default_factory=UnreadableLog)

    def batches(self, preprocessing: Preprocessing, targets: Targets = CLASS_LABELS) -> Iterator[Batch]:
        """Every image once."""
        size = min(self.batch, max(len(self.source), 1))
        options: Any = {"workers": self.workers, "ledger": self.ledger, "targets": targets}
        every = eval_batches(self.source, preprocessing, batch=size, **options)
        for done, batch in enumerate(every, start=1):
            yield batch
            self.progress("images", min(done * size, len(self.source)), len(self.source))

    def for_calibration(self, preprocessing: Preprocessing) -> Iterator[Tensor]:
        """Bytes [B, 3, H, W] of images that lie evenly over the set."""
        source = self.source if self.calibration is None else self.calibration
        if not len(source):
            raise DataError("there are no images to calibrate int8 with")
        places = np.unique(np.linspace(0, len(source) - 1, min(CALIBRATION, len(source))).astype(np.int64))
        some = SubsetDataset(source, places)
        for batch in eval_batches(some, preprocessing, batch=min(8, len(places)), ledger=self.ledger):
            if bool(batch.valid.any()):
                yield batch.pixels[batch.valid]


KEPT: Final = "mlp.contract"  # whose activations stay floats
LAYERS: Final = ("qkv", "out", "expand", "contract", "hidden", "classifier", "head")  # positions are products, too


def quantise(
    plain: Path, path: Path, bundle: Bundle, scoring_images: ExportImages | None, *, pixels: bool
) -> tuple[str, ...]:
    """An int8 file from a float one, and notes on which layers are in int8."""
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
                nodes_to_quantize=[*integer, *(f"{name}_MatMul" for name in integer)],  # what it makes of a Gemm
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
        notes.append(f"{convolutions} convolutions in int8, by the ranges of up to {CALIBRATION} images")
    if alone:
        notes.append(f"{alone} products behind GELU with int8 weights and float activations, which they need")
    kept = "the first convolution and norms" if convolutions and not alone else "patches, norms, softmax and positions"
    return (*notes, f"{kept} stay float32")


def find_products(model: Any) -> list[Any]:
    """Matrix products of linear layers."""
    held = {tensor.name for tensor in model.graph.initializer}
    found = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in held]
    return [node for node in found if node.name.partition("/")[0].rpartition(".")[2] in LAYERS]


def quantise_weights(nodes: list[Any], model: Any) -> int:
    """Their weights [K, N] to eight bits and a scale for each column; the graph makes floats of them again."""
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
    """All convolutions but the first, and that of the patches, in int8 with fixed ranges."""
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
    """Without the quantiser's advice, which it gives to the root logger, and which gives that a handler."""
    root, quiet, nothing = logging.getLogger(), logging.NullHandler(), logging.Filter("passes nothing")
    root.addFilter(nothing)
    root.addHandler(quiet)
    try:
        yield
    finally:
        root.removeHandler(quiet)
        root.removeFilter(nothing)
