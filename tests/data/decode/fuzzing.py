"""Damaged images by the thousand, read in forked children under a memory limit and a watchdog.

    python -m tests.data.decode.fuzzing --files 100 --seed 0

Run as a program of its own, because a process that has threads should not fork. A copy should be read, or be refused
with BadImage and a short reason. Any other exception, a warning, a crash, a hang or a blow-up ends the run with exit
status 1, and the file is left in ``--keep``; so does a word on stderr, but for libtiff's, which Pillow lets speak. The
same seed does the same damage.
"""

import argparse
import json
import os
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.data.decode.hostile import chunk, chunks, samples
from tests.forked import reports
from vitrail.core.errors import BadImage
from vitrail.data.decode.image import EncodedImage

BATCH = 100  # files a child
MEMORY = 1500 << 20  # bytes a child may map beyond what it was born with
GROWTH = 400 << 20  # bytes of resident memory that no small file has a claim to
PATIENCE = 20.0  # seconds for one file
OUTCOMES = ("refused", "read", "exception", "warning", "noise", "crash", "hang", "memory")
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutate(name: str, content: bytes, other: bytes, seed: str) -> tuple[str, bytes]:
    """One damaged copy and the name of what was done to it."""
    rng = random.Random(seed)
    damage = rng.choice(["flips", "flips", "cut", "splice", "header", "numbers", "zeros", "ones", "twice", "noise"])
    data = bytearray(content)
    at = rng.randrange(len(data))
    if damage == "flips":
        for _ in range(rng.choice([1, 1, 2, 8, 40])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif damage == "cut":
        del data[at:]
    elif damage == "splice":
        start = rng.randrange(len(other))
        data[at:] = other[start:]
    elif damage == "header":
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(min(len(data), 80))] = rng.randrange(256)
    elif damage == "numbers":
        for _ in range(rng.randint(1, 3)):
            form = rng.choice(["<H", ">H", "<I", ">I"])
            value = rng.choice(EXTREMES) & (0xFFFF if form.endswith("H") else 0xFFFFFFFF)
            where = rng.choice([rng.randrange(min(len(data), 200)), rng.randrange(len(data))])
            data[where : where + struct.calcsize(form)] = struct.pack(form, value)
    elif damage in ("zeros", "ones"):
        length = rng.choice([4, 16, 64, 500])
        data[at : at + length] = (b"\0" if damage == "zeros" else b"\xff") * len(data[at : at + length])
    elif damage == "twice":
        length = rng.choice([8, 30, 200])
        data[at:at] = data[at : at + length]
    else:
        data[at:at] = rng.randbytes(rng.choice([1, 2, 4, 30]))
    done = bytes(data)
    if name.startswith("png") and rng.random() < 0.5:  # past the checksums
        damage, done = damage + ", sealed", sealed_again(content, done)
    return damage, done


def sealed_again(content: bytes, damaged: bytes) -> bytes:
    """The damage of a PNG's chunks, with the right checksums: the chunks keep their number and length."""
    out, at = content[:8], 8
    for name, body in chunks(content):
        piece = damaged[at + 8 : at + 8 + len(body)]
        out += chunk(damaged[at + 4 : at + 8] if len(damaged) >= at + 8 else name, piece)
        at += 12 + len(body)
    return out


def attempt(content: bytes, scale: int) -> tuple[str, str]:
    """Read one file: what came of it, and the reason."""
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, words = "read", ""
    try:
        picture = EncodedImage(content)
        image = picture.rgb(scale)
        if image.mode != "RGB" or (scale == 1 and picture.size != (image.height, image.width)):
            outcome, words = "exception", f"{image.mode} {image.size} for {picture.size}"
    except BadImage as error:
        words = str(error)
        outcome = "refused" if words.isprintable() and 0 < len(words) < 250 and " at 0x" not in words else "exception"
        if "more memory than there is" in words:
            outcome = "memory"
        elif any(isinstance(cause, Warning) for cause in (error.__cause__, error.__context__)):
            outcome = "warning"
    except Exception as error:
        outcome, words = "exception", repr(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) << 10
    return ("memory", f"grew by {grown >> 20} MiB; {words}") if grown > GROWTH else (outcome, words)


