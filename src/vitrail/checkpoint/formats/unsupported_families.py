"""Families of networks that vitrail does not read, recognised by a tensor that only they have, so that errors can name
them."""

import re
from pathlib import Path
from typing import Final

from vitrail.checkpoint.formats.format import Settings
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.core.errors import MismatchedWeights

IN_STAGES: Final = r"stages\.\d+\.blocks\.\d+\."
# How the name of such a tensor begins, in timm, transformers or the family's own files. If two families share a name,
# the more specific one comes first.
UNSUPPORTED: Final = {
    "BEiT-3 with its text (timm's files are read)": r"beit3\.",
    "CaiT": r"blocks_token_only\.0\.",
    "CLIP or PE in their own names (timm's and Hugging Face's are read)": r"(.*\.)?transformer\.resblocks\.",
    "CoaT": r"serial_blocks1\.",
    "ConViT": r"blocks\.\d+\.attn\.gating_param$",
    "EdgeNeXt": IN_STAGES + r"(norm_)?xca\.",
    "ConvNeXt": IN_STAGES + r"conv_dw\.|downsample_layers\.\d|(.*\.)?stages\.\d+\.layers\.\d+\.(dw|depthwise_)conv\.",
    "CrossViT": r"(pos_embed|cls_token)_0$",
    "DaViT": IN_STAGES + r"\d+\.cpe1\.",
    "EfficientNet, MobileNet or kin": r"conv_stem\.",
    "EfficientViT or SHViT": r".*\.(context_module|mixer\.m)\.",
    "FasterNet": r".*\.spatial_mixing\.",
    "FocalNet": r".*\.modulation\.focal_layers\.",
    "GCViT": r".*\.global_block\.",
    "TNT": r"pixel_embed\.proj\.weight$",
    "SAM 2": r"pos_embed_window$|image_encoder\.trunk\.",
    "SAM in its own names (timm's and Hugging Face's are read)": r"image_encoder\.",
    "Hiera": r"(encoder\.)?blocks\.\d+\.proj\.weight$",
    "LeViT": r"stem\.conv1\.linear\.weight$",
    "MaxViT or CoAtNet": IN_STAGES + r"(conv\.conv1_1x1|attn_block|attn_grid|shortcut\.expand)\.",
    "MetaFormer or kin": IN_STAGES + r"token_mixer\b",
    "MLP-Mixer or kin": r"blocks\.\d+\.mlp_(tokens|channels)\.",
    "MobileViT": r"stages\.\d+\.\d+\.conv_kxk\.|(mobilevit\.)?encoder\.layer\.\d+\.conv_projection\.",
    "MViT": r"(stages\.\d+\.)?blocks\.\d+\.attn\.pool_[qkv]",
    "NaFlexViT": r"embeds\.proj\.weight$",
    "NesT": r"levels\.\d+\.transformer_encoder\.",
    "NextViT": r".*\.e_mhsa\.",
    "PiT": r"transformers\.\d+\.blocks\.",
    "PVT": IN_STAGES + r"attn\.kv\.weight$",
    "ResNet of another kind than BiT's": r"layer1\.0\.conv1\.weight$",
    "Sapiens2": r"blocks\.\d+\.attn\.wq\.weight$",
    "Swin": r"(swin\w*\.)?(encoder\.)?layers\.\d+\.blocks\.\d+\.att|.*\.attn\.meta_mlp\.",
    "TinyViT": IN_STAGES + r"local_conv\.",
    "Twins": r"pos_block\.\d+\.",
    "ViTamin": r"patch_embed\.backbone\.stages\.\d+\.\d+\.",
    "VOLO": r"network\.\d+\.\d+\.attn\.|post_network\.",
    "XCiT": r"cls_attn_blocks\.\d+\.",
    "a hybrid ViT of another kind than Google's": r"patch_embed\.backbone\.(\d+\.conv|conv|bn1)\.",
    "a ViT with differential attention": r".*\.lambda_[qk]1$",
    "a ViT with gated attention": r"blocks\.\d+\.attn\.gate\.",
    "a ViT with parallel layers": r"blocks\.\d+\.(attns\.\d+|in_proj)\.",
    "a ViT with relative positions by a network (vit_relpos)": r"(blocks\.\d+\.attn\.|shared_)rel_pos\.",
}  # fmt: skip


def refuse_unsupported(path: Path, tensors: Tensors, settings: Settings) -> None:
    """Raises MismatchedWeights if the tensors are those of a family that vitrail does not read."""
    names = "\n".join(tensors)
    for family, pattern in UNSUPPORTED.items():
        if re.search(rf"^(?:{pattern})", names, re.MULTILINE):
            stated = (settings or {}).get("architecture") or (settings or {}).get("model_type")
            also = f" ({stated})" if isinstance(stated, str) else ""
            found = f"these are weights of {family}{also}, which vitrail does not read"
            raise MismatchedWeights(f"{path}: {found}; docs/weights.md lists the families that it does")
