"""A dataset that fits lives on the accelerator as uint8 and is augmented there in batches, without a DataLoader.

    resident = DeviceDataset(dataset, device="cuda")
    for batch in resident.train_batches(augmentation, batch=1024, seed=0): ...

Order and draws are those of `loader.train_batches`: the same samples at the same step, cropped and flipped alike.
Several steps of small images are drawn and augmented at once, because kernel launches dominate there; grouping does not
change an image (on a GPU, up to rounding). A thread draws the next steps while the device works on the current ones.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import Pair, format_size
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.loader import Batch, BatchShare, EvalView, eval_batches
from vitrail.data.prefetch import PackedArrays, Prefetcher
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import CounterRng, EpochOrder
from vitrail.data.targets import CLASS_LABELS, Geometry, Targets
from vitrail.data.transforms.augmentation import Augmentation, check_geometries
from vitrail.data.transforms.batched import BatchedAugmentation, BatchPlan, find_sources, gather_masks
from vitrail.data.unreadable_log import UnreadableLog

LOAD_BATCH: Final = 256
MOVING: Final = "targets that follow crops and flips have no batched form, masks excepted"
ODD: Final = "is of another size than the first image"
LOOKED_AT: Final = 64  # images whose sizes are compared before a set is loaded
DRAWN: Final = 8192  # places of the stream that are looked up at once; a few take almost as long
GROUPED: Final = 4096  # images that are augmented at once, where steps have fewer
# What they may take as float32; all that is at work on them takes some times that. A CPU is quick in its cache alone.
GROUPED_BYTES: Final = {"cpu": 6 << 20}
GROUPED_BYTES_ELSEWHERE: Final = 64 << 20


def fits_on_device(source: ImageDataset, limit: int, targets: Targets = CLASS_LABELS) -> tuple[bool, str]:
    """Whether a source can live on a device that has `limit` bytes for it, and why or why not. Only some headers are
    read: images of another size among the rest are found when the source is loaded."""
    if targets.moves and targets.fill is None:
        return False, MOVING
    size, seen = None, np.unique(np.linspace(0, len(source) - 1, LOOKED_AT).astype(np.int64)) if len(source) else []
    for index in seen:
        try:
            image = source.open_image(int(index))
        except BadImage:
            continue  # not valid on the device either, which is not a reason against it
        if size is not None and image.size != size:
            return False, f"images are of several sizes, {format_size(size)} and {format_size(image.size)}"
        size = image.size
    if size is None:
        return False, "there is no image that can be read"
    need = bytes_needed(source, size, targets)
    told = f"{len(source):,} images of {format_size(size)} take {need / 1e9:.2f} GB"
    return need <= limit, f"{told}, {limit / 1e9:.2f} GB are allowed"


def bytes_needed(source: ImageDataset, size: Pair, targets: Targets) -> int:
    """The bytes that all images take at one size, with their masks where they have them."""
    return len(source) * (4 if targets.moves else 3) * size[0] * size[1]


def first_size(source: ImageDataset) -> Pair:
    """The size of the first image that can be read."""
    for index in range(len(source) - 1):
        with suppress(BadImage):
            return source.open_image(index).size
    return source.open_image(len(source) - 1).size


class WholeImage:
    """The view that changes nothing; all images must have one size."""

    def __init__(self, size: Pair) -> None:
        self.sizes = (size,)
        self.plain = EvalView(Preprocessing(image=size))

    def __call__(self, image: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        if image.size != self.sizes[0]:
            raise BadImage(ODD)
        return self.plain(image, draws)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        return self.plain.geometries(whole, draws)


class DeviceDataset:
    """All images of a source as one tensor on a device, uint8 [N, 3, H, W], brought to `size` where one is given."""

    def __init__(
        self,
        source: ImageDataset,
        *,
        device: torch.device | str,
        size: Pair | None = None,
        limit: int | None = None,
        workers: int = 0,
        ledger: UnreadableLog | None = None,
        targets: Targets = CLASS_LABELS,
    ) -> None:
        """`limit` is the number of bytes that the images may take."""
        if not len(source):
            raise DataError("a source without images cannot be loaded")
        if targets.moves and targets.fill is None:
            raise ConfigError(f"{MOVING}; read them through the loader")
        self.source, self.device, self.targets = source, torch.device(device), targets
        view = WholeImage(first_size(source)) if size is None else EvalView(Preprocessing(image=size))
        height, width = view.sizes[0]
        shape = (len(source), 3, height, width)
        need = bytes_needed(source, (height, width), targets)
        if limit is not None and need > limit:
            raise ConfigError(
                f"{len(source)} images of {height} x {width} take {need / 1e9:.1f} GB, "
                f"{limit / 1e9:.1f} GB are allowed; read them through the loader, or make them smaller"
            )
        self.pixels = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.valid = torch.zeros(len(source), dtype=torch.bool, device=self.device)
        self.target = self.load_targets((height, width))
        loaded = targets if targets.moves else CLASS_LABELS
        for batch in eval_batches(source, view, batch=LOAD_BATCH, workers=workers, ledger=ledger, targets=loaded):
            if odd := next((entry for entry in batch.unreadable if entry.reason == ODD), None):
                raise DataError(f"{odd}, {height} x {width}; give a size that all are brought to")
            first, count = batch.step * LOAD_BATCH, int((batch.sample >= 0).sum())
            self.pixels[first : first + count].copy_(batch.pixels[:count])
            self.valid[first : first + count].copy_(batch.valid[:count])
            if targets.moves:
                self.target[first : first + count].copy_(batch.target[:count])

    def load_targets(self, size: Pair) -> Tensor:
        """The targets of all samples [N, ...]; of those that move, what stands where there is no image."""
        if self.targets.moves:
            blank = self.targets.blank(size).to(self.device)
            return blank.repeat(len(self), *[1] * blank.ndim)
        return self.targets.batch(self.source, np.arange(len(self))).to(self.device)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def size(self) -> Pair:
        """Of the images as they lie on the device."""
        return (self.pixels.shape[-2], self.pixels.shape[-1])

    def train_batches(
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
        ahead: int = 4,
        group: int | None = None,
    ) -> Iterator[Batch]:
        """The training batches from step `start` on, as `loader.train_batches` gives them, already on the device. A
        thread draws `ahead` steps in advance, or the next group; with 0 there is no thread. `group` is the number of
        steps augmented at once, chosen by size if not given. Neither changes the batches."""
        if repeats < 1:
            raise ConfigError(f"repeats={repeats} must be at least 1")
        if group is not None and group < 1:
            raise ConfigError(f"group={group} must be at least 1")
        several = tuple(augmentations) if isinstance(augmentations, Sequence) else (augmentations,)
        views = [BatchedAugmentation(augmentation) for augmentation in several]
        share, order = BatchShare(batch=batch, rank=rank, world=world), EpochOrder(len(self), seed)
        group = group or self.choose_group(share.local, [view.size for view in views])
        blocks = groups(start, stop, group, block=max(1, DRAWN // (share.local * group)))
        if self.targets.moves:
            check_geometries(several)
        drawn = prepare_groups(blocks, views, self.size, share, order, repeats, moving=self.targets.moves)
        return self.batches(views, drawn, -(-ahead // group))

    def choose_group(self, local: int, sizes: Sequence[Pair]) -> int:
        """How many steps of `local` images to augment at once into views of these sizes."""
        room = GROUPED_BYTES.get(self.device.type, GROUPED_BYTES_ELSEWHERE)
        largest = max(height * width for height, width in (self.size, *sizes))
        return max(1, min(GROUPED, room // (4 * 3 * largest)) // local)

    def batches(
        self, views: Sequence[BatchedAugmentation], drawn: "Iterator[PreparedGroup]", ahead: int
    ) -> Iterator[Batch]:
        """What was drawn on the host, done on the device."""
        with closing(Prefetcher(drawn, ahead)) if ahead else nullcontext(drawn) as several:
            for group in several:
                yield from self.split_group(views, group)

    def split_group(self, views: Sequence[BatchedAugmentation], group: "PreparedGroup") -> Iterator[Batch]:
        """The steps of a group, all done before the first is asked for: parts of the same tensors."""
        whole = self.augment_group(views, group)
        if len(group.steps) == 1:
            yield whole
            return
        local = len(whole) // len(group.steps)
        rest = (whole.sample, whole.epoch, whole.valid)
        parts = zip(*(tensor.split(local) for tensor in (*rest, *whole.targets, *whole.views)), strict=True)
        for step, (sample, epoch, valid, *others) in zip(group.steps, parts, strict=True):
            targets, seen = tuple(others[: len(whole.targets)]), tuple(others[len(whole.targets) :])
            yield Batch(step=step, views=seen, targets=targets, sample=sample, epoch=epoch, valid=valid)

    def augment_group(self, views: Sequence[BatchedAugmentation], group: "PreparedGroup") -> Batch:
        """All steps of a group as one batch, by the number of the first."""
        arrays = iter(group.packed.to_device(self.device))
        taken, epoch = next(arrays), next(arrays)
        pixels = self.pixels.index_select(0, taken)
        seen = [view.apply(plan, pixels, arrays) for view, plan in zip(views, group.plans, strict=True)]
        targets = (self.target.index_select(0, taken),)
        if self.targets.fill is not None:
            targets = tuple(gather_masks(targets[0], next(arrays), next(arrays), self.targets.fill) for _ in views)
        return self.build_batch(group.steps.start, tuple(seen), targets, taken, epoch)

    def eval_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every sample once, as it is; as in `loader.eval_batches` the last batch has places without an image."""
        share = BatchShare(batch=batch, rank=rank, world=world)
        for step in range(-(-len(self) // batch)):
            places = share.places(step)
            inside = np.minimum(places, len(self) - 1)
            taken, epoch, exists = PackedArrays([inside, np.zeros_like(places), places < len(self)]).to_device(
                self.device
            )
            target = self.target.index_select(0, taken)
            if self.targets.fill is not None:
                target = target.masked_fill_(~exists[:, None, None], self.targets.fill)
            yield self.build_batch(step, (self.pixels.index_select(0, taken),), (target,), taken, epoch, exists)

    def build_batch(
        self,
        step: int,
        views: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
        taken: Tensor,
        epoch: Tensor,
        exists: Tensor | None = None,
    ) -> Batch:
        valid = self.valid.index_select(0, taken)
        return Batch(
            step=step,
            views=views,
            targets=targets,
            sample=taken if exists is None else torch.where(exists, taken, -1),
            epoch=epoch,
            valid=valid if exists is None else valid & exists,
        )


class PreparedGroup(NamedTuple):
    """What the host has to say about a group of steps: what to do, and the arrays for it: sample, epoch, those of the
    plans, and rows and columns for each view's masks."""

    steps: range
    plans: list[BatchPlan]
    packed: PackedArrays


def groups(start: int, stop: int | None, most: int, block: int = 1) -> Iterator[list[range]]:
    """The steps in groups of `most`, which end at its multiples wherever one starts, and at the stop; so many of them
    together as make a `block`."""
    ends = itertools.count(start - start % most + most, most)
    while stop is None or start < stop:
        some = [start, *itertools.islice(ends, block)]
        whole = [range(first, last if stop is None else min(last, stop)) for first, last in itertools.pairwise(some)]
        yield [steps for steps in whole if steps]
        start = some[-1]


def prepare_groups(
    blocks: Iterator[list[range]],
    views: Sequence[BatchedAugmentation],
    size: Pair,
    share: BatchShare,
    order: EpochOrder,
    repeats: int,
    *,
    moving: bool = False,
) -> Iterator[PreparedGroup]:
    """The host's part of each group of steps. Needs no device, and reads no images."""
    for block in blocks:
        first = block[0][0]
        at = order.locate(np.concatenate([share.places(step) for steps in block for step in steps]), repeats)
        draws = [
            CounterRng.for_samples(
                seed=order.seed, epoch=at.epoch, sample=at.sample, view=at.repeat * len(views) + number
            )
            for number in range(len(views))
        ]
        for steps in block:
            part = slice((steps.start - first) * share.local, (steps.stop - first) * share.local)
            plans = [view.plan(drawn.rows(part), size) for view, drawn in zip(views, draws, strict=True)]
            arrays = [array for plan in plans for array in plan.arrays]
            if moving:
                for view, drawn in zip(views, draws, strict=True):
                    arrays += find_sources(view.augmentation, drawn.rows(part), size)
            yield PreparedGroup(steps, plans, PackedArrays([at.sample[part], at.epoch[part], *arrays]))
