"""Feeds thousands of damaged weight files to the readers and checks what happens.

    python bench/fuzz_weights.py --files 2000 --flips 4000 --seed 0

For every kind of file, ``--files`` damaged copies and ``--flips`` copies with one flipped bit are read (one eighth of
both for whole networks in foreign formats, which two readers read). This happens in forked children with a memory limit
and a watchdog, so that crashes in native code, endless loops and excessive memory use are noticed, too. A copy must be
refused with one of vitrail's errors, or load and equal the original. A foreign file without checksums may also load
with different numbers; a sealed one may not, and none of its bits may be flipped unnoticed. Anything else ends the run
with exit status 1 and leaves the file in ``--keep``. The same seed does the same damage.
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import vitrail
from tests.checkpoint.mutations import Sample, flip_bit, mutate, same_tensors, samples
from tests.forked import reports
from vitrail.checkpoint.convert import export
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import VitrailError
from vitrail.models.build import build
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

VIT = ViTConfig(width=64, depth=1, mlp_width=16, heads=1, image=(8, 8), patch=(4, 4), classes=3)
BIT = ResNetConfig(blocks=(1, 1), classes=3)
BATCH = 50  # files a child
MEMORY = 1500 << 20  # bytes a child may map beyond what it was born with
GROWTH = 256 << 20  # bytes of resident memory that no small file has a claim to
PATIENCE = 20.0  # seconds for one file
OUTCOMES = ("refused", "equal", "different", "exception", "crash", "hang", "memory")
NO_MEMORY = "asks for more memory than there is"  # how read_weights words a MemoryError


@dataclass(frozen=True, kw_only=True)
class Original:
    """A sound file to damage: its kind, its bytes, the name it must have and the files that belong next to it.

    The kind is one that the mutations know, with more said after a colon where there are several: "npz:google".
    """

    kind: str
    content: bytes
    name: str = "weights.bin"
    beside: Mapping[str, bytes] = field(default_factory=dict)
    folder: bool = False  # what is read is the folder, not the file

    @property
    def sealed(self) -> bool:
        return self.family == "sealed"

    @property
    def family(self) -> str:
        return self.kind.partition(":")[0]


Reader = Callable[[Path], Mapping[str, Tensor]]


def corpus(folder: Path) -> list[Original]:
    """The sound files: plain tensors in every container, and whole, if tiny, networks in every format."""
    plain = (Original(kind=made.kind, content=made.content) for made in samples(folder))
    return [*plain, own_model(folder), *foreign_models(folder)]


def own_model(folder: Path) -> Original:
    path = folder / "model.safetensors"
    torch.manual_seed(0)
    vitrail.save(build(VIT), path)
    return Original(kind="sealed:vit", content=path.read_bytes(), name=path.name)


def foreign_models(folder: Path) -> list[Original]:
    """The same network, and a ResNet, as other libraries would have written them."""
    torch.manual_seed(0)
    targets = [
        ("safetensors:timm", VIT, "timm.safetensors", "timm"),
        ("torch:torchvision", VIT, "torchvision.pth", "torchvision"),
        ("npz:google", VIT, "google.npz", "npz"),
        ("npz:linen", VIT, "linen.npz", "npz-linen"),
        ("npz:bit", BIT, "bit.npz", "npz-bit"),
        ("safetensors:timm-bit", BIT, "bit.safetensors", "timm"),
    ]
    found: list[Original] = []
    for kind, config, name, form in targets:
        path = folder / name
        export(to_bundle(build(config)), path, form)
        path.with_name(path.name + ".vitrail.json").unlink(missing_ok=True)
        found.append(Original(kind=kind, content=path.read_bytes(), name=name))
    export(to_bundle(build(VIT)), folder / "hf", "hf")
    files = {path.name: path.read_bytes() for path in (folder / "hf").iterdir() if "vitrail" not in path.name}
    for kind, name in (("safetensors:huggingface", "model.safetensors"), ("json:huggingface", "config.json")):
        rest = {other: content for other, content in files.items() if other != name}
        found.append(Original(kind=kind, content=files[name], name=name, beside=rest, folder=True))
    return found


def readers() -> dict[str, Reader]:
    """The ways into the package: the plain reader of files, and the one that makes networks of them."""
    return {
        "read_weights": lambda path: read_weights(path).tensors,
        "load": lambda path: vitrail.load(path).state_dict(),
    }


@dataclass(frozen=True, kw_only=True)
class Job:
    """One damaged copy, made when its turn comes."""

    index: int
    original: Original
    make: Callable[[], tuple[str, bytes]]


def damaged(original: Original, others: list[Original], count: int, seed: int) -> list[Job]:
    """Copies with every sort of damage that the kind of file knows."""
    sample = Sample(original.family, original.content, {})

    def job(index: int) -> Job:
        other = others[index % len(others)].content
        return Job(
            index=index, original=original, make=lambda: mutate(sample, other, f"{seed} {original.kind} {index}")
        )

    return [job(index) for index in range(count)]


def flipped(original: Original, count: int, seed: int) -> list[Job]:
    """Copies with one flipped bit, no bit twice."""
    total = 8 * len(original.content)
    bits = random.Random(f"{seed} {original.kind}").sample(range(total), min(count, total))

    def job(index: int, bit: int) -> Job:
        return Job(index=index, original=original, make=lambda: (f"bit{bit}", flip_bit(original.content, bit)))

    return [job(index, bit) for index, bit in enumerate(bits)]


def place(original: Original, content: bytes, folder: Path) -> Path:
    """Write a copy where a reader expects it, with what belongs next to it."""
    if original.folder:
        folder = folder / "folder"
        folder.mkdir(exist_ok=True)
    for name, data in original.beside.items():
        (folder / name).write_bytes(data)
    path = folder / original.name
    path.write_bytes(content)
    return folder if original.folder else path


def attempt(reader: Reader, path: Path, expected: Mapping[str, Tensor]) -> tuple[str, str]:
    """Read one file: what came of it, and the error's own words."""
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        outcome, words = ("equal" if same_tensors(reader(path), expected) else "different"), ""
    except VitrailError as error:
        words = str(error)
        outcome = "memory" if NO_MEMORY in words else "refused" if words.isprintable() else "exception"
    except MemoryError as error:
        outcome, words = "memory", repr(error)
    except Exception as error:
        outcome, words = "exception", repr(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) << 10
    return ("memory", f"grew by {grown >> 20} MiB; {words}") if grown > GROWTH else (outcome, words)


