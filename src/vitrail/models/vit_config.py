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
from vitrail.models.resnet_config import ResNetConfig, trunk_steps

MOST_PATCHES: Final = 1 << 18
Placement: TypeAlias = Literal["stem", "every", "shared"]


@register_config
@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(ModelConfig):
    """A Vision Transformer (Table 1) or, with a backbone, a hybrid (3.1).

    `patch` is taken on the image, or on the backbone's feature map (1x1 in the paper). `placement=None` is the paper's
    way: at the stem, and for relative positions in every layer. `position_prefix` says whether the class token has a
    position of its own (the original code) or none (big_vision). `norm_after_pool` is timm's order for average pooling;
    the reference normalises every token first.
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
    head: Literal["none", "linear", "tanh", "patches"] = "linear"
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
    gelu: Literal["tanh", "erf"] = "tanh"
    norm_eps: float = 1e-6
    norm_after_pool: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "width", "depth", "mlp_width", "heads", "channels", "norm_eps")
        if self.width % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide width={self.width}")
        for name in ("dropout", "attention_dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if self.registers < 0:
            raise ConfigError(f"registers={self.registers} must be 0 or more")
        if self.pool == "token" and not self.class_token:
            raise ConfigError("pool='token' reads the class token; set class_token=True or pool='mean'")
        if self.norm_after_pool and self.pool != "mean":
            raise ConfigError("norm_after_pool=True goes with pool='mean'")
        if self.head == "none" and self.classes:
            raise ConfigError(f"head='none' has no room for classes={self.classes}; set classes=0")
        if self.classes < (self.head in ("linear", "patches")):
            raise ConfigError(f"head={self.head!r} does not take classes={self.classes}; set 1 or more, or head='none'")
        if self.attention == "axial" and (self.class_token or self.registers):
            raise ConfigError("attention='axial' keeps the token grid: set class_token=False, registers=0, pool='mean'")
        if self.position == "none" and self.placement not in (None, "stem"):
            raise ConfigError(f"position='none' has nothing to place at {self.placement!r}")
        if self.position == "learned2d" and self.width % 2:
            raise ConfigError(f"position='learned2d' joins two half-width tables; width={self.width} is odd")
        if self.position == "sincos2d" and self.width % 4:
            raise ConfigError(f"position='sincos2d' needs a width divisible by 4, not {self.width}")
        if self.attention == "axial" and self.position == "relative":
            raise ConfigError("position='relative' runs over the raster index; axial attention takes the other kinds")
        self._check_image()

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
        """Tokens in front of the patches: class token, then registers."""
        return int(self.class_token) + self.registers

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
        """Where positions enter, with the paper's way filled in."""
        return self.placement or ("every" if self.position == "relative" else "stem")

    @property
    def features(self) -> int:
        return self.width

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
        return self.width, self.depth, self.mlp_width, self.heads, self.patch, self.attention, stem

    @property
    def card_rows(self) -> list[tuple[str, str]]:
        numbers = {"layers": self.depth, "heads": self.heads, "width": self.width}
        return [("patches", format_size(self.grid)), *((name, str(value)) for name, value in numbers.items())]

    def walk(self) -> Iterator[CostStep]:
        n, t, d, channels = self.patches, self.tokens, self.width, self.channels
        yield CostStep("image", (*self.image, channels))
        if self.backbone is not None:
            yield from trunk_steps(self.backbone)
            channels = self.backbone.features
        inside = math.prod(self.patch) * channels
        yield CostStep(f"patches {format_size(self.patch)}", (n, inside))
        yield CostStep("embeddings E", (n, d), inside * d + d, n * inside * d)
        if self.class_token:
            yield CostStep("class token", (n + 1, d), d)
        if self.registers:
            yield CostStep(f"{self.registers} registers", (t, d), self.registers * d)
        if self.position != "none" and self.entry in ("stem", "shared"):
            shared = ", shared by all layers" if self.entry == "shared" else ""
            yield CostStep(f"positions ({self.position}{shared})", (t, d), _table_parameters(self))
        for layer in range(1, self.depth + 1):
            yield from _block(self, layer)
        yield from _patch_head(self) if self.has_patch_head else _head(self)

    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        """A token of a block: the inputs of both norms and their outputs (4D), q, k and v (3D), what attention gives
        (D), and the MLP's inside before and after GELU (2M). With recomputation only the inputs of the blocks stay, and
        what one block needs at its peak (10D + 3M)."""
        tokens, d, m = self.tokens, self.width, self.mlp_width
        layers = self.depth * (2 if self.attention == "axial" else 1)
        kept = tokens * (layers * d + 10 * d + 3 * m) if recompute else tokens * layers * (8 * d + 2 * m)
        stem = 0 if self.backbone is None else self.backbone.activation_bytes(1, recompute=recompute)
        # Logits as floats and their gradient; where each pixel has some, what the head gives before that, too.
        pixels = math.prod(self.image)
        logits = 8 * pixels + width * (pixels + self.patches) if self.has_patch_head else 8
        return width * (kept + stem + 4 * tokens * d) + self.classes * logits

    @property
    def padding_macs(self) -> int:
        return 0 if self.backbone is None else self.backbone.padding_macs

    def settle(self, changes: dict[str, Any]) -> None:
        """No classes means no head and the other way round; the backbone sees the network's image and channels."""
        if "head" not in changes:
            if changes.get("classes") == 0:
                changes["head"] = "none"
            elif self.head == "none" and "classes" in changes:
                changes["head"] = "linear"
        elif changes["head"] == "none" and "classes" not in changes:
            changes["classes"] = 0
        if changes.get("pool") == "token" and not self.class_token:
            changes.setdefault("class_token", True)
        inner: ResNetConfig | None = changes.get("backbone", self.backbone)
        if inner is not None:
            image, channels = changes.get("image", self.image), changes.get("channels", self.channels)
            changes["backbone"] = replace(inner, image=image, channels=channels)

    def configure_like(self, old: ModelConfig) -> ModelConfig:
        """Where both are ViTs, also with the same head, pooling, positions and regularisers: a name means a shape."""
        if not isinstance(old, ViTConfig):
            return super(ViTConfig, self).configure_like(old)
        names = ("width", "depth", "mlp_width", "heads", "patch")
        stem = None if self.backbone is None else replace(self.backbone, image=old.image, channels=old.channels)
        return replace(old, **{name: getattr(self, name) for name in names}, backbone=stem)

    def linear_head(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "linear" if classes else "none"}

    def patch_head(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "patches" if classes else "none"}

    def new_last_layer(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "tanh" if self.head == "tanh" else "linear"}

    @property
    def fixed_bytes(self) -> int:
        return 8 * self.tokens * self.width if self.position == "sincos2d" else 0


