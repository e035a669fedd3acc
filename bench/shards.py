"""How fast tar shards are indexed, opened, read and packed, and how much memory a shuffled pass takes.

    python bench/shards.py --members 100000 --index 10000000
    python bench/shards.py --pack set/train-{00000..00001}.tar --max-side 128

Makes a set of tiny images in a temporary folder, or in --folder (for example on a mounted store). The rates depend on
the machine and its other load; the growth of memory should not.
"""

import argparse
import io
import os
import shutil
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from vitrail.data.dataset import ImageDataset
from vitrail.data.randomness import EpochOrder
from vitrail.data.readers import shards
from vitrail.data.readers.shard_index import ShardFile, ShardIndex, open_spools, write_columns, write_index
from vitrail.data.tools.pack import pack

SHARDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=100_000, help="number of images in the generated set")
    parser.add_argument("--index", type=int, default=0, help="also write and open an index of this many samples")
    parser.add_argument("--pack", help="shards to pack, with one and with two processes")
    parser.add_argument("--max-side", type=int)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        os.environ["VITRAIL_CACHE"] = str(Path(name, "cache"))
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        if chosen.pack:
            pack_rates(chosen.pack, Path(name), chosen.max_side)
        else:
            make(Path(name, "set"), chosen.members)
            index_rates(Path(name, "set"))
            shuffled_pass(shards.read(Path(name, "set"))["train"])
        if chosen.index:
            big_index(Path(name), chosen.index)


def make(folder: Path, members: int) -> None:
    """Images of about 1 kB in ten shards; every one of them decodes."""
    folder.mkdir()
    kinds: list[bytes] = []
    for seed in range(16):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (18, 18, 3), np.uint8)).save(file, "PNG")
        kinds.append(file.getvalue())
    for part in range(SHARDS):
        with tarfile.open(folder / f"{part:05d}.tar", "w") as tar:
            for i in range(part * members // SHARDS, (part + 1) * members // SHARDS):
                for suffix, data in (("png", kinds[i % 16]), ("cls", str(i % 1000).encode())):
                    info = tarfile.TarInfo(f"{i:09d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def index_rates(folder: Path) -> None:
    began, worked = time.perf_counter(), time.process_time()
    source = shards.read(folder)["train"]
    made, own = time.perf_counter() - began, time.process_time() - worked
    began = time.perf_counter()
    shards.read(folder)
    again = time.perf_counter() - began
    worked = time.process_time()
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            tar.getmembers()
    plain = time.process_time() - worked
    print(f"index: {len(source):,} images ({2 * len(source):,} members) in {made:.2f} s, {own:.2f} s of processor")
    print(f"       opened again in {again * 1e3:.1f} ms; tarfile takes {plain:.2f} s of processor to list the members")


def shuffled_pass(source: ImageDataset) -> None:
    order, marks = EpochOrder(len(source), seed=0), list[tuple[float, float]]()
    step, elapsed = max(1, len(source) // 10), 0.0
    for start in range(0, len(source) - step + 1, step):
        samples = order(0, np.arange(start, start + step)).tolist()
        began = time.perf_counter()
        for i in samples:
            source.read(i)
        elapsed += time.perf_counter() - began
        marks.append(memory())
    print(f"reads: {len(source) / elapsed:,.0f} a second, shuffled, from the page cache")
    own, all_of_it = (np.array(column) for column in zip(*marks, strict=True))
    print(f"memory: {own[0]:.1f} MB of its own after a tenth of the pass, {own[-1]:.1f} MB at its end")
    print(f"        ({all_of_it[0]:.1f} and {all_of_it[-1]:.1f} MB with mapped files)")


def memory() -> tuple[float, float]:
    """MB of this process alone, and with the files it has mapped."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "VmRSS"))  # type: ignore[return-value]


def big_index(folder: Path, samples: int) -> None:
    """An index of many samples, whose shards do not exist."""
    each = 100_000
    number, none = np.arange(each), np.zeros(each, np.int64)
    rows = {"offset": number * 110_592 + 512, "size": np.full(each, 109_000), "label": number % 1000}
    rows |= {"names": np.frombuffer(b"".join(b"%09d.jpg" % i for i in range(each)), np.uint8)}
    rows |= {"name_length": np.full(each, 13), "several": number % 1000, "count": np.ones(each, np.int64)}
    rows |= {"listed": none, "mask_offset": none, "mask_size": none}
    wanted = [ShardFile(f"{i:05d}.tar", 11_059_200_000, 0) for i in range(samples // each)]
    began = time.perf_counter()
    with ExitStack() as stack:
        place, spools = open_spools([folder / "big.index"], stack)
        write_index(place, write_columns(wanted, lambda _: rows, spools), spools)
    made, before = time.perf_counter() - began, memory()
    began = time.perf_counter()
    source = shards.ShardDataset(folder, ShardIndex(place), 0, len(wanted) * each, tuple(map(str, range(1000))))
    name = source.name(len(source) // 2)
    opened, after = time.perf_counter() - began, memory()
    size = place.stat().st_size
    print(f"big index: {len(source):,} samples, {size / 1e6:,.0f} MB ({size / len(source):.1f} bytes each)")
    print(f"           written in {made:.1f} s, opened in {opened * 1e3:.1f} ms ({name})")
    print(f"           {after[0] - before[0]:.1f} MB of memory, {after[1] - before[1]:.1f} MB with mapped files")


def pack_rates(pattern: str, folder: Path, max_side: int | None) -> None:
    source = shards.read(pattern)
    for workers in (1, 2):
        out = folder / f"packed-{workers}"
        worked = time.process_time()
        report = pack(source, out, max_side=max_side, workers=workers)
        own = time.process_time() - worked
        count = sum(report.splits.values())
        print(
            f"pack, {workers} processes: {count:,} images, {report.reencoded:,} made smaller, "
            f"{report.bytes / 1e6:.0f} MB in {report.seconds:.1f} s: {count / report.seconds:,.0f} a second "
            f"({own:.1f} s of processor in the process that writes)"
        )
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
