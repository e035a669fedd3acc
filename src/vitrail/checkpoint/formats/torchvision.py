"""torchvision's `vit_*` state dicts, with today's names; the `mlp.linear_1` of older files is read too."""

from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.format import Format, Settings, imagenet_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes, copy, weight_and_bias
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig

NAME = "torchvision"
BLOCK = keys.name_layers("ln_1", "self_attention.out_proj", "ln_2", "mlp.0", "mlp.3")
LAYER = "encoder.layers.encoder_layer_{}."


def recognises(names: set[str], settings: Settings) -> bool:
    return {"conv_proj.weight", "class_token"} <= names


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Older files name the MLP's layers `linear_1` and `linear_2`."""
    return {n.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3."): t for n, t in tensors.items()}


def infer(shapes: TensorShapes) -> ModelConfig:
    sizes = keys.infer_sizes(shapes, "conv_proj", LAYER, BLOCK, "heads.head")
    sizes["image"], _ = keys.infer_image(shapes, shapes.get("encoder.pos_embedding", 3)[1], sizes["patch"], True)
    sizes |= {"head": "tanh"} if "heads.pre_logits.weight" in shapes else {}
    return ViTConfig(**sizes)


def build_table(config: ModelConfig) -> list[KeyEntry]:
    c = keys.require_plain(NAME, config)
    rows = [copy("class_token", "class_token"), keys.position_entry(c, "encoder.pos_embedding")]
    rows += weight_and_bias("embedding.projection", "conv_proj")
    rows += keys.block_entries(c.depth, LAYER, BLOCK)
    for i in range(c.depth):
        ours, theirs = f"blocks.{i}.", LAYER.format(i)
        rows += [copy(f"{ours}attention.qkv.{p}", f"{theirs}self_attention.in_proj_{p}") for p in ("weight", "bias")]
    rows += weight_and_bias("norm", "encoder.ln")
    rows += weight_and_bias("head.hidden", "heads.pre_logits") if c.head == "tanh" else []
    return rows + (weight_and_bias("head.classifier", "heads.head") if c.classes else [])


FORMATS = (
    Format(
        name=NAME,
        library=NAME,
        order=70,
        recognises=recognises,
        table=build_table,
        infer=infer,
        modern=modernise,
        preprocessing=imagenet_crop,
    ),
)
