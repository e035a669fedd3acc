"""How many pictures a second the on-device path gives: order, draws and augmentation, without a network.

    python bench/resident.py [--device cuda] [--count 50000] [--size 32] [--batch 1024]

The pictures are the rendered shapes of the package. For each augmentation: pictures a second over `--steps` steps, and
the part of the time in which the host was busy preparing steps (below 1 the host keeps ahead of the device). On an
accelerator the timed steps run with synchronisation forbidden, so a hidden wait would be an error, not a number.
"""

import argparse
import time

import torch

from vitrail.data.readers.shapes import Shapes
from vitrail.data.resident import Resident
from vitrail.data.transforms.augmentation import Augmentation, cifar, inception
from vitrail.data.transforms.erase import RandomErasing
from vitrail.data.transforms.policy import RandAugment, ThreeAugment


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


def measured(resident: Resident, augmentation: Augmentation, batch: int, steps: int) -> tuple[float, float]:
    """Pictures a second, and the host's part of the time."""
    device = resident.device
    for _ in resident.stream(augmentation, batch=batch, seed=0, stop=5):
        pass
    wait(device)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    for _ in resident.stream(augmentation, batch=batch, seed=0, start=5, stop=5 + steps):
        pass
    prepared = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    wait(device)
    whole = time.perf_counter() - start
    return steps * batch / whole, prepared / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}; {args.count:,} pictures of {args.size} px, batch {args.batch}")
    start = time.perf_counter()
    resident = Resident(Shapes(args.count, size=args.size), device=args.device)
    print(f"rendered and loaded in {time.perf_counter() - start:.1f} s, {resident.pixels.numel() / 1e6:.0f} MB")
    for label, augmentation in augmentations(args.size).items():
        rate, host = measured(resident, augmentation, args.batch, args.steps)
        print(f"{label:<40} {rate:>12,.0f} pictures/s   {args.batch / rate * 1e3:7.2f} ms a step   host {host:.2f}")


if __name__ == "__main__":
    main()
