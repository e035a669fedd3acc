"""What a network is, as frozen data: no torch here, so that tables and help stay quick.

Numerics are fields, never assumptions. The defaults are the reference implementation's; an importer sets what its
weights were trained with.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.shapes import Pair, times
from vitrail.models.config_checks import (
    MOST_BLOCKS,
    MOST_PATCHES,
    Attention,
    Gelu,
    Head,
    Mixing,
    Padding,
    Placement,
    Pool,
    PoolPadding,
    Position,
    Root,
    Standardisation,
    Unit,
    check_choices,
    check_most,
    check_positive,
    check_positive_pairs,
    check_types,
)
from vitrail.models.family import ImageSizes, ModelConfig, Step, register_family

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.resize import Numerics
    from vitrail.models.resnet import ResNet
    from vitrail.models.vit import ViT


@register_family
@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(ModelConfig):
    """A BiT ResNet: width factor, blocks a stage, GroupNorm and weight-standardised convolutions.

    `unit="preactivation"` is the ResNet-v2 of the BiT baselines; `"postactivation"` is the hybrid's backbone. The 3x3
    root has no max-pool and stride 1: it is for 28 to 64 px images. `mixing="axial"` puts row and column attention in
    the place of each 3x3 convolution (AxialResNet, D.6); its tables of relative positions tie it to `image`. A hybrid's
    backbone may have no blocks at all: the root alone (R+ViT-Ti/16).
    """

    family: ClassVar[str] = "resnet"
    head_layer: ClassVar[str] = "head"

    blocks: tuple[int, ...]
    image: Pair = (224, 224)
    factor: float = 1.0
    channels: int = 3
    classes: int = 1000
    unit: Unit = "preactivation"
    root: Root = "7x7"
    groups: int = 32
    norm_eps: float = 1e-5
    standardisation: Standardisation = "sqrt(var+eps)"
    standardisation_eps: float = 1e-10
    padding: Padding = "symmetric"
    pool_padding: PoolPadding = "zero"
    mixing: Mixing = "convolution"
    axial_heads: int = 8

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_positive(self, "channels", "groups", "norm_eps", "standardisation_eps", "factor", "axial_heads")
        check_positive_pairs(self, "image")
        check_most(self)
        fewest = 0 if self.unit == "postactivation" else 1
        if not fewest <= len(self.blocks) <= 8 or not all(1 <= count <= MOST_BLOCKS for count in self.blocks):
            raise ConfigError(f"blocks={self.blocks}: one to eight stages, each of 1 to {MOST_BLOCKS} blocks")
        if not 1 / 64 <= self.factor <= 64:
            raise ConfigError(f"factor={self.factor} must lie between 1/64 and 64")
        if self.classes < 0:
            raise ConfigError(f"classes={self.classes} must be 0 (no head) or more")
        if self.unit == "postactivation" and self.pool_padding == "zero":
            # Behind a ReLU the two are equal; one spelling keeps configs comparable.
            raise ConfigError(
                "pool_padding='zero' says nothing behind a ReLU; a post-activation network takes 'infinity'"
            )
        for channels in (self.root_width, *(self.bottleneck(s) for s in range(len(self.blocks)))):
            if channels % self.groups:
                raise ConfigError(f"groups={self.groups} does not divide {channels} channels at factor {self.factor}")
        if self.mixing == "axial" and any(self.bottleneck(s) % self.axial_heads for s in range(len(self.blocks))):
            raise ConfigError(f"axial_heads={self.axial_heads} does not divide the bottleneck widths")

    @property
    def root_width(self) -> int:
        return round(64 * self.factor)

    def bottleneck(self, stage: int) -> int:
        """Channels of the 3x3 convolutions in a stage; its output has four times as many."""
        return round(64 * 2**stage * self.factor)

    @property
    def features(self) -> int:
        return 4 * self.bottleneck(len(self.blocks) - 1) if self.blocks else self.root_width

    @property
    def stride(self) -> int:
        """Pixels of the image to one of the last feature map, along a side."""
        return (4 if self.root == "7x7" else 1) * 2 ** max(len(self.blocks) - 1, 0)

    @property
    def grid(self) -> Pair:
        """The feature map behind the last stage."""
        grid = self.pooled
        for stage in range(len(self.blocks)):
            grid = self.stage_grid(grid, stage)
        return grid

    @property
    def pooled(self) -> Pair:
        """The feature map behind the root and its max-pool."""
        if self.root == "3x3":
            return self.image
        return shrink(shrink(self.image, 2), 2)

    def stage_grid(self, grid: Pair, stage: int) -> Pair:
        return grid if stage == 0 else shrink(grid, 2)

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def units(self) -> int:
        return sum(self.blocks)

    @property
    def patch_pixels(self) -> Pair:
        return self.stride, self.stride

    @property
    def tied_to_size(self) -> str:
        return "an axial ResNet's relative positions are tied to one size" if self.mixing == "axial" else ""

    @property
    def open_sizes(self) -> ImageSizes:
        if self.tied_to_size:
            return ImageSizes(step=None, why=self.tied_to_size)
        if self.padding == "symmetric":
            return ImageSizes(step=self.patch_pixels, any=True)
        return multiples(self)

    @property
    def has_convolutions(self) -> bool:
        return True

    @property
    def title(self) -> str:
        return f"ResNet of {'+'.join(map(str, self.blocks))} blocks, width factor {self.factor:g}"

    @property
    def shape(self) -> tuple[object, ...]:
        return self.blocks, self.factor, self.root, self.mixing

    def build(self) -> "ResNet":
        from vitrail.models.resnet import ResNet

        return ResNet(self)

    def walk(self) -> Iterator[Step]:
        from vitrail.models.walk import resnet_steps

        return resnet_steps(self)

    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        """About four times what each unit gives."""
        return 4 * width * sum(math.prod(step.shape) for step in self.walk())

    @property
    def padding_macs(self) -> int:
        from vitrail.models.walk import padding_macs

        return padding_macs(self)


@register_family
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
    head: Head = "linear"
    pool: Pool = "token"
    class_token: bool = True
    registers: int = 0
    position: Position = "learned"
    placement: Placement | None = None
    position_prefix: bool = True
    attention: Attention = "full"
    backbone: ResNetConfig | None = None
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0
    gelu: Gelu = "tanh"
    norm_eps: float = 1e-6
    norm_after_pool: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_positive(self, "width", "depth", "mlp_width", "heads", "channels", "norm_eps")
        check_positive_pairs(self, "image", "patch")
        check_most(self)
        if self.width % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide width={self.width}")
        for name in ("dropout", "attention_dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        self._check_tokens()
        self._check_positions()
        self._check_image()

    def _check_tokens(self) -> None:
        if self.registers < 0:
            raise ConfigError(f"registers={self.registers} must be 0 or more")
        if self.pool == "token" and not self.class_token:
            raise ConfigError("pool='token' reads the class token; set class_token=True or pool='mean'")
        if self.norm_after_pool and self.pool != "mean":
            raise ConfigError("norm_after_pool=True goes with pool='mean'")
        if self.head == "none" and self.classes:
            raise ConfigError(f"head='none' has no room for classes={self.classes}; set classes=0")
        if self.classes < (self.head == "linear"):
            raise ConfigError(f"head={self.head!r} does not take classes={self.classes}; set 1 or more, or head='none'")
        if self.attention == "axial" and (self.class_token or self.registers):
            raise ConfigError(
                "attention='axial' keeps the tokens on their grid: set class_token=False, registers=0, pool='mean'"
            )

    def _check_positions(self) -> None:
        if self.position == "none" and self.placement not in (None, "stem"):
            raise ConfigError(f"position='none' has nothing to place at {self.placement!r}")
        if self.position == "learned2d" and self.width % 2:
            raise ConfigError(f"position='learned2d' joins two half-width tables; width={self.width} is odd")
        if self.position == "sincos2d" and self.width % 4:
            raise ConfigError(f"position='sincos2d' needs a width divisible by 4, not {self.width}")
        if self.attention == "axial" and self.position == "relative":
            raise ConfigError("position='relative' runs over the raster index; axial attention takes the other kinds")

    def _check_image(self) -> None:
        if self.backbone is not None and self.backbone.image != self.image:
            raise ConfigError(f"image={times(self.image)} but the backbone was made for {times(self.backbone.image)}")
        if self.backbone is not None and self.backbone.channels != self.channels:
            raise ConfigError(f"channels={self.channels} but the backbone takes {self.backbone.channels}")
        if self.backbone is not None and (self.backbone.unit, self.backbone.classes) != ("postactivation", 0):
            raise ConfigError("a hybrid's backbone is a post-activation ResNet without a head (classes=0)")
        ground, what = (self.image, "image") if self.backbone is None else (self.backbone.grid, "feature map")
        for size, patch in zip(ground, self.patch, strict=True):
            if size % patch:
                low = size - size % patch
                near = f"use {low} or {low + patch}" if low else f"use {patch}"
                raise ImageSizeError(
                    f"{what} {times(ground)} leaves {size % patch} pixels over at patch {times(self.patch)}; {near}"
                )
        if self.patches > MOST_PATCHES:
            raise ImageSizeError(
                f"image {times(self.image)} at patch {times(self.patch)} has {self.patches:,} patches, more than "
                f"{MOST_PATCHES:,}; use a smaller image or a larger patch"
            )

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
    def placed(self) -> Placement:
        """Where positions enter, with the paper's way filled in."""
        return self.placement or ("every" if self.position == "relative" else "stem")

    @property
    def features(self) -> int:
        return self.width

    @property
    def layers(self) -> int:
        return self.depth

    @property
    def units(self) -> int:
        return self.depth

    @property
    def size_step(self) -> Pair:
        return self.patch if self.backbone is None else (1, 1)

    @property
    def tied_to_size(self) -> str:
        if self.position != "relative":
            return ""
        return f"relative positions run over the raster index of a {times(self.grid)} grid and cannot be resized in 2-D"

    @property
    def open_sizes(self) -> ImageSizes:
        if self.position == "relative":
            return ImageSizes(step=None, why="relative positions are tied to one size")
        if self.attention == "axial":
            return ImageSizes(step=None, why="axial attention is tied to one grid")
        return multiples(self)

    @property
    def has_convolutions(self) -> bool:
        return self.backbone is not None

    @property
    def title(self) -> str:
        if self.backbone is not None:
            return f"hybrid ViT of {self.depth} layers, width {self.width}"
        height, width = self.patch
        patch = str(height) if height == width else times(self.patch)
        return f"ViT of {self.depth} layers, width {self.width}, patch {patch}"

    @property
    def shape(self) -> tuple[object, ...]:
        stem = None if self.backbone is None else self.backbone.shape
        return self.width, self.depth, self.mlp_width, self.heads, self.patch, self.attention, stem

    @property
    def table(self) -> list[tuple[str, str]]:
        return [
            ("patches", times(self.grid)),
            ("layers", str(self.depth)),
            ("heads", str(self.heads)),
            ("width", str(self.width)),
        ]

    def build(self) -> "ViT":
        from vitrail.models.hybrid import HybridEmbedding
        from vitrail.models.vit import PatchEmbedding, ViT

        if self.backbone is None:
            return ViT(self, PatchEmbedding(self.channels, self.width, self.patch))
        return ViT(self, HybridEmbedding(self.backbone, self.width, self.patch))

    def walk(self) -> Iterator[Step]:
        from vitrail.models.walk import vit_steps

        return vit_steps(self)

    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        """A token of a block: the inputs of both norms and their outputs (4D), q, k and v (3D), what attention gives
        (D), and the MLP's inside before and after GELU (2M). With recomputation only the inputs of the blocks stay, and
        what one block needs at its peak (10D + 3M)."""
        tokens, d, m = self.tokens, self.width, self.mlp_width
        layers = self.depth * (2 if self.attention == "axial" else 1)
        kept = tokens * (layers * d + 10 * d + 3 * m) if recompute else tokens * layers * (8 * d + 2 * m)
        stem = 0 if self.backbone is None else self.backbone.activation_bytes(1, recompute=recompute)
        return width * (kept + stem + 4 * tokens * d) + 8 * self.classes

    @property
    def can_recompute(self) -> bool:
        return True

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

    def configured_like(self, old: ModelConfig) -> ModelConfig:
        """Where both are ViTs, also with the same head, pooling, positions and regularisers: a name means a shape."""
        if not isinstance(old, ViTConfig):
            return super(ViTConfig, self).configured_like(old)
        names = ("width", "depth", "mlp_width", "heads", "patch")
        stem = None if self.backbone is None else replace(self.backbone, image=old.image, channels=old.channels)
        return replace(old, **{name: getattr(self, name) for name in names}, backbone=stem)

    def linear_head(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "linear" if classes else "none"}

    def new_last_layer(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "head": "tanh" if self.head == "tanh" else "linear"}

    def without_head(self) -> dict[str, Any]:
        return {"classes": 0, "head": "none"}

    def resize(
        self, tensors: "dict[str, Tensor]", new: ModelConfig, numerics: "Numerics" = "reference"
    ) -> "dict[str, Tensor]":
        from vitrail.models.resize import resize_positions

        return resize_positions(tensors, self, vit_config(new), numerics)

    def redraw_positions(self, tensors: "dict[str, Tensor]", drawn: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        from vitrail.models.resize import redraw_grid

        return redraw_grid(tensors, drawn, self)

    @property
    def fixed_bytes(self) -> int:
        return 8 * self.tokens * self.width if self.position == "sincos2d" else 0


def vit_config(config: ModelConfig | None, what: str = "this") -> ViTConfig:
    """The config of a ViT or hybrid, for what asks for one by its nature; other networks are refused by name."""
    if not isinstance(config, ViTConfig):
        title = "missing" if config is None else config.title
        raise ConfigError(f"{what} needs a ViT, and the model is {title}")
    return config


def multiples(config: ModelConfig) -> ImageSizes:
    """Multiples of the patch, or of a backbone's stride."""
    step = config.patch_pixels
    if config.image[0] % step[0] or config.image[1] % step[1]:
        return ImageSizes(
            step=None, why="SAME padding at a size that leaves pixels over is laid on for that size alone"
        )
    return ImageSizes(step=step)


def shrink(size: Pair, stride: int) -> Pair:
    """The size behind a strided convolution under either padding rule: rounded up."""
    return (-(-size[0] // stride), -(-size[1] // stride))
