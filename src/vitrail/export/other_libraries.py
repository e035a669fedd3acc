"""Exports to other libraries' formats. Each is loaded in its library, if installed, and compared with the network.

    to_library("mine.safetensors", "mine-hf", "hf")
    transformers.AutoModelForImageClassification.from_pretrained("mine-hf")

checkpoint/convert.py writes the tensors; this module loads and runs them. `ExportResult.use` is the call that loads
them; if the library is installed, that very call is checked.
"""

from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from vitrail.checkpoint import convert
from vitrail.checkpoint import parity_check as peers
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.convert import Conversion
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.registry import find_format
from vitrail.checkpoint.weights import build_network
from vitrail.core.errors import ExportFailed, ExportRefused, unknown_name
from vitrail.core.text import Pair
from vitrail.export.exportable import Weights, load_bundle, make_reference, source_path
from vitrail.export.output import ExportResult, atomic_output, check_target, list_files
from vitrail.export.verify import ExportReport, check_export
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import vit_config

Library: TypeAlias = Literal["hf", "timm", "npz", "torchvision"]

STATE_DICT: Final = (".pth", ".safetensors", ".bin")
SUFFIXES: Final = {"hf": (), "timm": STATE_DICT, "npz": (".npz",), "torchvision": STATE_DICT}
# timm's plain ViTs at 224 px by width, depth and heads, and their patches; all have an MLP of four times the width.
NAMED: Final[dict[tuple[int, int, int], tuple[str, tuple[int, ...]]]] = {
    (192, 12, 3): ("tiny", (16,)), (384, 12, 6): ("small", (16, 32)), (768, 12, 12): ("base", (8, 16, 32)),
    (1024, 24, 16): ("large", (16, 32)), (1280, 32, 16): ("huge", (14,)),
}  # fmt: skip
PLAIN: Final = "vit_base_patch16_224"
USUAL: Final[dict[str, Any]] = {
    "img_size": [224, 224], "qkv_bias": True, "class_token": True, "no_embed_class": False, "reg_tokens": 0,
    "global_pool": "token", "act_layer": "gelu", "in_chans": 3, "num_classes": 1000,
}  # fmt: skip


def to_library(
    weights: Weights, target: str | Path, to: Library, *, image_size: int | Pair | None = None
) -> ExportResult:
    """Writes the weights in another library's format, loads them there, and compares both networks before the files get
    their names. `hf` is a folder, `timm` a file or a folder, `npz` and `torchvision` are files."""
    if to not in get_args(Library):
        raise unknown_name("library", to, get_args(Library))
    target = Path(target)
    folder = to == "hf" or (to == "timm" and target.suffix not in convert.FILE_SUFFIXES)
    check_target(target, suffixes=SUFFIXES[to], folder=folder, source=source_path(weights))
    bundle = load_bundle(weights, image_size)
    known = find_format(to, bundle.config)
    known.table(bundle.config)  # refuses what the format cannot hold before anything is written
    known.refuse_unreadable(bundle.config)
    call = timm_call(bundle.config) if to == "timm" else None
    replaced = target.exists()
    with atomic_output(target) as draft:
        done = convert.export(bundle, draft, to)
        if (same := done.parity.identical) != (count := done.parity.tensors):
            raise ExportFailed(f"{target.name}: {same} of {count} tensors read back identical; nothing was written")
        report = check_written(bundle, draft, done, call, target.name)
    notes = list[str]()
    if done.sidecar is not None:
        sidecar, lost = (target if folder else target.parent) / done.sidecar.name, ", ".join(done.lost_fields)
        notes.append(f"{done.format} cannot hold {lost}: written to {sidecar}, keep it with the weights")
    use = describe_usage(bundle.config, target, to, call, folder=folder)
    return ExportResult(
        target=target, to=to, files=list_files(target), report=report, use=use, notes=tuple(notes), replaced=replaced
    )


