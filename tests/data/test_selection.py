"""Which samples take part, in a file that guards itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import listed
from vitrail.core.errors import DataError
from vitrail.data.splits import Selection


def selection(drop: bool = False) -> Selection:
    return Selection(source=listed(6).fingerprint, rule={"name": "odd", "seed": 0}, indices=np.array([1, 3]), drop=drop)


def test_keep_and_drop() -> None:
    assert [selection().apply(listed(6)).name(i) for i in range(2)] == ["image-1.png", "image-3.png"]
    assert selection(drop=True).apply(listed(6)).indices.tolist() == [0, 2, 4, 5]


def test_it_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "odd.json"
    selection().save(path)
    again = Selection.load(path)
    assert (again.hash, again.rule, again.indices.tolist()) == (selection().hash, {"name": "odd", "seed": 0}, [1, 3])
    assert [p.name for p in path.parent.iterdir()] == ["odd.json"]


def test_every_part_is_in_the_hash() -> None:
    base = selection()
    others = [
        Selection(source="other", rule=base.rule, indices=base.indices),
        Selection(source=base.source, rule={"name": "odd", "seed": 1}, indices=base.indices),
        Selection(source=base.source, rule=base.rule, indices=np.array([3, 1])),
        selection(drop=True),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 5


def test_changed_data_are_refused() -> None:
    with pytest.raises(DataError, match="have changed since"):
        selection().apply(listed(7))


@pytest.mark.parametrize("field", ["source", "rule", "drop", "indices", "hash", "kind"])
def test_a_file_changed_by_hand_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "odd.json"
    selection().save(path)
    body = json.loads(path.read_text())
    body[field] = [1] if field == "indices" else "x"
    path.write_text(json.dumps(body))
    with pytest.raises(DataError, match=r"odd\.json"):
        Selection.load(path)
    with pytest.raises(DataError, match="No such file"):
        Selection.load(tmp_path / "none.json")
