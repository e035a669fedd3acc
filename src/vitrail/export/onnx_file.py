"""ONNX: the network as a file that runs without PyTorch, with all that a program needs to know in its metadata.

    to_onnx("mine.safetensors", "mine.onnx")

The input is `image`, normalised float32 [batch, C, height, width]; with `preprocessing` it is `pixels`, bytes. The
output is `logits`: [batch, K], or [batch, K, height, width] for a head that reads every patch. Without a head it is
`features`. A network with queries has two outputs: `classes`, [batch, Q, K + 1], and `masks`, [batch, Q, rows,
columns]. The metadata holds JSON: `preprocessing`, `labels`, `config` and `provenance`, and `task` if it is not
classification; and `vitrail`, the version.

Files are checked in ONNX Runtime on the CPU, with its default optimisations.
"""

import ast
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import ExportedProgram

from vitrail import __version__
from vitrail.checkpoint.bundle import Bundle, describe
from vitrail.checkpoint.onnx_network import OnnxSession
from vitrail.checkpoint.weights import build_network
from vitrail.core.errors import ConfigError, ExportFailed, ExportRefused
from vitrail.core.text import Pair
from vitrail.export import int8
from vitrail.export.exportable import Weights, load_bundle, make_reference, make_references, source_path, to_exportable
from vitrail.export.int8 import ExportImages
from vitrail.export.output import ExportResult, atomic_output, check_target, list_files
from vitrail.export.torch_export import choose_sizes, note_fixed_size, silence_exporter, trace_network
from vitrail.export.verify import check_export, measure_speed, score_export
from vitrail.models.family import ImageSizes
from vitrail.models.query_output import QueryOutput

LIBRARIES: Final = ("onnx", "onnxscript", "onnxruntime")


OPSETS: Final = (18, 23)  # that torch writes and current runtimes read
LARGEST: Final = 2**31 - 2**26  # bytes that a single ONNX file can hold; larger weights are stored next to it


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxOptions:
    """`fixed_size` keeps the image at the network's own size where it could be dynamic; `preprocessing` puts the
    normalisation of bytes into the graph; `int8` quantises; `least_agreement` is the share of the given images on which
    the int8 file must agree with the network."""

    fixed_size: bool = False
    preprocessing: bool = False
    int8: bool = False
    opset: int = 20
    least_agreement: float = 0.95

    def __post_init__(self) -> None:
        if not OPSETS[0] <= self.opset <= OPSETS[1]:
            raise ConfigError(f"opset={self.opset} must lie between {OPSETS[0]} and {OPSETS[1]}")
        if not 0 <= self.least_agreement <= 1:
            raise ConfigError(f"least_agreement={self.least_agreement} must lie between 0 and 1")


def to_onnx(
    weights: Weights,
    target: str | Path,
    options: OnnxOptions | None = None,
    *,
    image_size: int | Pair | None = None,
    scoring_images: ExportImages | None = None,
) -> ExportResult:
    """Writes the network as ONNX and compares it, in ONNX Runtime, with the network before the file gets its name.
    With `scoring_images`, both are scored on them, and convolutions can be quantised."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise ExportRefused(f"--to onnx needs {', '.join(missing)}: pip install 'vitrail[export]'")
    options, target = options or OnnxOptions(), Path(target)
    check_target(target, suffixes=(".onnx",), source=source_path(weights))
    bundle = load_bundle(weights, image_size, exact=True)
    check_options(bundle, options, scoring_images)
    sizes, pixels = choose_sizes(bundle.config, options.fixed_size), options.preprocessing
    replaced = target.exists()
    with atomic_output(target) as draft:
        plain = draft.with_name(f"float-{draft.name}") if options.int8 else draft
        write_onnx(bundle, plain, options, sizes)
        session, references = OnnxSession(plain), make_references(bundle, sizes, pixels=pixels)
        report = check_export(bundle, references, session, target.name, session.version, pixels=pixels)
        done = ExportResult(
            target=target,
            to="onnx",
            files=(),
            report=report,
            notes=note_fixed_size(sizes),
            replaced=replaced,
            use=f'onnxruntime.InferenceSession("{target}")',
        )
        if options.int8:
            done = make_int8_file(bundle, plain, draft, options, scoring_images, done)
            plain.unlink()
        else:
            own = references[bundle.config.image]
            done = replace(done, scores=score_export(bundle, own, session, scoring_images, pixels=pixels))
    return replace(done, files=list_files(target))


def check_options(bundle: Bundle, options: OnnxOptions, scoring_images: ExportImages | None) -> None:
    config = bundle.config
    if options.int8 and is_large(bundle):
        raise ConfigError("weights beyond 2 GB are not quantised; leave --int8 out")
    if options.preprocessing and config.channels != 3:
        raise ConfigError(f"the preprocessing of images has 3 channels, this network {config.channels}; leave it out")
    if scoring_images is not None and config.channels != 3:
        raise ConfigError(f"images have 3 channels, this network {config.channels}; leave DATA out")
    if options.int8 and scoring_images is None and config.has_convolutions:
        raise ConfigError("convolutions are quantised by the range of their outputs: give images as DATA")


def is_large(bundle: Bundle) -> bool:
    return sum(tensor.nbytes for tensor in bundle.tensors.values()) > LARGEST


def write_onnx(bundle: Bundle, path: Path, options: OnnxOptions, sizes: ImageSizes) -> None:
    """Writes the graph with its metadata, and without any trace of this machine."""
    import onnx

    config, pixels = bundle.config, options.preprocessing
    prepare = bundle.card.preprocessing if pixels else None
    form = to_exportable(build_network(bundle), dynamic=sizes.step is not None, preprocessing=prepare)
    program = trace_network(form, config.image, config.channels, sizes, pixels=pixels)
    inputs, outputs = ["pixels" if pixels else "image"], name_outputs(program)
    outputs = outputs if config.classes else ["features"]
    with silence_exporter():
        names: Any = {"opset_version": options.opset, "input_names": inputs, "output_names": outputs}
        done: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    found, model = int(done.model.opset_imports[""]), done.model_proto
    if found != options.opset:
        raise ExportFailed(f"torch wrote opset {found} instead of {options.opset}; leave --opset out")
    name_axes(model, sizes)
    name_nodes(model)
    # Stack traces, which contain paths, and shapes that the runtime infers by itself.
    del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
    for thing in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        thing.doc_string = ""
        del thing.metadata_props[:]
    model.producer_name, model.producer_version, model.doc_string = "vitrail", __version__, ""
    model.graph.name = "vitrail"
    about = {name: json.dumps(value) for name, value in describe(config, bundle.card).items()}
    onnx.helper.set_model_props(model, {"vitrail": __version__, **about})
    external = is_large(bundle)
    location = f"{path.name}.data" if external else None
    onnx.save(model, str(path), save_as_external_data=external, location=location)
    onnx.checker.check_model(str(path))


def name_outputs(program: ExportedProgram) -> list[str]:
    """The names of the graph's outputs: `logits`, or the `classes` and `masks` of queries."""
    count = len(program.graph_signature.user_outputs)
    return ["logits"] if count == 1 else list(QueryOutput._fields)


