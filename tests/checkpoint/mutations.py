"""Small valid weight files of every kind, and ways to damage them; the same seed always does the same damage.

Half of the ways are blind (bits, runs, cuts). The others know the format, and lie where a blind change would be
caught by a checksum or a parser on the way: a header that is still JSON, an array or a pickle inside a zip whose CRC
was made right again, a directory that points elsewhere.
"""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vitrail.checkpoint.files.safetensors import write_sealed

DESCRIPTION = {"model": {"width": 8, "depth": 1}, "classes": ["cat", "dog"], "note": 'a "quoted" word, é'}


@dataclass(frozen=True)
class Sample:
    """A valid file: its kind, its bytes and the tensors that it holds."""

    kind: str
    content: bytes
    tensors: dict[str, Tensor]


def small_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A handful of tensors in the types that weight files use, under a kilobyte in all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "patch.weight": draw(4, 3, 2, 2),
        "block.0.norm.weight": draw(8).to(torch.float16),
        "block.0.mlp.weight": draw(8, 6).to(torch.bfloat16),
        "head.bias": draw(5).to(torch.float64),
        "steps": torch.tensor(1234),
        "used": torch.tensor([True, False, True]),
    }


def sealed_bytes(tensors: Mapping[str, Tensor], folder: Path) -> bytes:
    path = folder / "sealed.safetensors"
    write_sealed(path, tensors, DESCRIPTION)
    return path.read_bytes()


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save(dict(tensors), metadata={"format": "pt"})


def npz_bytes(tensors: Mapping[str, Tensor], *, deflated: bool = False) -> bytes:
    stream = io.BytesIO()
    save = np.savez_compressed if deflated else np.savez
    save(stream, **{name: as_array(tensor) for name, tensor in tensors.items()})
    return stream.getvalue()


def as_array(tensor: Tensor) -> np.ndarray:
    """The array that JAX or NumPy would save; bfloat16 goes out as two opaque bytes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def torch_bytes(content: object, *, old: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not old)
    return stream.getvalue()


def samples(folder: Path, seed: int = 0) -> list[Sample]:
    """One valid file of every kind, all holding the same tensors."""
    tensors = small_tensors(seed)
    made = {
        "sealed": sealed_bytes(tensors, folder),
        "safetensors": safetensors_bytes(tensors),
        "npz": npz_bytes(tensors),
        "npz-deflated": npz_bytes(tensors, deflated=True),
        "torch": torch_bytes(tensors),
        "torch-nested": torch_bytes({"model": tensors, "epoch": 3, "lr": 1e-3}),
        "torch-old": torch_bytes(tensors, old=True),
    }
    return [Sample(kind, content, tensors) for kind, content in made.items()]


def same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Equal names, types, shapes and bytes; NaN equals itself here."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and raw_bytes(found[name]) == raw_bytes(tensor)
        for name, tensor in expected.items()
    )


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flip_bit(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# Blind damage: (random, content, another file's content) -> content


def flip(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return flip_bit(content, rng.randrange(8 * len(content)))


def flip_several(rng: random.Random, content: bytes, other: bytes) -> bytes:
    for _ in range(rng.randint(2, 16)):
        content = flip_bit(content, rng.randrange(8 * len(content)))
    return content


def truncate(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def splice(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return content[: rng.randrange(len(content))] + other[rng.randrange(len(other)) :]


def _run(rng: random.Random, content: bytes) -> tuple[int, int]:
    start = rng.randrange(len(content))
    return start, min(len(content), start + rng.choice((1, 4, 8, 64, 512)))


def zero_run(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, stop = _run(rng, content)
    return content[:start] + bytes(stop - start) + content[stop:]


def full_run(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, stop = _run(rng, content)
    return content[:start] + b"\xff" * (stop - start) + content[stop:]


def double_run(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, stop = _run(rng, content)
    return content[:stop] + content[start:stop] + content[stop:]


def drop_run(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, stop = _run(rng, content)
    return content[:start] + content[stop:]


def random_run(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, stop = _run(rng, content)
    return content[:start] + rng.randbytes(stop - start) + content[stop:]


def append(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 100)))


def noise(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Random bytes behind a valid beginning."""
    kept = rng.choice((0, 2, 4, 9, 16, 64))
    return content[:kept] + rng.randbytes(rng.randrange(2000))


# Damage that knows the format

EXTREMES = (0, 1, 2, 3, 7, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1, 2**64, -1)


