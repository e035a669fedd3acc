"""Policies: draw which operations are applied to an image, and how strongly, for B samples at once.

RandAugment (Cubuk et al. 2020), 3-Augment (DeiT III, Touvron et al. 2022), and the colour distortions of
self-supervision (SimCLR, MoCo v3, DINO). A policy only draws a `Programme`: operations by number, and their levels. It
runs on one image here, and on a batch in batched_ops.py. The operations here act on uint8 pixels [3, H, W] with
torchvision's kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import atan, ceil, degrees
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.randomness import CounterRng
from vitrail.data.transforms.crop import Range

GEOMETRIC: Final = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")  # move pixels


class Programme(NamedTuple):
    """S operations in a row for each of B samples: their numbers and levels."""

    which: NDArray[np.int64]  # [B, S]
    level: NDArray[np.float64]  # [B, S]

    def run(self, pixels: Tensor, borders: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Tensor:
        """Runs the first sample's operations on pixels [3, H, W]. Borders (left, top, right, bottom) end up black, and
        are left out of the mean that contrast uses."""
        left, top, right, bottom = borders
        height, width = pixels.shape[-2:]
        inside = (slice(None), slice(top, height - bottom), slice(left, width - right))
        for which, level in zip(self.which[0].tolist(), self.level[0].tolist(), strict=True):
            if which == CONTRAST and any(borders):
                pixels = pixels.clone()
                pixels[inside] = OPERATIONS[which](pixels[inside], level)
            else:
                pixels = OPERATIONS[which](pixels, level)
        if not any(borders):
            return pixels
        framed = torch.zeros_like(pixels)
        framed[inside] = pixels[inside]
        return framed


@dataclass(frozen=True, kw_only=True, slots=True)
class RandAugment:
    """`ops` operations in a row, each at strength `magnitude` / (`bins` - 1), with torchvision's table of operations
    and ranges."""

    ops: int = 2
    magnitude: int = 9
    bins: int = 31

    def __post_init__(self) -> None:
        if self.ops < 1:
            raise ConfigError(f"ops={self.ops} must be at least 1")
        if not 0 <= self.magnitude < self.bins:
            raise ConfigError(f"magnitude={self.magnitude} must be one of {self.bins} steps, 0 to {self.bins - 1}")

    def choices(self, size: Pair) -> dict[str, Range]:
        """Returns the two equally likely levels of each operation on images of this size."""
        strength = self.magnitude / (self.bins - 1)
        bend, turn, more = 0.3 * strength, 30.0 * strength, 0.9 * strength
        down, across = (float(int(150 / 331 * side * strength)) for side in size)
        bits, threshold = round(8 - 4 * strength), 255.0 * (1 - strength)
        return {
            "identity": (0.0, 0.0),
            **dict.fromkeys(("shear_x", "shear_y"), (bend, -bend)),
            "translate_x": (across, -across),
            "translate_y": (down, -down),
            "rotate": (turn, -turn),
            **dict.fromkeys(("brightness", "saturation", "contrast", "sharpness"), (1 + more, 1 - more)),
            "posterise": (bits, bits),
            "solarise": (threshold, threshold),
            **dict.fromkeys(("autocontrast", "equalise"), (0.0, 0.0)),
        }

    def draw(self, draws: CounterRng, size: Pair) -> Programme:
        choices = self.choices(size)
        which = draws.integers("randaugment", len(choices), self.ops)
        sign = draws.integers("randaugment sign", 2, self.ops)
        numbers = np.array([NUMBER[name] for name in choices])
        sign += 2 * which  # now an index into all levels
        return Programme(numbers.take(which), np.array(list(choices.values())).take(sign))


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeAugment:
    """One of grey, solarise and blur; then brightness, contrast and saturation in random order."""

    jitter: float = 0.3
    sigma: Range = (0.1, 2.0)
    threshold: int = 128

    def __post_init__(self) -> None:
        check_strengths(self.sigma, (self.jitter,))

    def draw(self, draws: CounterRng, _size: Pair) -> Programme:
        choice = draws.integers("three", 3)
        sigma = uniform(draws, "blur", self.sigma)
        first = np.array([NUMBER["grey"], NUMBER["solarise"], NUMBER["blur"]])[choice]
        level = np.where(choice == 2, sigma, np.where(choice == 1, float(self.threshold), 0.0))
        jitter = draw_jitter(draws, (self.jitter, self.jitter, self.jitter, 0.0))
        return join_programmes(Programme(first, level), jitter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distort:
    """The colour distortion of self-supervision: jitter (brightness, contrast, saturation and hue in random order),
    grey, blur and solarise, each with its own probability."""

    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_probability: float = 0.8
    grey: float = 0.2
    blur: float = 0.5
    sigma: Range = (0.1, 2.0)
    solarise: float = 0.0
    threshold: int = 128

    def __post_init__(self) -> None:
        check_strengths(self.sigma, self.jitter)
        if self.jitter[3] > 0.5:
            raise ConfigError(f"jitter={self.jitter}: the last number, for the hue, must be at most 0.5")
        for name in ("jitter_probability", "grey", "blur", "solarise"):
            check_probability(name, getattr(self, name))

    def draw(self, draws: CounterRng, _size: Pair) -> Programme:
        jitter = draw_jitter(draws, self.jitter)
        shaken = draws.uniform("jitter") < self.jitter_probability
        sigma = uniform(draws, "blur", self.sigma)
        return join_programmes(
            Programme(np.where(shaken, jitter.which, IDENTITY), jitter.level),
            draw_sometimes(draws, "grey", self.grey, np.zeros_like(sigma)),
            draw_sometimes(draws, "blur", self.blur, sigma),
            draw_sometimes(draws, "solarise", self.solarise, np.full_like(sigma, self.threshold)),
        )


Policy: TypeAlias = RandAugment | ThreeAugment | Distort


def draw_jitter(draws: CounterRng, strength: tuple[float, float, float, float]) -> Programme:
    """Draws colour jitter: brightness, contrast and saturation by a factor within 1 ± strength, hue by ± strength.
    Those with a strength above 0 come in random order."""
    names = ("brightness", "contrast", "saturation", "hue")
    on = [i for i, amount in enumerate(strength) if amount > 0]
    if not on:
        return Programme(np.zeros((len(draws), 0), np.int64), np.zeros((len(draws), 0)))
    amount, centre = np.array(strength)[on], np.array([1.0, 1.0, 1.0, 0.0])[on]
    level = 2 * draws.uniform("jitter level", len(names))[:, on]
    level -= 1
    level *= amount
    level += centre
    np.maximum(level, np.where(centre > 0, 0.0, -np.inf), out=level)  # a factor stays at or above 0
    orders = np.array(list(permutations(range(len(on)))))
    order = orders.take(draws.integers("jitter order", len(orders))[:, 0], 0)
    numbers = np.array([NUMBER[names[i]] for i in on])
    return Programme(numbers.take(order), np.take_along_axis(level, order, 1))


def draw_sometimes(draws: CounterRng, name: str, probability: float, level: NDArray[np.float64]) -> Programme:
    on = draws.uniform(f"{name} or not") < probability
    return Programme(np.where(on, NUMBER[name], IDENTITY), level)


def join_programmes(*parts: Programme) -> Programme:
    return Programme(*(np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True)))


def uniform(draws: CounterRng, purpose: str, span: Range) -> NDArray[np.float64]:
    return span[0] + (span[1] - span[0]) * draws.uniform(purpose)


def operations_of(policy: Policy) -> set[str]:
    """Returns the names of the operations that a policy may choose."""
    if isinstance(policy, RandAugment):
        return set(policy.choices((1, 1)))
    names = {"grey", "blur", "solarise", "brightness", "contrast", "saturation"}
    return names | ({"hue"} if isinstance(policy, Distort) and policy.jitter[3] > 0 else set())


def check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value} must be a probability, 0 to 1")


def check_strengths(sigma: Range, jitter: tuple[float, ...]) -> None:
    if not 0 < sigma[0] <= sigma[1]:
        raise ConfigError(f"sigma={sigma} must be two numbers above 0, the smaller first")
    if min(jitter) < 0:
        raise ConfigError(f"jitter={jitter} must not be below 0")


def affine(pixels: Tensor, *, shear: Any = (0.0, 0.0), translate: Any = (0, 0), center: Any = None) -> Tensor:
    return F.affine(pixels, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=center)


def blur(pixels: Tensor, level: float) -> Tensor:
    """Applies a Gaussian blur with a standard deviation of `level` pixels: torchvision's kernel once down and once
    across, which gives the same result at a fraction of the cost."""
    # The radius is three standard deviations, limited by the side of a very small image.
    tall, wide = (2 * min(ceil(3 * level), side - 1) + 1 for side in pixels.shape[-2:])
    down = F.gaussian_blur(pixels.to(torch.float32), [1, tall], [level, level])
    return F.gaussian_blur(down, [wide, 1], [level, level]).round_().to(torch.uint8)


# Functions of pixels and a level, by name. Shears are relative to the upper left corner, translations are in whole
# pixels, rotations in degrees about the centre, and hues in turns of the colour circle.
_BY_NAME: Final[dict[str, Callable[[Tensor, float], Tensor]]] = {
    "identity": lambda pixels, _: pixels,
    "shear_x": lambda pixels, level: affine(pixels, shear=(degrees(atan(level)), 0.0), center=[0, 0]),
    "shear_y": lambda pixels, level: affine(pixels, shear=(0.0, degrees(atan(level))), center=[0, 0]),
    "translate_x": lambda pixels, level: affine(pixels, translate=(int(level), 0)),
    "translate_y": lambda pixels, level: affine(pixels, translate=(0, int(level))),
    "rotate": F.rotate,
    "brightness": F.adjust_brightness,
    "saturation": F.adjust_saturation,
    "contrast": F.adjust_contrast,
    # Channels become three grey images: the convolution is faster and gives the same numbers.
    "sharpness": lambda pixels, level: F.adjust_sharpness(pixels.unsqueeze(1), level).squeeze(1),
    "posterise": lambda pixels, level: F.posterize(pixels, int(level)),  # keeps `level` bits
    "solarise": lambda pixels, level: F.solarize(pixels, level),  # inverts values of at least `level`
    "autocontrast": lambda pixels, _: F.autocontrast(pixels),
    "equalise": lambda pixels, _: F.equalize(pixels),
    "hue": F.adjust_hue,
    "grey": lambda pixels, _: F.rgb_to_grayscale(pixels, num_output_channels=3),
    "blur": blur,
}
NUMBER: Final = {name: number for number, name in enumerate(_BY_NAME)}
OPERATIONS: Final = tuple(_BY_NAME.values())
IDENTITY: Final = NUMBER["identity"]
CONTRAST: Final = NUMBER["contrast"]
