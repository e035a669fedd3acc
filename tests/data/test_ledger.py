"""The list of what could not be read."""

from pathlib import Path

import pytest

from vitrail.core.errors import DataError
from vitrail.data.unreadable_log import UnreadableLog, UnreadableSample


def test_any_name_can_be_written_and_read_back(tmp_path: Path) -> None:
    name = "odd \udcff name\n.jpg"
    UnreadableLog(tmp_path).note([UnreadableSample(3, name, "empty")])
    assert UnreadableLog(tmp_path).known == {name: UnreadableSample(3, name, "empty")}


def test_a_cut_last_line_is_passed_over_and_a_foreign_file_refused(tmp_path: Path) -> None:
    UnreadableLog(tmp_path).note([UnreadableSample(i, f"{i}.jpg", "empty") for i in range(3)])
    path = tmp_path / "unreadable.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert list(UnreadableLog(tmp_path).known) == ["0.jpg", "1.jpg"]
    path.write_text("hello\nthere\n")
    with pytest.raises(DataError, match="line 1"):
        UnreadableLog(tmp_path)
