"""How many pictures a second the on-device path gives: order, draws and augmentation, without a network.

    python bench/resident.py [--device cuda] [--count 50000] [--size 32] [--batch 1024]

The pictures are the rendered shapes of the package. For each augmentation, over `--steps` steps: pictures a second; the
host's time a step, first what it draws (which runs in a thread, ahead of the rest), then what the training loop waits
for, with and without the thread; and the part of all the time in which that loop was busy preparing steps (below 1 the
host keeps ahead of the device). On an accelerator the timed steps run with synchronisation forbidden, so a hidden wait
would be an error, not a number. `--pause` sleeps so many milliseconds between two steps, as a network on the device
would let the host wait.
"""

import argparse
import itertools
import time

import torch

from vitrail.data.loader import Share
from vitrail.data.order import Order
from vitrail.data.readers.shapes import Shapes
from vitrail.data.resident import Resident, prepared
from vitrail.data.transforms.augmentation import Augmentation, cifar, inception
from vitrail.data.transforms.batched import BatchedAugmentation
from vitrail.data.transforms.erase import RandomErasing
from vitrail.data.transforms.policy import RandAugment, ThreeAugment

WARM = 8  # steps before the clock starts


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


def drawing(resident: Resident, augmentation: Augmentation, batch: int, steps: int) -> float:
    """Seconds a step for all that needs no device."""
    views = [BatchedAugmentation(augmentation)]
    order = Order(len(resident), 0)
    drawn = prepared(itertools.count(), views, resident.size, Share(batch=batch), order, 1)
    for _ in itertools.islice(drawn, WARM):
        pass
    start = time.perf_counter()
    for _ in itertools.islice(drawn, steps):
        pass
    return (time.perf_counter() - start) / steps


def measured(
    resident: Resident, augmentation: Augmentation, batch: int, steps: int, ahead: int, pause: float
) -> tuple[float, float]:
    """Seconds a step, and seconds of it that the loop waits for its next batch."""
    device = resident.device
    batches = resident.stream(augmentation, batch=batch, seed=0, ahead=ahead)
    for _ in itertools.islice(batches, WARM):
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
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}; {args.count:,} pictures of {args.size} px, batch {args.batch}")
    start = time.perf_counter()
    resident = Resident(Shapes(args.count, size=args.size), device=args.device)
    print(f"rendered and loaded in {time.perf_counter() - start:.1f} s, {resident.pixels.numel() / 1e6:.0f} MB")
    for label, augmentation in augmentations(args.size).items():
        drawn = drawing(resident, augmentation, args.batch, args.steps)
        _, alone = measured(resident, augmentation, args.batch, args.steps, 0, args.pause / 1e3)
        step, busy = measured(resident, augmentation, args.batch, args.steps, args.ahead, args.pause / 1e3)
        rate = f"{args.batch / step:>12,.0f} pictures/s   {step * 1e3:7.2f} ms a step   host {busy / step:.2f}"
        host = f"draws {drawn * 1e3:5.2f}   loop {busy * 1e3:6.2f}, without the thread {alone * 1e3:6.2f} ms"
        print(f"{label:<40} {rate}   {host}")


if __name__ == "__main__":
    main()
