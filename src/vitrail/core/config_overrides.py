"""Changes nested frozen dataclasses by field name, compares, prints and stores them. Independent of what they
configure.

    run = with_settings(run, ["optim.lr=3e-4", "augmentation.policy=RandAugment", "augmentation.policy.magnitude=9"])

All changes are collected before anything is built, so that a rule between two fields (the size of the network and that
of the crop) is checked once, at the end, and the order of the settings does not matter.

A text is parsed as the field's annotated type, and a value is formatted so that parsing it gives the value again.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vitrail.core.errors import ConfigError, UnknownName, unknown_name
from vitrail.core.text import format_size

WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@cache
def field_types(kind: type) -> dict[str, Any]:
    """The fields of a class with their annotated types."""
    known = get_type_hints(kind)
    return {field.name: known[field.name] for field in fields(cast(Any, kind))}


class Choice(ABC):
    """A base class of configs that can be extended: a field of this type may hold any registered subclass, as if its
    annotation named them all."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def list_registered(cls) -> tuple[type[Any], ...]: ...


def union_members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type; for a `Choice`, all that are registered."""
    named = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found: list[Any] = []
    for member in named:
        is_open = isinstance(member, type) and issubclass(member, Choice) and not is_dataclass(member)
        found += cast(type[Choice], member).list_registered() if is_open else [member]
    return tuple(found)


def classes_of(hint: Any) -> list[type[Any]]:
    """Those of its types that are configs."""
    return [cast(type[Any], member) for member in union_members(hint) if is_dataclass(member)]


def is_choice(hint: Any) -> bool:
    """Whether a field may hold one of several classes."""
    return len(classes_of(hint)) > 1


def parse_value(hint: Any, text: str, path: str) -> Any:
    """Parses a text as a value of an annotated type. Of several types, the first that fits is used, single values
    before tuples: 448 is a number where either a number or a pair is allowed."""
    simple = [member for member in union_members(hint) if not is_dataclass(member)]
    simple.sort(key=lambda member: (member is not NoneType, get_origin(member) is tuple, member is str))
    for member in simple:
        try:
            return parse_as(member, text)
        except (ValueError, KeyError):
            continue
    choices = list(describe_choices(hint))
    if simple and all(get_origin(member) is Literal or member is NoneType for member in simple):
        raise unknown_name(path, text.strip(), choices)
    raise ConfigError(f"{path}={text} must be {' or '.join(choices)}")


def parse_as(kind: Any, text: str) -> Any:
    """Parses a text as a value of one type. Whole numbers may be written as 10_000 or 1e4, tuples with commas and with
    or without brackets, pairs of whole numbers also as 224x224 or 224. KeyError or ValueError if the text is not such a
    value."""
    word = text.strip()
    if kind is str:
        return text
    if kind is bool or kind is NoneType:
        return (WORDS if kind is bool else {"none": None})[word.lower()]
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[word]
    if get_origin(kind) is tuple:
        kinds, bare = get_args(kind), word.strip("()[]").strip().rstrip(",")
        if kinds == (int, int):
            sides = bare.replace("x", ",").split(",")
            parts = sides * 2 if len(sides) == 1 else sides
        else:
            parts = bare.split(",") if bare else []
        kinds = (kinds[0],) * len(parts) if kinds[-1] is Ellipsis else kinds
        return tuple(parse_as(one, part) for one, part in zip(kinds, parts, strict=True))
    if kind is int:
        with contextlib.suppress(ValueError):
            return int(text)
    value = float(text) if kind in (int, float) else math.nan  # no other annotation can be parsed
    if not math.isfinite(value) or (kind is int and not value.is_integer()):
        raise ValueError
    return kind(value)


NAMES: dict[Any, str] = {NoneType: "none", bool: "on or off", int: "a whole number", float: "a number", str: "a text"}


def describe_choices(hint: Any) -> Iterator[str]:
    """Descriptions of the allowed values."""
    for member in union_members(hint):
        if is_dataclass(member):
            yield cast(type, member).__name__
        elif get_origin(member) is Literal:
            yield from (str(choice) for choice in get_args(member))
        elif get_args(member) == (int, int):
            yield "a size such as 224 or 224x224"
        elif get_origin(member) is tuple:
            count = "" if get_args(member)[-1] is Ellipsis else f"{len(get_args(member))} "
            yield f"{count}numbers separated by commas"
        else:
            yield NAMES.get(member, str(member))


def format_value(value: Any) -> str:
    """Formats a value as in a setting."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        if len(items) == 2 and all(type(item) is int for item in items):
            return format_size((items[0], items[1]))
        return ",".join(format_value(item) for item in items)
    return type(value).__name__ if is_dataclass(value) else str(value)


