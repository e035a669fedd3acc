"""Configurations of networks whose queries predict classes and masks: EoMT and PMT on any Vision Transformer.

EoMT (Kerssies et al. 2025) prepends queries to the tokens in the last blocks of the encoder itself. PMT feeds features
of an encoder, which may be frozen, to a few blocks of its own that process the queries. No torch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.models.family import CostStep, ModelConfig, register_config
from vitrail.models.query_cost import query_activation_bytes, walk_eomt, walk_pmt
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.vit_parts import Rotary

QueryKind: TypeAlias = Literal["eomt", "pmt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryConfig(ViTConfig):
    """The shared fields of EoMT and PMT: Q queries, each with a mask and one of K classes or "no object".

    Masks have 2**upscale times the resolution of the patch grid. Inference uses masked attention in the last
    `masked_blocks` query blocks, as training does before annealing; with 0 it uses none and is faster. `pool` applies
    to `features`, which do not involve the queries.
    """

    design: ClassVar[str]  # its usual name

    head: Literal["none", "linear", "tanh", "patches", "distilled", "queries"] = "queries"
    queries: int = 100
    query_blocks: int = 4
    upscale: int = 2
    masked_blocks: int = 0

    def __post_init__(self) -> None:
        ViTConfig.__post_init__(self)
        for name in ("queries", "query_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.upscale < 0:
            raise ConfigError(f"upscale={self.upscale} must be 0 or more; each doubles the resolution of masks")
        if not 0 <= self.masked_blocks <= self.query_blocks:
            raise ConfigError(f"masked_blocks={self.masked_blocks} must lie between 0 and query_blocks")
        if self.pool == "map" or self.projection or self.neck or not self.norm_final:
            raise ConfigError("queries need norm_final=True, and no pool='map', projection or neck")

    @property
    def has_queries(self) -> bool:
        return True

    @property
    def encoder(self) -> ViTConfig:
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(ViTConfig)}
        own |= {"head": "none", "classes": 0}
        return ViTConfig(**own)

    @property
    def tapped(self) -> tuple[int, ...]:
        """The encoder layers, from 0, whose tokens are the input of the head's own blocks."""
        return ()

    @property
    def head_blocks(self) -> ViTConfig | None:
        """The config of the head's own blocks; None if it has none."""
        return None

    @property
    def title(self) -> str:
        return f"{self.design} of {self.encoder.title}"

    @property
    def shape(self) -> tuple[object, ...]:
        return self.family, *self.encoder.shape, self.queries, self.query_blocks, self.upscale

    @property
    def card_rows(self) -> list[tuple[str, str]]:
        rows, columns = (side << self.upscale for side in self.grid)
        own = {"queries": self.queries, "query blocks": self.query_blocks, "masks": f"{rows}x{columns}"}
        return [*self.encoder.card_rows, *((name, str(value)) for name, value in own.items())]

    def settle(self, changes: dict[str, Any]) -> None:
        """Keeps the head; everything else is settled as in any ViT."""
        changes.setdefault("head", "queries")
        ViTConfig.settle(self, changes)

    def linear_head(self, classes: int) -> dict[str, Any]:
        raise ConfigError(f"{self.title} has queries in place of a linear head; start from the weights of an encoder")

    def patch_head(self, classes: int) -> dict[str, Any]:
        return self.linear_head(classes)

    def new_last_layer(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "queries"}

    @property
    def has_plain_head(self) -> bool:
        return False

    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        return query_activation_bytes(self, width, recompute=recompute)


@register_config
@dataclass(frozen=True, kw_only=True, slots=True)
class EoMTConfig(QueryConfig):
    """Queries in front of the tokens in the last `query_blocks` blocks of the encoder."""

    family: ClassVar[str] = "eomt"
    design: ClassVar[str] = "EoMT"

    def __post_init__(self) -> None:
        QueryConfig.__post_init__(self)
        if self.query_blocks > self.depth:
            raise ConfigError(f"query_blocks={self.query_blocks} must be at most the depth={self.depth} of the encoder")
        if self.attention == "axial" or self.position == "relative" or self.entry != "stem":
            what = "axial attention" if self.attention == "axial" else f"position={self.position!r} in its blocks"
            raise ConfigError(f"queries have no position in the grid that {what} needs; use family='pmt'")

    def walk(self) -> Iterator[CostStep]:
        return walk_eomt(self)