def name_axes(model: Any, sizes: ImageSizes) -> None:
    """Names the dynamic axes, instead of the tracer's numbers. The masks of queries have axes of their own."""
    words: dict[int, str] = {0: "batch"}
    if sizes.any:
        words |= {2: "height", 3: "width"}
    elif sizes.step is not None:
        for axis, name, step in ((2, "rows", sizes.step[0]), (3, "columns", sizes.step[1])):
            words[axis] = f"{step}*{name}" if step > 1 else name
    for value in (model.graph.input[0], *model.graph.output):
        sides = value.type.tensor_type.shape.dim
        named = {"classes": {0: "batch"}, "masks": {0: "batch", 2: "mask_rows", 3: "mask_columns"}}
        for axis, word in named.get(value.name, words).items():
            if axis < len(sides) and (value.name != "masks" or not sides[axis].dim_value):
                sides[axis].dim_param = word


def name_nodes(model: Any) -> None:
    """Names each node after its layer, "blocks.0.mlp.contract/MatMul", if torch records it."""
    seen: dict[str, int] = {}
    for node in model.graph.node:
        scopes = next((prop.value for prop in node.metadata_props if prop.key == "pkg.torch.onnx.name_scopes"), "[]")
        layers = [scope for scope in ast.literal_eval(scopes)[:-1] if scope]
        name = f"{layers[-1]}/{node.op_type}" if layers else node.op_type
        seen[name] = seen.get(name, 0) + 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"


def make_int8_file(
    bundle: Bundle, plain: Path, path: Path, options: OnnxOptions, images: ExportImages | None, done: ExportResult
) -> ExportResult:
    """Quantises the float file; runs, scores and times the int8 file next to it."""
    name, image, pixels = done.target.name, bundle.config.image, options.preprocessing
    notes = int8.quantise(plain, path, bundle, images, pixels=pixels)
    session, references = OnnxSession(path), {image: make_reference(bundle, image, pixels=pixels)}
    report = check_export(bundle, references, session, name, session.version, pixels=pixels, tolerance=None)
    scores = score_export(bundle, references[image], session, images, pixels=pixels)
    agreement = None if scores is None else scores.agreement
    if scores is not None and agreement is not None and not agreement >= options.least_agreement:
        fault = f"{name}: int8 agrees on {agreement:.2%} of {scores.count:,} images, not {options.least_agreement:.0%}"
        remedy = f"omit --int8, or accept it with --agreement {int(agreement * 100) / 100:g}"
        raise ExportFailed(f"{fault}; nothing was written: {remedy}")
    return replace(
        done,
        report=report,
        plain=done.report,
        scores=scores,
        notes=(*done.notes, *notes),
        pace=measure_speed({"float32": OnnxSession(plain), "int8": session}, bundle, pixels=pixels),
        plain_bytes=plain.stat().st_size,
    )
