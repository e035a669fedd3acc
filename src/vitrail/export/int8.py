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
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.models.family import ModelConfig

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
        every = eval_batches(
            self.source, preprocessing, batch=size, workers=self.workers, ledger=self.ledger, targets=targets
        )
        for done, batch in enumerate(every, start=1):
            yield batch
            self.progress("images", min(done * size, len(self.source)), len(self.source))

    def for_calibration(self, preprocessing: Preprocessing, count: int = CALIBRATION) -> Iterator[Tensor]:
        """Bytes [B, 3, H, W] of images that lie evenly over the set."""
        import numpy as np

        from vitrail.data.dataset import SubsetDataset

        source = self.source if self.calibration is None else self.calibration
        if not len(source):
            raise DataError("there are no images to calibrate int8 with")
        places = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).astype(np.int64))
        for batch in eval_batches(
            SubsetDataset(source, places), preprocessing, batch=min(8, len(places)), ledger=self.ledger
        ):
            if bool(batch.valid.any()):
                yield batch.pixels[batch.valid]


KEPT: Final = "mlp.contract"  # whose activations stay floats
LAYERS: Final = ("qkv", "out", "expand", "contract", "hidden", "classifier", "head")  # positions are products, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """How many products and convolutions are integers now, and whose weights alone are."""

    integer: int
    weights_only: int
    notes: tuple[str, ...]


def needs_calibration(config: ModelConfig) -> bool:
    """Whether there are convolutions that need images."""
    return config.has_convolutions


def quantise(
    plain: Path, path: Path, bundle: Bundle, scoring_images: ExportImages | None, *, pixels: bool
) -> Quantised:
    """An int8 file from a float one."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model: Any = onnx.load(str(plain))
    props = {prop.key: prop.value for prop in model.metadata_props}
    convolutions = 0
    with silence_quantiser():
        if needs_calibration(bundle.config) and scoring_images is not None:
            model, convolutions = quantise_convolutions(
                model, path, iterate_calibration(bundle, scoring_images, pixels)
            )
        alone = quantise_weights([node for node in find_products(model) if KEPT in node.name], model)
        integer = [node.name for node in find_products(model)]
        if integer:
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
    return Quantised(
        integer=len(integer) + convolutions,
        weights_only=alone,
        notes=describe_layers(len(integer), convolutions, alone),
    )


def describe_layers(integer: int, convolutions: int, alone: int) -> tuple[str, ...]:
    """What became of the layers, in words."""
    notes = [f"{integer} matrix products in int8"] if integer else []
    notes += (
        [f"{convolutions} convolutions in int8, by the ranges of up to {CALIBRATION} images"] if convolutions else []
    )
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
        across = 1 if is_transposed(node) else 0
        largest = np.abs(weight).max(axis=across, keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        bits = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
        model.graph.initializer.remove(tensors[name])
        model.graph.initializer.append(numpy_helper.from_array(bits, f"{name}_int8"))
        model.graph.initializer.append(numpy_helper.from_array(scale.reshape(-1), f"{name}_scale"))
        wide = onnx.helper.make_node(
            "DequantizeLinear", [f"{name}_int8", f"{name}_scale"], [name], name=f"{node.name}/weights", axis=1 - across
        )
        model.graph.node.insert(places[id(node)], wide)
    return len(nodes)


def is_transposed(node: Any) -> bool:
    """Whether a Gemm holds its weights as [N, K]."""
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


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


def iterate_calibration(bundle: Bundle, scoring_images: ExportImages, pixels: bool) -> Iterator[Tensor]:
    """What the graph is fed with to see its ranges."""
    prepare = bundle.card.preprocessing
    for shown in scoring_images.for_calibration(prepare):
        yield shown if pixels else prepare.normalise(shown)


@contextlib.contextmanager
def silence_quantiser() -> Generator[None]:
    """Without the quantiser's advice, which it gives to the root logger, and which gives that a handler."""
    root, quiet = logging.getLogger(), logging.NullHandler()

    def drop(record: logging.LogRecord) -> bool:
        return False

    root.addFilter(drop)
    root.addHandler(quiet)
    try:
        yield
    finally:
        root.removeHandler(quiet)
        root.removeFilter(drop)
