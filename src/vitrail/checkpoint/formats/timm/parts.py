"""What timm's ViT modules have in common, vision_transformer.py, eva.py, beit.py and vision_transformer_sam.py: the
names of layers, and what their tensors and a folder's config.json say about the network. Meta's own files use the same
names.

A state dict does not state everything. `model_args` in the config.json take precedence, then the name of the
architecture, then what published weights with such tensors have; a caller's facts override everything.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes, copy
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, pair
from vitrail.models.build import tensor_shapes
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig

STEM = "patch_embed.proj.weight"
# Ours to theirs; {} is the number of a layer.
NAMES = {
    "class_token": "cls_token", "registers": "reg_token", "position.tables.0.table": "pos_embed",
    "embedding.projection": "patch_embed.proj", "norm_stem": "norm_pre", "norm": "norm",
    "blocks.{}.norm_attention": "blocks.{}.norm1", "blocks.{}.attention.qkv": "blocks.{}.attn.qkv",
    "blocks.{}.attention.norm_q": "blocks.{}.attn.q_norm", "blocks.{}.attention.norm_k": "blocks.{}.attn.k_norm",
    "blocks.{}.attention.norm": "blocks.{}.attn.norm", "blocks.{}.attention.out": "blocks.{}.attn.proj",
    "blocks.{}.scale_attention.gamma": "blocks.{}.ls1.gamma", "blocks.{}.scale_mlp.gamma": "blocks.{}.ls2.gamma",
    "blocks.{}.norm_mlp": "blocks.{}.norm2", "blocks.{}.mlp.norm": "blocks.{}.mlp.norm",
    "blocks.{}.mlp.expand": "blocks.{}.mlp.fc1", "blocks.{}.mlp.contract": "blocks.{}.mlp.fc2",
    "map_pool.query": "attn_pool.latent", "map_pool.q": "attn_pool.q", "map_pool.kv": "attn_pool.kv",
    "map_pool.out": "attn_pool.proj", "map_pool.norm": "attn_pool.norm", "map_pool.mlp.expand": "attn_pool.mlp.fc1",
    "map_pool.mlp.contract": "attn_pool.mlp.fc2", "head.classifier": "head",
}  # fmt: skip
GAMMAS = {"blocks.{}.scale_attention.gamma": "blocks.{}.gamma_1", "blocks.{}.scale_mlp.gamma": "blocks.{}.gamma_2"}
# Heads of architectures whose tensors show another number than other networks of that width have.
NAMED_HEADS = ((r"^vit_base_patch16_gap_", 16), (r"^test_vit2?$", 2), (r"^test_vit[34]$", 3))
# Arguments that leave no trace in the tensors: those of their values that vitrail has.
UNDERSTOOD: dict[str, tuple[object, ...]] = {
    "global_pool": (None, "", "avg", "token", "map"),
    "norm_layer": (None, "layernorm", "layernormfp32", "rmsnorm", "rmsnormfp32"),
    "embed_norm_layer": (None, "layernorm", "layernormfp32", "rmsnorm", "rmsnormfp32"),
    "rope_type": (None, "", "cat", "dinov3", "mixed"),
    "use_rope": (None, False),
}
NUMBERS = (
    "rope_temperature", "rope_grid_offset", "rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords",
)  # fmt: skip
GELU = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
DINO = re.compile(r"dinov[23]|tips|lingbot|eupe")
Change: TypeAlias = Callable[[Tensor], Tensor]
Special: TypeAlias = Callable[
    [str, str], KeyEntry | None
]  # for our tensor and its name there, if it is not copied unchanged


def named_entries(
    library: str, config: ViTConfig, names: dict[str, str], special: Special = lambda ours, theirs: None
) -> list[KeyEntry]:
    """An entry for each tensor of the network, by the names of layers; ExportRefused if one has no name."""
    rows: list[KeyEntry] = []
    for ours in tensor_shapes(config):
        form, layer = re.sub(r"^blocks\.\d+\.", "blocks.{}.", ours), "".join(re.findall(r"^blocks\.(\d+)\.", ours))
        stem, part = (form, "") if form in names else (form.rpartition(".")[0], "." + form.rpartition(".")[2])
        if stem not in names:
            raise ExportRefused(f"{library} has no place for tensor {ours!r}; write a vitrail file instead")
        theirs = names[stem].format(layer) + part
        rows.append(special(ours, theirs) or copy(ours, theirs))
    return rows


def require_fields(library: str, config: ModelConfig, *, free: Iterable[str]) -> ViTConfig:
    """The config as a ViT that differs from the paper's in `free` fields only; ExportRefused with any other field."""
    if not isinstance(config, ViTConfig):
        raise ExportRefused(f"{library} has no such network: {config.title}")
    defaults = {field.name: field.default for field in fields(config)}
    always = {"position_resample", *free}
    for name in ("attention", "backbone", *config.parts):
        if name not in always and (value := getattr(config, name)) != defaults[name]:
            raise ExportRefused(f"{library} has no place for field {name}={value!r}; write a vitrail file instead")
    if config.entry != "stem" or config.position not in ("learned", "none"):
        field = f"position={config.position!r} at {config.entry!r}"
        raise ExportRefused(f"{library} has learned positions at the stem or none, not field {field}")
    if config.head in ("tanh", "patches"):
        kind = "hidden tanh layer" if config.head == "tanh" else "head on patches"
        remedy = "use head='linear' or vitrail's"
        raise ExportRefused(f"{library} has no {kind}: field head={config.head!r} cannot be held; {remedy}")
    if config.pool == "token+mean" and config.classes:
        raise ExportRefused(f"{library} has no classifier on token and mean: field pool='token+mean' cannot be held")
    return config