Job = tuple[str, str, bytes]  # kind, damage, content


def child(jobs: list[Job], pipe: int, noise: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(noise, 2)
    for index, (_, _, content) in enumerate(jobs):
        before = os.fstat(noise).st_size
        outcome, words = attempt(content, 4 if index % 4 == 3 else 1)
        if os.fstat(noise).st_size > before and outcome in ("refused", "read"):
            outcome, words = "noise", words + " " + os.pread(noise, 200, before).decode("utf-8", "replace")
        os.write(pipe, json.dumps([outcome, words[:1000]]).encode() + b"\n")


def run_batch(jobs: list[Job]) -> list[tuple[str, str]]:
    """The reports of a batch; shorter than the batch, and ending in crash or hang, when its child did not survive."""
    with tempfile.TemporaryFile() as noise:
        lines, ended, status = reports(lambda into: child(jobs, into, noise.fileno()), PATIENCE)
        if len(lines) < len(jobs):
            noise.seek(0)
            said = noise.read()[-500:].decode("utf-8", "replace")
            lines.append((ended, f"child ended with status {status} {said}"))
        return lines


def run(jobs: list[Job]) -> Iterator[tuple[Job, str, str]]:
    """All jobs with outcome and words; whoever outlives its child's death is read by the next one."""
    done = 0
    while done < len(jobs):
        batch = jobs[done : done + BATCH]
        for job, report in zip(batch, run_batch(batch), strict=False):
            yield job, *report
            done += 1


def fuzz(files: int, seed: int, keep: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """`files` damaged copies of every sample: outcomes by kind, and the failures in words."""
    sound = samples()
    counts: dict[str, Counter[str]] = {}
    failures: list[str] = []
    names = list(sound)
    for kind in names:
        jobs: list[Job] = []
        for index in range(files):
            other = sound[names[zlib.crc32(f"{seed} {kind} {index}".encode()) % len(names)]]
            jobs.append((kind, *mutate(kind, sound[kind], other, f"{seed} {kind} {index}")))
        counts[kind] = Counter()
        for index, ((_, damage, content), outcome, words) in enumerate(run(jobs)):
            counts[kind][outcome] += 1
            if outcome not in ("refused", "read") and not (outcome == "noise" and kind.startswith("tiff")):
                keep.mkdir(parents=True, exist_ok=True)
                path = keep / f"{kind.replace(' ', '-')}-{index}.bin"
                path.write_bytes(content)
                failures.append(f"{outcome}: {path} ({damage}) {words}")
    return counts, failures


def table(counts: dict[str, Counter[str]], seconds: float) -> str:
    total = sum(counts.values(), Counter[str]())
    lines = [" ".join([f"{'':<18}", *(f"{name:>9}" for name in ("files", *OUTCOMES))])]
    for kind, row in [*counts.items(), ("all", total)]:
        cells = [row.total(), *(row[outcome] for outcome in OUTCOMES)]
        lines.append(" ".join([f"{kind:<18}", *(f"{cell:>9}" for cell in cells)]))
    return "\n".join([*lines, f"{seconds:.1f} s, {total.total() / seconds:.0f} files a second"])


def main() -> int:
    """OPENBLAS_NUM_THREADS=1 keeps numpy from threads, which Python warns about when it forks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1000, help="damaged copies of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for files that failed")
    options = parser.parse_args()
    warnings.simplefilter("error")
    start = time.monotonic()
    counts, failures = fuzz(options.files, options.seed, options.keep)
    done = [table(counts, time.monotonic() - start), f"{len(failures)} failures", *failures[:50]]
    sys.stdout.write("\n".join(done) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
