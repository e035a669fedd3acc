"""Settings by dotted name: values by type, classes by name, errors that help, plain data and back."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.core.config_overrides import (
    apply_settings,
    diff_plain,
    drop_fields,
    format_value,
    from_plain,
    list_fields,
    to_plain,
)
from vitrail.core.errors import ConfigError, UnknownName


def diff_configs(config: Any, base: Any) -> list[str]:
    return diff_plain(to_plain(base), to_plain(config))


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    size: tuple[int, int]
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    size: tuple[int, int]
    side: int
    radius: int = 2  # of another type than Round's


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    width: int = 3

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"width={self.width} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rate: float = 1e-3
    count: int = 2
    on: bool = False
    word: str = ""
    choice: "Literal['red', 'green']" = "red"
    perhaps: int | None = None
    shade: "Literal['dark', 'light'] | None" = None
    many: tuple[float, ...] = (0.3, 0.6)
    span: tuple[float, float] = (0.0, 1.0)
    size: tuple[int, int] = (8, 8)
    either: tuple[int, int] | int = 4

    def __post_init__(self) -> None:
        if self.size[0] > 1000:
            raise ConfigError(f"size={self.size} is too large")


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    shape: Round | Square
    inner: Inner = field(default_factory=Inner)
    maybe: Round | Square | None = None
    frame: Frame | None = None
    title: str = "a"

    def __post_init__(self) -> None:
        if self.shape.size != self.inner.size:
            raise ConfigError(f"shape {self.shape.size} and inner {self.inner.size} differ")


WHOLE = Whole(shape=Round(size=(8, 8)))


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("inner.rate=3e-4", "rate", 3e-4),
        ("inner.rate=1", "rate", 1.0),
        ("inner.count=10_000", "count", 10_000),
        ("inner.count=1e4", "count", 10_000),
        ("inner.count=-1", "count", -1),
        *((f"inner.on={word}", "on", True) for word in ("on", "true", "Yes", "TRUE")),
        *((f"inner.on={word}", "on", False) for word in ("off", "false", "no")),
        ("inner.word=", "word", ""),
        ("inner.word= a=b ", "word", " a=b "),
        ("inner.choice=green", "choice", "green"),
        ("inner.perhaps=3", "perhaps", 3),
        ("inner.perhaps=none", "perhaps", None),
        ("inner.shade=dark", "shade", "dark"),
        ("inner.shade=None", "shade", None),
        ("inner.many=0.1,0.5,0.9", "many", (0.1, 0.5, 0.9)),
        ("inner.many=0.5", "many", (0.5,)),
        ("inner.many=", "many", ()),
        ("inner.many=(0.1, 0.2)", "many", (0.1, 0.2)),
        ("inner.span=0.2,1", "span", (0.2, 1.0)),
        ("inner.either=448", "either", 448),
        ("inner.either=448x384", "either", (448, 384)),
        ("inner.either=448,384", "either", (448, 384)),
    ],
)
def test_values_by_type(setting: str, name: str, value: Any) -> None:
    found = getattr(apply_settings(WHOLE, [setting]).inner, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("inner.rate=fast", "inner.rate=fast must be a number"),
        ("inner.rate=inf", "inner.rate=inf must be a number"),
        ("inner.rate=nan", "inner.rate=nan must be a number"),
        ("inner.count=2.5", "inner.count=2.5 must be a whole number"),
        ("inner.count=inf", "inner.count=inf must be a whole number"),
        ("inner.on=2", "inner.on=2 must be on or off"),
        ("inner.choice=greem", "unknown inner.choice 'greem'; did you mean green"),
        ("inner.perhaps=x", "inner.perhaps=x must be a whole number or none"),
        ("inner.shade=dusk", "unknown inner.shade 'dusk'"),
        ("inner.many=1,b", "inner.many=1,b must be numbers separated by commas"),
        ("inner.span=1", "inner.span=1 must be 2 numbers separated by commas"),
        ("inner.size=8x8x8", "inner.size=8x8x8 must be a size such as 224 or 224x224"),
        ("inner.either=x", "inner.either=x must be a size such as 224 or 224x224 or a whole number"),
        ("inner=3", "inner=3 must be Inner"),
        ("shape=Triangle", "shape=Triangle must be Round or Square"),
        ("maybe=rond", "unknown maybe 'rond'; did you mean Round"),
        ("shape=none", "shape=none must be Round or Square"),
        ("inner.rat=1", "unknown setting 'inner.rat'; did you mean inner.rate"),
        ("rate=1", "unknown setting 'rate'; did you mean inner.rate?"),
        ("iner.rate=1", "unknown setting 'iner'; did you mean inner"),
        ("inner.rate.x=1", "inner.rate.x: inner.rate is a plain value without fields"),
        ("maybe.radius=1", "maybe.radius: maybe is none now; set maybe=Round or maybe=Square too"),
        ("maybe=Round", "maybe=Round has no default for maybe.size; set that too"),
        ("frame.width=0", "frame: width=0 must be at least 1"),
        ("inner.size=2000", "inner: size=(2000, 2000) is too large"),
        ("inner.rate", "'inner.rate' is not a setting; write NAME=VALUE"),
        ("=3", "'=3' is not a setting; write NAME=VALUE"),
    ],
)
def test_errors_name_field_value_and_rule(setting: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_settings(WHOLE, [setting])
    assert str(caught.value).startswith(told)


def test_unknown_fields_are_unknown_names() -> None:
    with pytest.raises(UnknownName):
        apply_settings(WHOLE, ["inner.rat=1"])


@pytest.mark.parametrize("order", [1, -1])
def test_rules_between_fields_are_asked_once_at_the_end(order: int) -> None:
    both = ["shape.size=16", "inner.size=16x16"][::order]
    assert apply_settings(WHOLE, both) == Whole(shape=Round(size=(16, 16)), inner=Inner(size=(16, 16)))
    with pytest.raises(ConfigError, match="differ"):
        apply_settings(WHOLE, both[:1])


def test_another_class_keeps_what_has_the_same_name_and_type() -> None:
    start = replace(WHOLE, shape=Round(size=(8, 8), radius=5.0))
    found = apply_settings(start, ["shape.side=3", "shape=Square"])
    assert found.shape == Square(size=(8, 8), side=3, radius=2)


def test_the_same_class_keeps_everything() -> None:
    start = replace(WHOLE, shape=Round(size=(8, 8), radius=5.0))
    assert apply_settings(start, ["shape=round"]) == start


def test_a_class_out_of_nothing_and_back() -> None:
    found = apply_settings(WHOLE, ["maybe=Round", "maybe.size=4", "frame.width=7"])
    assert found.maybe == Round(size=(4, 4))
    assert found.frame == Frame(width=7)  # the only class that it can be
    assert apply_settings(found, ["maybe=none", "frame=none"]) == WHOLE
    with pytest.raises(ConfigError, match="maybe is none now"):
        apply_settings(found, ["maybe=none", "maybe.size=4"])


def test_the_later_of_two_counts() -> None:
    assert apply_settings(WHOLE, ["title=b", "title=c"]).title == "c"


def test_the_config_itself_is_left_alone() -> None:
    before = to_plain(WHOLE)
    apply_settings(WHOLE, ["title=b", "inner.count=9"])
    assert to_plain(WHOLE) == before
    assert apply_settings(WHOLE, []) is WHOLE


def test_makers_know_more_texts() -> None:
    def make(old: Round | Square, text: str) -> Any:
        return replace(old, size=(8, 8), radius=9.0) if text == "wheel" else NotImplemented

    assert apply_settings(WHOLE, ["shape=wheel"], {"shape": make}).shape == Round(size=(8, 8), radius=9.0)
    inside = apply_settings(WHOLE, ["shape=wheel", "shape.radius=2"], {"shape": make})
    assert inside.shape == Round(size=(8, 8), radius=2.0)
    assert apply_settings(WHOLE, ["shape=Square", "shape.side=1"], {"shape": make}).shape == Square(size=(8, 8), side=1)


def test_flat_has_every_field_and_says_what_is_the_default() -> None:
    lines = {line.name: line for line in list_fields(apply_settings(WHOLE, ["inner.rate=0.5", "inner.size=8x8"]))}
    assert list(lines)[:3] == ["shape", "shape.size", "shape.radius"]
    assert lines["shape"] == ("shape", "Round", False)
    assert lines["shape.size"] == ("shape.size", "8x8", False)
    assert lines["inner.rate"] == ("inner.rate", "0.5", False)
    assert lines["inner.size"] == ("inner.size", "8x8", True)
    assert lines["inner.on"].text == "off"
    assert lines["inner.many"].text == "0.3,0.6"
    assert lines["maybe"] == ("maybe", "none", True)
    assert "inner" not in lines


def test_plain_is_json_and_tags_what_was_chosen() -> None:
    data = to_plain(WHOLE)
    assert data["shape"] == {"kind": "Round", "size": [8, 8], "radius": 1.0}
    assert data["maybe"] is None
    assert "kind" not in data["inner"]
    assert json.loads(json.dumps(data)) == data
    assert list(data) == ["shape", "inner", "maybe", "frame", "title"]


def test_restored_reads_back_what_plain_wrote() -> None:
    config = apply_settings(
        WHOLE, ["maybe=Square", "maybe.size=4", "maybe.side=1", "inner.either=3x4", "frame.width=2"]
    )
    assert from_plain(Whole, json.loads(json.dumps(to_plain(config)))) == config


def test_restored_takes_defaults_and_whole_numbers() -> None:
    found = from_plain(Whole, {"shape": {"kind": "Round", "size": [8, 8], "radius": 3}})
    assert found == replace(WHOLE, shape=Round(size=(8, 8), radius=3.0))
    assert type(found.shape.radius) is float


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"shape": {"kind": "Rond", "size": [8, 8]}}, "unknown shape.kind 'Rond'"),
        ({"shape": {"size": [8, 8]}}, "unknown shape.kind 'None'"),
        ({"shape": {"kind": "Round"}}, "shape=Round has no default for shape.size"),
        ({"shape": {"kind": "Round", "size": [8]}}, "shape.size=(8,) must be a size"),
        ({"shape": {"kind": "Round", "size": [8, 8], "radius": "1"}}, "shape.radius='1' must be a number"),
        ({"shape": {"kind": "Round", "size": [8, 8]}, "titel": "a"}, "unknown setting 'titel'; did you mean title"),
        ({"shape": {"kind": "Round", "size": [8, 8]}, "inner": {"on": 1}}, "inner.on=1 must be on or off"),
        ({"shape": {"kind": "Round", "size": [8, 8]}, "inner": {"choice": "blue"}}, "inner.choice='blue' must be red"),
        ({"shape": {"kind": "Round", "size": [8, 8]}, "inner": {"many": [1, "b"]}}, "inner.many=(1, 'b') must be"),
    ],
)
def test_restored_refuses(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_plain(Whole, data)
    assert str(caught.value).startswith(told)


def test_differences_of_some_fields_do_not_count() -> None:
    lines = ["keep.steps: 4 -> 5", "keeper: 1 -> 2", "optim.lr: 0.1 -> 0.2", "optim.clip: 1 -> 2"]
    assert drop_fields(lines, ["keep", "optim.lr"]) == ["keeper: 1 -> 2", "optim.clip: 1 -> 2"]


def test_differences_are_named() -> None:
    other = apply_settings(
        WHOLE, ["inner.rate=0.003", "inner.many=0.5", "shape=Square", "shape.side=3", "title=b", "frame.width=2"]
    )
    assert diff_configs(other, WHOLE) == [
        "shape.kind: Round -> Square",
        "shape.radius: 1.0 -> 2",
        "shape.side: (absent) -> 3",
        "inner.rate: 0.001 -> 0.003",
        "inner.many: 0.3,0.6 -> 0.5",
        "frame: (none) -> {...}",
        "title: a -> b",
    ]
    assert diff_plain(to_plain(WHOLE), to_plain(WHOLE)) == []
    assert diff_plain({"a": {"b": 1}}, {"a": {"b": 1}, "c": True}) == ["c: (absent) -> on"]
    assert diff_plain({"a": {"kind": "X", "b": 1}}, {}) == ["a: X -> (absent)"]


INNER = st.builds(
    Inner,
    rate=st.floats(allow_nan=False, allow_infinity=False),
    count=st.integers(),
    on=st.booleans(),
    word=st.text(),
    choice=st.sampled_from(["red", "green"]),
    perhaps=st.none() | st.integers(),
    shade=st.sampled_from(["dark", "light", None]),
    many=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4).map(tuple),
    span=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    size=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    either=st.integers(0, 999) | st.tuples(st.integers(0, 999), st.integers(0, 999)),
)
SHAPES = st.builds(Round, size=st.just((8, 8)), radius=st.floats(0, 9)) | st.builds(
    Square, size=st.just((8, 8)), side=st.integers(0, 9)
)


@settings(max_examples=25, deadline=None)
@given(inner=INNER, maybe=st.none() | SHAPES, frame=st.none() | st.builds(Frame, width=st.integers(1, 9)))
@pytest.mark.slow
def test_what_is_printed_can_be_set(inner: Inner, maybe: Round | Square | None, frame: Frame | None) -> None:
    """All lines of a config, given as settings, make any other config into it; so do its plain data."""
    config = Whole(shape=Round(size=inner.size), inner=inner, maybe=maybe, frame=frame)
    texts = [f"{line.name}={line.text}" for line in list_fields(config)]
    assert apply_settings(WHOLE, texts) == config
    assert from_plain(Whole, json.loads(json.dumps(to_plain(config)))) == config
    assert diff_configs(apply_settings(WHOLE, texts), config) == []


@settings(deadline=None)
@given(
    st.text(), st.sampled_from(["inner.rate", "inner.many", "inner.size", "inner.choice", "shape", "frame", "inner"])
)
def test_any_text_is_read_or_refused(text: str, name: str) -> None:
    try:
        found = apply_settings(WHOLE, [f"{name}={text}"])
    except ConfigError:
        return
    assert isinstance(found, Whole)


def test_text_of_a_pair_and_of_a_list() -> None:
    assert [format_value(value) for value in ((1, 2), (1, 2, 3), (1.0, 2.0), None, True, 1e-8)] == [
        *("1x2", "1,2,3", "1.0,2.0", "none", "on", "1e-08")
    ]
