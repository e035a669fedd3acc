"""Names in two arrays."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.dataset import StringArray

NAMES = st.lists(st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape")), max_size=20)


@given(NAMES)
def test_they_come_back_as_they_were(names: list[str]) -> None:
    packed = StringArray(names)
    assert list(packed) == names
    assert list(pickle.loads(pickle.dumps(packed))) == names
    assert list(StringArray.from_arrays(packed.bytes, packed.starts)) == names


def test_outside_is_an_index_error() -> None:
    for index in (-1, 2):
        with pytest.raises(IndexError):
            StringArray(["a", "b"])[index]