def read_args(shapes: TensorShapes) -> dict[str, Any]:
    """The constructor's arguments in the folder's config.json; timm treats null as not given."""
    args = (shapes.settings or {}).get("model_args")
    given = cast(dict[str, Any], args) if isinstance(args, dict) else {}
    return {name: value for name, value in given.items() if value is not None}


def read_architecture(shapes: TensorShapes) -> str:
    name = (shapes.settings or {}).get("architecture", "")
    return name if isinstance(name, str) else ""


def read_gelu(shapes: TensorShapes, args: dict[str, Any], *, gated: bool) -> str:
    """The activation that a folder states; a gated MLP has SiLU."""
    act = args.get("act_layer")
    if act is None or (act == "silu" and gated):
        return "erf"
    if act not in GELU or gated:
        known = "silu, since its MLP is gated" if gated else ", ".join(GELU)
        raise MismatchedWeights(f"{shapes.path}: act_layer {act!r} of its model_args is not one of vitrail's: {known}")
    return GELU[act]


def _refuse_unknown_args(shapes: TensorShapes, args: dict[str, Any]) -> None:
    for name, values in UNDERSTOOD.items():
        if args.get(name) not in values:
            found = f"{name}={args[name]!r} of its model_args"
            known = ", ".join(repr(value) for value in values if value)
            raise MismatchedWeights(f"{shapes.path}: {found} has no counterpart in vitrail; known: {known or None}")
    shape, layers = args.get("ref_feat_shape", 1), args.get("global_attn_indexes", [])
    sound = {name: type(args.get(name, 0)) in (int, float) for name in NUMBERS}
    sound |= {
        "ref_feat_shape": type(shape) is int or _is_list_of_integers(shape),
        "global_attn_indexes": _is_list_of_integers(layers),
    }
    sound |= {"act_layer": isinstance(args.get("act_layer", ""), str)}
    for name in (name for name, right in sound.items() if not right):
        raise MismatchedWeights(f"{shapes.path}: {name}={args[name]!r} of its model_args has the wrong type")


def _is_list_of_integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in cast(list[object], values))


