"""Values and their texts: a text is read as the annotated type asks, a value is written so that it is read again."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from vitrail.core.errors import ConfigError, unknown
from vitrail.core.shapes import times

WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@cache
def hints(kind: type) -> dict[str, Any]:
    """The fields of a class with their annotated types."""
    known = get_type_hints(kind)
    return {field.name: known[field.name] for field in fields(cast(Any, kind))}


class Choice(ABC):
    """A base class of configs to which others can be added: a field of this type may hold any that is registered, as if
    its annotation named them all."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def registered(cls) -> tuple[type[Any], ...]: ...


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type; of an open choice all that are registered."""
    named = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found: list[Any] = []
    for member in named:
        is_open = isinstance(member, type) and issubclass(member, Choice) and not is_dataclass(member)
        found += cast(type[Choice], member).registered() if is_open else [member]
    return tuple(found)


def classes_of(hint: Any) -> list[type[Any]]:
    """Those of its types that are configs themselves."""
    return [cast(type[Any], member) for member in members(hint) if is_dataclass(member)]


def is_choice(hint: Any) -> bool:
    """Whether a field may hold one of several classes."""
    return len(classes_of(hint)) > 1


def parsed(hint: Any, text: str, path: str) -> Any:
    """A text as a value of an annotated type. Of several types the first that fits is taken, single values before
    tuples, so that 448 is a number where a number or a pair will do."""
    simple = [member for member in members(hint) if not is_dataclass(member)]
    simple.sort(key=lambda member: (member is not NoneType, get_origin(member) is tuple, member is str))
    for member in simple:
        try:
            return PARSERS.get(get_origin(member) or member, no_parser)(member, text)
        except ValueError:
            continue
    choices = list(expected(hint))
    if simple and all(get_origin(member) is Literal or member is NoneType for member in simple):
        raise unknown(path, text.strip(), choices)
    raise ConfigError(f"{path}={text} must be {' or '.join(choices)}")


def parse_none(hint: Any, text: str) -> None:
    del hint
    if text.strip().lower() != "none":
        raise ValueError


def parse_bool(hint: Any, text: str) -> bool:
    del hint
    if text.strip().lower() not in WORDS:
        raise ValueError
    return WORDS[text.strip().lower()]


def parse_int(hint: Any, text: str) -> int:
    """Also 10_000 and 1e4."""
    del hint
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():  # so for infinities and what is not a number
            raise ValueError from None
        return int(value)


def parse_float(hint: Any, text: str) -> float:
    del hint
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def parse_str(hint: Any, text: str) -> str:
    del hint
    return text


def parse_literal(hint: Any, text: str) -> Any:
    for choice in get_args(hint):
        if str(choice) == text.strip():
            return choice
    raise ValueError


def parse_tuple(hint: Any, text: str) -> tuple[Any, ...]:
    """Values with commas between them, in brackets or not; a pair of whole numbers also as 224x224 or 224."""
    kinds = get_args(hint)
    bare = text.strip().strip("()[]").strip().rstrip(",")
    if kinds == (int, int):
        sides = bare.replace("x", ",").split(",")
        parts = sides * 2 if len(sides) == 1 else sides
    else:
        parts = bare.split(",") if bare else []
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    if len(parts) != len(kinds):
        raise ValueError
    return tuple(PARSERS.get(kind, no_parser)(kind, part) for kind, part in zip(kinds, parts, strict=True))


def no_parser(hint: Any, text: str) -> Any:
    """An annotation that no text can be read as; a mistake of the house, unless it is one of several."""
    raise ValueError(f"{hint} {text}")


PARSERS: dict[Any, Callable[[Any, str], Any]] = {
    NoneType: parse_none,
    bool: parse_bool,
    int: parse_int,
    float: parse_float,
    str: parse_str,
    Literal: parse_literal,
    tuple: parse_tuple,
}
NAMES: dict[Any, str] = {
    NoneType: "none",
    bool: "on or off",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


def expected(hint: Any) -> Iterator[str]:
    """What a value may be, in words."""
    for member in members(hint):
        if is_dataclass(member):
            yield cast(type, member).__name__
        elif get_origin(member) is Literal:
            yield from (str(choice) for choice in get_args(member))
        elif get_origin(member) is tuple:
            yield expected_tuple(get_args(member))
        else:
            yield NAMES.get(member, str(member))


def expected_tuple(kinds: tuple[Any, ...]) -> str:
    if kinds == (int, int):
        return "a size, as in 224 or 224x224"
    count = "" if kinds[-1] is Ellipsis else f"{len(kinds)} "
    return f"{count}numbers with commas between them"


def text_of(value: Any) -> str:
    """A value as a setting would give it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        if len(items) == 2 and all(type(item) is int for item in items):
            return times((items[0], items[1]))
        return ",".join(text_of(item) for item in items)
    return type(value).__name__ if is_dataclass(value) else str(value)
