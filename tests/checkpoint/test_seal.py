"""The sealed file: equal input gives equal bytes, every flipped bit is noticed, a failed write leaves the old one."""

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoint.mutations import DESCRIPTION, flip_bit, same_tensors, small_tensors
from vitrail.checkpoint.files import safetensors as seal
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.core.errors import ConfigError, CorruptWeights, MismatchedWeights, WeightsError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def header_of(content: bytes) -> tuple[bytes, dict[str, Any]]:
    (length,) = struct.unpack("<Q", content[:8])
    return content[: 8 + length], json.loads(content[8 : 8 + length])


class TestRoundTrip:
    def test_tensors_and_description_come_back(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        found = read_weights(path)
        assert same_tensors(found.tensors, small_tensors())
        assert found.description == DESCRIPTION
        assert (found.path, found.container) == (path, "safetensors")

    def test_the_library_reads_it(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        assert same_tensors(safetensors.torch.load_file(path), small_tensors())
        with safetensors.safe_open(path, "pt") as file:
            assert list(file.metadata()) == ["vitrail"]

    def test_every_tensor_lies_on_its_alignment(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        raw, header = header_of(path.read_bytes())
        for name, tensor in small_tensors().items():
            assert (len(raw) + header[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0

    def test_the_header_is_what_it_is_documented_to_be(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        raw, header = header_of(path.read_bytes())
        own = json.loads(header["__metadata__"]["vitrail"])
        assert own["format"] == 1
        for name, tensor in small_tensors().items():
            content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert own["checksums"][name] == hashlib.sha256(content).hexdigest()
        assert own["seal"] == hashlib.sha256(raw.replace(own["seal"].encode(), b"0" * 64)).hexdigest()

    @pytest.mark.parametrize("dtype", list(seal.DTYPE_NAMES), ids=str)
    def test_every_type(self, dtype: torch.dtype, path: Path) -> None:
        tensors = {"a": torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)}
        tensors |= {"scalar": tensors["a"][0, 0].clone(), "empty": tensors["a"][:0].clone()}
        write_sealed(path, tensors, {})
        assert same_tensors(read_weights(path).tensors, tensors)

    def test_shared_turned_and_conjugate_tensors_become_copies(self, path: Path) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        tensors = {"a": base, "tied": base, "turned": base.t(), "column": base[:, 1], "wide": base[0, 0].expand(5)}
        tensors |= {"conjugate": torch.tensor([1 + 2j]).conj(), "parameter": torch.nn.Parameter(base)}
        write_sealed(path, tensors, {})
        found = read_weights(path).tensors
        assert all(found[name].equal(tensor) for name, tensor in tensors.items())
        assert found["a"].data_ptr() != found["tied"].data_ptr()

    def test_names_stay_even_where_they_look_wrapped(self, path: Path) -> None:
        tensors = {"module.é": torch.ones(1), "module.b": torch.ones(1)}
        write_sealed(path, tensors, {})
        assert read_weights(path).tensors.keys() == tensors.keys()

    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(
        description=st.dictionaries(
            st.text(max_size=8).filter(lambda key: key not in seal.RESERVED),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
                max_leaves=6,
            ),
            max_size=4,
        ),
        names=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True),
    )
    def test_any_description_and_names(
        self, description: dict[str, Any], names: list[str], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = tmp_path_factory.mktemp("any") / "model"
        tensors = {name: torch.arange(3.0) for name in names}
        write_sealed(path, tensors, description)
        found = read_weights(path)
        assert found.description == description
        assert same_tensors(found.tensors, tensors)

    @pytest.mark.parametrize("text", ['"seal":"' + "0" * 64 + '"}', '\\"seal\\":\\"' + "a" * 64 + '\\"}"'])
    def test_a_description_that_reads_like_a_seal(self, text: str, path: Path) -> None:
        description = {"note": text, "nested": {"seal": "0" * 64, "checksums": {}, "vitrail": text}}
        write_sealed(path, small_tensors(), description)
        assert read_weights(path).description == description


class TestDeterminism:
    def test_equal_input_gives_equal_bytes(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        first = path.read_bytes()
        turned = dict(reversed(list(small_tensors().items())))
        write_sealed(path, turned, dict(reversed(list(DESCRIPTION.items()))))
        assert path.read_bytes() == first

    @pytest.mark.slow
    def test_in_another_process_too(self, path: Path) -> None:
        code = (
            "import sys, torch; from vitrail.checkpoint.files.safetensors import write_sealed;"
            "write_sealed(sys.argv[1], {n: torch.arange(5.0) for n in {'a', 'b', 'c', 'd'}}, {'x': 1, 'y': [2]})"
        )
        contents: set[bytes] = set()
        for salt in ("1", "2"):
            env = os.environ | {"PYTHONHASHSEED": salt}
            subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=True)
            contents.add(path.read_bytes())
        assert len(contents) == 1


class TestFlippedBits:
    @pytest.mark.slow
    def test_every_bit_of_a_file_is_watched(self, path: Path) -> None:
        """Length, header, digests, padding and data: each bit of about six kilobytes, one after the other."""
        generator = torch.Generator().manual_seed(1)
        tensors = small_tensors() | {"block.0.qkv.weight": torch.randn(36, 30, generator=generator)}
        write_sealed(path, tensors, DESCRIPTION)
        content = path.read_bytes()
        assert 5_500 < len(content) < 6_500
        missed: list[int] = []
        with path.open("r+b", buffering=0) as file:
            for bit in range(8 * len(content)):
                os.pwrite(file.fileno(), bytes([content[bit // 8] ^ 1 << bit % 8]), bit // 8)
                try:
                    read_weights(path)
                    missed.append(bit)
                except WeightsError:
                    pass
                os.pwrite(file.fileno(), content[bit // 8 : bit // 8 + 1], bit // 8)
        assert missed == []
        assert same_tensors(read_weights(path).tensors, tensors)

    def test_the_tensor_at_fault_is_named(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        content = path.read_bytes()
        raw, header = header_of(content)
        for name in small_tensors():
            start, stop = header[name]["data_offsets"]
            for at in (start, stop - 1):
                path.write_bytes(flip_bit(content, 8 * (len(raw) + at)))
                with pytest.raises(CorruptWeights, match=rf"tensor '{name}' does not match its checksum"):
                    read_weights(path)

    def test_a_damaged_key_does_not_make_it_a_foreign_file(self, path: Path) -> None:
        write_sealed(path, small_tensors(), DESCRIPTION)
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"vitrail":', b'"Vitrail":', 1))
        with pytest.raises(CorruptWeights, match="carries a seal but no 'vitrail' entry"):
            read_weights(path)

    def test_a_seal_made_for_other_data(self, path: Path) -> None:
        """Other tensors saved by another tool, the old description kept."""
        write_sealed(path, small_tensors(), DESCRIPTION)
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
        safetensors.torch.save_file({"other": torch.ones(1)}, path, metadata)
        with pytest.raises(CorruptWeights, match="altered since vitrail wrote it"):
            read_weights(path)

    @pytest.mark.parametrize(
        "text", ["", "null", "[]", "{}", '{"format": 0}', '{"format": true}', '{"format": 1}', "["]
    )
    def test_a_description_that_is_none(self, text: str, path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(1)}, path, {"vitrail": text})
        with pytest.raises(CorruptWeights, match="altered since vitrail wrote it"):
            read_weights(path)

    def test_a_newer_format_says_so(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(seal, "FORMAT", 2)
        write_sealed(path, small_tensors(), DESCRIPTION)
        monkeypatch.undo()
        with pytest.raises(WeightsError, match=r"written by a newer vitrail \(format 2.*upgrade vitrail"):
            read_weights(path)


class TestRefusals:
    @pytest.mark.parametrize("field", seal.RESERVED)
    def test_reserved_fields(self, field: str, path: Path) -> None:
        with pytest.raises(ConfigError, match=f"'{field}' is vitrail's own"):
            write_sealed(path, small_tensors(), {field: 1})

    @pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}, b"bytes"])
    def test_values_that_json_cannot_hold(self, value: object, path: Path) -> None:
        with pytest.raises(ConfigError, match="plain values"):
            write_sealed(path, small_tensors(), {"x": value})

    @pytest.mark.parametrize(
        ("tensors", "cause"),
        [
            ({}, "no tensors"),
            ({"": torch.ones(1)}, "cannot be called ''"),
            ({"__metadata__": torch.ones(1)}, "cannot be called '__metadata__'"),
            ({"a\ud800": torch.ones(1)}, "cannot be called"),
            ({"a": torch.eye(2).to_sparse()}, "'a' .* cannot be stored"),
            ({"a": torch.ones(1, device="meta")}, "'a' .* cannot be stored"),
            ({"a": torch.ones(1, dtype=torch.complex128)}, "'a' .* cannot be stored"),
            ({'"seal":"' + "0" * 64 + '"}': torch.ones(1)}, "looks like a seal"),
        ],
    )
    def test_tensors_that_could_not_be_read_back(self, tensors: dict[str, Tensor], cause: str, path: Path) -> None:
        with pytest.raises(MismatchedWeights, match=cause):
            write_sealed(path, tensors, {})
        assert list(path.parent.iterdir()) == []

    def test_not_finite(self, path: Path) -> None:
        with pytest.raises(CorruptWeights, match="'b' holds NaN or infinity; nothing was written"):
            write_sealed(path, {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}, {})
        assert not path.exists()

    def test_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"gone does not exist; create it first"):
            write_sealed(tmp_path / "gone" / "model.safetensors", small_tensors(), {})

    def test_folder_in_place_of_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match="is a folder; name a file inside it"):
            write_sealed(tmp_path, small_tensors(), {})


def failing(where: str, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os, where, fail)


class TestFailedWrites:
    @pytest.fixture
    def old(self, path: Path) -> bytes:
        write_sealed(path, small_tensors(), {"which": "old"})
        return path.read_bytes()

    def check_untouched(self, path: Path, old: bytes) -> None:
        assert path.read_bytes() == old
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("where", ["fsync", "replace"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
    def test_disk_errors_keep_the_old_file(
        self, where: str, code: int, path: Path, old: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failing(where, monkeypatch, OSError(code, os.strerror(code)))
        with pytest.raises(
            WeightsError, match=rf"cannot be written \({os.strerror(code)}\).*nothing was replaced"
        ) as caught:
            write_sealed(path, small_tensors(1), {"which": "new"})
        assert str(caught.value).isprintable()
        self.check_untouched(path, old)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit(1)])
    def test_an_interruption_cleans_up(
        self, error: BaseException, path: Path, old: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failing("replace", monkeypatch, error)
        with pytest.raises(type(error)):
            write_sealed(path, small_tensors(1), {"which": "new"})
        self.check_untouched(path, old)

    @pytest.mark.slow
    def test_a_disk_that_fills_up(self, path: Path, old: bytes) -> None:
        """The system itself cuts the write off, in the middle of the tensors."""
        code = (
            "import resource, sys, torch; from vitrail.checkpoint.files.safetensors import write_sealed;"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
            "write_sealed(sys.argv[1], {'a': torch.zeros(1 << 16), 'b': torch.zeros(1 << 20)}, {})"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert "WeightsError" in done.stderr.splitlines()[-1]
        assert "cannot be written (File too large)" in done.stderr.splitlines()[-1]
        self.check_untouched(path, old)

    def test_a_folder_that_cannot_be_put_on_disk(self, path: Path, old: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rename has happened by then, and the message does not pretend otherwise."""
        real: Callable[[int], None] = os.fsync

        def fail(descriptor: int) -> None:
            if os.path.isdir(f"/dev/fd/{descriptor}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(WeightsError, match="was written, but its folder could not be synced to disk"):
            write_sealed(path, small_tensors(1), {"which": "new"})
        assert read_weights(path).description == {"which": "new"}

    def test_a_folder_without_permission(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr("builtins.open", fail)
        with pytest.raises(WeightsError, match=r"cannot be written \(Permission denied\)"):
            write_sealed(path, small_tensors(), {})

    def test_the_order_of_events(self, path: Path, old: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """On disk before the rename, and the rename on disk before the function returns."""
        events: list[str] = []
        real_fsync, real_replace = os.fsync, os.replace

        def fsync(descriptor: int) -> None:
            events.append("folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "file")
            real_fsync(descriptor)

        def replace(source: Path, target: Path) -> None:
            assert source.parent == target.parent
            assert target.read_bytes() == old
            assert read_weights(source).description == {"which": "new"}
            events.append("rename")
            real_replace(source, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        write_sealed(path, small_tensors(1), {"which": "new"})
        assert events == ["file", "rename", "folder"]

    def test_the_usual_permissions(self, path: Path) -> None:
        before = os.umask(0o022)
        try:
            write_sealed(path, small_tensors(), {})
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.slow
def test_memory_stays_at_one_model(path: Path) -> None:
    """Writing 400 MB takes no second 400 MB; reading takes them once."""
    code = (
        "import resource, sys, torch; from vitrail.checkpoint.files.safetensors import write_sealed;"
        "from vitrail.checkpoint.files.read_weights import read_weights;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10;"
        "tensors = {str(n): torch.ones(5 << 20) for n in range(20)}; before = peak();"
        "write_sealed(sys.argv[1], tensors, {}); wrote = peak() - before;"
        "read_weights(sys.argv[1]); print(wrote, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    wrote, read = map(int, done.stdout.split())
    assert wrote < 100
    assert read < 550
