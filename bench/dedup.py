"""Which planted copies de-duplication finds, and how long it takes.

    python bench/dedup.py planted PHOTOGRAPHS.tar                       # recall and precision by kind of copy
    python bench/dedup.py planted PHOTOGRAPHS.tar --strangers OTHERS.tar OTHERS2.tar
    python bench/dedup.py --workers 2 speed                             # 1,000 x 50,000, from files to pairs

``planted`` uses a tar file of real photographs as TRAIN and makes one copy of every kind from each of them
(tests/data/dedup/planted.py); TEST consists of these copies and the ``--strangers``. Precision counts every pair that
was not planted as wrong, so the strangers must not contain real copies: check the page written to ``--out``. ``speed``
writes 51,000 JPEG files of 64 x 64, random crops of 500 rendered images with the spectrum of photographs, and times the
two parts of the work: reading, decoding and hashing; then comparing.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.dedup.planted import Files, encoded, plant, scene, score, tar_files
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.dedup.deduplicate import DedupJob, deduplicate, write_page


class Numbered(ImageDataset):
    """Files that are called by their numbers."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.labels = folder, Labels.none(count)

    def read(self, index: int) -> bytes:
        return (self.folder / self.name(index)).read_bytes()

    def name(self, index: int) -> str:
        return f"{index:06d}.jpg"

    def sizes(self) -> "np.ndarray":
        return np.array([(self.folder / self.name(i)).stat().st_size for i in range(len(self))], np.int64)


class Clock:
    """Seconds by stage, from the progress that is reported."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ends: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.ends[stage] = time.perf_counter() - self.began

    def said(self) -> str:
        stages, before = [], 0.0
        for stage, end in self.ends.items():
            stages.append(f"{stage} {end - before:.1f} s")
            before = end
        return ", ".join(stages)


def planted(photographs: Path, strangers: list[Path], workers: int, out: Path) -> None:
    train = tar_files(photographs)
    others = [tar_files(path) for path in strangers]
    rest = Files([f for one in others for f in one.files], [n for one in others for n in one.names])
    made = plant(train, rest)
    print(f"{len(train):,} photographs, {len(made.truth):,} copies, {len(rest):,} strangers")
    clock = Clock()
    job = DedupJob(
        train=train, tests={"planted": made.test}, out=out, cache=out / "cache", workers=workers, progress=clock
    )
    outcome = deduplicate(job)
    result = score(made, set(zip(outcome.pairs["train"].tolist(), outcome.pairs["test"].tolist(), strict=True)))
    print(clock.said())
    for kind, recall in result.recall.items():
        print(f"  recall {recall:.4f}  {kind}")
    print(f"  precision {result.precision:.5f}: {len(outcome.pairs):,} pairs, {len(result.wrong)} not planted")
    for one, other in result.wrong[:20]:
        print(f"    {train.name(one)} ~ {made.test.name(other)}")
    write_page(out / "pairs.html", outcome.record, outcome.pairs, train, job.tests)
    print(f"  {out / 'pairs.html'}")


def speed(train: int, test: int, workers: int, out: Path) -> None:
    rng = np.random.default_rng(0)
    large = [scene(rng, 256) for _ in range(500)]
    folders = {"train": train, "test": test}
    for name, count in folders.items():
        (out / name).mkdir(parents=True)
        for i in range(count):
            left, top = rng.integers(0, 192, 2).tolist()
            window = large[int(rng.integers(len(large)))].crop((left, top, left + 64, top + 64))
            (out / name / f"{i:06d}.jpg").write_bytes(encoded(window, "JPEG", 85))
    print(f"{test:,} x {train:,} JPEG files of 64 x 64, {workers} workers")
    sources = {name: Numbered(out / name, count) for name, count in folders.items()}
    for run in ("from files", "again, prints cached"):
        clock, before = Clock(), os.times()
        outcome = deduplicate(
            DedupJob(
                train=sources["train"],
                tests={"test": sources["test"]},
                out=out / "result",
                cache=out / "cache",
                workers=workers,
                progress=clock,
            )
        )
        total = time.perf_counter() - clock.began
        spent = sum(os.times()[:4]) - sum(before[:4])  # of this process and of those that it has waited for
        print(
            f"  {run}: {total:.1f} s in all ({clock.said()}), {spent:.1f} s of processor time, "
            f"{len(outcome.pairs):,} pairs"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="output folder, kept (default: a temporary folder)")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("planted")
    one.add_argument("photographs", type=Path)
    one.add_argument("--strangers", type=Path, nargs="*", default=[])
    two = commands.add_parser("speed")
    two.add_argument("--train", type=int, default=50_000)
    two.add_argument("--test", type=int, default=1_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        if args.command == "planted":
            planted(args.photographs, args.strangers, args.workers, out)
        else:
            speed(args.train, args.test, args.workers, out)


if __name__ == "__main__":
    main()
