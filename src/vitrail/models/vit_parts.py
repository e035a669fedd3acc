"""Parts of a Vision Transformer that need more than one number, as frozen data: rotary positions, windows. No torch."""

from dataclasses import dataclass
from typing import Literal

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary positions: queries and keys of patches are rotated by angles proportional to their grid coordinates.

    Each axis gets half of a head's pairs, at frequencies base^(-4i/D_h); `mixed` learns two frequencies, one per axis,
    for every pair, head and layer. Coordinates are the `index` of row and column, plus `offset` and scaled from the
    current grid to a `reference` grid if there is one, or `unit`: 2π times the centre of the patch in [-1, 1]. `layout`
    says which numbers of a head are rotated together, i and i + D_h/2 (halves) or 2i and 2i + 1 (pairs); `order` says
    which axis comes first.

    The last three fields vary unit coordinates in training, as in DINOv3: each axis is moved by up to `shift` and
    stretched by a factor of up to `jitter`, and both axes by a common factor of up to `rescale`. 0 turns each off.
    """

    mixed: bool = False
    base: float = 100.0
    coordinates: Literal["index", "unit"] = "index"
    layout: Literal["halves", "pairs"] = "halves"
    order: Literal["yx", "xy"] = "yx"
    offset: float = 0.0
    reference: Pair | None = None
    shift: float = 0.0
    jitter: float = 0.0
    rescale: float = 0.0

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ConfigError(f"rotary base={self.base} must be above 1")
        if self.reference is not None and min(self.reference) < 1:
            raise ConfigError(f"rotary reference={self.reference} must be (rows, columns), both at least 1")
        if self.shift < 0:
            raise ConfigError(f"rotary shift={self.shift} must be 0 or more")
        for name in ("jitter", "rescale"):
            if 0 != getattr(self, name) < 1:
                raise ConfigError(f"rotary {name}={getattr(self, name)} is a factor: 1 or more, or 0 for none")
        if self.coordinates == "unit" and (self.offset or self.reference):
            raise ConfigError("rotary coordinates='unit' have no offset and no reference grid")
        if self.coordinates == "index" and (self.shift or self.jitter or self.rescale):
            raise ConfigError("rotary shift, jitter and rescale require coordinates='unit'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Attention within windows of `size` x `size` patches, padded if the grid is not a multiple. Layers in `whole`,
    counted from 0, attend to all patches."""

    size: int
    whole: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"windows of size={self.size} must be of at least one patch")
