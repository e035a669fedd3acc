"""Hugging Face folders: `config.json`, `model.safetensors` or `pytorch_model.bin`, and `preprocessor_config.json`.

This module has ViT, BiT, and what all folders share: class names and preprocessing. The other families are rows in the
modules next to this one; grammar.py defines the columns. `ViTModel` folders, whose tensor names lack the `vit.` prefix,
may have a pooler: a hidden tanh layer without a classifier.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, cast

from vitrail.checkpoint.formats import huggingface
from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.format import Format, Settings
from vitrail.checkpoint.formats.huggingface import grammar
from vitrail.checkpoint.formats.huggingface.config_json import NAME, ConfigReader
from vitrail.checkpoint.formats.huggingface.names import FIVE
from vitrail.checkpoint.formats.huggingface.vit import VIT
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes, weight_and_bias
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, format_size
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

__all__ = ["FIVE", "FORMATS", "MULTI_LABEL", "NAME", "build_preprocessor", "build_settings", "read_labels"]


def _collect_families() -> Iterator[grammar.Family]:
    """All families, in the order in which they are tried for export; ViT, the plainest, comes last."""
    for module in pkgutil.iter_modules(huggingface.__path__):
        if module.name != "folder":
            yield from getattr(importlib.import_module(f"{huggingface.__name__}.{module.name}"), "FAMILIES", ())


FAMILIES: Final = tuple(_collect_families())
MULTI_LABEL = "multi_label_classification"  # the name in config.json for several labels per image
PATCHES = re.compile(r"(^|\.)(embeddings\.(patch_embed|projection)|embedder\.convolution|vision_encoder\.patch_embed)")


def recognises(names: set[str], settings: Settings) -> bool:
    if settings is not None and settings.get("model_type", "vit") not in ("vit", "bit"):
        return False
    return any(PATCHES.search(name) for name in names)


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Names of transformers 5, and of bare `ViTModel` and `BitModel` folders, to those of transformers 4."""
    if "embedder.convolution.weight" in tensors:
        return {f"bit.{name}": tensor for name, tensor in tensors.items()}
    if "bit.embedder.convolution.weight" in tensors:
        return tensors
    return grammar.modernise(VIT, tensors, {"model_type": "vit"} | (settings or {}))


def infer(shapes: TensorShapes) -> ModelConfig:
    """The config that the folder's `config.json` states; the tensors are checked against it afterwards."""
    if shapes.settings is None:
        raise MismatchedWeights(f"{shapes.path}: Hugging Face tensors without their config.json; give the folder")
    if shapes.settings.get("model_type") == "bit":
        return _infer_bit(ConfigReader(shapes, shapes.settings))
    return grammar.infer(VIT, shapes)


def _infer_bit(get: ConfigReader) -> ResNetConfig:
    shapes, settings = get.shapes, get.values
    blocks = shapes.count_units("bit.encoder.stages.{}.layers.{}.conv1.weight")
    padded = settings.get("global_padding") or settings.get("embedding_dynamic_padding")
    if padded or settings.get("layer_type", "preactivation") != "preactivation":
        raise get.refuse("only the pre-activation BiT with its own padding is a network of the paper")
    if tuple(settings.get("depths", (3, 4, 6, 3))) != blocks:
        raise get.refuse(f"config.json says depths={settings.get('depths')}, the tensors make {blocks}")
    width, channels, *_ = shapes.get("bit.embedder.convolution.weight", 4)
    classes = shapes.get("classifier.1.weight", 2)[0] if "classifier.1.weight" in shapes else 0
    sizes: Any = {"channels": channels, "classes": classes, "groups": get.integer("num_groups", 32)}
    return ResNetConfig(blocks=blocks, factor=width / 64, standardisation_eps=1e-8, **sizes)


def find_family(settings: dict[str, Any]) -> grammar.Family | None:
    """The family of a folder that was written, by its config.json; None for BiT."""
    return next((family for family in (VIT, *FAMILIES) if grammar.is_of(family, settings)), None)


def build_table(config: ModelConfig) -> list[KeyEntry]:
    if isinstance(config, ResNetConfig):
        return _bit_table(config)
    if not isinstance(config, ViTConfig):
        raise ExportRefused(f"{NAME} has no such network: {config.title}")
    if grammar.find_misfits(VIT, config):
        raise grammar.refuse_nearest((VIT, *FAMILIES), config)
    return grammar.build_table(VIT, config)


def _bit_table(c: ResNetConfig) -> list[KeyEntry]:
    keys.require_bit(NAME, c)
    rows = keys.kernel("trunk.root", "bit.embedder.convolution")
    rows += keys.unit_entries(c, "trunk.", "bit.encoder.stages.{0}.layers.{1}.", {"project": "downsample.conv"})
    rows += weight_and_bias("norm", "bit.norm")
    return rows + (weight_and_bias("head", "classifier.1") if c.classes else [])


def build_settings(
    network: dict[str, Any], c: ModelConfig, class_names: tuple[str, ...] | None, dtype: str, multi_label: bool = False
) -> dict[str, Any]:
    """Builds the folder's `config.json` around its description of the network."""
    names = class_names or [f"LABEL_{i}" for i in range(c.classes)]
    numbers = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    problem = {"problem_type": MULTI_LABEL} if multi_label else {}
    return {**network, **numbers, "torch_dtype": dtype, **problem}


