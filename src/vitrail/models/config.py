"""What a network is, as frozen data: no torch here, so that tables and help stay quick.

Numerics are fields, never assumptions. The defaults are the reference implementation's; an importer sets what its
weights were trained with.
"""

import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from vitrail.core.errors import ConfigError, ImageSizeError, unknown
from vitrail.core.shapes import LARGEST_SIDE, Pair, pair, times

Gelu: TypeAlias = Literal["tanh", "erf"]
Position: TypeAlias = Literal["none", "learned", "learned2d", "learned2d-sum", "relative", "sincos2d"]
Placement: TypeAlias = Literal["stem", "every", "shared"]
Pool: TypeAlias = Literal["token", "mean"]
Head: TypeAlias = Literal["none", "linear", "tanh"]
Attention: TypeAlias = Literal["full", "axial"]
Unit: TypeAlias = Literal["preactivation", "postactivation"]
Root: TypeAlias = Literal["7x7", "3x3"]
Standardisation: TypeAlias = Literal["std+eps", "sqrt(var+eps)"]
Padding: TypeAlias = Literal["same", "symmetric"]
PoolPadding: TypeAlias = Literal["zero", "infinity"]
Mixing: TypeAlias = Literal["convolution", "axial"]

# Beyond these no machine computes, and merely naming all the tensors would take minutes.
MOST: Final = {
    "depth": 1024,
    "width": 1 << 16,
    "mlp_width": 1 << 18,
    "heads": 1 << 12,
    "channels": 1 << 12,
    "classes": 1 << 24,
    "registers": 1 << 12,
    "groups": 1 << 16,
    "axial_heads": 1 << 12,
}
MOST_BLOCKS: Final = 1024  # of one stage of a ResNet
MOST_PATCHES: Final = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig:
    """A BiT ResNet: width factor, blocks a stage, GroupNorm and weight-standardised convolutions.

    `unit="preactivation"` is the ResNet-v2 of the BiT baselines; `"postactivation"` is the hybrid's backbone. The 3x3
    root has no max-pool and stride 1: it is for 28 to 64 px images. `mixing="axial"` puts row and column attention in
    the place of each 3x3 convolution (AxialResNet, D.6); its tables of relative positions tie it to `image`. A hybrid's
    backbone may have no blocks at all: the root alone (R+ViT-Ti/16).
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """A Vision Transformer (Table 1) or, with a backbone, a hybrid (3.1).

    `patch` is taken on the image, or on the backbone's feature map (1x1 in the paper). `placement=None` is the paper's
    way: at the stem, and for relative positions in every layer. `position_prefix` says whether the class token has a
    position of its own (the original code) or none (big_vision). `norm_after_pool` is timm's order for average pooling;
    the reference normalises every token first.
    """

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
    def any_size(self) -> bool:
        """Whether images of other sizes than `image` can be read: neither attention nor positions are tied to it."""
        return self.attention == "full" and self.position != "relative"

    @property
    def placed(self) -> Placement:
        """Where positions enter, with the paper's way filled in."""
        return self.placement or ("every" if self.position == "relative" else "stem")


ModelConfig: TypeAlias = ViTConfig | ResNetConfig


def shrink(size: Pair, stride: int) -> Pair:
    """The size behind a strided convolution under either padding rule: rounded up."""
    return (-(-size[0] // stride), -(-size[1] // stride))


CHOICES: dict[str, tuple[str | None, ...]] = {
    "gelu": get_args(Gelu),
    "position": get_args(Position),
    "placement": (None, *get_args(Placement)),
    "pool": get_args(Pool),
    "head": get_args(Head),
    "attention": get_args(Attention),
    "unit": get_args(Unit),
    "root": get_args(Root),
    "standardisation": get_args(Standardisation),
    "padding": get_args(Padding),
    "pool_padding": get_args(PoolPadding),
    "mixing": get_args(Mixing),
}


def check_types(config: ModelConfig) -> None:
    """Numbers are numbers and switches are switches; a file, a shell or a slip may say otherwise."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in (int, bool) and type(value) is not field.type:
            raise ConfigError(f"{field.name}={value!r} must be of type {getattr(field.type, '__name__', field.type)}")
        if field.type is float and (type(value) not in (int, float) or not -math.inf < value < math.inf):
            raise ConfigError(f"{field.name}={value!r} must be a finite number")


def check_choices(config: ModelConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in CHOICES and value not in CHOICES[field.name]:
            raise unknown(field.name, str(value), [str(choice) for choice in CHOICES[field.name]])


def check_positive(config: ModelConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}={value} must be above 0")


def check_most(config: ModelConfig) -> None:
    """Sizes that no machine could compute."""
    for field in fields(config):
        if field.name in MOST and getattr(config, field.name) > MOST[field.name]:
            raise ConfigError(f"{field.name}={getattr(config, field.name)} is more than {MOST[field.name]:,}")
    if max(config.image) > LARGEST_SIDE:
        raise ImageSizeError(f"image={times(config.image)} is larger than {LARGEST_SIDE} pixels a side")


def check_positive_pairs(config: ModelConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (len(value) == 2 and min(value) >= 1):
            raise ConfigError(f"{name}={value} must be (height, width), both at least 1")


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Plain data for a file header; `from_dict` reads it back."""
    return {"family": "resnet" if isinstance(config, ResNetConfig) else "vit", **asdict(config)}


def from_dict(data: dict[str, Any]) -> ModelConfig:
    """The config that `to_dict` wrote; unknown or ill-typed fields are refused by name."""
    families: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
    rest = dict(data)
    family = str(rest.pop("family", None))
    if family not in families:
        raise unknown("model family", family, families)
    kind = families[family]
    known = {field.name: field for field in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in rest.items():
        if name not in known:
            raise unknown("config field", name, known)
        values[name] = _typed(name, known[name].type, value)
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"incomplete model config: {', '.join(missing)} missing")
    return kind(**values)


def _typed(name: str, kind: Any, value: Any) -> Any:
    """JSON knows no tuples and blurs 1 and 1.0; everything else must already be right."""
    if name == "backbone":
        if value is None:
            return None
        if not isinstance(value, dict) or cast(dict[str, Any], value).get("family", "resnet") != "resnet":
            raise ConfigError(f"backbone={value!r} must be the config of a ResNet")
        try:
            return from_dict({"family": "resnet", **cast(dict[str, Any], value)})
        except ConfigError as error:
            raise ConfigError(f"backbone: {error}") from None
    if name in ("image", "patch", "blocks"):
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise ConfigError(f"{name}={value!r} must be a list of whole numbers")
        return pair(list(value)) if name != "blocks" and len(value) == 2 else tuple(value)
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if not isinstance(value, kind if kind in (int, float, bool) else (str, type(None))) or (
        type(value) is bool and kind is not bool
    ):
        raise ConfigError(f"{name}={value!r} must be of type {getattr(kind, '__name__', 'text')}")
    return value
