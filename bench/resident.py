"""Throughput of the on-device data path in images per second: order, random draws and augmentation, without a network.

    python bench/resident.py [--device cuda] [--count 50000] [--size 32] [--batch 1024] [--group 1 --group 8]

The images are the bundled rendered shapes. Each augmentation runs for `--steps` steps, rounded up to whole groups, and
the following is reported:
- images per second, step by step and with several steps prepared at once (the automatic number, or `--group`);
- dispatched operations per step, including views;
- host time per step: for the random draws (made ahead in a thread), and for what the training loop waits for, with and
  without that thread;
- the share of the total time in which the loop was busy preparing steps (below 1, the host keeps ahead of the device).
On an accelerator, synchronisation is forbidden during the timed steps, so a hidden wait is an error, not a number.
`--pause` sleeps that many milliseconds between two steps, as if the host were waiting for a network on the device.
"""

import argparse
import itertools
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.data.datasets.builtin_sets import ShapesDataset
from vitrail.data.device_dataset import DeviceDataset
from vitrail.data.loader import BatchStream
from vitrail.data.randomness import EpochOrder
from vitrail.data.transforms.augmentation import Augmentation, RandomErasing, cifar, inception
from vitrail.data.transforms.batched import BatchedAugmentation
from vitrail.data.transforms.policy import RandAugment, ThreeAugment

WARM = 8  # steps before the clock starts, at least


class Counted(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def augmentations(size: int) -> dict[str, Augmentation]:
    pad = cifar(size)
    return {
        "pad, crop, flip": pad,
        "Inception crop, flip": inception(size),
        "pad, crop, flip, RandAugment": Augmentation(crop=pad.crop, policy=RandAugment()),
        "pad, crop, flip, RandAugment, erasing": Augmentation(
            crop=pad.crop, policy=RandAugment(), erase=RandomErasing()
        ),
        "pad, crop, flip, 3-Augment": Augmentation(crop=pad.crop, policy=ThreeAugment()),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def whole(steps: int, group: int) -> int:
    """So many steps, or more, as make whole groups."""
    return -(-steps // group) * group


def drawing(resident: DeviceDataset, augmentation: Augmentation, batch: int, steps: int, group: int) -> float:
    """Seconds a step for all that needs no device."""
    views = [BatchedAugmentation(augmentation)]
    drawn = resident.prepare_groups(views, BatchStream(batch=batch), EpochOrder(len(resident), 0), group)
    for _ in itertools.islice(drawn, whole(WARM, group) // group):
        pass
    start = time.perf_counter()
    for _ in itertools.islice(drawn, whole(steps, group) // group):
        pass
    return (time.perf_counter() - start) / whole(steps, group)


def dispatched(resident: DeviceDataset, augmentation: Augmentation, batch: int, group: int) -> float:
    """Operations a step."""
    with Counted() as counted:
        for _ in resident.train_batches(augmentation, BatchStream(batch=batch, stop=2 * group), group=group):
            pass
    return counted.count / (2 * group)


def measured(
    resident: DeviceDataset, augmentation: Augmentation, batch: int, steps: int, group: int, ahead: int, pause: float
) -> tuple[float, float]:
    """Seconds a step, and seconds of it that the loop waits for its next batch."""
    device, steps = resident.device, whole(steps, group)
    batches = resident.train_batches(augmentation, BatchStream(batch=batch), ahead=ahead, group=group)
    for _ in itertools.islice(batches, whole(WARM, group)):
        pass
    wait(device)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    start, busy = time.perf_counter(), 0.0
    for _ in range(steps):
        asked = time.perf_counter()
        next(batches)
        busy += time.perf_counter() - asked
        if pause:
            time.sleep(pause)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    wait(device)
    return (time.perf_counter() - start) / steps, busy / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("--group", type=int, action="append", help="steps prepared at once (default: 1 and automatic)")
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}; {args.count:,} images of {args.size} px, batch {args.batch}")
    start = time.perf_counter()
    resident = DeviceDataset(ShapesDataset(args.count, size=args.size), device=args.device)
    print(f"rendered and loaded in {time.perf_counter() - start:.1f} s, {resident.pixels.numel() / 1e6:.0f} MB")
    chosen = resident.choose_group(args.batch, [(args.size, args.size)])
    print(f"groups of {chosen} steps are chosen")
    pause = args.pause / 1e3
    for label, augmentation in augmentations(args.size).items():
        for group in args.group or sorted({1, chosen}):
            drawn = drawing(resident, augmentation, args.batch, args.steps, group)
            _, alone = measured(resident, augmentation, args.batch, args.steps, group, 0, pause)
            step, busy = measured(resident, augmentation, args.batch, args.steps, group, args.ahead, pause)
            count = dispatched(resident, augmentation, args.batch, group)
            rate = f"{args.batch / step:>12,.0f} pictures/s   {step * 1e3:7.2f} ms a step   host {busy / step:.2f}"
            host = f"draws {drawn * 1e3:5.2f}   loop {busy * 1e3:6.2f}, without the thread {alone * 1e3:6.2f} ms"
            print(f"{label:<38} group {group:<4} {rate}   {count:5.1f} operations   {host}")


if __name__ == "__main__":
    main()