T = TypeVar("T")
Maker = Callable[[Any, str], Any]  # from the old value and a text to a new value, or NotImplemented
KIND = "kind"  # names the class of a union's member in plain data
NOTHING, ABSENT = "(none)", "(absent)"


class ConfigLine(NamedTuple):
    """A field for printing: its dotted name, its value as in a setting, and whether that is the default."""

    name: str
    text: str
    default: bool


def apply_settings(config: T, settings: Iterable[str], makers: Mapping[str, Maker] | None = None) -> T:
    """Returns a new config with "dotted.name=value" settings applied; if a field is set twice, the later value counts.
    A class is chosen by its name and keeps the old value's fields of the same name and type. `makers`, by dotted name,
    accept further texts for some fields; a maker returns NotImplemented for a text that it does not recognise."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{setting!r} is not a setting; write NAME=VALUE, as in optim.lr=3e-4")
        texts[name.strip()] = text
    names = [line.name for line in list_fields(config)]
    return Overrides(texts, names, makers or {}).rebuild(config, "") if texts else config


@dataclass(frozen=True, slots=True)
class Overrides:
    """The texts of settings by dotted name, and what errors and makers need to know about the whole config."""

    texts: Mapping[str, str]
    names: list[str]
    makers: Mapping[str, Maker]

    def inside(self, path: str) -> list[str]:
        """The fields to change in the value at a path. The path ends in a dot, unless it is that of the whole
        config."""
        inner = (name.removeprefix(path) for name in self.texts if name.startswith(path))
        return list(dict.fromkeys(name.partition(".")[0] for name in inner))

    def rebuild(self, old: T, path: str, kind: "type[T] | None" = None) -> T:
        """Rebuilds a value after its inner fields, as its own class or as `kind`. A different class starts with the old
        value's fields of the same name and type."""
        kind = kind or type(old)
        before, after = field_types(type(old)) if is_dataclass(old) else {}, field_types(kind)
        values = {name: getattr(old, name) for name, hint in before.items() if after.get(name) == hint}
        if unknown := [name for name in self.inside(path) if name not in after]:
            raise unknown_field(path + unknown[0], [*(path + known for known in after), *self.names])
        for name in self.inside(path):
            values[name] = self.change_value(after[name], values.get(name), path + name)
        return construct(kind, values, path.rstrip("."))

    def change_value(self, hint: Any, old: Any, path: str) -> Any:
        """Returns a field's new value."""
        text, classes, inner = self.texts.get(path), classes_of(hint), f"{path}."
        if text is not None and path in self.makers:
            made = self.makers[path](old, text)
            if made is not NotImplemented:
                return self.rebuild(made, inner) if self.inside(inner) else made
        if text is None:
            if is_dataclass(old) or (old is None and len(classes) == 1):
                return self.rebuild(old, inner, None if is_dataclass(old) else classes[0])
            raise self.no_fields_inside(old, classes, path)
        chosen = next((kind for kind in classes if kind.__name__.lower() == text.strip().lower()), None)
        if chosen is not None:
            return self.rebuild(old, inner, chosen)
        value = parse_value(hint, text, path)
        if self.inside(inner):
            raise self.no_fields_inside(value, classes, path)
        return value

    def no_fields_inside(self, value: Any, classes: list[type[Any]], path: str) -> ConfigError:
        inner = f"{path}.{self.inside(f'{path}.')[0]}"
        if not classes:
            return ConfigError(f"{inner}: {path} is a plain value without fields")
        choice = " or ".join(f"{path}={kind.__name__}" for kind in classes)
        return ConfigError(f"{inner}: {path} is {format_value(value)} now; set {choice} too")


def construct(kind: type[T], values: dict[str, Any], path: str) -> T:
    """Builds a value, which checks the rules of its class."""
    unset = [field for field in fields(cast(Any, kind)) if field.name not in values]
    if missing := [field.name for field in unset if default_of(field) is MISSING]:
        wanted = ", ".join(f"{path}.{name}" if path else name for name in missing)
        raise ConfigError(f"{path or kind.__name__}={kind.__name__} has no default for {wanted}; set that too")
    try:
        return kind(**values)
    except ConfigError as error:
        message = str(error)
        head = f"{path}: " if path and not message.startswith(path) else ""
        raise type(error)(f"{head}{message}") from None


def unknown_field(path: str, names: list[str]) -> UnknownName:
    """The error for an unknown field. It first suggests fields with the same last part: "lr" probably means
    "optim.lr"."""
    last = path.rpartition(".")[2]
    alike = [name for name in names if name.rpartition(".")[2] == last]
    return unknown_name("setting", path, dict.fromkeys(alike or names))


