"""A parity certificate: what came back from a written file, and how far the other library's network is from ours.

Both networks run on one seeded batch. The largest difference is taken after the stem, after every block and at the
logits, relative to the largest value there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.checkpoint import peers
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.weights import network
from vitrail.models.build import Model


@dataclass(frozen=True, slots=True)
class Row:
    """One place in the network: largest absolute difference, and the same over the largest value."""

    place: str
    absolute: float
    relative: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Tensors that came back bit for bit, of how many; and the rows against `peer`, or why there are none."""

    identical: int
    tensors: int
    peer: str | None
    why_not: str | None
    rows: list[Row]

    @property
    def worst(self) -> float:
        return max((row.relative for row in self.rows), default=0.0)


def certify(bundle: Bundle, back: Bundle, format_name: str, target: Path) -> Certificate:
    """Hold what was read back against what was written, and both against the library that the format belongs to."""
    same = sum(_equal(tensor, back.tensors.get(name)) for name, tensor in bundle.tensors.items())
    built = peers.peer(format_name, bundle.config, target)
    rows: list[Row] = []
    if isinstance(built, peers.Peer):
        rows = compare(network(bundle), built)
    return Certificate(
        identical=same,
        tensors=len(bundle.tensors),
        peer=built.library if isinstance(built, peers.Peer) else None,
        why_not=built if isinstance(built, str) else None,
        rows=rows,
    )


def _equal(mine: Tensor, theirs: Tensor | None) -> bool:
    return theirs is not None and mine.shape == theirs.shape and torch.equal(mine.float(), theirs.float())


def compare(model: Model, other: "peers.Peer", seed: int = 0) -> list[Row]:
    """The two networks side by side on one seeded batch of two."""
    config = model.config
    images = torch.randn(2, config.channels, *config.image, generator=torch.Generator().manual_seed(seed))
    mine = walk(model, *places(model), images)
    theirs = walk(other.network, other.first, other.blocks, images, other.logits)
    return [_row(place, mine[place], theirs[place]) for place in mine]


def _row(place: str, mine: Tensor, theirs: Tensor) -> Row:
    difference = (mine.double() - theirs.double()).abs().max().item()
    scale = theirs.double().abs().max().item()
    return Row(place, difference, difference / scale if scale else difference)


def places(model: Model) -> tuple[nn.Module, list[nn.Module]]:
    """Where the stem ends, and the blocks, in our networks."""
    units = model.units()
    return units[0], units


@torch.no_grad()
def walk(
    model: nn.Module,
    first: nn.Module,
    blocks: list[nn.Module],
    images: Tensor,
    logits: Callable[[object], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Activations after the stem, after each block and at the end, by forward hooks."""
    seen: dict[str, Tensor] = {}

    def stem(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["stem"] = inputs[0]

    def after(place: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            seen[place] = output[0] if isinstance(output, tuple) else output  # pyright: ignore[reportArgumentType]

        return hook

    hooks = [first.register_forward_pre_hook(stem)]
    hooks += [block.register_forward_hook(after(f"block {i}")) for i, block in enumerate(blocks, start=1)]
    try:
        out: object = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    seen["logits"] = logits(out) if logits else out  # pyright: ignore[reportArgumentType]
    return seen
