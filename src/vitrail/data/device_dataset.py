"""Keeps a dataset that fits on the accelerator as uint8 and augments it there in batches, without a DataLoader.

    resident = DeviceDataset(dataset, device="cuda")
    for batch in resident.train_batches(augmentation, BatchStream(batch=1024)): ...

Order and draws are those of `loader.train_batches`: the same samples at the same step, cropped and flipped alike.
Several steps of small images are drawn and augmented at once, because kernel launches dominate there; grouping does not
change an image (on a GPU, up to rounding). A thread draws the next steps while the device works on the current ones.
"""

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from typing import Final, TypeAlias, TypeVar, cast

import numpy as np
import torch

from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import Pair, format_size
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import OTHER_SIZE, Batch, BatchStream, EvalView, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import EpochOrder
from vitrail.data.segment_targets import BITS, SegmentTargets, add_places, drop_unseen, round_up_places
from vitrail.data.targets import CLASS_LABELS, Target, Targets, TargetSegments, map_target
from vitrail.data.transforms.augmentation import Augmentations, check_geometries
from vitrail.data.transforms.batched import BatchedAugmentation, BatchPlan, PackedArrays, find_sources, gather_masks
from vitrail.data.unreadable_log import UnreadableLog

Item = TypeVar("Item")
Device: TypeAlias = torch.device | str
# The host's part of a group of steps: the steps, the plans, and their arrays: sample, epoch, those of the plans, and
# the rows and columns for each view's masks.
PreparedGroup: TypeAlias = tuple[range, list[BatchPlan], PackedArrays]

LOAD_BATCH: Final = 256
MOVING: Final = "targets that follow crops and flips have no batched form, masks and segments excepted"
SIZES_COMPARED: Final = 64  # images whose sizes are compared before a set is loaded
DRAWN: Final = 8192  # positions of the stream looked up at once; a few take almost as long
GROUPED: Final = 4096  # images augmented at once, if steps have fewer
# The bytes that they may take as float32. Working memory is a few times that, and a CPU is fast only within its cache.
CPU_BYTES, DEVICE_BYTES = 6 << 20, 64 << 20


def fits_on_device(source: ImageDataset, limit: int, targets: Targets = CLASS_LABELS) -> tuple[bool, str]:
    """Whether a source fits on a device that has `limit` bytes for it, and why or why not. Only some headers are read:
    images of another size among the rest are found when the source is loaded."""
    if targets.moves and targets.fill is None:
        return False, MOVING
    sizes, seen = list[Pair](), np.unique(np.linspace(0, len(source) - 1, SIZES_COMPARED).astype(np.int64))
    segments = 0  # of the fullest image
    for index in seen.tolist() if len(source) else ():
        with suppress(BadImage, OSError):  # an unreadable image is marked as not valid on the device, too
            sizes.append(source.open_image(index).size)
            if isinstance(targets, SegmentTargets):
                segments = max(segments, len(targets.read(source, index, sizes[-1])))
    if not sizes:
        return False, "no image can be read"
    size, other = sizes[0], next((size for size in sizes if size != sizes[0]), None)
    if other is not None:
        return False, f"images are of several sizes, {format_size(size)} and {format_size(other)}"
    masks = round_up_places(segments) // BITS if isinstance(targets, SegmentTargets) else int(targets.moves)
    need = len(source) * (3 + masks) * size[0] * size[1]
    takes = f"{len(source):,} images of {format_size(size)} take {need / 1e9:.2f} GB"
    return need <= limit, f"{takes}, {limit / 1e9:.2f} GB are allowed"


def first_size(source: ImageDataset) -> Pair:
    """Returns the size of the first image that can be read. BadImage if there is none."""
    if not len(source):
        raise DataError("a source without images cannot be loaded")
    for index in range(len(source) - 1):
        with suppress(BadImage):
            return source.open_image(index).size
    return source.open_image(len(source) - 1).size


