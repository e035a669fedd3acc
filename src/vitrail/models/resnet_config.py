"""A BiT ResNet as frozen data: its shape, rules and closed-form cost. No torch, so that tables and help stay quick.

Numerics are fields, never assumptions. The defaults are the reference implementation's; an importer sets what its
weights were trained with.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.models.family import CostStep, ImageSizes, ModelConfig, check_fields, register_config

MOST_BLOCKS: Final = 1024  # of one stage


@register_config
@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(ModelConfig):
    """A BiT ResNet: width factor, blocks per stage, GroupNorm and weight-standardised convolutions.

    `unit="preactivation"` is the ResNet-v2 of the BiT baselines; `"postactivation"` is the hybrid's backbone. The 3x3
    root has stride 1 and no max-pool: it is for images of 28 to 64 pixels. `mixing="axial"` replaces each 3x3
    convolution by row and column attention (AxialResNet, D.6), whose tables of relative positions tie it to `image`. A
    hybrid's backbone may consist of the root alone, without blocks (R+ViT-Ti/16).
    """

    family: ClassVar[str] = "resnet"
    head_layer: ClassVar[str] = "head"

    blocks: tuple[int, ...]
    image: Pair = (224, 224)
    factor: float = 1.0
    channels: int = 3
    classes: int = 1000
    unit: Literal["preactivation", "postactivation"] = "preactivation"
    root: Literal["7x7", "3x3"] = "7x7"
    groups: int = 32
    norm_eps: float = 1e-5
    standardisation: Literal["std+eps", "sqrt(var+eps)"] = "sqrt(var+eps)"
    standardisation_eps: float = 1e-10
    padding: Literal["same", "symmetric"] = "symmetric"
    pool_padding: Literal["zero", "infinity"] = "zero"
    mixing: Literal["convolution", "axial"] = "convolution"
    axial_heads: int = 8

    def __post_init__(self) -> None:
        check_fields(self, "channels", "groups", "norm_eps", "standardisation_eps", "factor", "axial_heads")
        fewest = 0 if self.unit == "postactivation" else 1
        if not fewest <= len(self.blocks) <= 8 or not all(1 <= count <= MOST_BLOCKS for count in self.blocks):
            raise ConfigError(f"blocks={self.blocks}: one to eight stages, each of 1 to {MOST_BLOCKS} blocks")
        if not 1 / 64 <= self.factor <= 64:
            raise ConfigError(f"factor={self.factor} must lie between 1/64 and 64")
        if self.classes < 0:
            raise ConfigError(f"classes={self.classes} must be 0 (no head) or more")
        if self.unit == "postactivation" and self.pool_padding == "zero":
            # After a ReLU the two are equal; allowing only one keeps configs comparable.
            raise ConfigError("pool_padding='zero' has no effect after a ReLU; with postactivation use 'infinity'")
        widths = [self.bottleneck(stage) for stage in range(len(self.blocks))]
        for channels in (self.root_width, *widths):
            if channels % self.groups:
                raise ConfigError(f"groups={self.groups} does not divide {channels} channels at factor {self.factor}")
        if self.mixing == "axial" and any(width % self.axial_heads for width in widths):
            raise ConfigError(f"axial_heads={self.axial_heads} does not divide the bottleneck widths")

    @property
    def root_width(self) -> int:
        return round(64 * self.factor)

    @property
    def root_size(self) -> Pair:
        """Side and stride of the root convolution."""
        return (7, 2) if self.root == "7x7" else (3, 1)

    def bottleneck(self, stage: int) -> int:
        """Channels of the 3x3 convolutions in a stage; its output has four times as many."""
        return round(64 * 2**stage * self.factor)

    @property
    def features(self) -> int:
        return 4 * self.bottleneck(len(self.blocks) - 1) if self.blocks else self.root_width

    @property
    def stride(self) -> int:
        """Pixels of the image per pixel of the last feature map, along a side."""
        return (4 if self.root == "7x7" else 1) * 2 ** max(len(self.blocks) - 1, 0)

    @property
    def grid(self) -> Pair:
        """The size of the feature map after the last stage."""
        grid = self.pooled
        for stage in range(len(self.blocks)):
            grid = self.stage_grid(grid, stage)
        return grid

    @property
    def pooled(self) -> Pair:
        """The size of the feature map after the root and its max-pool."""
        return self.image if self.root == "3x3" else shrink(shrink(self.image, 2), 2)

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
        return self.multiples_of_patch()

    @property
    def has_convolutions(self) -> bool:
        return True

    @property
    def title(self) -> str:
        return f"ResNet of {'+'.join(map(str, self.blocks))} blocks, width factor {self.factor:g}"

    @property
    def shape(self) -> tuple[object, ...]:
        return self.blocks, self.factor, self.root, self.mixing

    def walk(self) -> Iterator[CostStep]:
        f, k = self.features, self.classes
        yield CostStep("image", (*self.image, self.channels))
        yield from trunk_steps(self)
        if self.unit == "preactivation":
            yield CostStep("norm, ReLU", (*self.grid, f), 2 * f)
        yield CostStep("mean over positions", (f,))
        if k:
            yield CostStep("head: logits", (k,), f * k + k, f * k)

    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        """Estimates the memory of activations as four times the outputs of all units."""
        return 4 * width * sum(math.prod(step.shape) for step in self.walk())

    @property
    def padding_macs(self) -> int:
        wasted = _on_padding(self, self.image, *self.root_size) * self.channels * self.root_width
        if self.mixing != "convolution":
            return wasted
        grid = self.pooled
        for stage, count in enumerate(self.blocks):
            inner = self.bottleneck(stage) ** 2
            wasted += _on_padding(self, grid, 3, 2 if stage else 1) * inner
            grid = self.stage_grid(grid, stage)
            wasted += (count - 1) * _on_padding(self, grid, 3, 1) * inner
        return wasted


def shrink(size: Pair, stride: int) -> Pair:
    """Returns the size after a strided convolution, which rounds up under either padding rule."""
    return (-(-size[0] // stride), -(-size[1] // stride))


def same_widths(size: int, side: int, stride: int) -> Pair:
    """Returns the padding before and after a line by TensorFlow's SAME rule: ceil(size / stride) outputs, with the odd
    pixel after."""
    total = max((-(-size // stride) - 1) * stride + side - size, 0)
    return total // 2, total - total // 2


def trunk_steps(c: ResNetConfig) -> Iterator[CostStep]:
    side, stride = c.root_size
    grid = shrink(c.image, stride)
    kernel = side * side * c.channels * c.root_width
    norm = 2 * c.root_width if c.unit == "postactivation" else 0
    yield CostStep(f"root {c.root} convolution", (*grid, c.root_width), kernel + norm, math.prod(grid) * kernel)
    if c.root == "7x7":
        yield CostStep("max-pool 3x3", (*c.pooled, c.root_width))
    grid, width = c.pooled, c.root_width
    for stage, count in enumerate(c.blocks):
        for block in range(count):
            out = c.stage_grid(grid, stage) if block == 0 else grid
            strided = stage > 0 and block == 0
            yield _unit(c, f"stage {stage + 1}, block {block + 1}", grid, out, width, c.bottleneck(stage), strided)
            grid, width = out, 4 * c.bottleneck(stage)


def _unit(c: ResNetConfig, name: str, grid: Pair, out: Pair, width: int, inner: int, strided: bool) -> CostStep:
    """One bottleneck: 1x1, 3x3 (or axial attention), 1x1, and a projected shortcut where the shape changes."""
    wide = 4 * inner
    before, after = math.prod(grid), math.prod(out)
    projected = width * wide if width != wide or strided else 0
    outer = width if c.unit == "preactivation" else 2 * wide if projected else wide
    norms = 2 * (inner + inner + outer)
    # The 3x3 convolution, or the row and column attention that replaces it (D.6).
    middle_params, middle_macs = 9 * inner * inner, after * 9 * inner * inner
    if c.mixing == "axial":
        heads, square = c.axial_heads, 4 * inner * inner
        middle_params = sum(square + (2 * length - 1) * (inner // heads) for length in grid)
        middle_macs = sum(before * (square + (4 * length - 1) * inner) for length in grid)
    kernels = width * inner + middle_params + inner * wide + projected
    work = before * width * inner + middle_macs + after * (inner * wide + projected)
    return CostStep(name, (*out, wide), kernels + norms, work)


def _on_padding(config: ResNetConfig, size: Pair, side: int, stride: int) -> int:
    """Counts the taps of a convolution over a plane that fall on padding."""
    outputs = math.prod(shrink(size, stride))
    inside = 1
    for length in size:
        before = same_widths(length, side, stride)[0] if config.padding == "same" else side // 2
        starts = range(-before, -(-length // stride) * stride - before, stride)  # of the outputs along this axis
        inside *= sum(min(start + side, length) - max(start, 0) for start in starts)
    return outputs * side * side - inside
