"""A file has its name only once it was checked."""

import os
from pathlib import Path

import pytest

from vitrail.core.errors import ConfigError, ExportRefused
from vitrail.export.output import atomic_output, check_target


def test_a_file_gets_its_name_behind_the_block(tmp_path: Path) -> None:
    target = tmp_path / "new" / "m.onnx"
    with atomic_output(target) as draft:
        draft.write_bytes(b"whole")
        draft.with_name("m.onnx.data").write_bytes(b"more")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert sorted(path.name for path in target.parent.iterdir()) == ["m.onnx", "m.onnx.data"]


def interrupted(target: Path) -> None:
    with atomic_output(target) as draft:
        draft.write_bytes(b"half")
        raise KeyboardInterrupt


def test_what_was_not_finished_leaves_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_filled_and_a_stale_description_goes(tmp_path: Path) -> None:
    target = tmp_path / "m-hf"
    target.mkdir()
    (target / "README.md").write_text("mine")
    (target / "model.safetensors.vitrail.json").write_text("of other weights")
    with atomic_output(target) as draft:
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(b"new")
    assert sorted(path.name for path in target.iterdir()) == ["README.md", "model.safetensors"]


def test_others_may_read_it_as_far_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_output(tmp_path / "m.onnx") as draft:
            draft.write_bytes(b"whole")
    finally:
        os.umask(before)
    assert (tmp_path / "m.onnx").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_told_of(tmp_path: Path) -> None:
    told = r"m\.onnx cannot be written \(No space left on device\); give another --out"
    with pytest.raises(ConfigError, match=told), atomic_output(tmp_path / "m.onnx"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["m.txt", "m", "m.onnx.zip"])
def test_a_wrong_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        check_target(tmp_path / name, suffixes=(".onnx",))


def test_a_target_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        check_target(tmp_path / "m.onnx", suffixes=(".onnx",))
    with pytest.raises(ExportRefused, match="is a file, but this format is a folder"):
        check_target(tmp_path / "file", suffixes=(), folder=True)
    with pytest.raises(ConfigError, match="file is not a folder"):
        check_target(tmp_path / "file" / "m.onnx", suffixes=(".onnx",))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match=r"no permission to write to .*; give another --out"):
            check_target(tmp_path / "m.onnx", suffixes=(".onnx",))
    finally:
        tmp_path.chmod(0o700)


def test_the_weights_themselves_are_no_target(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"")
    (tmp_path / "link.safetensors").symlink_to(weights)
    for target in (weights, tmp_path / "link.safetensors"):
        with pytest.raises(ConfigError, match="holds the weights themselves"):
            check_target(target, suffixes=(".safetensors",), source=weights)
