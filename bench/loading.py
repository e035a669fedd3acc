"""Loading speed compared with torchvision's ImageFolder and v2 transforms: ratios of medians in one run.

    python bench/loading.py PHOTOGRAPHS                 # a folder of images, or a tar file with images in it
    python bench/loading.py --jpegs small=DIR1 large=DIR2

Both libraries decode JPEGs, take a random crop (5 to 100 % of the area) at 224 px and flip it, in one process,
alternating pass by pass, so that other load on the machine affects both. Then vitrail runs alone with one and with two
loader processes. The sets are first made from PHOTOGRAPHS: images of 500x400 and 1800x1350 pixels, composed of several
photographs at their own resolution, so that the fine detail is real. Small photographs are sharper per pixel than the
1800 px images of cameras and web sites. For the large set they are therefore enlarged by 1.5, which at quality 90 gives
the 2 bits per pixel that such images have; the last set ("sharp") has them without enlargement. With --jpegs the given
folders are read as they are.
"""

import argparse
import io
import json
import math
import os
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.data.decode.image import EncodedImage
from vitrail.data.loader import BatchStream, train_batches
from vitrail.data.randomness import CounterRng
from vitrail.data.readers.folder import read_classes
from vitrail.data.transforms.augmentation import inception

SIZE = 224
SETS = {  # width, height, enlarged by, how many
    "500x400": (500, 400, 1.0, 64),
    "1800x1350": (1800, 1350, 1.5, 24),
    "1800 sharp": (1800, 1350, 1.0, 24),
}


def photographs(path: Path) -> Iterator[Image.Image]:
    """The images of a folder or a tar file, over and over."""
    while True:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
                    yield Image.open(file).convert("RGB")
        else:
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.name.endswith((".jpg", ".jpeg", ".png", ".webp")):
                        yield Image.open(io.BytesIO(archive.extractfile(member).read())).convert("RGB")  # type: ignore[union-attr]


def mosaic(pictures: Iterator[Image.Image], width: int, height: int) -> Image.Image:
    """Photographs side by side until the canvas is full."""
    canvas, top = Image.new("RGB", (width, height)), 0
    while top < height:
        left, row = 0, height
        while left < width:
            picture = next(pictures)
            canvas.paste(picture, (left, top))
            left, row = left + picture.width, min(row, picture.height)
        top += row
    return canvas


def make(pictures: Iterator[Image.Image], name: str, folder: Path, quality: int) -> None:
    width, height, zoom, count = SETS[name]
    (folder / "all").mkdir(parents=True)
    for i in range(count):
        whole = mosaic(pictures, round(width / zoom), round(height / zoom))
        whole.resize((width, height), Image.Resampling.BICUBIC).save(folder / "all" / f"{i:03}.jpg", quality=quality)


def bits_a_pixel(folder: Path) -> float:
    files = list(folder.rglob("*.jp*g"))
    return 8 * sum(file.stat().st_size for file in files) / sum(math.prod(Image.open(file).size) for file in files)


