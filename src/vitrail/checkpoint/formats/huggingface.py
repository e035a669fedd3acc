"""Hugging Face folders: `config.json` with `model.safetensors` (or `pytorch_model.bin`), ViT and BiT.

Files are written with the tensor names of transformers 4, which 5 reads too; both names are read. `ViTModel` folders,
whose tensors stand without the `vit.` in front, may carry a pooler: a hidden tanh layer without a classifier.
"""

from typing import Any, cast

import torch

from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.format import Format, Settings
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes, copy, weight_and_bias
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config

NAME = "huggingface"
MULTI_LABEL = "multi_label_classification"  # what its config.json calls a problem of several labels
GELU = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
_NORMS = ("layernorm_before", "layernorm_after")
BLOCK = keys.name_layers(_NORMS[0], "attention.output.dense", _NORMS[1], "intermediate.dense", "output.dense")
# Names of transformers 5: those of 4.
_QKV = {f"attention.{name[0]}_proj.": f"attention.attention.{name}." for name in ("query", "key", "value")}
_DENSE = {"attention.o_proj.": "attention.output.", "mlp.fc1.": "intermediate.", "mlp.fc2.": "output."}
FIVE = _QKV | {five: f"{four}dense." for five, four in _DENSE.items()}
# Fields of a ViT: what config.json calls them, and the value that it need not state.
INTEGERS = {
    "width": ("hidden_size", 768), "depth": ("num_hidden_layers", 12), "mlp_width": ("intermediate_size", 3072),
    "heads": ("num_attention_heads", 12), "channels": ("num_channels", 3),
}  # fmt: skip
NUMBERS = {
    "dropout": ("hidden_dropout_prob", 0.0), "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "norm_eps": ("layer_norm_eps", 1e-12),
}  # fmt: skip


def recognises(names: set[str], settings: Settings) -> bool:
    return bool(names & {"vit.embeddings.cls_token", "embeddings.cls_token", "bit.embedder.convolution.weight"})


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Names of transformers 5, and of bare `ViTModel` and `BitModel` folders, to those of transformers 4."""
    if "embedder.convolution.weight" in tensors:
        return {f"bit.{name}": tensor for name, tensor in tensors.items()}
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(("embeddings.", "encoder.", "layers.", "layernorm.", "pooler.")):
            name = f"vit.{name}"
        if name.startswith("vit.layers."):
            name = "vit.encoder.layer." + name.removeprefix("vit.layers.")
            for five, four in FIVE.items():
                name = name.replace(five, four)
        out[name] = tensor
    return out


def infer(shapes: TensorShapes) -> ModelConfig:
    """The config that the folder's `config.json` states; tensors are held against it afterwards."""
    if shapes.settings is None:
        raise MismatchedWeights(f"{shapes.path}: Hugging Face tensors without their config.json; give the folder")
    get = ConfigReader(shapes, shapes.settings)
    return _infer_bit(get) if get.values.get("model_type") == "bit" else _infer_vit(get)


class ConfigReader:
    """A config.json, read with the types it must have."""

    def __init__(self, shapes: TensorShapes, values: dict[str, Any]):
        self.shapes, self.values = shapes, values

    def refuse(self, cause: str) -> MismatchedWeights:
        return MismatchedWeights(f"{self.shapes.path}: {cause}")

    def integer(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not 0 < value < 2**20:
            raise self.refuse(f"config.json says {name}={value!r}, expected a whole number above 0")
        return value

    def size(self, name: str, default: int) -> Pair:
        value = self.values.get(name, default)
        numbers = [value, value] if type(value) is int else value
        if not isinstance(numbers, list) or [type(n) for n in cast(list[object], numbers)] != [int, int]:
            raise self.refuse(f"config.json says {name}={value!r}, expected one or two whole numbers")
        return pair(cast(list[int], numbers))

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"config.json says {name}={value!r}, expected a number")
        return float(value)


def _infer_vit(get: ConfigReader) -> ViTConfig:
    shapes, settings = get.shapes, get.values
    kind, act = settings.get("model_type", "vit"), settings.get("hidden_act", "gelu")
    if kind not in ("vit", "deit"):
        raise get.refuse(f"model_type {kind!r} is not a ViT or BiT of the paper")
    if act not in GELU:
        raise get.refuse(f"hidden_act {act!r} is not a GELU; known: {', '.join(GELU)}")
    fields: dict[str, Any] = {field: get.integer(*known) for field, known in INTEGERS.items()}
    if fields["depth"] != (found := shapes.count("vit.encoder.layer.{}.layernorm_before.weight")):
        raise get.refuse(f"config.json says num_hidden_layers={fields['depth']}, the tensors make {found}")
    fields |= {field: get.number(*known) for field, known in NUMBERS.items()}
    classes = shapes.get("classifier.weight", 2)[0] if "classifier.weight" in shapes else 0
    pooler = "vit.pooler.dense.weight" in shapes
    if pooler and settings.get("pooler_act", "tanh") != "tanh":
        raise get.refuse(f"pooler_act {settings['pooler_act']!r} is not the paper's tanh")
    return ViTConfig(
        **fields,
        image=shapes.image or get.size("image_size", 224),
        patch=get.size("patch_size", 16),
        classes=classes,
        head="tanh" if pooler else "linear" if classes else "none",
        qkv_bias=bool(settings.get("qkv_bias", True)),
        gelu="erf" if GELU[act] == "erf" else "tanh",
    )


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