def child(jobs: list[Job], reader: Reader, expected: Mapping[str, Tensor], folder: Path, pipe: int) -> None:
    """Read a batch of copies and report each as soon as it is done."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for job in jobs:
        damage, content = job.make()
        outcome, words = attempt(reader, place(job.original, content, folder), expected)
        os.write(pipe, json.dumps([damage, outcome, words[:1000]]).encode() + b"\n")


def run_batch(
    jobs: list[Job], reader: Reader, expected: Mapping[str, Tensor], folder: Path
) -> list[tuple[str, str, str]]:
    """The reports of a batch; shorter than the batch, and ending in crash or hang, when its child did not survive."""
    lines, ended, status = reports(lambda into: child(jobs, reader, expected, folder, into), PATIENCE)
    if len(lines) < len(jobs):
        damage, _ = jobs[len(lines)].make()
        lines.append((damage, ended, f"child ended with status {status}"))
    return lines


def run(
    jobs: list[Job], reader: Reader, expected: Mapping[str, Tensor], folder: Path
) -> Iterable[tuple[Job, str, str, str]]:
    """All jobs with damage, outcome and words; if a child dies, the next one reads the remaining copies."""
    done = 0
    while done < len(jobs):
        batch = jobs[done : done + BATCH]
        for job, report in zip(batch, run_batch(batch, reader, expected, folder), strict=False):
            yield job, *report
            done += 1


def is_failure(original: Original, damage: str, outcome: str) -> bool:
    if outcome == "refused":
        return False
    if original.sealed:
        return damage.startswith("bit") or outcome != "equal"
    return outcome not in ("equal", "different")


def keep(folder: Path, job: Job, label: str, damage: str, outcome: str, words: str) -> str:
    """Leave a file that should not have done what it did, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{label}-{job.original.kind.replace(':', '-')}-{damage}-{job.index}.bin"
    path.write_bytes(job.make()[1])
    return f"{outcome}: {path} {words}"


def table(rows: list[tuple[str, Counter[str], float]]) -> str:
    width = max(len(name) for name, _, _ in rows)
    lines = [" ".join([" " * width, *(f"{name:>9}" for name in ("files", *OUTCOMES, "seconds"))])]
    for name, counts, seconds in rows:
        cells = [counts.total(), *(counts[outcome] for outcome in OUTCOMES)]
        lines.append(" ".join([f"{name:<{width}}", *(f"{cell:>9}" for cell in cells), f"{seconds:>9.1f}"]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=2000, help="damaged copies of each kind")
    parser.add_argument("--flips", type=int, default=4000, help="copies of each kind with one flipped bit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for files that failed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has no use for the threads of its parent
    rows: list[tuple[str, Counter[str], float]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        originals = corpus(folder)
        for label, reader in readers().items():
            for original in originals:
                try:
                    expected = dict(reader(place(original, original.content, folder)))
                except VitrailError:
                    continue  # sound, but not a file for this reader
                share = 8 if ":" in original.kind and not original.sealed else 1  # whole foreign networks are slow
                plans = {
                    "damaged": damaged(original, originals, options.files // share, options.seed),
                    "one bit": flipped(original, options.flips // share, options.seed),
                }
                for plan, jobs in plans.items():
                    start, counts = time.monotonic(), Counter[str]()
                    for job, damage, outcome, words in run(jobs, reader, expected, folder):
                        counts[outcome] += 1
                        if is_failure(original, damage, outcome):
                            failures.append(keep(options.keep, job, label, damage, outcome, words))
                    rows.append((f"{label} {original.kind}, {plan}", counts, time.monotonic() - start))
                    sys.stderr.write(f"{rows[-1][0]}: {dict(counts)}, {rows[-1][2]:.1f} s\n")
    sys.stdout.write("\n".join([table(rows), f"{len(failures)} failures", *failures[:50]]) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
