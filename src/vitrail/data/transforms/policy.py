"""Policies: which operations an image goes through, and how strongly. Drawn for B samples at once.

RandAugment (Cubuk et al. 2020), 3-Augment (DeiT III, Touvron et al. 2022), and the colour distortions of
self-supervision (SimCLR, MoCo v3, DINO). Each only draws a `Programme`; what runs it is elsewhere.

The operations on colour and geometry that policies choose from, each with one number, its level.

They act on uint8 pixels [3, H, W] and are torchvision's kernels. The same table, for whole batches with a level a
sample, is in batched_operations.py.

What a policy hands to those who run it: operations by number, and how strongly. Needs no torchvision.
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

NAMES: Final = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "saturation", "contrast", "sharpness", "posterise", "solarise", "autocontrast", "equalise"),
    *("hue", "grey", "blur"),
)
NUMBER: Final = {name: number for number, name in enumerate(NAMES)}
GEOMETRIC: Final = frozenset({"shear_x", "shear_y", "translate_x", "translate_y", "rotate"})  # move pixels
IDENTITY: Final = NUMBER["identity"]


class Programme(NamedTuple):
    """S operations in a row for each of B samples: their numbers, and their levels."""

    which: NDArray[np.int64]  # [B, S]
    level: NDArray[np.float64]  # [B, S]


@dataclass(frozen=True, kw_only=True, slots=True)
class RandAugment:
    """`ops` operations in a row, all of them with the same strength: `magnitude` of `bins` - 1. The table of operations
    and their ranges is torchvision's."""

    ops: int = 2
    magnitude: int = 9
    bins: int = 31

    def __post_init__(self) -> None:
        if self.ops < 1:
            raise ConfigError(f"ops={self.ops} must be at least 1")
        if not 0 <= self.magnitude < self.bins:
            raise ConfigError(f"magnitude={self.magnitude} must be one of {self.bins} steps, 0 to {self.bins - 1}")

    def choices(self, size: Pair) -> dict[str, Range]:
        """The levels of each operation on images of this size; either of the two is as likely."""
        strength = self.magnitude / (self.bins - 1)
        height, width = size
        bend, turn, more = 0.3 * strength, 30.0 * strength, 0.9 * strength
        down, across = (float(int(150 / 331 * side * strength)) for side in (height, width))
        bits, threshold = round(8 - 4 * strength), 255.0 * (1 - strength)
        return {
            "identity": (0.0, 0.0),
            "shear_x": (bend, -bend),
            "shear_y": (bend, -bend),
            "translate_x": (across, -across),
            "translate_y": (down, -down),
            "rotate": (turn, -turn),
            "brightness": (1 + more, 1 - more),
            "saturation": (1 + more, 1 - more),
            "contrast": (1 + more, 1 - more),
            "sharpness": (1 + more, 1 - more),
            "posterise": (bits, bits),
            "solarise": (threshold, threshold),
            "autocontrast": (0.0, 0.0),
            "equalise": (0.0, 0.0),
        }

    def draw(self, draws: CounterRng, size: Pair) -> Programme:
        choices = self.choices(size)
        which = draws.integers("randaugment", len(choices), self.ops)
        sign = draws.integers("randaugment sign", 2, self.ops)
        numbers = np.array([NUMBER[name] for name in choices])
        sign += 2 * which  # now the place among all levels
        return Programme(numbers.take(which), np.array(list(choices.values())).take(sign))


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeAugment:
    """Grey, solarised or blurred, one of the three; then brightness, contrast and saturation in some order."""

    jitter: float = 0.3
    sigma: Range = (0.1, 2.0)
    threshold: int = 128

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        check_jitter((self.jitter,))

    def draw(self, draws: CounterRng, size: Pair) -> Programme:
        del size
        choice = draws.integers("three", 3)
        sigma = uniform(draws, "blur", self.sigma)
        first = np.array([NUMBER["grey"], NUMBER["solarise"], NUMBER["blur"]])[choice]
        level = np.where(choice == 2, sigma, np.where(choice == 1, float(self.threshold), 0.0))
        jitter = draw_jitter(draws, (self.jitter, self.jitter, self.jitter, 0.0))
        return join_programmes(Programme(first, level), jitter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distort:
    """The colour distortion of self-supervision: jitter (brightness, contrast, saturation, hue, in a drawn order),
    grey, blur, solarise, each with its probability."""

    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_probability: float = 0.8
    grey: float = 0.2
    blur: float = 0.5
    sigma: Range = (0.1, 2.0)
    solarise: float = 0.0
    threshold: int = 128

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        check_jitter(self.jitter)
        if self.jitter[3] > 0.5:
            raise ConfigError(f"jitter={self.jitter}: the last number, of the hue, is at most 0.5")
        for name in ("jitter_probability", "grey", "blur", "solarise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be a probability, 0 to 1")

    def draw(self, draws: CounterRng, size: Pair) -> Programme:
        del size
        jitter = draw_jitter(draws, self.jitter)
        shaken = draws.uniform("jitter") < self.jitter_probability
        sigma = uniform(draws, "blur", self.sigma)
        return join_programmes(
            Programme(np.where(shaken, jitter.which, IDENTITY), jitter.level),
            apply_sometimes(draws, "grey", self.grey, np.zeros_like(sigma)),
            apply_sometimes(draws, "blur", self.blur, sigma),
            apply_sometimes(draws, "solarise", self.solarise, np.full_like(sigma, self.threshold)),
        )


Policy: TypeAlias = RandAugment | ThreeAugment | Distort


def draw_jitter(draws: CounterRng, strength: tuple[float, float, float, float]) -> Programme:
    """Brightness, contrast and saturation by a factor within 1 +- strength, hue turned within +- strength; those that
    are on, in a drawn order."""
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


def apply_sometimes(draws: CounterRng, name: str, probability: float, level: NDArray[np.float64]) -> Programme:
    on = draws.uniform(f"{name} or not") < probability
    return Programme(np.where(on, NUMBER[name], IDENTITY), level)


def join_programmes(*parts: Programme) -> Programme:
    return Programme(
        np.concatenate([part.which for part in parts], 1), np.concatenate([part.level for part in parts], 1)
    )


def uniform(draws: CounterRng, purpose: str, span: Range) -> NDArray[np.float64]:
    return span[0] + (span[1] - span[0]) * draws.uniform(purpose)


def operations_of(policy: Policy) -> set[str]:
    """The operations that a policy may choose."""
    if isinstance(policy, RandAugment):
        return set(policy.choices((1, 1)))
    names = {"grey", "blur", "solarise"} | {"brightness", "contrast", "saturation"}
    return names | ({"hue"} if isinstance(policy, Distort) and policy.jitter[3] > 0 else set())


def check_sigma(sigma: Range) -> None:
    if not 0 < sigma[0] <= sigma[1]:
        raise ConfigError(f"sigma={sigma} must be two numbers above 0, the smaller first")


def check_jitter(jitter: tuple[float, ...]) -> None:
    if min(jitter) < 0:
        raise ConfigError(f"jitter={jitter} must not be below 0")


Operation: TypeAlias = Callable[[Tensor, float], Tensor]


def identity(pixels: Tensor, level: float) -> Tensor:
    del level
    return pixels


def shear_x(pixels: Tensor, level: float) -> Tensor:
    """Rows move by `level` times their distance from the upper edge."""
    return affine(pixels, shear=[degrees(atan(level)), 0.0], center=[0, 0])


def shear_y(pixels: Tensor, level: float) -> Tensor:
    return affine(pixels, shear=[0.0, degrees(atan(level))], center=[0, 0])


def translate_x(pixels: Tensor, level: float) -> Tensor:
    """By whole pixels."""
    return affine(pixels, translate=[int(level), 0])


def translate_y(pixels: Tensor, level: float) -> Tensor:
    return affine(pixels, translate=[0, int(level)])


def affine(pixels: Tensor, *, shear: Any = (0.0, 0.0), translate: Any = (0, 0), center: Any = None) -> Tensor:
    return F.affine(pixels, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=center)


def rotate(pixels: Tensor, level: float) -> Tensor:
    """By degrees, about the centre."""
    return F.rotate(pixels, level)


def brightness(pixels: Tensor, level: float) -> Tensor:
    return F.adjust_brightness(pixels, level)


def saturation(pixels: Tensor, level: float) -> Tensor:
    return F.adjust_saturation(pixels, level)


def contrast(pixels: Tensor, level: float) -> Tensor:
    return F.adjust_contrast(pixels, level)


def sharpness(pixels: Tensor, level: float) -> Tensor:
    # Three grey images for one of three channels: the same numbers, from a quicker convolution.
    return F.adjust_sharpness(pixels.unsqueeze(1), level).squeeze(1)


def posterise(pixels: Tensor, level: float) -> Tensor:
    """Keeps `level` bits."""
    return F.posterize(pixels, int(level))


def solarise(pixels: Tensor, level: float) -> Tensor:
    """Inverts what is at or above `level`, of 255."""
    return F.solarize(pixels, level)


def autocontrast(pixels: Tensor, level: float) -> Tensor:
    del level
    return F.autocontrast(pixels)


def equalise(pixels: Tensor, level: float) -> Tensor:
    del level
    return F.equalize(pixels)


def hue(pixels: Tensor, level: float) -> Tensor:
    """Turns the colour circle by `level`, of 1."""
    return F.adjust_hue(pixels, level)


def grey(pixels: Tensor, level: float) -> Tensor:
    del level
    return F.rgb_to_grayscale(pixels, num_output_channels=3)


def blur(pixels: Tensor, level: float) -> Tensor:
    """Gaussian with a standard deviation of `level` pixels: torchvision's kernel, once down and once across, which is
    the same blur for a fraction of the work."""
    tall, wide = (2 * reach(level, side) + 1 for side in pixels.shape[-2:])
    down = F.gaussian_blur(pixels.to(torch.float32), [1, tall], [level, level])
    return F.gaussian_blur(down, [wide, 1], [level, level]).round_().to(torch.uint8)


def reach(sigma: float, side: int) -> int:
    """How far a blur looks: three standard deviations, or to the end of a very small image."""
    return min(ceil(3 * sigma), side - 1)


FUNCTIONS: Final[tuple[Operation, ...]] = (
    *(identity, shear_x, shear_y, translate_x, translate_y, rotate),
    *(brightness, saturation, contrast, sharpness, posterise, solarise, autocontrast, equalise),
    *(hue, grey, blur),
)
OPERATIONS: Final[dict[int, Operation]] = {NUMBER[function.__name__]: function for function in FUNCTIONS}