def check_written(
    bundle: Bundle, draft: Path, done: Conversion, call: tuple[str, dict[str, Any]] | None, name: str
) -> ExportReport:
    """Compares what was written with the network: loaded in its library, or read back by vitrail if that is missing."""
    built = peers.build_reference(done.format, bundle.config, draft)
    if isinstance(built, str):
        if "cannot build" in built:
            raise ExportRefused(f"{built}; `vitrail convert` writes the tensors anyway")
        against, candidate = f"vitrail itself, which read it back ({built})", build_network(read_bundle(draft))
    else:
        network, logits = built.network, built.logits
        if call is not None:
            with torch.random.fork_rng(devices=[]):  # it draws random weights before it loads ours
                network = peers.load_with_timm(*call, draft)
            peers.open_pooling(network, bundle.config)
        forward = lambda images: (network(images) if logits is None else logits(network(images))).flatten(1)  # noqa: E731
        against, candidate = built.library, forward
    image = bundle.config.image
    try:
        return check_export(bundle, {image: make_reference(bundle, image)}, candidate, name, against)
    except ExportFailed as error:
        if not done.lost_fields:
            raise
        lost = f"{done.format} cannot hold {', '.join(done.lost_fields)}"
        raise ExportFailed(f"{error}. {lost}; --to onnx can, and `vitrail convert` writes the tensors") from None


def timm_call(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The arguments of `timm.create_model`: a name, and what differs from it. Refused if timm has no such network."""
    name, args = peers.describe_for_timm(config)
    if not config.tokens:
        return name, {field: value for field, value in args.items() if USUAL.get(field) != value}
    if name != PLAIN and "_r50_" not in name:  # its defaults differ; timm ignores None
        given = {field: value for field, value in args.items() if value is not None}
        return name, {field: tuple(value) if isinstance(value, list) else value for field, value in given.items()}
    config = vit_config(config, "a network of timm's")
    size, patches = NAMED.get((config.width, config.depth, config.heads), ("", ()))
    square = config.patch[0] == config.patch[1] and config.mlp_width == 4 * config.width
    if config.backbone is None and square and config.patch[0] in patches:
        name = f"vit_{size}_patch{config.patch[0]}_224"
        for field in ("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size"):
            args.pop(field)
    elif int(config.width * (ratio := config.mlp_width / config.width)) == config.mlp_width:
        args["mlp_ratio"] = ratio
    if config.pool != "mean":
        args.pop("fc_norm")  # otherwise it depends on the pooling
    args = {field: value for field, value in args.items() if field not in USUAL or USUAL[field] != value}
    if "img_size" in args and config.image[0] == config.image[1]:
        args["img_size"] = config.image[0]
    return name, {field: tuple(value) if isinstance(value, list) else value for field, value in args.items()}


def describe_transformers(config: ModelConfig, target: Path) -> str:
    """The call that loads a folder with a network without a classifier."""
    settings = find_format("hf", config).settings
    kind = settings(config)["architectures"][0] if settings is not None else ""
    if kind.endswith("WithProjection"):
        return f'transformers.{kind}.from_pretrained("{target}")'
    # Without this, a pooler that the folder does not contain would be random.
    bare = kind in ("ViTModel", "DeiTModel", "BeitModel") and getattr(config, "head", "") == "none"
    less = ", add_pooling_layer=False" if bare and not getattr(config, "norm_after_pool", False) else ""
    return f'transformers.AutoModel.from_pretrained("{target}"{less})'


def describe_usage(
    config: ModelConfig, target: Path, to: str, call: tuple[str, dict[str, Any]] | None, *, folder: bool
) -> str:
    """The call that loads the written files."""
    match to:
        case "hf":
            if config.classes:
                return f'transformers.AutoModelForImageClassification.from_pretrained("{target}")'
            return describe_transformers(config, target)
        case "timm" if folder:
            return f'timm.create_model("local-dir:{target}", pretrained=True)'
        case "timm":
            assert call is not None
            more = "".join(f", {field}={value!r}" for field, value in call[1].items())
            return f'timm.create_model("{call[0]}", checkpoint_path="{target}"{more})'
        case "torchvision":
            vit = vit_config(config, "torchvision's format")
            args: dict[str, Any] = {
                "image_size": vit.image[0], "patch_size": vit.patch[0], "num_layers": vit.depth, "num_heads": vit.heads,
                "hidden_dim": vit.width, "mlp_dim": vit.mlp_width, "num_classes": vit.classes or 1,
            }  # fmt: skip
            args |= {"representation_size": vit.width} if vit.head == "tanh" else {}
            text = ", ".join(f"{name}={value}" for name, value in args.items())
            read = "torch.load" if target.suffix != ".safetensors" else "safetensors.torch.load_file"
            less = "" if vit.classes else "del model.heads.head; "
            make = f"model = torchvision.models.VisionTransformer({text})"
            return f'{make}; {less}model.load_state_dict({read}("{target}"))'
        case _:
            return f'vitrail.load("{target}"), or the JAX code that uses this format'
