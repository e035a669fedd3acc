"""Damaged files of every kind in quick succession; the long run, with children and limits, is bench/fuzz_weights.py."""

import random
from pathlib import Path

import pytest

from tests.checkpoint.mutations import Sample, flip_bit, mutate, same_tensors, samples
from tests.lanes import rest_slow
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.core.errors import WeightsError

FILES = 200
FLIPS = 300
KINDS = ("sealed", "safetensors", "npz", "npz-deflated", "torch", "torch-nested", "torch-old")
# Their bytes carry no checksum of their own, so a changed number can pass for another number.
UNCHECKED = ("safetensors", "torch-old")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return {sample.kind: sample for sample in samples(tmp_path_factory.mktemp("samples"))}


def loads(path: Path, content: bytes, sample: Sample) -> bool | None:
    """None: refused as it should be; otherwise whether what was read is what the sound file holds."""
    path.write_bytes(content)
    try:
        found = read_weights(path)
    except WeightsError:
        return None
    return same_tensors(found.tensors, sample.tensors)


@pytest.mark.parametrize("kind", rest_slow(KINDS, "sealed", "torch"))
def test_damaged_files_are_refused_or_equal(kind: str, made: dict[str, Sample], tmp_path: Path) -> None:
    """A rewritten zip has a right CRC, so only blind damage is held to equality there."""
    sample, others = made[kind], list(made.values())
    for index in range(FILES):
        damage, content = mutate(sample, others[index % len(others)].content, f"{kind} {index}")
        equal = loads(tmp_path / "weights.bin", content, sample)
        if kind not in UNCHECKED and not damage.startswith("lie_in"):
            assert equal in (None, True), (damage, index)


@pytest.mark.parametrize("kind", rest_slow(KINDS, "sealed"))
def test_flipped_bits(kind: str, made: dict[str, Sample], tmp_path: Path) -> None:
    rng = random.Random(kind)
    sample = made[kind]
    for bit in rng.sample(range(8 * len(sample.content)), FLIPS):
        equal = loads(tmp_path / "weights.bin", flip_bit(sample.content, bit), sample)
        if kind == "sealed":
            assert equal is None, bit
        elif kind not in UNCHECKED:
            assert equal in (None, True), bit