def torchvision_pass(folder: Path) -> Callable[[int], None]:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIZE, scale=(0.05, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    pictures = ImageFolder(str(folder), v2.Compose(steps))
    loader = DataLoader(pictures, batch_size=len(pictures), shuffle=True)

    def once(number: int) -> None:
        torch.manual_seed(number)
        ((pixels, _),) = loader
        assert pixels.shape == (len(pictures), 3, SIZE, SIZE)
        assert pixels.dtype == torch.uint8

    return once


def vitrail_pass(folder: Path) -> Callable[[int], None]:
    source = read_classes(folder)
    batches = train_batches(source, inception(SIZE), BatchStream(batch=len(source)))  # endless: a pass is one step

    def once(number: int) -> None:
        del number  # the stream counts by itself
        batch = next(batches)
        assert batch.pixels.shape == (len(source), 3, SIZE, SIZE)
        assert bool(batch.valid.all())

    return once


def timed(once: Callable[[int], None], number: int) -> float:
    start = time.perf_counter()
    once(number)
    return time.perf_counter() - start


def beside(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Images a second of both, in one process, pass by pass in turn."""
    passes = {"vitrail": vitrail_pass(folder), "torchvision": torchvision_pass(folder)}
    count = len(list(folder.rglob("*.jp*g")))
    times: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(-1, args.rounds):
        for name in list(passes) if number % 2 else list(passes)[::-1]:
            took = timed(passes[name], number + 1)
            if number >= 0:  # the first pass warms the file cache
                times[name].append(took)
    rate = {name: count / statistics.median(values) for name, values in times.items()}
    pairs = [theirs / ours for ours, theirs in zip(times["vitrail"], times["torchvision"], strict=True)]
    ratio = rate["vitrail"] / rate["torchvision"]
    return {"pictures/s": rate, "ratio": ratio, "pairs": [min(pairs), max(pairs)]}


def with_workers(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Images a second with one and with two loader processes, in turn: from one batch to another well inside an
    endless stream, so that neither the start nor an end counts."""
    source, view = read_classes(folder), inception(SIZE)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for number in range(args.rounds):
        for workers in (1, 2) if number % 2 else (2, 1):
            batches = train_batches(source, view, BatchStream(batch=16), workers=workers)
            for _ in range(8):  # what was read ahead while the processes started
                next(batches)
            start = time.perf_counter()
            done = sum(len(next(batches)) for _ in range(args.batches))
            rates[workers].append(done / (time.perf_counter() - start))
            del batches  # ends the processes
    medians = {workers: statistics.median(values) for workers, values in rates.items()}
    return {"pictures/s": medians, "ratio": medians[2] / medians[1]}


def parts(folder: Path) -> dict[str, float]:
    """Where the time of one image goes, in milliseconds."""
    source, view = read_classes(folder), inception(SIZE)
    names = ("read", "header", "draw", "decode", "rest")
    spent: dict[str, list[float]] = {name: [] for name in names}
    for i in range(3 * len(source)):
        marks = [time.perf_counter()]
        data = source.read(i % len(source))
        marks.append(time.perf_counter())
        picture = EncodedImage(data)
        marks.append(time.perf_counter())
        draws = CounterRng(np.array([i * 7919], np.uint64))
        cut = view.crop.cut(picture.size, draws)
        marks.append(time.perf_counter())
        image = picture.rgb(cut.scale)
        marks.append(time.perf_counter())
        view.finish(image, picture.size, cut, draws)
        marks.append(time.perf_counter())
        for name, start, end in zip(names, marks, marks[1:], strict=False):
            spent[name].append(1e3 * (end - start))
    return {name: statistics.mean(values) for name, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, nargs="?", help="a folder or a tar file of images")
    parser.add_argument(
        "--jpegs", nargs="+", default=[], metavar="NAME=FOLDER", help="image folders of JPEGs, as they are"
    )
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=32, help="batches of 16 for each number of loader processes")
    parser.add_argument("--parts", action="store_true", help="also print where the time goes")
    parser.add_argument("--no-workers", action="store_true", help="skip the measurement with loader processes")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    import torchvision

    torch.set_num_threads(1)
    print(f"torchvision {torchvision.__version__}, Pillow {Image.__version__}, {platform.machine()}, ", end="")
    print(f"{os.cpu_count()} cores, {args.rounds} pairs of passes, quality {args.quality}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(folder) for name, folder in (given.split("=", 1) for given in args.jpegs)}
        if args.photographs is not None:
            pictures = photographs(args.photographs)
            for name in SETS:
                folders[name] = Path(temporary) / name
                make(pictures, name, folders[name], args.quality)
        rates = f"{'vitrail/s':>10} {'torchvision/s':>14} {'ratio':>7} {'of pairs':>13}"
        print(f"{'JPEGs':12} {'bits/pixel':>10} {rates} {'2 workers to 1':>16}")
        for name, folder in folders.items():
            row = beside(folder, args)
            rate, (low, high) = row["pictures/s"], row["pairs"]
            print(f"{name:12} {bits_a_pixel(folder):10.2f} {rate['vitrail']:10.1f} ", end="")
            print(f"{rate['torchvision']:14.1f} {row['ratio']:7.2f} ", end="")
            print(f"{low:6.2f}-{high:5.2f} ", end="", flush=True)
            if not args.no_workers:
                row["workers"] = with_workers(folder, args)
                print(f"{row['workers']['ratio']:16.2f}", end="")
            print(flush=True)
            if args.parts:
                row["parts"] = parts(folder)
                print("  ms: " + ", ".join(f"{part} {value:.2f}" for part, value in row["parts"].items()))
            results[name] = row
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
