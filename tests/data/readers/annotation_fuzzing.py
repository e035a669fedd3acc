"""Damaged annotations by the thousand, read in forked children under a memory limit and a watchdog.

    python -m tests.data.readers.annotation_fuzzing --files 300 --seed 0

A damaged copy of one file of a set is put in its place; the set should open and give its segments and masks, or refuse
with an error of this package in one line. Any other exception, a crash, a hang or a blow-up ends the run with exit
status 1, and the file is left in ``--keep``. The same seed does the same damage.
"""

import argparse
import copy
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.data.decode.fuzzing import mutate
from tests.data.readers.annotated_sets import write_coco, write_panoptic, write_voc, write_yolo
from tests.forked import reports
from vitrail.core.errors import BadImage, VitrailError
from vitrail.data.collection import open_collection

BATCH = 50
MEMORY = 3000 << 20  # bytes a child may map beyond what it was born with
GROWTH = 600 << 20  # bytes of resident memory that no small file has a claim to
PATIENCE = 30.0
OUTCOMES = ("refused", "unreadable", "read", "exception", "crash", "hang", "memory")
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 7, 1.5, -1e9, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, "", "1", "10", "cat",
    "\ud800", "a\0b", "é" * 300, [], {}, [[]], [None], ["x"], [1, 2, 3], {"size": [24, 32], "counts": [768]},
    {"size": [10**9, 10**9], "counts": [10**18]}, {"size": [24, 32], "counts": "0" * 50}, [[1e7, 0, -1e7, 5, 3, 3]],
)  # fmt: skip
# Of each kind of set: how it is read, how it is written, and which of its files is damaged.
KINDS: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "coco": ("coco", write_coco, ""),
    "coco boxes": ("coco", partial(write_coco, masks=False), ""),
    "panoptic": ("panoptic", write_panoptic, ""),
    "panoptic png": ("panoptic", write_panoptic, "annotations/panoptic_train/0.png"),
    "yolo": ("yolo", write_yolo, ""),
    "yolo boxes": ("yolo", partial(write_yolo, masks=False), ""),
    "yolo names": ("yolo", write_yolo, "data.yaml"),
    "voc": ("voc", write_voc, ""),
    "voc masks": ("voc", partial(write_voc, masks=True), ""),
    "voc lists": ("voc", partial(write_voc, masks=True), "ImageSets/Segmentation/train.txt"),
}


def replace_value(content: Any, rng: random.Random) -> Any:
    """The content with something in it replaced, taken out, or put in twice."""
    if not isinstance(content, dict | list) or not content or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(VALUES))
    key = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
    if rng.random() < 0.1:
        del content[key]
    elif isinstance(content, list) and rng.random() < 0.1:
        content.insert(key, copy.deepcopy(content[key]))
    else:
        content[key] = replace_value(content[key], rng)
    return content


def damage_file(path: Path, seed: str) -> tuple[str, bytes]:
    """What is done to a file, and its new content."""
    rng, content = random.Random(seed), path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        parsed: Any = json.loads(content)
        for _ in range(rng.choice([1, 1, 2, 4])):
            parsed = replace_value(parsed, rng)
        return "values", json.dumps(parsed).encode()
    if path.suffix in (".txt", ".xml", ".yaml") and rng.random() < 0.6:
        words = content.decode().replace(">", "> ").replace("<", " <").split(" ")
        for _ in range(rng.choice([1, 1, 3])):
            words[rng.randrange(len(words))] = rng.choice(
                ["nan", "-1", "1e999", "0.5", "", "\n", "x", "9" * 400, "[", "#", "1_0"]
            )
        return "words", " ".join(words).encode()
    name = "png" if path.suffix == ".png" else "text"
    return mutate(name, content, content[::-1], seed)


def attempt(kind: str, root: Path) -> tuple[str, str]:
    """Open a set and read all of it: what came of it, and the reason."""
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, words = "read", ""
    try:
        found = open_collection(f"{KINDS[kind][0]}:{root}")
        for source in found.splits.values():
            words = source.fingerprint
            for at in range(len(source)):
                for read in [source.segments, *([source.mask] if source.pixel_classes else [])]:
                    try:
                        read(at)
                    except BadImage as error:
                        outcome, words = "unreadable", str(error)
        words = words + "".join(found.notes)
    except VitrailError as error:
        outcome, words = "refused", str(error)
    except Exception as error:
        outcome, words = "exception", repr(error)
    if outcome in ("refused", "unreadable") and not (
        words.isprintable() and 0 < len(words) < 1000 and " at 0x" not in words
    ):
        outcome = "exception"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) << 10
    return ("memory", f"grew by {grown >> 20} MiB; {words}") if grown > GROWTH else (outcome, words)


Job = tuple[str, bytes]  # damage, content


def child(kind: str, root: Path, file: Path, jobs: list[Job], pipe: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for _, content in jobs:
        file.write_bytes(content)
        os.write(pipe, json.dumps(attempt(kind, root)).encode() + b"\n")


def fuzz_kind(kind: str, files: int, seed: int, root: Path) -> Iterator[tuple[Job, str, str]]:
    """Damaged copies of one kind, with outcome and words; whoever outlives its child's death is read by the next."""
    _, write, other = KINDS[kind]
    file = write(root)
    file = root / other if other else file
    jobs = [damage_file(file, f"{seed} {kind} {at}") for at in range(files)]
    while jobs:
        batch = jobs[:BATCH]
        lines, ended, status = reports(lambda into, batch=batch: child(kind, root, file, batch, into), PATIENCE)
        if len(lines) < len(batch):
            lines.append((ended, f"child ended with status {status}"))
        for job, (outcome, words) in zip(batch, lines, strict=False):
            yield job, outcome, words
        jobs = jobs[len(lines) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=300, help="damaged copies of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for files that failed")
    options = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork.*")
    start, total, failures = time.monotonic(), Counter[str](), list[str]()
    lines = [" ".join([f"{'':<14}", *(f"{name:>10}" for name in OUTCOMES)])]
    for kind in KINDS:
        counts, root = Counter[str](), Path(tempfile.mkdtemp())
        for at, ((damage, content), outcome, words) in enumerate(fuzz_kind(kind, options.files, options.seed, root)):
            counts[outcome] += 1
            if outcome not in ("refused", "unreadable", "read"):
                options.keep.mkdir(parents=True, exist_ok=True)
                path = options.keep / f"{kind.replace(' ', '-')}-{at}"
                path.write_bytes(content)
                failures.append(f"{outcome}: {path} ({damage}) {words[:300]}")
        shutil.rmtree(root)
        lines.append(" ".join([f"{kind:<14}", *(f"{counts[outcome]:>10}" for outcome in OUTCOMES)]))
        total += counts
    lines.append(" ".join([f"{'all':<14}", *(f"{total[outcome]:>10}" for outcome in OUTCOMES)]))
    lines += [f"{time.monotonic() - start:.1f} s, {total.total()} files", f"{len(failures)} failures", *failures[:50]]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
