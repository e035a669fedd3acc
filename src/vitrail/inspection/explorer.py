"""The attention explorer: one picks a patch of an image, a layer and a head, and sees where it looks.

All weights of an image travel inside the page, a byte each. A row of attention sums to one, so that its scale need not
be kept: what is stored is the root of each weight over the largest of its row, in 255 steps, and whoever reads it
squares the bytes and divides by their sum. The root gives small weights finer steps than large ones.

What would make the page too large is thinned, and the page says so: first the patches of a fine grid are taken
together, then single heads are kept for some layers only and their mean for the others.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.text import Pair, format_size

Floats = NDArray[np.floating[Any]]

MOST_PATCHES: Final = 400  # a side of 20; finer grids are taken together
MOST_BYTES: Final = 6_000_000  # of one image; a third more as text


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorerPlan:
    """What of a network's attention goes into a page."""

    layers: int
    heads: int
    grid: Pair  # of the network
    prefix: int  # tokens before the patches
    block: int = 1  # patches a side that are taken together
    kept: tuple[int, ...] = ()  # layers, from 0, whose heads are kept one by one; of others their mean

    @property
    def shown(self) -> Pair:
        """The grid of the page."""
        return -(-self.grid[0] // self.block), -(-self.grid[1] // self.block)

    @property
    def tokens(self) -> int:
        return self.prefix + self.shown[0] * self.shown[1]

    @property
    def size(self) -> int:
        """Bytes of one image."""
        return (len(self.kept) * self.heads + self.layers - len(self.kept)) * self.tokens**2

    @property
    def note(self) -> str:
        """What was left out; empty where nothing was."""
        said: list[str] = []
        if self.block > 1:
            said.append(
                f"{self.block} x {self.block} patches of the {format_size(self.grid)} grid are taken together, "
                "so that a "
                "rollout is near the exact one and not equal to it"
            )
        if len(self.kept) < self.layers:
            some = f"of layers {', '.join(str(layer + 1) for layer in self.kept)} only" if self.kept else "of no layer"
            said.append(f"single heads are kept {some}; for the others there is their mean")
        return f"To keep the page small, {' and '.join(said)}." if said else ""


def plan_explorer(layers: int, heads: int, grid: Pair, prefix: int, most: int = MOST_BYTES) -> ExplorerPlan:
    """As much as `most` bytes an image hold: the first and last layers before those between."""
    block = 1
    while -(-grid[0] // block) * -(-grid[1] // block) > MOST_PATCHES:
        block += 1
    found = ExplorerPlan(layers=layers, heads=heads, grid=grid, prefix=prefix, block=block)
    room = most - found.size
    count = layers if heads == 1 else min(max(room // ((heads - 1) * found.tokens**2), 0), layers)
    kept = tuple(sorted({round(at) for at in np.linspace(layers - 1, 0, count).tolist()}))
    return ExplorerPlan(layers=layers, heads=heads, grid=grid, prefix=prefix, block=block, kept=kept)


def pack_attention(plan: ExplorerPlan, attention: Iterable[Floats]) -> bytes:
    """The weights of one image, given layer by layer as [k, T, T]: one block of T x T bytes for each head, or for
    their mean."""
    out: list[bytes] = []
    for layer, weights in enumerate(attention):
        coarse = merge_patches(plan, weights)
        out.append(quantise(coarse if layer in plan.kept else coarse.mean(0, keepdims=True)).tobytes())
    return b"".join(out)


def merge_patches(plan: ExplorerPlan, weights: Floats) -> Floats:
    """[k, T, T] with blocks of patches as one: what they are looked at is summed, how they look is averaged."""
    if plan.block == 1:
        return weights
    rows, columns = np.indices(plan.grid) // plan.block
    place = np.concatenate([np.arange(plan.prefix), plan.prefix + (rows * plan.shown[1] + columns).ravel()])
    onto = np.zeros((weights.shape[-1], plan.tokens), weights.dtype)  # [T, T']
    onto[np.arange(len(place)), place] = 1
    return (onto / onto.sum(0)).T @ weights @ onto


def quantise(weights: Floats) -> NDArray[np.uint8]:
    """Rows of attention [..., T] as bytes: the largest of a row is 255."""
    largest = weights.max(-1, keepdims=True)
    return np.rint(255 * np.sqrt(weights / np.maximum(largest, 1e-30))).astype(np.uint8)


def dequantise(stored: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What the page makes of the bytes again: rows [..., T] that sum to one."""
    squares = stored.astype(np.float64) ** 2
    return squares / squares.sum(-1, keepdims=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExploredImage:
    """An image as a data URI, its name, and its weights as `packed` made them."""

    name: str
    picture: str
    weights: bytes

    @property
    def text(self) -> str:
        return base64.b64encode(self.weights).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorerSection:
    """The part of a page that has the explorer in it; it needs the page's script."""

    plan: ExplorerPlan
    pictures: Sequence[ExploredImage]
    prefix: Sequence[str]  # names of the tokens before the patches
    start: int  # the token that is asked first
    title: str = "Attention explorer"
    lead: str = ""
    template: str = field(default="explorer.html", init=False)

    @property
    def kept(self) -> str:
        return " ".join(map(str, self.plan.kept))
