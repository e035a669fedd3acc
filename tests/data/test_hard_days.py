"""The loader on real files, on a bad day: damaged by the thousand, stopped anywhere, resumed otherwise."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.decode.fuzzing import mutate
from tests.data.decode.hostile import bombs, no_pictures, samples
from vitrail.core.errors import BadImage
from vitrail.data.decode.image import EncodedImage
from vitrail.data.loader import Batch, BatchStream, eval_batches, train_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.readers.folder import FileDataset, read_classes, read_flat
from vitrail.data.transforms.augmentation import Augmentation, RandomErasing, inception
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.data.transforms.policy import RandAugment
from vitrail.data.unreadable_log import UnreadableLog


def is_sound(data: bytes) -> bool:
    try:
        EncodedImage(data).rgb()
    except BadImage:
        return False
    return True


def damaged(count: int) -> dict[str, bytes]:
    """So many damaged copies of every kind of file, bombs and files that are not images."""
    kinds = samples()
    names = sorted(kinds)
    files = {}
    for number in range(count):
        name, other = names[number % len(names)], names[(7 * number + 1) % len(names)]
        files[f"{number:04}-{name}.jpg"] = mutate(name, kinds[name], kinds[other], str(number))[1]
    files |= {f"bomb-{name}.png": data for name, data in bombs().items()}
    files |= {f"none-{name}.jpg": data for name, (data, _) in no_pictures().items()}
    return {name.replace("/", "_"): data for name, data in files.items()}


EPOCH = """
import json, resource, sys
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.data.loader import BatchStream, train_batches
from vitrail.data.readers.folder import read_flat
from vitrail.data.transforms.augmentation import inception
source, ledger = read_flat(sys.argv[1]), UnreadableLog()
list(train_batches(source, inception(32), BatchStream(batch=8, stop=2)))  # imports what workers need
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seen, empty = set(), set()
steps = -(-len(source) // 32)
for batch in train_batches(source, inception(32), BatchStream(batch=32, stop=steps), workers=2, ledger=ledger):
    seen.update(batch.sample.tolist())
    empty.update(source.name(i) for i in batch.sample[~batch.valid].tolist())
print(json.dumps({
    "whole": seen == set(range(len(source))),
    "empty": sorted(empty),
    "told": {name: entry.reason for name, entry in ledger.known.items()},
    "grown": (resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - before) / 1024,
}))
"""


@pytest.mark.slow
def test_a_thousand_damaged_files_through_the_loader(tmp_path: Path) -> None:
    """The epoch goes on to its end; every bad file is named once, with a reason, and no other; memory stays flat."""
    files = damaged(1000)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run([sys.executable, "-c", EPOCH, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    bad = {name for name, data in files.items() if not is_sound(data)}
    assert 300 < len(bad) < len(files) - 200
    assert said["whole"]
    assert set(said["told"]) == set(said["empty"]) == bad
    assert all(0 < len(reason) < 200 and "\n" not in reason for reason in said["told"].values())
    assert said["grown"] < 300  # MiB that the hungriest loader process has beyond its parent


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> FileDataset:
    """JPEGs and PNGs of several sizes, in three classes; one of them is empty."""
    root = tmp_path_factory.mktemp("photographs")
    draw = np.random.default_rng(0)
    for number in range(29):
        folder = root / f"class {number % 3}"
        folder.mkdir(exist_ok=True)
        height, width = (int(side) for side in draw.integers(40, 400, 2))
        small = Image.fromarray(draw.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8))
        kind = "png" if number % 5 == 0 else "jpg"
        small.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.{kind}")
    (root / "class 1" / "7.jpg").write_bytes(b"")
    return read_classes(root)


VIEWS = (
    Augmentation(crop=InceptionCrop(size=(24, 32)), policy=RandAugment(), erase=RandomErasing(probability=0.5)),
    inception(16),
)


def pieces(source: FileDataset, spans: list[tuple[int, int, int, int]]) -> list[Batch]:
    """The stream in stretches (from, to, processes, workers), each read again; the parts of a step in order."""
    got: list[Batch] = []
    for start, stop, world, workers in spans:
        ranks = [
            list(
                train_batches(
                    source,
                    VIEWS,
                    BatchStream(batch=8, seed=1, start=start, stop=stop, rank=rank, world=world),
                    workers=workers,
                )
            )
            for rank in range(world)
        ]
        got += [part for parts in zip(*ranks, strict=True) for part in parts]
    return got


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_stopped_anywhere_and_gone_on_with_otherwise(photographs: FileDataset, seed: int) -> None:
    """Random stretches with random numbers of processes and workers give the pixels of a run that never stopped."""
    draw = np.random.default_rng(seed)
    stops = sorted({0, 11, *draw.integers(1, 11, 2).tolist()})
    spans = [
        (start, stop, int(draw.choice([1, 2, 4])), int(draw.integers(0, 4)))
        for start, stop in itertools.pairwise(stops)
    ]
    whole, parts = pieces(photographs, [(0, 11, 1, 0)]), pieces(photographs, spans)
    for field in ("sample", "epoch", "target", "valid"):
        assert torch.equal(*(torch.cat([getattr(b, field) for b in batches]) for batches in (whole, parts)))
    for view in range(2):
        assert torch.equal(*(torch.cat([b.views[view] for b in batches]) for batches in (whole, parts)))
    sample, epoch = torch.cat([b.sample for b in whole]), torch.cat([b.epoch for b in whole])
    for number in range(3):
        assert sorted(sample[epoch == number].tolist()) == list(range(29))


def test_a_file_that_goes_away_is_named(photographs: FileDataset, tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(samples()["png"])
    source, ledger = read_flat(tmp_path), UnreadableLog()
    (tmp_path / "1.png").unlink()
    (batch,) = eval_batches(source, Preprocessing(image=(8, 8)), batch=3, ledger=ledger)
    assert batch.valid.tolist() == [True, False, True]
    assert [str(entry) for entry in ledger.known.values()] == ["1.png: No such file or directory"]
