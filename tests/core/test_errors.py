"""The tree of errors and the help in an unknown name."""

import inspect
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vitrail.core import errors
from vitrail.core.errors import (
    ConfigError,
    ImageSizeError,
    UnknownName,
    VitrailError,
    WeightsError,
    describe_error,
    unknown_name,
)


def classes() -> dict[str, type[VitrailError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, VitrailError) and value is not VitrailError
    }


def test_tree_is_as_drawn() -> None:
    """Depth in the drawing is depth in the tree."""
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    path: list[tuple[int, str]] = [(-1, "VitrailError")]
    for line in errors.__doc__.splitlines():
        if "── " not in line:
            continue
        depth, name = line.index("──"), line.split("── ")[1].split()[0]
        while path[-1][0] >= depth:
            path.pop()
        drawn[name] = path[-1][1]
        path.append((depth, name))
    assert drawn == {name: value.__bases__[0].__name__ for name, value in classes().items()}


def test_two_families() -> None:
    assert issubclass(UnknownName, ConfigError)
    assert issubclass(ImageSizeError, ConfigError)
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(WeightsError, ConfigError)
    assert all(value.__doc__ for value in classes().values())


def test_unknown_name_lists_the_nearest_first() -> None:
    error = unknown_name("fruit", "appel", ["kiwi", "grape", "apple"])
    assert isinstance(error, UnknownName)
    assert str(error) == "unknown fruit 'appel'; did you mean apple, grape?"


def test_unknown_name_is_compared_without_case_and_answered_as_written() -> None:
    assert str(unknown_name("fruit", "APPLE", ["Apple", "kiwi"])) == "unknown fruit 'APPLE'; did you mean Apple?"


def test_of_two_names_alike_but_for_case_the_first_is_named() -> None:
    assert "ViT-B/32" in str(unknown_name("model", "vit-b/33", ["ViT-B/32", "ViT-b/32"]))


@pytest.mark.parametrize(("count", "dots"), [(3, False), (12, False), (13, True)])
def test_unknown_name_like_nothing_lists_what_there_is(count: int, dots: bool) -> None:
    known = [f"name{i}" for i in range(count)]
    text = str(unknown_name("thing", "§§§", known))
    assert text.startswith("unknown thing '§§§'; known: name0, name1, name2")
    assert text.endswith(", ...") == dots
    assert text.count("name") == min(count, 12)


def test_at_most_four_are_named() -> None:
    text = str(unknown_name("thing", "name", [f"name{i}" for i in range(9)]))
    assert text.count("name") == 1 + 4


@pytest.mark.parametrize(
    "broken",
    [
        lambda: struct.unpack_from(">I", b"", 4),
        lambda: int("x"),
        lambda: float("x"),
        lambda: json.loads("{"),
        lambda: b"\xff".decode("utf-8"),
        lambda: {}["key"],
        lambda: [][1],
        lambda: zip([1], [], strict=True).__next__(),
        lambda: np.zeros(3).reshape(2),
        lambda: Path("/nowhere/at/all").read_bytes(),
        lambda: json.loads("[" * 100_000),
        lambda: (lambda a: a)(),  # type: ignore[call-arg]
        lambda: None.x,  # type: ignore[attr-defined]
    ],
)
def test_reasons_are_about_the_file_and_not_about_python(broken: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        broken()
    words = describe_error(caught.value)
    internals = ("unpack", "literal", "convert", "codec", "Errno", "reshape", "argument", "NoneType", "index")
    assert words
    assert not any(theirs in words for theirs in internals)


def test_our_own_words_stay() -> None:
    assert describe_error(ConfigError("depth=0 must be above 0")) == "depth=0 must be above 0"
    assert describe_error(ValueError("its hash does not fit")) == "its hash does not fit"
