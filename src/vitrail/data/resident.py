"""A source that fits lives on the accelerator as uint8, and is augmented there in batches. No DataLoader on this path.

    resident = Resident(source, device="cuda")
    for batch in resident.stream(augmentation, batch=1024, seed=0): ...

The order and the draws are those of `loader.stream`: the same samples at the same step, cropped and turned alike.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadPicture, ConfigError, DataError
from vitrail.core.shapes import Pair
from vitrail.data.decode.picture import Picture
from vitrail.data.draws import Draws
from vitrail.data.ledger import Ledger
from vitrail.data.loader import Batch, Plain, Share, sweep
from vitrail.data.order import Order, Positions
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.source import Source
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.batched import BatchedAugmentation

LOAD_BATCH = 256
ODD = "is of another size than the first picture"


class AsIs:
    """The view that changes nothing; all pictures must have one size."""

    def __init__(self, size: Pair) -> None:
        self.sizes = (size,)
        self.plain = Plain(Preprocessing(image=size))

    def __call__(self, picture: Picture, draws: Sequence[Draws]) -> tuple[Tensor, ...]:
        if picture.size != self.sizes[0]:
            raise BadPicture(ODD)
        return self.plain(picture, draws)


class Resident:
    """All pictures of a source as one tensor on a device, uint8 [N, 3, H, W], brought to `size` where one is given."""

    def __init__(
        self,
        source: Source,
        *,
        device: torch.device | str,
        size: Pair | None = None,
        limit: int | None = None,
        workers: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        """`limit` is the number of bytes that the pictures may take."""
        if not len(source):
            raise DataError("a source without pictures cannot be loaded")
        self.source, self.device = source, torch.device(device)
        view = AsIs(source.picture(0).size) if size is None else Plain(Preprocessing(image=size))
        height, width = view.sizes[0]
        shape = (len(source), 3, height, width)
        need = int(np.prod(shape))
        if limit is not None and need > limit:
            raise ConfigError(
                f"{len(source)} pictures of {height} x {width} take {need / 1e9:.1f} GB, "
                f"{limit / 1e9:.1f} GB are allowed; read them through the loader, or make them smaller"
            )
        self.pixels = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.valid = torch.zeros(len(source), dtype=torch.bool, device=self.device)
        for batch in sweep(source, view, batch=LOAD_BATCH, workers=workers, ledger=ledger):
            if odd := next((entry for entry in batch.unreadable if entry.reason == ODD), None):
                raise DataError(f"{odd}, {height} x {width}; give a size that all are brought to")
            first, count = batch.step * LOAD_BATCH, int((batch.sample >= 0).sum())
            self.pixels[first : first + count].copy_(batch.pixels[:count])
            self.valid[first : first + count].copy_(batch.valid[:count])
        self.labels = torch.from_numpy(source.labels.rows(np.arange(len(source)))).to(self.device)

    def __len__(self) -> int:
        return len(self.source)

    def stream(
        self,
        augmentations: Augmentation | Sequence[Augmentation],
        *,
        batch: int,
        seed: int,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
    ) -> Iterator[Batch]:
        """The training batches from step `start` on, as `loader.stream` gives them, already on the device."""
        several = tuple(augmentations) if isinstance(augmentations, Sequence) else (augmentations,)
        views = [BatchedAugmentation(augmentation) for augmentation in several]
        share, order = Share(batch=batch, rank=rank, world=world), Order(len(self), seed)
        for step in itertools.count(start) if stop is None else range(start, stop):
            at = order.stream(share.places(step), repeats)
            taken = self.sent(at.sample)
            pixels = self.pixels.index_select(0, taken)
            draws = [
                Draws.of(seed=seed, epoch=at.epoch, sample=at.sample, view=at.repeat * len(views) + number)
                for number in range(len(views))
            ]
            yield self.batch(step, tuple(v(pixels, d) for v, d in zip(views, draws, strict=True)), taken, at)

    def sweep(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every sample once, as it is; as in `loader.sweep` the last batch has places without a picture."""
        share = Share(batch=batch, rank=rank, world=world)
        for step in range(-(-len(self) // batch)):
            places = share.places(step)
            nought = np.zeros_like(places)
            exists = self.sent(places < len(self))
            taken = self.sent(np.minimum(places, len(self) - 1))
            at = Positions(epoch=nought, sample=places, repeat=nought)
            yield self.batch(step, (self.pixels.index_select(0, taken),), taken, at, exists)

    def batch(
        self, step: int, views: tuple[Tensor, ...], taken: Tensor, at: Positions, exists: Tensor | None = None
    ) -> Batch:
        valid = self.valid.index_select(0, taken)
        return Batch(
            step=step,
            views=views,
            label=self.labels.index_select(0, taken),
            sample=taken if exists is None else torch.where(exists, taken, -1),
            epoch=self.sent(at.epoch),
            valid=valid if exists is None else valid & exists,
        )

    def sent(self, array: "NDArray[np.int64] | NDArray[np.bool_]") -> Tensor:
        """A small array to the device without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
