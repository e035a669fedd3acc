"""Policies: which operations a picture goes through, and how strongly. Drawn for B samples at once.

RandAugment (Cubuk et al. 2020), 3-Augment (DeiT III, Touvron et al. 2022), and the colour distortions of
self-supervision (SimCLR, MoCo v3, DINO). Each only draws a `Programme`; what runs it is elsewhere.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError
from vitrail.core.shapes import Pair
from vitrail.data.draws import Draws
from vitrail.data.transforms.crop import Range
from vitrail.data.transforms.programme import IDENTITY, NUMBER, Programme


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
        """The levels of each operation on pictures of this size; either of the two is as likely."""
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

    def draw(self, draws: Draws, size: Pair) -> Programme:
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

    def draw(self, draws: Draws, size: Pair) -> Programme:
        del size
        choice = draws.integers("three", 3)
        sigma = uniform(draws, "blur", self.sigma)
        first = np.array([NUMBER["grey"], NUMBER["solarise"], NUMBER["blur"]])[choice]
        level = np.where(choice == 2, sigma, np.where(choice == 1, float(self.threshold), 0.0))
        jitter = jittered(draws, (self.jitter, self.jitter, self.jitter, 0.0))
        return joined(Programme(first, level), jitter)


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

    def draw(self, draws: Draws, size: Pair) -> Programme:
        del size
        jitter = jittered(draws, self.jitter)
        shaken = draws.uniform("jitter") < self.jitter_probability
        sigma = uniform(draws, "blur", self.sigma)
        return joined(
            Programme(np.where(shaken, jitter.which, IDENTITY), jitter.level),
            sometimes(draws, "grey", self.grey, np.zeros_like(sigma)),
            sometimes(draws, "blur", self.blur, sigma),
            sometimes(draws, "solarise", self.solarise, np.full_like(sigma, self.threshold)),
        )


Policy: TypeAlias = RandAugment | ThreeAugment | Distort


def jittered(draws: Draws, strength: tuple[float, float, float, float]) -> Programme:
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


def sometimes(draws: Draws, name: str, probability: float, level: NDArray[np.float64]) -> Programme:
    on = draws.uniform(f"{name} or not") < probability
    return Programme(np.where(on, NUMBER[name], IDENTITY), level)


def joined(*parts: Programme) -> Programme:
    return Programme(
        np.concatenate([part.which for part in parts], 1), np.concatenate([part.level for part in parts], 1)
    )


def uniform(draws: Draws, purpose: str, span: Range) -> NDArray[np.float64]:
    return span[0] + (span[1] - span[0]) * draws.uniform(purpose)


def used(policy: Policy) -> set[str]:
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
