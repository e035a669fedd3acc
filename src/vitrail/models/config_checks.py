"""Rules that the configs of several families share: types, choices, positive numbers, sizes that a machine can hold."""

import math
from dataclasses import fields
from typing import Final, Literal, TypeAlias, get_args

from vitrail.core.errors import ConfigError, ImageSizeError, unknown
from vitrail.core.shapes import LARGEST_SIDE, times
from vitrail.models.family import ModelConfig

Gelu: TypeAlias = Literal["tanh", "erf"]
Position: TypeAlias = Literal["none", "learned", "learned2d", "learned2d-sum", "relative", "sincos2d"]
Placement: TypeAlias = Literal["stem", "every", "shared"]
Pool: TypeAlias = Literal["token", "mean"]
Head: TypeAlias = Literal["none", "linear", "tanh", "patches"]
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