def infer_layers(shapes: TensorShapes) -> dict[str, Any]:
    """The fields that the first block, the stem and the head show."""
    _refuse_unknown_args(shapes, read_args(shapes))
    args, inside = read_args(shapes), {name.removeprefix("blocks.0.") for name in shapes.tensors}
    width, channels, *patch = shapes.get(STEM, 4)
    mlp_width = shapes.get("blocks.0.mlp.fc2.weight", 2)[1]
    gated = "mlp.fc1_g.weight" in inside or shapes.get("blocks.0.mlp.fc1.weight", 2)[0] == 2 * mlp_width
    norm = "layer" if "norm1.bias" in inside else "rms"
    biases = bool(inside & {"attn.qkv.bias", "attn.q_bias", "attn.q_proj.bias"})
    classes = shapes.get("head.weight", 2)[0] if "head.weight" in shapes else 0
    scaled = bool(inside & {"ls1.gamma", "gamma_1"})
    start = args.get("init_values")
    pooled = "attn_pool.latent" in shapes
    inner = shapes.get("attn_pool.mlp.fc1.weight", 2)[0] if pooled else mlp_width
    return {
        "width": width, "channels": channels, "patch": (patch[0], patch[1]), "mlp_width": mlp_width, "gated": gated,
        "depth": shapes.count("blocks.{}.norm1.weight"), "classes": classes, "head": "linear" if classes else "none",
        "heads": infer_heads(shapes, width, mlp_width, gated and norm == "rms"),
        "class_token": "cls_token" in shapes,
        "registers": shapes.get("reg_token", 3)[1] if "reg_token" in shapes else 0,
        "qkv_bias": biases, "key_bias": not biases or bool(inside & {"attn.qkv.bias", "attn.k_proj.bias"}),
        "out_bias": "attn.proj.bias" in inside, "mlp_bias": "mlp.fc2.bias" in inside,
        "patch_bias": "patch_embed.proj.bias" in shapes, "norm": norm, "norm_qk": "attn.q_norm.weight" in inside,
        "norm_inner_attention": "attn.norm.weight" in inside, "norm_inner_mlp": "mlp.norm.weight" in inside,
        "norm_stem": "tokens" if "norm_pre.weight" in shapes else "none",
        "layer_scale": (float(start) if isinstance(start, int | float) and start > 0 else 1e-5) if scaled else 0.0,
        "norm_final": "norm.weight" in shapes or "fc_norm.weight" in shapes,
        "norm_after_pool": "fc_norm.weight" in shapes, "map_mlp_width": inner if inner != mlp_width else 0,
    }  # fmt: skip