def build_table(config: ModelConfig) -> list[KeyEntry]:
    if isinstance(config, ResNetConfig):
        return _bit_table(config)
    c = keys.require_plain(NAME, config, free=("qkv_bias",))
    if c.head == "tanh" and c.classes:
        raise ExportRefused("huggingface has no classifier behind a tanh layer: field head='tanh' goes with classes=0")
    rows = [copy("class_token", "vit.embeddings.cls_token")]
    rows += [keys.position_entry(c, "vit.embeddings.position_embeddings")]
    rows += weight_and_bias("embedding.projection", "vit.embeddings.patch_embeddings.projection")
    rows += keys.block_entries(c.depth, "vit.encoder.layer.{}.", BLOCK)
    for i in range(c.depth):
        for p in ("weight", "bias") if c.qkv_bias else ("weight",):
            # q, k and v stacked in one matrix here, three of their own there
            theirs = [f"vit.encoder.layer.{i}.attention.attention.{part}.{p}" for part in ("query", "key", "value")]
            rows += [KeyEntry(f"blocks.{i}.attention.qkv.{p}", tuple(theirs), lambda t: t.chunk(3), torch.cat)]
    rows += weight_and_bias("norm", "vit.layernorm")
    rows += weight_and_bias("head.hidden", "vit.pooler.dense") if c.head == "tanh" else []
    return rows + (weight_and_bias("head.classifier", "classifier") if c.classes else [])


def _bit_table(c: ResNetConfig) -> list[KeyEntry]:
    keys.require_bit(NAME, c)
    rows = keys.kernel("trunk.root", "bit.embedder.convolution")
    rows += keys.unit_entries(c, "trunk.", "bit.encoder.stages.{0}.layers.{1}.", {"project": "downsample.conv"})
    rows += weight_and_bias("norm", "bit.norm")
    return rows + (weight_and_bias("head", "classifier.1") if c.classes else [])


def build_settings(
    network: dict[str, Any], c: ModelConfig, class_names: tuple[str, ...] | None, dtype: str, multi_label: bool = False
) -> dict[str, Any]:
    """The folder's `config.json`, around what it says of the network."""
    names = class_names or [f"LABEL_{i}" for i in range(c.classes)]
    numbers = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    problem = {"problem_type": MULTI_LABEL} if multi_label else {}
    return network | {"num_channels": c.channels, **numbers, "torch_dtype": dtype, **problem}


def network_settings(config: ModelConfig) -> dict[str, Any]:
    if isinstance(config, ResNetConfig):
        widths = [4 * config.bottleneck(stage) for stage in range(len(config.blocks))]
        bit: dict[str, Any] = {"model_type": "bit", "architectures": ["BitForImageClassification"], "width_factor": 1}
        bit |= {"layer_type": "preactivation", "global_padding": None, "num_groups": config.groups}
        return bit | {"depths": list(config.blocks), "embedding_size": config.root_width, "hidden_sizes": widths}
    c = vit_config(config, NAME)
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if c.classes else "ViTModel"],
        **{name: getattr(c, field) for field, (name, _) in (INTEGERS | NUMBERS).items()},
        "image_size": c.image[0] if c.image[0] == c.image[1] else list(c.image),
        "patch_size": c.patch[0] if c.patch[0] == c.patch[1] else list(c.patch),
        "hidden_act": "gelu" if c.gelu == "erf" else "gelu_pytorch_tanh",
        "qkv_bias": c.qkv_bias,
    }


def read_labels(settings: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    """Class names, unless they are the LABEL_0, LABEL_1, ... that stand for none."""
    names: Any = settings.get("id2label")
    if not isinstance(names, dict) or not classes or len(cast(dict[str, Any], names)) != classes:
        return None
    found = tuple(str(cast(dict[str, Any], names).get(str(i))) for i in range(classes))
    return None if found[0] == "LABEL_0" else found


RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
BOX = 4  # the nearest of them to "area", which it is not


def build_preprocessor(p: Preprocessing) -> dict[str, Any]:
    """The folder's `preprocessor_config.json`; a centre crop needs BiT's image processor."""
    common: dict[str, Any] = {
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True), "rescale_factor": 1 / 255,
        "resample": RESAMPLE.get(p.interpolation, BOX), "image_mean": list(p.mean), "image_std": list(p.std),
    }  # fmt: skip
    box = {"height": p.image[0], "width": p.image[1]}
    if p.resize is None:
        return {"image_processor_type": "ViTImageProcessor", "size": box, **common}
    crop = {"size": {"shortest_edge": p.resize}, "crop_size": box, "do_center_crop": True}
    return {"image_processor_type": "BitImageProcessor", **crop, **common}


def read_preprocessor(values: dict[str, Any], image: Pair) -> Preprocessing | None:
    """What a `preprocessor_config.json` says, where it says what we can do; None otherwise. ConfigError where it asks
    for something absurd."""
    names = {number: name for name, number in RESAMPLE.items()}
    try:
        size, crop = values["size"], values.get("crop_size")
        size = {"height": size, "width": size} if isinstance(size, int | float) else size
        box = crop if values.get("do_center_crop") and crop else size
        said: dict[str, Any] = {
            "image": (box["height"], box["width"]) if isinstance(box, dict) and "height" in box else image,
            "resize": size.get("shortest_edge"), "interpolation": names[values.get("resample", 2)],
            "mean": values["image_mean"], "std": values["image_std"],
        }  # fmt: skip
        if said["resize"] is not None and said["resize"] < min(said["image"]):
            return None  # the rest would be filled with black
    except (KeyError, TypeError, AttributeError):
        return None
    return Preprocessing.from_dict(said)


FORMATS = (
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