def lie_in_header(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A safetensors header that is still JSON, with one field changed and the length made right."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    names = [key for key in header if key not in ("__metadata__", name)]
    kind = rng.randrange(8)
    if kind == 0:
        entry["dtype"] = rng.choice(("F32", "F16", "BF16", "I8", "U8", "BOOL", "F64", "F4", "F8_E4M3", "", "X", 3))
    elif kind == 1:
        entry["shape"] = [rng.choice(EXTREMES) for _ in range(rng.choice((0, 1, 2, 4, 70)))]
    elif kind == 2:
        entry["data_offsets"] = [rng.choice(EXTREMES), rng.choice(EXTREMES)]
    elif kind == 3:
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-8, -1, 1, 2, 8))
    elif kind == 4:
        entry["shape"] = entry["shape"][::-1] + rng.choice(([], [1], [2], [0], [1.0], [True], [None]))
    elif kind == 5:
        entry.update(header[rng.choice(names)])
    elif kind == 6:
        header[rng.choice((name.upper(), "", "__metadata__", "é" * 40))] = header.pop(name)
    else:
        del entry[rng.choice(list(entry))]
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def rewrite_member(content: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """The same zip with members changed and their CRCs made right, each stored or deflated as it was."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(stream, "w") as target:
        for member in source.infolist():
            copy = zipfile.ZipInfo(member.filename, (1980, 1, 1, 0, 0, 0))
            copy.compress_type = member.compress_type
            target.writestr(copy, change(member.filename, source.read(member)))
    return stream.getvalue()


def lie_in_array(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """An .npy header inside a sound zip with one field changed."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        target = rng.choice(source.namelist())
    big = rng.choice(EXTREMES)
    replacements = [
        (b"'<f4'", rng.choice((b"'|O'", b"'>f4'", b"'<f8'", b"'<i4'", b"'|V4'", b"'<U4'", b"[('a','<f4')]"))),
        (b"(", rng.choice((b"(2, ", b"(0, ", f"({big}, ".encode(), b"((", b"(" + b"1, " * 70))),
        (b"False", rng.choice((b"True", b"None", b"0"))),
        (b"'shape'", rng.choice((b"'descr'", b"'shape '", b"shape"))),
        (b"}", rng.choice((b", 'a': 1}", b"}}", b"} ", b"", b"+__import__('os')}"))),
        (b"NUMPY\x01", b"NUMPY" + bytes([rng.randrange(256)])),
    ]

    def change(name: str, data: bytes) -> bytes:
        if name != target or not data.startswith(b"\x93NUMPY"):
            return data
        size = struct.unpack("<H", data[8:10])[0]
        head = data[10 : 10 + size]
        old, new = rng.choice(replacements)
        if old in data[:8]:
            return data.replace(old, new, 1)
        head = head.replace(old, new, 1)
        return data[:8] + struct.pack("<H", len(head)) + head + data[10 + size :]

    return rewrite_member(content, change)


def lie_in_pickle(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A pickle inside a sound zip with a few bytes changed, or one instruction put in."""
    inserts = (b"(", b")", b"t", b"0", b"2", b"R", b"Q", b"}", b"]", b"N", b"K\xff", b"\x85", b"cos\nsystem\n", b".")

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            return data[:at] + rng.choice(inserts) + data[at:]
        return random_run(rng, data, b"") if rng.random() < 0.3 else flip(rng, data, b"")

    return rewrite_member(content, change)


def lie_in_storage(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """One member of a sound zip shortened, lengthened, dropped to nothing or swapped for another's content."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        target = rng.choice(source.namelist())
        donor = source.read(rng.choice(source.namelist()))
    choices: tuple[Callable[[bytes], bytes], ...] = (
        lambda data: data[:-1],
        lambda data: data + b"\0" * 8,
        lambda data: b"",
        lambda data: donor,
    )
    pick = rng.choice(choices)
    return rewrite_member(content, lambda name, data: pick(data) if name == target else data)


def lie_in_directory(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """One field of a zip's central directory, local header or closing record changed."""
    marks = {b"PK\x01\x02": 46, b"PK\x03\x04": 30, b"PK\x05\x06": 22, b"PK\x06\x06": 56, b"PK\x06\x07": 20}
    mark = rng.choice([mark for mark in marks if mark in content])
    places = [at for at in range(len(content) - 4) if content.startswith(mark, at)]
    at = rng.choice(places) + rng.randrange(4, marks[mark])
    value = rng.choice((b"\0", b"\xff", b"\xff\xff", b"\xff" * 4, b"\0" * 4, b"\x01\0", b"\x08\0", rng.randbytes(4)))
    return content[:at] + value + content[at + len(value) :]


def grow_pickle_number(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A number in an old torch file made enormous: a count, a size, a stride, an offset."""
    places = [at for at in range(len(content) - 1) if content[at : at + 1] == b"K"]
    at = rng.choice(places)
    value = rng.choice((b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x3f", b"K\0", b"N"))
    return content[:at] + value + content[at + 2 :]


Damage = Callable[[random.Random, bytes, bytes], bytes]
BLIND: tuple[Damage, ...] = (
    *(flip, flip_several, truncate, splice, zero_run, full_run),
    *(double_run, drop_run, random_run, append, noise),
)
INFORMED: dict[str, tuple[Damage, ...]] = {
    "sealed": (lie_in_header,),
    "safetensors": (lie_in_header,),
    "npz": (lie_in_array, lie_in_directory, lie_in_storage),
    "npz-deflated": (lie_in_array, lie_in_directory, lie_in_storage),
    "torch": (lie_in_pickle, lie_in_directory, lie_in_storage),
    "torch-nested": (lie_in_pickle, lie_in_directory, lie_in_storage),
    "torch-old": (grow_pickle_number,),
}


def mutate(sample: Sample, other: bytes, seed: str) -> tuple[str, bytes]:
    """One damaged copy, and the name of what was done to it; depends on nothing but its arguments."""
    rng = random.Random(seed)
    informed = INFORMED.get(sample.kind, ())
    damage = rng.choice(informed) if informed and rng.random() < 0.5 else rng.choice(BLIND)
    return damage.__name__, damage(rng, sample.content, other)