def infer_heads(shapes: TensorShapes, width: int, mlp_width: int, wide: bool) -> int:
    """The number of heads as stated, from the q/k norms, or by published shapes; `wide` heads have 128 dimensions
    (AIMv2)."""
    stated = read_args(shapes).get("num_heads")
    if "heads" not in shapes.facts:
        if type(stated) is int and stated > 0:
            return stated
        if named := [heads for form, heads in NAMED_HEADS if re.search(form, read_architecture(shapes))]:
            return named[0]
        if "blocks.0.attn.q_norm.weight" in shapes:
            return max(1, width // shapes.get("blocks.0.attn.q_norm.weight", 1)[0])
        if wide and not width % 128:
            return width // 128
    return keys.infer_heads(shapes, width, mlp_width)


def infer_positions(shapes: TensorShapes, fields: dict[str, Any], default: int = 224) -> dict[str, Any]:
    """The image size, and whether the tokens in front of the patches have positions: all or none. Without a table, the
    image has the size in the config.json or the default size."""
    token, patch = fields["class_token"] * fields.get("class_tokens", 1), cast(Pair, fields["patch"])
    if "pos_embed" not in shapes:
        size = shapes.image or read_image(shapes, patch) or pair(default)
        return {"image": size, "position": "none"}
    size, prefix = infer_grid(shapes, shapes.get("pos_embed", 3)[1], patch, token + fields["registers"])
    covered = bool(prefix) and bool(fields["registers"])
    return {"image": size, "position_prefix": bool(prefix) or not token, "register_positions": covered}


def infer_grid(shapes: TensorShapes, rows: int, patch: Pair, prefix: int) -> tuple[Pair, int]:
    """The image size of a position table, and how many of its rows belong to the tokens in front of the patches."""
    said = read_image(shapes, patch)
    counts = (0,) if read_args(shapes).get("no_embed_class") is True else (prefix, 0)
    if shapes.image is None and said is not None:
        for count in counts:
            if (said[0] // patch[0]) * (said[1] // patch[1]) == rows - count:
                return said, count
    return keys.infer_image(shapes, rows, patch, counts[0])


def read_image(shapes: TensorShapes, patch: Pair) -> Pair | None:
    """The image size in the folder's config.json, without the pixels beyond the last patch, which are not used."""
    cfg: Any = (shapes.settings or {}).get("pretrained_cfg")
    size = read_args(shapes).get("img_size") or (cfg.get("input_size") if isinstance(cfg, dict) else None)
    numbers = [size, size] if type(size) is int else list(cast(list[Any], size))[-2:] if isinstance(size, list) else []
    if [type(n) for n in numbers] != [int, int] or not 0 < min(numbers) <= max(numbers) < 2**16:
        return None
    height, width = pair(cast(list[int], numbers))
    cut = (height - height % patch[0], width - width % patch[1])
    return cut if min(cut) else (height, width)


def infer_pool(shapes: TensorShapes, fields: dict[str, Any], default: str = "") -> str:
    """The pooling as stated; attention pooling if it has weights; both readouts for a DINO-like file without a head;
    else the class token, or the mean if there is none or the norm comes after pooling."""
    if "attn_pool.latent" in shapes:
        return "map"
    given = read_args(shapes).get("global_pool")
    stated = given or (shapes.settings or {}).get("global_pool")  # timm writes it next to the arguments, too
    if stated not in UNDERSTOOD["global_pool"]:
        raise MismatchedWeights(
            f"{shapes.path}: global_pool={stated!r} of its config.json has no counterpart in vitrail"
        )
    if given == "" and fields["classes"]:
        raise MismatchedWeights(f"{shapes.path}: global_pool='' classifies every token; vitrail has no such head")
    if fields["norm_after_pool"] or not fields["class_token"]:
        if stated == "token":
            fault = "the norm comes after pooling" if fields["class_token"] else "the network has no class token"
            raise MismatchedWeights(f"{shapes.path}: global_pool='token', but {fault}; vitrail uses the mean there")
        return "mean"
    dino = bool(DINO.search(read_architecture(shapes)))
    if not fields["classes"] and fields["norm_final"] and (dino or default == "token+mean") and not given:
        return "token+mean"
    usual = "token" if default in ("", "token+mean") else default
    return {"avg": "mean", "token": "token"}.get(str(stated), usual)


def store_gates(tensors: Tensors, *, split: bool) -> Tensors:
    """Gated MLPs in one form: gate and value `split` into fc1_g and fc1_x, or stacked in that order in fc1."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if split and (found := re.fullmatch(r"(blocks\.\d+\.mlp\.fc1)\.(weight|bias)", name)):
            narrow = tensors.get(f"{found[1][:-1]}2.weight")
            if narrow is not None and narrow.ndim == 2 and tensor.ndim and tensor.shape[0] == 2 * narrow.shape[1]:
                gate, value = out.pop(name).chunk(2)
                out |= {f"{found[1]}_g.{found[2]}": gate, f"{found[1]}_x.{found[2]}": value}
        elif not split and (found := re.fullmatch(r"(blocks\.\d+\.mlp\.fc1)_g\.(weight|bias)", name)):
            value = tensors.get(f"{found[1]}_x.{found[2]}")
            if value is not None and (value.shape, value.dtype) == (tensor.shape, tensor.dtype) and tensor.ndim:
                del out[name], out[f"{found[1]}_x.{found[2]}"]
                out[f"{found[1]}.{found[2]}"] = torch.cat([tensor, value])
    return out


def split_gate(ours: str, theirs: str) -> KeyEntry | None:
    """Gate and value stacked here, two layers there."""
    if not re.match(r"blocks\.\d+\.mlp\.expand\.", ours):
        return None
    names = (theirs.replace("mlp.fc1.", "mlp.fc1_g."), theirs.replace("mlp.fc1.", "mlp.fc1_x."))
    return KeyEntry(ours, names, lambda t: t.chunk(2), torch.cat)


def join_projection(ours: str, theirs: str) -> KeyEntry:
    """The projection of CLIP and PE, without bias, which timm stores as a head with a bias of zeros."""

    def drop_zeros(parts: tuple[Tensor, ...]) -> Tensor:
        if parts[1].count_nonzero():
            raise ExportRefused("the bias of its head is not zero, so it is not a projection; pass projection=0")
        return parts[0]

    both = (theirs, theirs.replace("weight", "bias"))
    return KeyEntry(ours, both, lambda t: (t, t.new_zeros(t.shape[0])), drop_zeros)


def refuse_second_matrix(what: str, c: ViTConfig) -> None:
    if c.projection and c.classes:
        raise ExportRefused(f"{what} has one matrix after pooling: field projection={c.projection} leaves no classes")


def reshape(ours: str, theirs: str, out: Change, back: Change) -> KeyEntry:
    """One tensor for one, in another shape."""
    return KeyEntry(ours, (theirs,), lambda t: (out(t),), lambda ts: back(ts[0]))
