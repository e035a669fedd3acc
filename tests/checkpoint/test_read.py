"""Reading weight files: every kind comes out as it went in, and every bad one is refused in one line."""

import io
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.mutations import (
    Sample,
    npz_bytes,
    rewrite_member,
    safetensors_bytes,
    same_tensors,
    samples,
    small_tensors,
    torch_bytes,
)
from tests.lanes import rest_slow
from vitrail.checkpoint.files import safetensors as read_safetensors
from vitrail.checkpoint.files import safetensors as safetensors_header
from vitrail.checkpoint.files.read_weights import RawWeights, read_weights
from vitrail.checkpoint.files.safetensors import CHECKED, first_unsound
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights, WeightsError, WeightsNotFound

KINDS = ("sealed", "safetensors", "npz", "npz-deflated", "torch", "torch-nested", "torch-old")
Read = Callable[[bytes], RawWeights]
Refused = Callable[..., str]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read bytes as a file whose name says nothing about its kind."""

    def run(content: bytes) -> RawWeights:
        path = tmp_path / "weights.bin"
        path.write_bytes(content)
        return read_weights(path)

    return run


@pytest.fixture
def refused(read: Read) -> Refused:
    """The message with which bytes are refused: of the right kind, in one line, naming the file and a remedy."""

    def run(content: bytes, kind: type[WeightsError] = CorruptWeights, match: str | None = None) -> str:
        with pytest.raises(kind, match=match) as caught:
            read(content)
        message = str(caught.value)
        assert "weights.bin: " in message
        assert ";" in message
        assert message.isprintable()
        assert len(message) < 1500
        return message

    return run


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return {made.kind: made for made in samples(tmp_path_factory.mktemp("samples"))}


def safetensors_file(header: object, data: bytes = bytes(24), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def npy(header: str, data: bytes, version: int = 1) -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


class TestEveryKind:
    @pytest.mark.parametrize("kind", KINDS)
    def test_comes_out_as_it_went_in(self, kind: str, sample: dict[str, Sample], read: Read) -> None:
        found = read(sample[kind].content)
        assert same_tensors(found.tensors, sample[kind].tensors)
        assert found.container == {"sealed": "safetensors"}.get(kind, kind.split("-")[0])
        assert (found.description is not None) == (kind == "sealed")
        assert all(t.is_contiguous() and t.device.type == "cpu" for t in found.tensors.values())

    @pytest.mark.parametrize("kind", rest_slow(KINDS, "sealed", "npz", "torch"))
    def test_cut_anywhere_is_refused(self, kind: str, sample: dict[str, Sample], refused: Refused) -> None:
        content = sample[kind].content
        for stop in [*range(0, len(content), 13), *range(len(content) - 30, len(content))]:
            refused(content[:stop], WeightsError)

    @pytest.mark.parametrize("kind", KINDS)
    def test_trailing_bytes_are_refused(self, kind: str, sample: dict[str, Sample], refused: Refused) -> None:
        for more in (b"\0", b"x" * 22, bytes(1000)):
            refused(sample[kind].content + more)

    @pytest.mark.parametrize("value", rest_slow([float("nan"), float("inf"), -float("inf")]))
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", ["safetensors", "npz", "torch", "torch-old"])
    def test_not_finite_is_refused_by_name(self, kind: str, dtype: torch.dtype, value: float, refused: Refused) -> None:
        bad = torch.zeros(1_100_000, dtype=dtype)
        bad[-1] = value
        tensors = {"good": torch.ones(3), "at fault": bad, "last": bad[-3:].clone()}
        write: dict[str, Callable[..., bytes]] = {
            "safetensors": safetensors_bytes,
            "npz": npz_bytes,
            "torch": torch_bytes,
            "torch-old": lambda t: torch_bytes(t, old=True),
        }
        refused(write[kind](tensors), CorruptWeights, "'at fault' holds NaN or infinity")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", sorted(CHECKED, key=str), ids=str)
    def test_not_finite_in_any_place(self, dtype: torch.dtype, value: float) -> None:
        """Vectorised code has a body and ends, and could miss one of them."""
        for size in (1, 2, 3, 7, 8, 9, 31, 33, 257, 70_001):
            for place in {0, size // 3, size // 2, size - 1}:
                tensor = torch.ones(size, dtype=dtype)
                assert first_unsound({"a": tensor}) is None
                tensor[place] = value
                assert first_unsound({"a": tensor}) == ("a", "NaN or infinity")
                assert first_unsound({"a": tensor.expand(3, size).t()}) == ("a", "NaN or infinity")

    @pytest.mark.parametrize("write", [safetensors_bytes, npz_bytes, torch_bytes])
    def test_no_tensors_is_refused(self, write: Callable[..., bytes], refused: Refused) -> None:
        refused(write({}), WeightsError)

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
    def test_wrappers_are_taken_off(self, prefix: str, read: Read) -> None:
        wrapped = {prefix + name: tensor for name, tensor in small_tensors().items()}
        assert same_tensors(read(torch_bytes(wrapped)).tensors, small_tensors())

    def test_a_prefix_of_some_names_stays(self, read: Read) -> None:
        tensors = {"module.a": torch.ones(1), "b": torch.ones(1)}
        assert same_tensors(read(torch_bytes(tensors)).tensors, tensors)
        assert list(read(torch_bytes({"module.": torch.ones(1)})).tensors) == ["module."]


class TestNotAWeightFile:
    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            (b"", "empty"),
            (bytes(4096), "zeros"),
            (b"these are not weights\n" * 10, "not a weight file"),
            (b"\n<!DOCTYPE html><html>404</html>", "web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
            (b"\x1f\x8b\x08\0" + bytes(100), "gzip"),
            (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
            (b"GGUF\x03\0\0\0\x01", "GGUF"),
            (b"\xff\xd8\xff\xe0\0\x10JFIF", "not a weight file"),
            (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(4)), "savez"),
            (zipped({"readme.txt": b"hello"}), "zip without tensors"),
            (zipped({}), "not a weight file"),
            (b"PK\x03\x04", "zip"),
            (b"\x80", "pickle"),
        ],
        ids=[
            *("empty", "zeros", "text", "web page", "pointer of git lfs", "gzip", "hdf5", "gguf", "jpeg", "npy"),
            *("zip of a text", "zip of nothing", "start of a zip", "start of a pickle"),
        ],
    )
    def test_is_refused_with_its_cause(self, content: bytes, cause: str, refused: Refused) -> None:
        assert cause in refused(content, WeightsError)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsNotFound, match=r"gone\.npz: does not exist; check"):
            read_weights(tmp_path / "gone.npz")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match="is a folder"):
            read_weights(str(tmp_path))

    def test_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(WeightsError, match="device or pipe"):
            read_weights(tmp_path / "pipe")

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
    def test_no_permission(self, tmp_path: Path, sample: dict[str, Sample]) -> None:
        path = tmp_path / "secret.npz"
        path.write_bytes(sample["npz"].content)
        path.chmod(0)
        with pytest.raises(WeightsError, match="Permission denied"):
            read_weights(path)

    def test_error_of_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "weights.npz"
        path.write_bytes(b"PK\x03\x04")

        def fail(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", fail)
        with pytest.raises(WeightsError, match=r"cannot be read \(Permission denied\)"):
            read_weights(path)

    def test_name_with_control_characters_stays_on_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a\nb\x1b[31m.npz"
        path.write_bytes(b"")
        with pytest.raises(CorruptWeights) as caught:
            read_weights(path)
        assert str(caught.value).isprintable()


class TestSafetensors:
    @pytest.mark.parametrize("name", list(safetensors_header.DTYPES))
    def test_every_type(self, name: str, read: Read) -> None:
        dtype = safetensors_header.DTYPES[name]
        tensor = torch.zeros(2, 3, dtype=torch.uint8).repeat(1, dtype.itemsize).view(dtype)
        found = read(safetensors_file({"a": entry(0, tensor.nbytes, [2, 3], name)}, bytes(tensor.nbytes)))
        assert found.tensors["a"].dtype == dtype
        assert found.tensors["a"].shape == (2, 3)

    def test_scalars_and_empty_tensors(self, read: Read) -> None:
        found = read(safetensors_file({"none": entry(0, 0, [0, 5]), "one": entry(0, 4, [])}, struct.pack("<f", 2.5)))
        assert found.tensors["none"].shape == (0, 5)
        assert found.tensors["one"].item() == 2.5

    @pytest.mark.parametrize(
        ("header", "cause"),
        [
            ({"a": entry(0, 16), "b": entry(12, 24)}, "'b' starts at byte 12, which overlaps"),
            ({"a": entry(0, 24), "b": entry(0, 24)}, "'b' starts at byte 0, which overlaps"),
            ({"a": entry(0, 8), "b": entry(12, 24)}, "'b' starts at byte 12, which leaves a hole"),
            ({"a": entry(4, 24)}, "'a' starts at byte 4, which leaves a hole"),
            ({"a": entry(0, 20)}, "4 bytes trailing"),
            ({"a": entry(0, 28)}, "4 bytes too few"),
            ({"a": entry(0, 24, [7])}, "needs 28 bytes"),
            ({"a": entry(0, 24, [2**62, 2**62])}, "'a' of shape"),
            ({"a": entry(0, 24, [2**64])}, "'a' is not described"),
            ({"a": entry(0, 24, [-6])}, "'a' is not described"),
            ({"a": entry(0, 24, [6.0])}, "'a' is not described"),
            ({"a": entry(0, 24, [6, True])}, "'a' is not described"),
            ({"a": entry(0, 24, [1] * 70 + [6])}, "'a' is not described"),
            ({"a": {"dtype": "F32", "shape": [6]}}, "'a' is not described"),
            ({"a": entry(0, 24) | {"extra": 1}}, "'a' is not described"),
            ({"a": ["F32", [6], [0, 24]]}, "'a' is not described"),
            ({"a": entry(24, 0)}, "'a'"),
            ({"__metadata__": {"x": 1}, "a": entry(0, 24)}, "metadata"),
            ([1, 2], "not a weight file"),
            (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON"),
            (b'{"a": \xff}', "JSON"),
            (b"{", "JSON"),
            (
                b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"a":%s}' % json.dumps(entry(0, 24)).encode(),
                "twice",
            ),
            (b'{"__metadata__":{"x":"1","x":"2"},"a":%s}' % json.dumps(entry(0, 24)).encode(), "'x' appears twice"),
        ],
    )
    def test_header_that_lies_is_refused(self, header: object, cause: str, refused: Refused) -> None:
        assert cause in refused(safetensors_file(header), CorruptWeights)

    def test_type_without_counterpart(self, refused: Refused) -> None:
        refused(safetensors_file({"a": entry(0, 24, [48], "F4")}), MismatchedWeights, "'a' has type 'F4'")

    def test_boolean_that_is_neither(self, refused: Refused) -> None:
        refused(safetensors_file({"a": entry(0, 3, [3], "BOOL")}, b"\0\1\2"), CorruptWeights, "'a' holds bytes other")

    @pytest.mark.parametrize("length", [100_000_001, 2**40, 2**63, 2**64 - 1])
    def test_header_over_100_mb_is_refused(self, length: int, refused: Refused) -> None:
        refused(safetensors_file({"a": entry(0, 24)}, length=length), UnsafeWeights, "over the limit of 100000000")

    def test_header_over_100_mb_that_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 100_000_008) + b"{")
            file.truncate(100_000_100)
        with pytest.raises(UnsafeWeights, match="over the limit"):
            read_weights(path)

    def test_both_parsers_must_agree(self, read: Read, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
        content = safetensors_file({"a": entry(0, 24)})
        read(content)
        monkeypatch.setattr(read_safetensors, "_library_verdict", lambda _: "the library objects")
        assert "the library objects" in refused(content)

    def test_tensors_do_not_hang_on_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        path.write_bytes(safetensors_bytes(small_tensors()))
        found = read_weights(path)
        os.truncate(path, 10)
        assert same_tensors(found.tensors, small_tensors())


class TestNpz:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_orders_types_and_shapes(self, save: Callable[..., None], read: Read) -> None:
        base = np.arange(24).reshape(2, 3, 4)
        arrays = {
            f"a/{kind}{order}": np.asarray(base.astype(kind), order=order)
            for kind in ("<f4", ">f4", "<f2", ">f8", "<c8", ">c8", ">c16", "<i8", ">i2", "|u1", ">u4", "|b1")
            for order in ("C", "F")
        } | {"scalar": np.float32(3), "empty": np.zeros((0, 3), ">f4"), "line": np.arange(3.0)}
        stream = io.BytesIO()
        save(stream, **arrays)
        found = read(stream.getvalue())
        assert found.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = found.tensors[name]
            assert tensor.is_contiguous()
            assert tensor.shape == array.shape
            np.testing.assert_array_equal(tensor.numpy(), array)

    @pytest.mark.parametrize("descr", ["|V2", "<V2"])
    def test_two_opaque_bytes_are_bfloat16(self, descr: str, read: Read) -> None:
        tensor = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
        data = tensor.view(torch.int16).numpy().tobytes()
        header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (1, 2), }}\n"
        assert same_tensors(read(zipped({"a.npy": npy(header, data)})).tensors, {"a": tensor})

    @pytest.mark.parametrize("version", [1, 2, 3])
    @pytest.mark.parametrize(
        "header",
        [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }   \n",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}\n",
            "{'shape': (2,), 'fortran_order': False, 'descr': '<f4'}",
            "{'descr':'<f4','fortran_order':False,'shape':(2,)}",
        ],
    )
    def test_headers_of_other_writers(self, header: str, version: int, read: Read) -> None:
        found = read(zipped({"a.npy": npy(header, struct.pack("<2f", 1, 2), version)}))
        assert found.tensors["a"].tolist() == [1, 2]

    @pytest.mark.parametrize(
        ("header", "kind", "cause"),
        [
            ("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", UnsafeWeights, "Python objects"),
            ("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (2,), }", UnsafeWeights, "records"),
            ("{'descr': '<U2', 'fortran_order': False, 'shape': (2,), }", MismatchedWeights, "type '<U2'"),
            ("{'descr': '|V1', 'fortran_order': False, 'shape': (8,), }", MismatchedWeights, "type '|V1'"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", CorruptWeights, "needs 12 bytes"),
            (
                "{'descr': '<f4', 'fortran_order': False, 'shape': (500000000000,), }",
                CorruptWeights,
                "needs 2000000000000",
            ),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999), }", UnsafeWeights, "shape"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }", CorruptWeights, "header"),
            ("{'descr': '<f4', 'fortran_order': 'False', 'shape': (2,), }", CorruptWeights, "header"),
            ("{'descr': True, 'fortran_order': False, 'shape': (2,), }", MismatchedWeights, "type"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': True, }", CorruptWeights, "header"),
            ("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", CorruptWeights, "header"),
            ("{'descr': '<f4', 'fortran_order': False, }", CorruptWeights, "header"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }+print(1)", CorruptWeights, "header"),
            ("(" * 30000, CorruptWeights, "header"),
        ],
    )
    def test_header_that_lies_is_refused(
        self, header: str, kind: type[WeightsError], cause: str, refused: Refused
    ) -> None:
        message = refused(zipped({"good.npy": b"", "a.npy": npy(header, bytes(8))} | {"good.npy": _good_array()}), kind)
        assert cause in message
        assert "a.npy" in message

    def test_long_header_is_not_read(self, refused: Refused) -> None:
        content = b"\x93NUMPY\x02\0" + struct.pack("<I", 2**31) + bytes(100)
        refused(zipped({"a.npy": content}), UnsafeWeights, "header of 2147483648 bytes")

    def test_pickled_objects_do_not_run(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        with path.open("wb") as file:
            np.savez(file, a=np.array([Trap(tmp_path / "ran")], dtype=object))
        with pytest.raises(UnsafeWeights, match="Python objects"):
            read_weights(path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.slow
    def test_bomb_is_refused_by_its_budget(self, refused: Refused) -> None:
        content = zipped({"a.npy": bytes(200 << 20)}, zipfile.ZIP_DEFLATED)
        assert len(content) < 300_000
        refused(content, UnsafeWeights, "re-save uncompressed")

    def test_bomb_with_a_modest_declared_size_is_cut_off(self, refused: Refused) -> None:
        header = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", b"")
        content = bytearray(zipped({"a.npy": header + bytes(32 << 20)}, zipfile.ZIP_DEFLATED))
        at = content.index(b"PK\x01\x02")
        content[at + 24 : at + 28] = struct.pack("<I", len(header) + 8)
        refused(bytes(content), CorruptWeights, "'a.npy' is damaged")

    def test_damage_is_named_by_its_member(self, sample: dict[str, Sample], refused: Refused) -> None:
        content = bytearray(sample["npz"].content)
        content[content.index(b"NUMPY", content.index(b"block.0.mlp")) + 130] ^= 1
        assert "'block.0.mlp.weight.npy' is damaged (Bad CRC-32" in refused(bytes(content))

    def test_encrypted_member(self, sample: dict[str, Sample], refused: Refused) -> None:
        content = bytearray(sample["npz"].content)
        content[content.index(b"PK\x01\x02") + 8] |= 1
        assert "encrypted" in refused(bytes(content))

    def test_an_entry_that_swallows_the_next(self, sample: dict[str, Sample], refused: Refused) -> None:
        """A comment declared longer than it is hides the members behind it."""
        content = bytearray(sample["npz"].content)
        content[content.index(b"PK\x01\x02") + 33] ^= 2
        assert "lists 1 members but counts 6" in refused(bytes(content))

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_methods_that_unpack_without_bound(self, method: int, refused: Refused) -> None:
        refused(zipped({"a.npy": _good_array()}, method), UnsafeWeights, "packed by method")

    def test_a_name_twice(self, refused: Refused) -> None:
        stream = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
            warnings.simplefilter("ignore")
            archive.writestr("a.npy", _good_array())
            archive.writestr("a.npy", _good_array())
        assert "'a.npy' appears twice" in refused(stream.getvalue())

    def test_something_else_beside_the_arrays(self, refused: Refused) -> None:
        assert "'b.txt' is not a .npy array" in refused(zipped({"a.npy": _good_array(), "b.txt": b"hello"}))

    def test_bytes_before_the_archive(self, refused: Refused) -> None:
        assert "does not start" in refused(b"PK\x03\x04junk" + zipped({"a.npy": _good_array()}))

    def test_overlapping_members(self, refused: Refused) -> None:
        """Sixty names for one member's bytes: a bomb that needs no compression."""
        content = zipped({f"{n:02}.npy": _good_array(1 << 18) for n in range(60)})
        directory = content[content.index(b"PK\x01\x02") :]
        size = len(content) - len(directory)
        first = content[: size // 60]
        entries = bytearray(directory)
        at = entries.find(b"PK\x01\x02")
        while at >= 0:
            entries[at + 42 : at + 46] = bytes(4)
            at = entries.find(b"PK\x01\x02", at + 1)
        end = entries.index(b"PK\x05\x06")
        entries[end + 16 : end + 20] = struct.pack("<I", len(first))
        refused(first + bytes(entries), WeightsError)


def _good_array(size: int = 2) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size},), }}"
    return npy(header, bytes(4 * size))


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class TestTorch:
    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize("holder", ["model", "state_dict", "model_state_dict", "module", "teacher", "model_ema"])
    def test_holders(self, holder: str, old: bool, read: Read) -> None:
        content = {holder: small_tensors(), "epoch": 3, "name": "run", "sizes": [1, 2], "optimizer": {"lr": 0.1}}
        assert same_tensors(read(torch_bytes(content, old=old)).tensors, small_tensors())

    @pytest.mark.parametrize("old", [False, True])
    def test_numbers_beside_tensors_at_the_top_are_ignored(self, old: bool, read: Read) -> None:
        content = {"w": torch.ones(2), "epoch": 3, "best": 0.5, "model": {"name": "vit"}}
        assert list(read(torch_bytes(content, old=old)).tensors) == ["w"]

    def test_numbers_among_the_weights_are_refused(self, refused: Refused) -> None:
        content = torch_bytes({"model": {"w": torch.ones(2), "scale": 0.5}})
        refused(content, MismatchedWeights, "'scale' in model is a float")

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            ({"encoder": {"w": torch.ones(2)}, "epoch": 1}, "its keys are 'encoder', 'epoch'"),
            ([torch.ones(2)], "holds a list"),
            (torch.ones(2), "holds a Tensor"),
            ({"model": {3: torch.ones(2)}}, "tensor name 3"),
        ],
    )
    def test_other_shapes_are_refused_with_what_was_seen(self, content: object, cause: str, refused: Refused) -> None:
        assert cause in refused(torch_bytes(content), MismatchedWeights)

    @pytest.mark.parametrize("old", [False, True])
    def test_state_dict_of_a_module(self, old: bool, read: Read) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        found = read(torch_bytes(module.state_dict(), old=old)).tensors
        assert same_tensors(found, module.state_dict())
        assert not any(tensor.requires_grad for tensor in found.values())
        assert read(torch_bytes(dict(module.named_parameters()), old=old)).tensors.keys() < found.keys()

    @pytest.mark.parametrize("old", [False, True])
    def test_shared_and_strided_storage(self, old: bool, read: Read) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        content = {"a": base, "tied": base, "turned": base.t(), "row": base[1], "column": base[:, 1]}
        found = read(torch_bytes(content, old=old)).tensors
        assert same_tensors(found, content)
        assert all(tensor.is_contiguous() for tensor in found.values())

    def test_rare_types(self, read: Read) -> None:
        content = {"e": torch.ones(4).to(torch.float8_e4m3fn), "u": torch.ones(2, dtype=torch.uint16)}
        content |= {"c": torch.ones(2, dtype=torch.complex64), "s": torch.tensor(1.0)}
        assert same_tensors(read(torch_bytes(content)).tensors, content)

    @pytest.mark.parametrize("old", [False, True])
    def test_one_number_shown_two_billion_times(self, old: bool, refused: Refused) -> None:
        content = torch_bytes({"w": torch.ones(1).expand(2_000_000_000), "b": torch.ones(2)}, old=old)
        assert len(content) < 3000
        refused(content, UnsafeWeights, "'w' of shape .* repeats a storage of 4 bytes")

    def test_many_views_of_one_storage(self, refused: Refused) -> None:
        base = torch.zeros(500, 500)
        content = torch_bytes({str(n): base.t() for n in range(100)})
        refused(content, UnsafeWeights, "re-save uncompressed and without expanded views")

    def test_deflated_pth(self, refused: Refused) -> None:
        content = torch_bytes({"w": torch.zeros(50 << 20, dtype=torch.uint8)})
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        bomb = zipped(members, zipfile.ZIP_DEFLATED)
        assert len(bomb) < 60_000
        assert "is compressed" in refused(bomb, UnsafeWeights)

    def test_a_flipped_bit_of_data_is_named_by_its_member(self, sample: dict[str, Sample], refused: Refused) -> None:
        content = bytearray(sample["torch"].content)
        at = content.index(small_tensors()["patch.weight"].numpy().tobytes())
        content[at] ^= 1
        assert "/data/0' is damaged (Bad CRC-32" in refused(bytes(content))

    def test_a_member_marked_as_a_folder(self, sample: dict[str, Sample], refused: Refused) -> None:
        """torch would return memory as it found it."""
        content = bytearray(sample["torch"].content)
        at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))
        content[at + 38] ^= 0x10
        assert "/data/0' is marked as a folder" in refused(bytes(content))

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    @pytest.mark.parametrize("form", ["plain", "zip", "old", "nested", "numpy"])
    def test_malicious_pickle(self, form: str, protocol: int, tmp_path: Path) -> None:
        trap = Trap(tmp_path / "ran")
        path = tmp_path / "weights.bin"
        if form == "plain":
            path.write_bytes(pickle.dumps(trap, protocol))
        else:
            inner: dict[str, Any] = {"zip": trap, "old": trap, "nested": {"a": [trap]}, "numpy": np.float64(1)}
            content = {"w": torch.ones(2), "evil": inner[form]}
            torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=form != "old")
        with pytest.raises(UnsafeWeights, match="nothing of it was run"):
            read_weights(path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.slow
    def test_malicious_pickle_with_the_unsafe_variable_set(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(2), "evil": Trap(tmp_path / "ran")}, tmp_path / "weights.pt")
        code = "import sys; from vitrail.checkpoint.files.read_weights import read_weights; read_weights(sys.argv[1])"
        env = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        command = [sys.executable, "-c", code, str(tmp_path / "weights.pt")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert "UnsafeWeights" in done.stderr
        assert "mkdir" in done.stderr
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "instructions",
        [
            b"c__builtin__\nbytearray\n\x8a\x06\xff\xff\xff\xff\xff\x0f\x85R",
            b"c__builtin__\neval\nX\x01\0\0\x001\x85R",
            b"ctorch\nload\nX\x01\0\0\x001\x85R",
            b"ctorch._tensor\n_rebuild_from_type_v2\n)R",
            b")" + b"\x85" * 100_000,
        ],
    )
    def test_what_torch_would_follow(self, instructions: bytes, refused: Refused) -> None:
        """Asked for memory or for deep nesting: on torch's own list, or out of its sight."""
        content = torch_bytes({"w": torch.ones(2)})
        value = b"\x80\x02}X\x01\0\0\0a" + instructions + b"s."
        refused(rewrite_member(content, lambda n, d: value if n.endswith("data.pkl") else d), UnsafeWeights)

    @pytest.mark.slow
    def test_a_pickle_without_end(self, refused: Refused) -> None:
        content = torch_bytes({"w": torch.ones(2)})
        value = b"\x80\x02" + b"N" * 2_100_000 + b"."
        changed = rewrite_member(content, lambda n, d: value if n.endswith("data.pkl") else d)
        refused(changed, UnsafeWeights, "over 2000000 instructions")

    def test_storage_larger_than_its_member(self, refused: Refused) -> None:
        content = torch_bytes({"w": torch.ones(4)})

        def change(name: str, data: bytes) -> bytes:
            return data.replace(b"K\x04", b"K\xf0") if name.endswith("data.pkl") else data

        refused(rewrite_member(content, change), CorruptWeights, "'0' should hold 960 bytes but holds 16")

    def test_old_storage_larger_than_the_file(self, refused: Refused) -> None:
        content = torch_bytes({"w": torch.ones(4)}, old=True).replace(b"K\x04N", b"\x8a\x06\xff\xff\xff\xff\xff\x0fN")
        refused(content, CorruptWeights, "should take 70368744177668 bytes but have 24")

    def test_old_text_longer_than_the_file(self, refused: Refused) -> None:
        """Four gigabytes are declared; a buffered file would allocate them before finding that they are not there."""
        content = torch_bytes({"w": torch.ones(4)}, old=True).replace(b"X\x01\0\0\0w", b"X\xff\xff\xff\xffw")
        tracemalloc.start()
        refused(content, CorruptWeights, "its pickle is damaged")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()

    def test_old_storage_that_nothing_fills(self, refused: Refused) -> None:
        """torch would hand out the memory as it found it."""
        content = torch_bytes({"w": torch.ones(4)}, old=True)
        at = content.rindex(b"X", 0, content.rindex(b"a."))
        refused(content[:at] + content[content.rindex(b"a.") + 1 :], WeightsError)

    @pytest.mark.parametrize(
        ("make", "cause"),
        [
            (lambda: torch.eye(3).to_sparse(), "'w' is sparse"),
            (lambda: torch.eye(3).to_sparse_csr(), "'w' is sparse"),
            (lambda: torch.ones(3, device="meta"), "'w' has no data"),
            (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "'w' is quantised"),
        ],
        ids=["sparse", "csr", "meta", "quantised"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_tensors_that_are_not_dense(self, make: Callable[[], torch.Tensor], cause: str, refused: Refused) -> None:
        assert cause in refused(torch_bytes({"w": make()}), MismatchedWeights)

    def test_torchscript(self, refused: Refused, tmp_path: Path) -> None:
        content = torch_bytes({"w": torch.ones(2)})
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        refused(zipped(members | {"archive/constants.pkl": b"."}), MismatchedWeights, "TorchScript")

    def test_warnings_of_torch_do_not_leak(self, read: Read) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(torch_bytes(OrderedDict(w=torch.ones(2)), old=True))

    @pytest.mark.parametrize("error", [RecursionError, MemoryError, OverflowError, KeyError, RuntimeError, UserWarning])
    def test_every_error_of_torch_is_caught(
        self, error: type[Exception], refused: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error("line\nline")

        monkeypatch.setattr(torch, "load", fail)
        refused(torch_bytes({"w": torch.ones(2)}), WeightsError)


def test_files_are_left_as_they_were(tmp_path: Path, sample: dict[str, Sample]) -> None:
    for kind, made in sample.items():
        path = tmp_path / kind
        path.write_bytes(made.content)
        path.chmod(stat.S_IRUSR)
        read_weights(path)
        assert path.read_bytes() == made.content
    assert len(list(tmp_path.iterdir())) == len(sample)