@register_config
@dataclass(frozen=True, kw_only=True, slots=True)
class PMTConfig(QueryConfig):
    """The tokens of `levels` encoder layers, evenly spaced up to the last, each pass through a norm and a small MLP and
    are summed. `query_blocks` blocks of the head, of the encoder's kind and width, then process them with the queries
    in front."""

    family: ClassVar[str] = "pmt"
    design: ClassVar[str] = "PMT"

    query_blocks: int = 6
    levels: int = 4

    def __post_init__(self) -> None:
        QueryConfig.__post_init__(self)
        if not 1 <= self.levels <= self.depth:
            raise ConfigError(f"levels={self.levels} must lie between 1 and the depth={self.depth} of the encoder")
        if self.head_size % 4:
            raise ConfigError(f"PMT's rotary positions need heads of a width divisible by 4, not {self.head_size}")

    @property
    def tapped(self) -> tuple[int, ...]:
        return tuple((level + 1) * self.depth // self.levels - 1 for level in range(self.levels))

    @property
    def shape(self) -> tuple[object, ...]:
        return self.family, *self.encoder.shape, self.queries, self.query_blocks, self.upscale, self.levels

    @property
    def head_blocks(self) -> ViTConfig:
        """Plain pre-norm blocks with rotary positions: those of the encoder or, if it has none or learns them per
        layer, rotary positions of unit coordinates."""
        rotary = self.rotary if self.rotary is not None and not self.rotary.mixed else Rotary(coordinates="unit")
        plain: dict[str, Any] = {"position": "none", "position_grid": None, "position_bias": "none", "windows": None}
        plain |= {"attention": "full", "placement": None, "norm_order": "pre", "layer_scale": 0.0, "rotary": rotary}
        plain |= {"register_positions": False, "position_prefix": True, "depth": self.query_blocks}
        return replace(self.encoder, **plain)

    def walk(self) -> Iterator[CostStep]:
        return walk_pmt(self)


KINDS: dict[str, type[QueryConfig]] = {"eomt": EoMTConfig, "pmt": PMTConfig}


def query_config(config: ModelConfig, kind: QueryKind, classes: int, **changes: Any) -> QueryConfig:
    """Turns a ViT into a network with queries: keeps its blocks and positions, drops its head. If it is of this kind
    already, only the classes change. `changes` override fields. By default masks have at most a quarter of the image's
    resolution, exactly so for patches of 8, 16 or 32 pixels, or more if patches are below 8 pixels."""
    if kind not in KINDS:
        raise unknown_name("kind of network with queries", kind, KINDS)
    wanted = KINDS[kind]
    if isinstance(config, wanted):
        return replace(config, **{"classes": classes, **changes})
    vit = vit_config(config.encoder or config, f"a network with queries ({kind})")
    if type(vit) is not ViTConfig:
        raise ConfigError(f"{wanted.design} does not support the blocks of family {vit.family!r}; use a plain ViT")
    own: dict[str, Any] = {field.name: getattr(vit, field.name) for field in fields(ViTConfig)}
    pool = vit.pool if vit.pool != "map" else "token" if vit.class_token else "mean"
    own |= {"head": "queries", "classes": classes, "projection": 0, "neck": 0, "norm_final": True, "pool": pool}
    plain = ViTConfig.__dataclass_fields__
    own |= {name: plain[name].default for name in ("map_heads", "map_mlp_width", "map_style", "map_prefix")}
    own["upscale"] = max(1, int(math.log2(max(vit.patch_pixels))) - 2)
    if wanted is PMTConfig:
        own["levels"] = min(4, vit.depth)
    else:
        own["query_blocks"] = min(4, vit.depth)
    return wanted(**{**own, **changes})
