"""Families of networks that vitrail does not read, known by a tensor that only they have: a refusal names them."""

import re
from pathlib import Path
from typing import Final

from vitrail.checkpoint.formats.format import Settings
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.core.errors import MismatchedWeights

# How the name of such a tensor begins, in timm, transformers or the family's own files.
STRANGERS: Final = {
    "CaiT": r"blocks_token_only\.0\.",
    "CoaT": r"patch_embed1\.proj|serial_blocks1\.",
    "ConViT": r"blocks\.\d+\.attn\.gating_param$",
    "ConvNeXt": r"stages\.\d+\.(blocks\.)?\d+\.(conv_dw|dwconv)\.weight$|.*\.\d+\.(dwconv|depthwise_conv)\.weight$",
    "CrossViT": r"(pos_embed|cls_token)_0$",
    "DaViT": r"stages\.\d+\.blocks\.\d+\.\d+\.cpe1\.",
    "EfficientNet or MobileNet": r"conv_stem\.weight$",
    "Hiera": r"(encoder\.)?blocks\.\d+\.proj\.weight$",
    "LeViT": r"stem\.conv1\.linear\.weight$",
    "MaxViT or CoAtNet": r"stages\.\d+\.blocks\.\d+\.(conv\.conv1_1x1|attn_block|attn_grid)\.",
    "MobileViT": r"stages\.\d+\.\d+\.conv_kxk\.|(mobilevit\.)?encoder\.layer\.\d+\.conv_projection\.",
    "MViT": r"(stages\.\d+\.)?blocks\.\d+\.attn\.pool_[qkv]",
    "NaFlexViT": r"embeds\.proj\.weight$",
    "NesT": r"levels\.\d+\.transformer_encoder\.",
    "a ViT with parallel layers": r"blocks\.\d+\.attns\.\d+\.",
    "PiT": r"transformers\.\d+\.blocks\.",
    "PVT": r"stages\.\d+\.blocks\.\d+\.attn\.kv\.weight$",
    "a ViT with relative positions by a network (vit_relpos)": r"(blocks\.\d+\.attn|shared)\.rel_pos\.",
    "ResNet of another kind than BiT's": r"layer1\.0\.conv1\.weight$",
    "Sapiens2": r"blocks\.\d+\.attn\.wq\.weight$",
    "Swin": r"(swin\w*\.)?(encoder\.)?layers\.\d+\.blocks\.\d+\.att",
    "TNT": r"pixel_embed\.proj\.weight$",
    "Twins": r"pos_block\.\d+\.",
    "VOLO": r"network\.\d+\.\d+\.attn\.|post_network\.",
    "XCiT": r"cls_attn_blocks\.\d+\.",
}  # fmt: skip


def refuse_stranger(path: Path, tensors: Tensors, settings: Settings) -> None:
    """MismatchedWeights where the tensors are those of a family that vitrail does not read."""
    names = "\n".join(tensors)
    for family, pattern in STRANGERS.items():
        if re.search(rf"^{pattern}", names, re.MULTILINE):
            stated = (settings or {}).get("architecture") or (settings or {}).get("model_type")
            also = f" ({stated})" if isinstance(stated, str) else ""
            found = f"these are weights of {family}{also}, which vitrail does not read"
            raise MismatchedWeights(f"{path}: {found}; docs/weights.md lists the families that it does")