def default_of(field: "Field[Any]") -> Any:
    """A field's default, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def list_fields(config: Any, path: str = "") -> list[ConfigLine]:
    """Lists every field of a config and of the configs in it, in the order of the classes. A field that may hold one of
    several classes has a line with the name of its class, before the lines of its fields."""
    lines: list[ConfigLine] = []
    for field in fields(config):
        value, name, default = getattr(config, field.name), f"{path}{field.name}", default_of(field)
        if is_dataclass(value):
            if is_choice(field_types(type(config))[field.name]):
                lines.append(ConfigLine(name, format_value(value), type(value) is type(default)))
            lines += list_fields(value, f"{name}.")
        else:
            lines.append(ConfigLine(name, format_value(value), value == default))
    return lines


def to_plain(config: Any) -> dict[str, Any]:
    """Converts a config to data for JSON, in the order of its fields. For a choice among several classes, "kind" is the
    name of the class."""
    kinds = field_types(type(config))
    return {name: value_to_plain(getattr(config, name), is_choice(kinds[name])) for name in kinds}


def value_to_plain(value: Any, choice: bool = False) -> Any:
    if is_dataclass(value):
        return {**({KIND: type(value).__name__} if choice else {}), **to_plain(value)}
    if isinstance(value, tuple):
        return [value_to_plain(item) for item in cast(tuple[Any, ...], value)]
    return value


def from_plain(kind: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Restores a config from the data that `to_plain` made. A missing field takes its default; an unknown one is
    refused. If a class is not named, it is that of the default: there was no other when the data were written."""
    kinds, usual = field_types(kind), {field.name: default_of(field) for field in fields(cast(Any, kind))}
    for name in data:
        if name not in kinds:
            raise unknown_field(f"{path}{name}", [f"{path}{known}" for known in kinds])
    values = {name: value_from_plain(kinds[name], value, f"{path}{name}", usual[name]) for name, value in data.items()}
    return construct(kind, values, path.rstrip("."))


def value_from_plain(hint: Any, value: Any, path: str, usual: Any) -> Any:
    classes = classes_of(hint)
    if classes and isinstance(value, Mapping):
        data = dict(cast(Mapping[str, Any], value))
        default = type(usual).__name__ if is_dataclass(usual) else None
        name = data.pop(KIND, default) if len(classes) > 1 else classes[0].__name__
        chosen = next((member for member in classes if member.__name__ == name), None)
        if chosen is None:
            raise unknown_name(f"{path}.{KIND}", str(name), [member.__name__ for member in classes])
        return from_plain(chosen, data, f"{path}.")
    if isinstance(value, list):
        value = tuple(cast(list[Any], value))
    if not any(fits(member, value) for member in union_members(hint)):
        raise ConfigError(f"{path}={value!r} must be {' or '.join(describe_choices(hint))}")
    widens = type(value) is int and float in union_members(hint) and int not in union_members(hint)
    return float(value) if widens else value


def fits(hint: Any, value: Any) -> bool:
    """Whether a value from JSON is of an annotated type; a whole number fits any number type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        kinds, items = get_args(hint), cast(tuple[Any, ...], value)
        kinds = (kinds[0],) * len(items) if kinds[-1] is Ellipsis else kinds
        return len(kinds) == len(items) and all(map(fits, kinds, items))
    return type(value) is hint or (hint is float and type(value) is int)


def diff_plain(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """The differences between two plain configs, one line each: "optim.lr: 0.001 -> 0.003"."""
    lines: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, MISSING), new.get(name, MISSING)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += diff_plain(cast(Mapping[str, Any], before), cast(Mapping[str, Any], after), f"{path}{name}.")
        elif before != after or type(before) is not type(after):
            lines.append(f"{path}{name}: {format_plain(before)} -> {format_plain(after)}")
    return lines


def drop_fields(lines: Iterable[str], fields: Iterable[str]) -> list[str]:
    """Lines of `diff_plain` without those of some fields: "optim.lr" names one, "optim" all of its fields."""
    names = tuple(fields)
    kept = ((line, line.partition(":")[0]) for line in lines)
    return [line for line, field in kept if not any(field == name or field.startswith(f"{name}.") for name in names)]


def format_plain(value: Any) -> str:
    """A plain value as one line of text; nested data as its class name if known."""
    if value is MISSING or value is None:
        return ABSENT if value is MISSING else NOTHING
    if isinstance(value, Mapping):
        return str(cast(Mapping[str, Any], value).get(KIND, "{...}"))
    return format_value(tuple(cast(list[Any], value)) if isinstance(value, list) else value)