def network_settings(config: ModelConfig) -> dict[str, Any]:
    if not isinstance(config, ResNetConfig):
        return grammar.build_settings(VIT, config)
    widths = [4 * config.bottleneck(stage) for stage in range(len(config.blocks))]
    kind = "BitForImageClassification" if config.classes else "BitModel"
    bit: dict[str, Any] = {"model_type": "bit", "architectures": [kind], "width_factor": 1}
    bit |= {"layer_type": "preactivation", "global_padding": None, "num_groups": config.groups}
    bit |= {"depths": list(config.blocks), "embedding_size": config.root_width, "hidden_sizes": widths}
    return {**bit, "num_channels": config.channels}


def read_labels(settings: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    """Class names; None for the placeholders LABEL_0, LABEL_1, ...."""
    names: Any = settings.get("id2label")
    if not isinstance(names, dict) or not classes or len(cast(dict[str, Any], names)) != classes:
        return None
    found = tuple(str(cast(dict[str, Any], names).get(str(i))) for i in range(classes))
    return None if found[0] == "LABEL_0" else found


RESAMPLE: Final = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
BOX: Final = 4  # the nearest filter to "area", but not the same
SHORTEST: Final = ("CLIP", "Bit")  # processors whose size, given as one number, is that of the shorter side


def build_preprocessor(p: Preprocessing, network: dict[str, Any] | None = None) -> dict[str, Any]:
    """Builds the folder's `preprocessor_config.json`. A centre crop needs BiT's image processor; only EoMT's puts
    borders where ours are."""
    common: dict[str, Any] = {
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True), "rescale_factor": 1 / 255,
        "resample": RESAMPLE.get(p.interpolation, BOX), "image_mean": list(p.mean), "image_std": list(p.std),
    }  # fmt: skip
    if network is not None and "num_patches" in network:  # SigLIP 2 takes patches, of images of any aspect
        sizes = {"patch_size": network["patch_size"], "max_num_patches": network["num_patches"]}
        return {"image_processor_type": "Siglip2ImageProcessor", **sizes, **common}
    box = {"height": p.image[0], "width": p.image[1]}
    if p.fit == "pad":
        if network is None or not str(network.get("model_type")).startswith("eomt") or p.image[0] != p.image[1]:
            fault = f"{NAME} pads square images of EoMT alone: no place for fit='pad' at {format_size(p.image)} px"
            raise ExportRefused(f"{fault}; write a vitrail file instead")
        sides = dict.fromkeys(("shortest_edge", "longest_edge"), p.image[0])
        how = {"size": sides, "do_pad": True, "do_split_image": False}
        return {"image_processor_type": "EomtImageProcessor", **how, **common}
    if p.resize is None:
        return {"image_processor_type": "ViTImageProcessor", "size": box, **common}
    crop = {"size": {"shortest_edge": p.resize}, "crop_size": box, "do_center_crop": True}
    return {"image_processor_type": "BitImageProcessor", **crop, **common}


def read_preprocessor(values: dict[str, Any], image: Pair, step: Pair = (1, 1)) -> Preprocessing | None:
    """Reads a `preprocessor_config.json`; None if it describes something that vitrail does not support. ConfigError for
    absurd values. The size is rounded down to multiples of `step`, since pixels beyond the last patch are not used."""
    names = {number: name for name, number in RESAMPLE.items()}
    kind, fit = str(values.get("image_processor_type") or values.get("feature_extractor_type") or ""), "squash"
    try:
        if kind.startswith("Eomt") and values.get("do_pad") and not values.get("do_split_image"):
            if (side := values["size"]["longest_edge"]) != values["size"]["shortest_edge"]:
                return None
            values, fit = {**values, "size": {"height": side, "width": side}}, "pad"
        size, crop = values["size"], values.get("crop_size") if values.get("do_center_crop") else None
        size = _read_box(size, shortest=kind.startswith(SHORTEST))
        box = size if crop is None else _read_box(crop)
        if crop is not None and "height" in size:  # squashed, then cropped
            return None
        said: dict[str, Any] = {
            "image": (box["height"], box["width"]) if "height" in box else image,
            "resize": size.get("shortest_edge"), "interpolation": names[values.get("resample", 2)],
            "mean": values["image_mean"], "std": values["image_std"], "fit": fit,
        }  # fmt: skip
        if said["resize"] is not None and said["resize"] < min(said["image"]):
            return None  # the rest would be filled with black
        if "longest_edge" in size or abs(values.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
            return None
        if not all(values.get(step, True) for step in ("do_resize", "do_rescale", "do_normalize")):
            return None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    made = Preprocessing.from_dict(said)
    cut = (made.image[0] - made.image[0] % step[0], made.image[1] - made.image[1] % step[1])
    return made if min(cut) < 1 else replace(made, image=cut)


def _read_box(size: Any, *, shortest: bool = False) -> dict[str, Any]:
    """A size as a dictionary; a single number is both sides, or the shorter one."""
    if not isinstance(size, int | float):
        return dict(size)
    return {"shortest_edge": size} if shortest else {"height": size, "width": size}


FORMATS = (
    *(grammar.build_format(family, order) for order, family in enumerate(FAMILIES, start=20)),
    Format(
        name=NAME,
        library=NAME,
        order=60,
        recognises=recognises,
        table=build_table,
        infer=infer,
        modern=modernise,
        settings=network_settings,
    ),
)