def vit_config(config: ModelConfig | None, what: str = "this") -> ViTConfig:
    """The config of a ViT or hybrid, for what asks for one by its nature; other networks are refused by name."""
    if not isinstance(config, ViTConfig):
        title = "missing" if config is None else config.title
        raise ConfigError(f"{what} needs a ViT, and the model is {title}")
    return config


def _head(c: ViTConfig) -> Iterator[CostStep]:
    t, d = c.tokens, c.width
    if not c.norm_after_pool:
        yield CostStep("norm", (t, d), 2 * d)
    yield CostStep("class token's row" if c.pool == "token" else "mean of patches", (d,))
    if c.norm_after_pool:
        yield CostStep("norm", (d,), 2 * d)
    if c.head == "tanh":
        yield CostStep("head: hidden tanh layer", (d,), d * d + d, d * d)
    if c.classes:
        yield CostStep("head: logits", (c.classes,), d * c.classes + c.classes, d * c.classes)


def _patch_head(c: ViTConfig) -> Iterator[CostStep]:
    n, d, k = c.patches, c.width, c.classes
    yield CostStep("norm of patches", (n, d), 2 * d)
    yield CostStep("head: logits of patches", (n, k), d * k + k, n * d * k)
    yield CostStep("head: logits of pixels", (k, *c.image))


def _block(c: ViTConfig, layer: int) -> Iterator[CostStep]:
    t, d, m = c.tokens, c.width, c.mlp_width
    if c.position not in ("none", "relative") and c.entry == "every":
        yield CostStep(f"block {layer}: positions ({c.position})", (t, d), _table_parameters(c))
    bias = 3 * d * c.qkv_bias
    relative = c.position == "relative" and (layer == 1 or c.entry != "stem")
    offsets = _table_parameters(c) if relative and c.entry == "every" else 0
    # Sub-blocks and how many tokens one query sees: all, or its row and then its column (D.6).
    axes = [("", t)] if c.attention == "full" else [("row ", c.grid[1]), ("column ", c.grid[0])]
    for axis, length in axes:
        name = f"block {layer}: {axis}"
        work = 2 * t * length * d + relative * t * (2 * length - 1) * d
        yield CostStep(f"{name}norm, q k v", (3, c.heads, t, d // c.heads), 2 * d + 3 * d * d + bias, 3 * t * d * d)
        yield CostStep(f"{name}attention", (c.heads, t, d // c.heads), offsets, work)
        yield CostStep(f"{name}out, residual", (t, d), d * d + d, t * d * d)
        yield CostStep(f"{name}norm, MLP, residual", (t, d), 2 * d + 2 * d * m + d + m, 2 * t * d * m)


def _table_parameters(c: ViTConfig) -> int:
    """Parameters of one position table (D.4)."""
    if c.position == "relative":
        return (2 * c.tokens - 1) * (c.width // c.heads)
    sides, prefix = sum(c.grid), c.width if c.class_token and c.position_prefix else 0
    rows = {"learned": c.patches * c.width, "learned2d": sides * (c.width // 2), "learned2d-sum": sides * c.width}
    return rows[c.position] + prefix if c.position in rows else 0
