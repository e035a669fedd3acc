"""Formats that know one ViT alone: class token, learned positions at the stem, full attention, no backbone."""

from vitrail.checkpoint.formats.table import Entry, class_row_added, same
from vitrail.core.errors import ExportRefused
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig


def require_plain(
    format_name: str, config: ModelConfig, heads: tuple[str, ...], *, free: tuple[str, ...] = ()
) -> ViTConfig:
    """The config as a plain ViT, or a refusal that names the first field the format has no place for."""
    if not isinstance(config, ViTConfig):
        raise ExportRefused(f"{format_name} holds ViTs; this network is a {config.title}")
    rules: dict[str, tuple[object, ...]] = {
        "attention": ("full",),
        "position": ("learned",),
        "placed": ("stem",),
        "backbone": (None,),
        "registers": (0,),
        "class_token": (True,),
        "pool": ("token",),
        "norm_after_pool": (False,),
        "head": heads,
        "qkv_bias": (True,),
    }
    for field, allowed in rules.items():
        value = getattr(config, field)
        if value not in allowed and field not in free:
            name = "placement" if field == "placed" else field
            raise ExportRefused(
                f"{format_name} has no place for field {name}={value!r}; it holds {name} in {list(allowed)}"
            )
    return config


def position_entry(config: ViTConfig, theirs: str) -> Entry:
    """Learned positions where the format always has a row for the class token."""
    own = config.position_prefix or not config.class_token
    return (same if own else class_row_added)("position.tables.0.table", theirs)
