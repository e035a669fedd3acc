"""A Vision Transformer as frozen data: its shape, rules and closed-form cost. No torch, so that tables stay quick.

Numerics are fields, never assumptions. The defaults are the reference implementation's; an importer sets what its
weights were trained with.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.text import Pair, format_size
from vitrail.models.family import CostStep, ImageSizes, ModelConfig, Pool, Position, check_fields, register_config
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_cost import vit_activation_bytes, walk_vit
from vitrail.models.vit_parts import Rotary, Windows

MOST_PATCHES: Final = 1 << 18
Placement: TypeAlias = Literal["stem", "every", "shared"]
Numerics: TypeAlias = Literal[
    "reference", "bilinear", "bilinear-antialias", "bicubic", "bicubic-sharp", "bicubic-offset"
]


@register_config
@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(ModelConfig):
    """A Vision Transformer (Table 1) or, with a backbone, a hybrid (3.1).

    `patch` is taken on the image, or on the backbone's feature map (1x1 in the paper). `placement=None` is the paper's
    way: at the stem, and for relative positions in every layer. `position_prefix` says whether the class token has a
    position of its own (the original code) or none (big_vision). `norm_after_pool` is timm's order for average pooling;
    the reference normalises every token first.

    The fields from `head_width` on belong to later families of weights, and the paper's networks do not use them; 0
    means "as in the paper". docs/models.md lists which family uses which.
    """

    family: ClassVar[str] = "vit"
    head_layer: ClassVar[str] = "head.classifier"

    width: int
    depth: int
    mlp_width: int
    heads: int
    image: Pair = (224, 224)
    patch: Pair = (16, 16)
    channels: int = 3
    classes: int = 1000
    head: Literal["none", "linear", "tanh", "patches", "distilled", "queries"] = "linear"
    pool: Pool = "token"
    class_token: bool = True
    registers: int = 0
    position: Position = "learned"
    placement: Placement | None = None
    position_prefix: bool = True
    attention: Literal["full", "axial"] = "full"
    backbone: ResNetConfig | None = None
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0
    gelu: Literal["tanh", "erf", "quick"] = "tanh"
    norm_eps: float = 1e-6
    norm_after_pool: bool = False

    head_width: int = 0  # of each attention head; 0: width / heads
    class_tokens: int = 1  # their number, if class_token is set; pooling takes their mean
    register_positions: bool = False  # registers have rows in the position table, after the class token's
    position_grid: Pair | None = None  # of the learned table, if not the image's: it is resampled in every pass
    position_resample: Numerics = "reference"  # for images of other sizes
    position_bias: Literal["none", "table", "shared-table", "decomposed"] = "none"  # added to the attention logits
    rotary: Rotary | None = None
    windows: Windows | None = None
    gated: bool = False  # SwiGLU: silu(gate) times value, each of mlp_width, instead of GELU
    layer_scale: float = 0.0  # initial factor for each channel of a residual branch; 0: no LayerScale
    norm: Literal["layer", "rms"] = "layer"
    norm_order: Literal["pre", "res-post"] = "pre"  # res-post: z + LN(f(z))
    norm_stem: Literal["none", "patches", "tokens"] = "none"  # of patch embeddings, or of tokens with positions
    norm_final: bool = True
    norm_qk: bool = False  # normalises queries and keys, head by head
    norm_inner_attention: bool = False  # normalises the output of the heads, before `out`
    norm_inner_mlp: bool = False  # normalises the hidden layer, before `contract`
    key_bias: bool = True  # with qkv_bias, whether keys have a bias, too
    out_bias: bool = True
    mlp_bias: bool = True
    patch_bias: bool = True
    map_heads: int = 0  # of pool="map"; 0: as many as the blocks
    map_mlp_width: int = 0  # 0: as in the blocks
    map_style: Literal["siglip", "aimv2"] = "siglip"  # aimv2: the query is not projected, and nothing follows `out`
    map_prefix: bool = True  # whether pooling also reads the tokens before the patches
    projection: int = 0  # width of the features after a projection without bias, as in CLIP
    neck: int = 0  # channels of SAM's convolutions after the last block

    # Fields that the paper's networks leave at their defaults, so that their files do not contain them.
    parts: ClassVar[tuple[str, ...]] = (
        "head_width", "class_tokens", "register_positions", "position_grid", "position_resample", "position_bias",
        "rotary", "windows", "gated", "layer_scale", "norm", "norm_order", "norm_stem", "norm_final", "norm_qk",
        "norm_inner_attention", "norm_inner_mlp", "key_bias", "out_bias", "mlp_bias", "patch_bias", "map_heads",
        "map_mlp_width", "map_style", "map_prefix", "projection", "neck",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, "width", "depth", "mlp_width", "heads", "channels", "norm_eps", "class_tokens")
        if not self.head_width and self.width % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide width={self.width}")
        for name in ("dropout", "attention_dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name in ("registers", "head_width", "map_heads", "map_mlp_width", "projection", "neck", "layer_scale"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        self._check_head()
        self._check_positions()
        self._check_attention()
        self._check_image()

    def _check_head(self) -> None:
        if "token" in self.pool and not self.class_token:
            raise ConfigError(f"pool={self.pool!r} reads the class token; set class_token=True or pool='mean'")
        if self.norm_after_pool and self.pool != "mean":
            raise ConfigError("norm_after_pool=True goes with pool='mean'")
        if self.head == "none" and self.classes:
            raise ConfigError(f"head='none' has no room for classes={self.classes}; set classes=0")
        if (self.head == "queries") != self.has_queries:
            needs = "is of the families 'eomt' and 'pmt'; make one with query_config"
            raise ConfigError(f"head={self.head!r} {'does not go with queries' if self.has_queries else needs}")
        if self.classes < (self.head in ("linear", "patches", "distilled", "queries")):
            raise ConfigError(f"head={self.head!r} does not take classes={self.classes}; set 1 or more, or head='none'")
        if self.head == "distilled" and not (self.pool == "token" and self.registers and self.class_tokens == 1):
            raise ConfigError("head='distilled' reads one class token and a register; set pool='token', registers=1")
        if self.pool == "map" and self.width % (self.map_heads or self.heads):
            raise ConfigError(f"map_heads={self.map_heads or self.heads} does not divide width={self.width}")
        if self.head == "patches" and (self.pool == "map" or self.projection):
            raise ConfigError("head='patches' reads each patch separately; set pool='mean', projection=0")
        if self.neck and self.pool != "mean":
            raise ConfigError(f"neck={self.neck} outputs a feature map; set pool='mean'")

    def _check_positions(self) -> None:
        if self.position == "none" and self.placement not in (None, "stem"):
            raise ConfigError(f"position='none' has nothing to place at {self.placement!r}")
        if self.position == "learned2d" and self.width % 2:
            raise ConfigError(f"position='learned2d' joins two half-width tables; width={self.width} is odd")
        if self.position == "sincos2d" and self.width % 4:
            raise ConfigError(f"position='sincos2d' needs a width divisible by 4, not {self.width}")
        if self.position_grid is not None and (self.position != "learned" or min(self.position_grid) < 1):
            raise ConfigError(f"position_grid={self.position_grid} is the rows and columns of position='learned'")
        if self.register_positions and (self.position != "learned" or (self.class_token and not self.position_prefix)):
            raise ConfigError("register_positions=True needs position='learned' and a row for the class token")
        if self.rotary is not None and self.head_size % 4:
            raise ConfigError(f"rotary positions need heads of a width divisible by 4, not {self.head_size}")
        if self.position_bias == "decomposed" and self.prefix:
            raise ConfigError("position_bias='decomposed' supports only patches; set class_token=False, registers=0")
        if "table" in self.position_bias and (self.registers or self.class_tokens > 1):
            raise ConfigError(f"position_bias={self.position_bias!r} has no place for registers or more class tokens")

    def _check_attention(self) -> None:
        if self.windows is not None:
            if self.prefix or self.rotary or "table" in self.position_bias:
                raise ConfigError("windows cut the grid of patches: no class token, registers, rotary or bias table")
            if self.windows.whole and not 0 <= min(self.windows.whole) <= max(self.windows.whole) < self.depth:
                raise ConfigError(f"windows.whole={self.windows.whole}: there are layers 0 to {self.depth - 1}")
        if self.attention == "axial":
            if self.class_token or self.registers:
                needs = "set class_token=False, registers=0, pool='mean'"
                raise ConfigError(f"attention='axial' keeps the token grid: {needs}")
            if self.position == "relative":
                raise ConfigError("position='relative' runs over the raster index; axial attention takes other kinds")
        if self.attention == "axial" or self.position == "relative":
            which = "attention='axial'" if self.attention == "axial" else "position='relative'"
            if self.rotary or self.windows or self.position_bias != "none" or self.norm_order != "pre":
                raise ConfigError(f"{which} goes without rotary positions, windows, position_bias and norm_order")

    def _check_image(self) -> None:
        ground, what, stem = self.image, "image", self.backbone
        if stem is not None:
            ground, what = stem.grid, "feature map"
            if stem.image != self.image:
                own, other = format_size(self.image), format_size(stem.image)
                raise ConfigError(f"image={own} but the backbone was made for {other}")
            if stem.channels != self.channels:
                raise ConfigError(f"channels={self.channels} but the backbone takes {stem.channels}")
            if (stem.unit, stem.classes) != ("postactivation", 0):
                raise ConfigError("a hybrid's backbone is a post-activation ResNet without a head (classes=0)")
        for size, patch in zip(ground, self.patch, strict=True):
            if left := size % patch:
                near = f"use {size - left} or {size - left + patch}" if size > patch else f"use {patch}"
                over = f"leaves {left} pixel{'s' if left > 1 else ''} over at patch {format_size(self.patch)}"
                raise ImageSizeError(f"{what} {format_size(ground)} {over}; {near}")
        if self.patches > MOST_PATCHES:
            found = f"image {format_size(self.image)} at patch {format_size(self.patch)} has {self.patches:,} patches"
            raise ImageSizeError(f"{found}, more than {MOST_PATCHES:,}; use a smaller image or a larger patch")

    @property
    def grid(self) -> Pair:
        """Rows and columns of patches."""
        height, width = self.image if self.backbone is None else self.backbone.grid
        return (height // self.patch[0], width // self.patch[1])

    @property
    def patches(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches: class tokens, then registers."""
        return self.class_tokens * self.class_token + self.registers

    @property
    def position_rows(self) -> int:
        """The number of tokens before the patches that have their own positions."""
        classes = self.class_tokens if self.class_token and self.position_prefix else 0
        return classes + self.registers * self.register_positions

    @property
    def table_grid(self) -> Pair:
        """The grid of the learned position table."""
        return self.position_grid or self.grid

    @property
    def head_size(self) -> int:
        """D_h: the width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def attention_width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_size

    def window_of(self, layer: int) -> int:
        """The side of a layer's attention windows, in patches; 0 if it sees all tokens."""
        return 0 if self.windows is None or layer in self.windows.whole else self.windows.size

    @property
    def tokens(self) -> int:
        """T."""
        return self.patches + self.prefix

    @property
    def patch_pixels(self) -> Pair:
        """Pixels of the image from one patch to the next."""
        stride = 1 if self.backbone is None else self.backbone.stride
        return self.patch[0] * stride, self.patch[1] * stride

    @property
    def entry(self) -> Placement:
        """Where positions enter: `placement`, or the paper's choice."""
        return self.placement or ("every" if self.position == "relative" else "stem")

    @property
    def features(self) -> int:
        return self.projection or self.patch_features * (2 if self.pool == "token+mean" else 1)

    @property
    def patch_features(self) -> int:
        """The length of a vector of the patch map."""
        return self.neck or self.width

    @property
    def layers(self) -> int:
        return self.depth

    @property
    def size_step(self) -> Pair:
        return self.patch if self.backbone is None else (1, 1)

    @property
    def tied_to_size(self) -> str:
        if self.position != "relative":
            return ""
        grid = format_size(self.grid)
        return f"relative positions run over the raster index of a {grid} grid and cannot be resized in 2-D"

    @property
    def open_sizes(self) -> ImageSizes:
        if self.position == "relative" or self.attention == "axial":
            what = "relative positions are" if self.position == "relative" else "axial attention is"
            return ImageSizes(step=None, why=f"{what} tied to one size")
        return self.multiples_of_patch()

    @property
    def has_patch_head(self) -> bool:
        return self.head == "patches"

    @property
    def has_convolutions(self) -> bool:
        return self.backbone is not None

    @property
    def title(self) -> str:
        if self.backbone is not None:
            return f"hybrid ViT of {self.depth} layers, width {self.width}"
        height, width = self.patch
        patch = str(height) if height == width else format_size(self.patch)
        return f"ViT of {self.depth} layers, width {self.width}, patch {patch}"

    @property
    def shape(self) -> tuple[object, ...]:
        stem = None if self.backbone is None else self.backbone.shape
        sizes = self.width, self.depth, self.mlp_width, self.heads, self.patch, self.attention, stem
        return *sizes, *self._parts_of_shape()

    def _parts_of_shape(self) -> Iterator[tuple[str, object]]:
        """How blocks and stem differ from the paper's networks, regardless of head, size and training."""
        for name in self.parts:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if (
                value != default
                and name not in ("position_grid", "position_resample", "projection")
                and "map" not in name
            ):
                plain = value if not isinstance(value, Rotary) else replace(value, shift=0.0, jitter=0.0, rescale=0.0)
                yield name, True if name == "layer_scale" else plain

    @property
    def card_rows(self) -> list[tuple[str, str]]:
        numbers = {"layers": self.depth, "heads": self.heads, "width": self.width}
        return [("patches", format_size(self.grid)), *((name, str(value)) for name, value in numbers.items())]

    def walk(self) -> Iterator[CostStep]:
        return walk_vit(self)

    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        return vit_activation_bytes(self, width, recompute=recompute)

    @property
    def padding_macs(self) -> int:
        return 0 if self.backbone is None else self.backbone.padding_macs

    def settle(self, changes: dict[str, Any]) -> None:
        """Makes changes consistent: no classes means no head and vice versa, and the backbone gets the network's image
        and channels."""
        if "head" not in changes:
            if changes.get("classes") == 0:
                changes["head"] = "none"
            elif self.head == "none" and "classes" in changes:
                changes["head"] = "linear"
        elif changes["head"] == "none" and "classes" not in changes:
            changes["classes"] = 0
        if "token" in changes.get("pool", "") and not self.class_token:
            changes.setdefault("class_token", True)
        inner: ResNetConfig | None = changes.get("backbone", self.backbone)
        if inner is not None:
            image, channels = changes.get("image", self.image), changes.get("channels", self.channels)
            changes["backbone"] = replace(inner, image=image, channels=channels)

    def configure_like(self, old: ModelConfig) -> ModelConfig:
        """Between two ViTs, also keeps the old head, pooling, positions and regularisers, because a name fixes only a
        shape."""
        if not isinstance(old, ViTConfig):
            return super(ViTConfig, self).configure_like(old)
        names = ("width", "depth", "mlp_width", "heads", "patch", *self.parts)
        stem = None if self.backbone is None else replace(self.backbone, image=old.image, channels=old.channels)
        return replace(old, **{name: getattr(self, name) for name in names}, backbone=stem)

    def without_parts(self, *kept: str) -> "ViTConfig":
        """Returns the network with the fields of later families at their defaults, except for those in `kept`."""
        names = [name for name in self.parts if name not in kept]
        return replace(self, **{name: self.__dataclass_fields__[name].default for name in names})

    def linear_head(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "linear" if classes else "none", "projection": 0}

    def patch_head(self, classes: int) -> dict[str, Any]:
        pooled = {"pool": "mean", "projection": 0} if self.pool == "map" or self.projection else {}
        return {"classes": classes, "head": "patches" if classes else "none", **pooled}

    def new_last_layer(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": self.head if self.head in ("tanh", "distilled") else "linear"}

    @property
    def last_layers(self) -> tuple[str, ...]:
        return (self.head_layer, "head.distilled") if self.head == "distilled" else (self.head_layer,)

    @property
    def has_plain_head(self) -> bool:
        return self.head not in ("tanh", "distilled") and not self.projection

    @property
    def fixed_bytes(self) -> int:
        return 8 * self.tokens * self.width if self.position == "sincos2d" else 0


def vit_config(config: ModelConfig | None, what: str = "this") -> ViTConfig:
    """Returns the config if it is that of a ViT or hybrid. Raises ConfigError for other networks; `what` names the
    feature that needs a ViT."""
    if not isinstance(config, ViTConfig):
        title = "missing" if config is None else config.title
        raise ConfigError(f"{what} needs a ViT, and the model is {title}")
    return config
