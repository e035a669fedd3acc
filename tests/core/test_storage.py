"""A file that a person named is written with the folders above it, or refused with its name."""

from pathlib import Path

import pytest

from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.errors import ConfigError


def test_with_the_folders_above_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "file")
    assert not (tmp_path / "a").exists()
    write_file(tmp_path / "a" / "b" / "file", b"1")
    write_file(tmp_path / "a" / "b" / "file", b"2")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"2"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_what_cannot_be_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for check in (check_writable, lambda path: write_file(path, b"")):
        with pytest.raises(ConfigError, match=r"file/below"):
            check(tmp_path / "file" / "below")
        with pytest.raises(ConfigError, match=str(tmp_path)):
            check(tmp_path)
