"""Hugging Face's families of ViTs, a row each; hf_grammar.py says what the columns are.

Masks, decoders, text towers and the prompts of SAM are left out when a folder is read. A mask token that transformers
wants to find is written as zeros. `position_resample` is what transformers does for images of other sizes.
"""

from typing import Final

from vitrail.checkpoint.formats.hf_beit import BEIT, DATA2VEC
from vitrail.checkpoint.formats.hf_dino import DINOV2, DINOV2_REGISTERS, DINOV3
from vitrail.checkpoint.formats.hf_grammar import build_format
from vitrail.checkpoint.formats.hf_maps import SAM, VITDET
from vitrail.checkpoint.formats.hf_towers import AIM, CLIP, METACLIP_2, SIGLIP, SIGLIP_2
from vitrail.checkpoint.formats.hf_vit import DEIT, IJEPA, MAE, MSN, PIXIO

# In the order in which they are tried for a network that is exported; ViT, the plainest, is huggingface.py's own.
FAMILIES: Final = (
    DEIT, MAE, MSN, IJEPA, BEIT, DATA2VEC, DINOV2, DINOV2_REGISTERS, DINOV3, CLIP, METACLIP_2, SIGLIP_2, SIGLIP, AIM,
    PIXIO, SAM, VITDET,
)  # fmt: skip
FORMATS = tuple(build_format(family, order) for order, family in enumerate(FAMILIES, start=20))