class DeviceDataset:
    """All images of a source, which must have the same size, as one tensor on a device, uint8 [N, 3, H, W]. `workers`
    is the number of loader processes that read them."""

    def __init__(
        self,
        source: ImageDataset,
        device: Device,
        ledger: UnreadableLog | None = None,
        targets: Targets = CLASS_LABELS,
        *,
        workers: int = 0,
    ) -> None:
        if targets.moves and targets.fill is None:
            raise ConfigError(f"{MOVING}; read them through the loader")
        self.source, self.device, self.targets = source, torch.device(device), targets
        self.size = height, width = first_size(source)
        self.pixels = torch.empty((len(source), 3, height, width), dtype=torch.uint8, device=self.device)
        self.valid = torch.zeros(len(source), dtype=torch.bool, device=self.device)
        self.target = make_blank_target(source, targets, self.size, self.device)
        view = EvalView(Preprocessing(image=self.size), same_size=True)
        batches = eval_batches(source, view, batch=LOAD_BATCH, workers=workers, ledger=ledger, targets=targets)
        for batch in batches:
            if odd := next((entry for entry in batch.unreadable if entry.reason == OTHER_SIZE), None):
                raise DataError(f"{odd}, {height} x {width}; use data.resident=off")
            first, count = batch.step * LOAD_BATCH, int((batch.sample >= 0).sum())
            self.pixels[first : first + count].copy_(batch.pixels[:count])
            self.valid[first : first + count].copy_(batch.valid[:count])
            if targets.moves:
                self.target = write_target(self.target, batch.targets[0], first, count)

    def __len__(self) -> int:
        return len(self.source)

    def train_batches(
        self, augmentations: Augmentations, stream: BatchStream, *, ahead: int = 4, group: int | None = None
    ) -> Iterator[Batch]:
        """Yields the training batches of a stream, as `loader.train_batches` does, already on the device. A thread
        draws `ahead` steps in advance, or the next group; with 0 there is no thread. `group` is the number of steps
        augmented at once, chosen by size if not given. Neither changes the batches."""
        if group is not None and group < 1:
            raise ConfigError(f"group={group} must be at least 1")
        several = tuple(augmentations) if isinstance(augmentations, Sequence) else (augmentations,)
        views = [BatchedAugmentation(augmentation) for augmentation in several]
        if self.targets.moves:
            check_geometries(several)
        group = group or self.choose_group(stream.local, [view.size for view in views])
        order = EpochOrder(len(self), stream.seed, stream.repeats)
        return self.batches(views, self.prepare_groups(views, stream, order, group), -(-ahead // group))

    def choose_group(self, local: int, sizes: Sequence[Pair]) -> int:
        """Chooses how many steps of `local` images to augment at once into views of these sizes."""
        room = CPU_BYTES if self.device.type == "cpu" else DEVICE_BYTES
        largest = max(height * width for height, width in (self.size, *sizes))
        return max(1, min(GROUPED, room // (4 * 3 * largest)) // local)

    def prepare_groups(
        self, views: Sequence[BatchedAugmentation], stream: BatchStream, order: EpochOrder, group: int
    ) -> Iterator[PreparedGroup]:
        """Draws the host's part of each group of steps. Needs no device and reads no images."""
        local, size = stream.local, self.size
        for block in groups(stream.start, stream.stop, group, block=max(1, DRAWN // (local * group))):
            first = block[0][0]
            at = order.locate(np.concatenate([stream.places(step) for steps in block for step in steps]))
            draws = at.draws(stream.seed, len(views))
            for steps in block:
                part = slice((steps.start - first) * local, (steps.stop - first) * local)
                pairs = [(view, drawn.rows(part)) for view, drawn in zip(views, draws, strict=True)]
                plans = [view.plan(drawn, size) for view, drawn in pairs]
                arrays = [array for plan in plans for array in plan.arrays]
                for view, drawn in pairs if self.targets.moves else []:
                    arrays += find_sources(view.augmentation, drawn, size)
                yield steps, plans, PackedArrays([at.sample[part], at.epoch[part], *arrays])

    def batches(
        self, views: Sequence[BatchedAugmentation], drawn: Iterator[PreparedGroup], ahead: int
    ) -> Iterator[Batch]:
        """Runs on the device what the host has drawn."""
        with closing(prefetch(drawn, ahead)) if ahead else nullcontext(drawn) as several:
            for group in several:
                yield from self.augment_group(views, *group)

    def augment_group(
        self, views: Sequence[BatchedAugmentation], steps: range, plans: list[BatchPlan], packed: PackedArrays
    ) -> Iterator[Batch]:
        """Augments a whole group and returns its steps, which are slices of the same tensors."""
        arrays = iter(packed.to_device(self.device))
        taken, epoch = next(arrays), next(arrays)
        pixels = self.pixels.index_select(0, taken)
        seen = [view.apply(plan, pixels, arrays) for view, plan in zip(views, plans, strict=True)]
        target = map_target(self.target, lambda tensor: tensor.index_select(0, taken))
        targets = [target]
        if self.targets.fill is not None:
            targets = [gather_target(target, next(arrays), next(arrays), self.targets.fill) for _ in views]
        local = len(taken) // len(steps)
        tensors = (taken, epoch, self.valid.index_select(0, taken), *seen)
        parts = zip(*(tensor.split(local) for tensor in tensors), strict=True)
        for place, (step, (sample, epochs, valid, *images)) in enumerate(zip(steps, parts, strict=True)):
            mine = slice(place * local, (place + 1) * local)
            moved = tuple(map_target(target, lambda tensor, mine=mine: tensor[mine]) for target in targets)
            yield Batch(step=step, views=tuple(images), targets=moved, sample=sample, epoch=epochs, valid=valid)


def make_blank_target(source: ImageDataset, targets: Targets, size: Pair, device: torch.device) -> Target:
    """Makes the targets of all images if they do not move with the pixels, else the blank target of an unreadable image
    for each, to be overwritten by `write_target`."""
    count = len(source)
    if not targets.moves:
        return targets.batch(source, np.arange(count)).to(device)
    if isinstance(targets, SegmentTargets):
        return map_target(targets.stack([None], size), lambda one: one.to(device).repeat(count, *[1] * (one.ndim - 1)))
    blank = targets.blank(size).to(device)
    return blank.repeat(count, *[1] * blank.ndim)


def write_target(target: Target, batch: Target, first: int, count: int) -> Target:
    """Writes the targets of `count` images, from `first` on, into those of all images, and returns these. Segments are
    padded to more places if an image has more than any before it."""
    pairs = list[tuple[torch.Tensor, torch.Tensor]]()
    if isinstance(target, TargetSegments) and isinstance(batch, TargetSegments):
        places = max(target.classes.shape[1], batch.classes.shape[1])
        target = add_places(target, places) if places > target.classes.shape[1] else target
        pairs += zip(target, add_places(batch, places), strict=True)
    elif isinstance(target, torch.Tensor) and isinstance(batch, torch.Tensor):
        pairs.append((target, batch))
    for whole, part in pairs:
        whole[first : first + count].copy_(part[:count])
    return target


def gather_target(target: Target, rows: torch.Tensor, columns: torch.Tensor, fill: int) -> Target:
    """Gathers the rows and columns of masks or segments that a view shows."""
    if isinstance(target, torch.Tensor):
        return gather_masks(target, rows, columns, fill)
    return drop_unseen(target._replace(planes=gather_masks(target.planes, rows, columns, fill)))


def groups(start: int, stop: int | None, most: int, block: int = 1) -> Iterator[list[range]]:
    """Splits the steps into groups that end at multiples of `most`, wherever the steps start, and at the stop. Yields
    up to `block` groups at a time."""
    ends = itertools.count(start - start % most + most, most)
    while stop is None or start < stop:
        some = [start, *itertools.islice(ends, block)]
        whole = [range(first, last if stop is None else min(last, stop)) for first, last in itertools.pairwise(some)]
        yield [steps for steps in whole if steps]
        start = some[-1]


def prefetch(items: Iterator[Item], depth: int) -> Generator[Item]:
    """Yields the items and errors of an iterator in order, with up to `depth` of them computed in advance by a thread.
    The thread ends with the iterator, when the generator is closed or garbage collected, and when Python exits."""
    end, pool = object(), ThreadPoolExecutor(1, "prefetch")
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield cast("Item", item)
    finally:
        pool.shutdown(cancel_futures=True)
