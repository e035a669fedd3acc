"""Nested frozen dataclasses, changed by name, told apart, printed and stored. Knows nothing of what they configure.

    run = with_settings(run, ["optim.lr=3e-4", "augmentation.policy=RandAugment", "augmentation.policy.magnitude=9"])

All changes are gathered before anything is built, so that a rule between two fields (the size of the network and that
of the crop) is asked once, at the end, and the order of the settings says nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from vitrail.core.errors import ConfigError, UnknownName, unknown
from vitrail.core.values import classes_of, expected, hints, is_choice, members, parsed, text_of

T = TypeVar("T")
Maker = Callable[[Any, str], Any]  # from the old value and a text to a new value, or NotImplemented
KIND = "kind"  # what names the class of a union's member in plain data
NOTHING, ABSENT = "(none)", "(absent)"


class Line(NamedTuple):
    """A field for printing: its dotted name, its value as a setting would give it, and whether that is the default."""

    name: str
    text: str
    default: bool


@dataclass(slots=True)
class Change:
    """What is to become of one field: a text for its value, and changes of the fields inside it."""

    text: str | None = None
    inside: "dict[str, Change]" = dataclass_field(default_factory=dict[str, "Change"])


def with_settings(config: T, settings: Iterable[str], makers: Mapping[str, Maker] | None = None) -> T:
    """A new config with "dotted.name=value" settings applied; of two for one field the later counts. A class is chosen
    by its name and takes over what the old value has under the same name and type. `makers` know more texts for some
    fields, by dotted name; one that does not know a text says NotImplemented."""
    root = Change()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{setting!r} is no setting; write NAME=VALUE, as in optim.lr=3e-4")
        at = root
        for part in name.strip().split("."):
            at = at.inside.setdefault(part, Change())
        at.text = text
    names = [line.name for line in flat(config)]
    return rebuilt(config, root, Where(names=names, makers=makers or {})) if root.inside else config


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place in the tree, and what an error or a maker needs to know of the whole."""

    path: str = ""
    names: list[str]
    makers: Mapping[str, Maker]

    def inner(self, name: str) -> "Where":
        return replace(self, path=f"{self.path}.{name}" if self.path else name)


def rebuilt(old: T, change: Change, where: Where, kind: "type[T] | None" = None) -> T:
    """The fields inside first, then the value itself: anew, or as another class where `kind` is one."""
    kind = kind or type(old)
    kinds = hints(kind)
    for name in change.inside:
        if name not in kinds:
            raise no_field(where.inner(name).path, [*(where.inner(known).path for known in kinds), *where.names])
    values = carried(old, kind)
    for name, inner in change.inside.items():
        values[name] = changed_value(kinds[name], values.get(name), inner, where.inner(name))
    return constructed(kind, values, where.path)


def changed_value(hint: Any, old: Any, change: Change, where: Where) -> Any:
    """A field's new value."""
    make = where.makers.get(where.path)
    made = NotImplemented if make is None or change.text is None else make(old, change.text)
    if made is not NotImplemented:
        return rebuilt(made, change, where) if change.inside else made
    classes = classes_of(hint)
    if change.text is None:
        if old is None and len(classes) == 1:
            return rebuilt(None, change, where, classes[0])
        if not is_dataclass(old):
            raise nothing_inside(old, classes, change, where)
        return rebuilt(old, change, where)
    chosen = next((kind for kind in classes if kind.__name__.lower() == change.text.strip().lower()), None)
    if chosen is not None:
        return rebuilt(old, change, where, chosen)
    value = parsed(hint, change.text, where.path)
    if change.inside:
        raise nothing_inside(value, classes, change, where)
    return value


def carried(old: Any, kind: type) -> dict[str, Any]:
    """What a value of a class starts with: all of an old value of that class; of one of another class, or of none, the
    fields of the same name and type."""
    if not is_dataclass(old):
        return {}
    before, after = hints(type(old)), hints(kind)
    return {name: getattr(old, name) for name, hint in before.items() if after.get(name) == hint}


def constructed(kind: type[T], values: dict[str, Any], path: str) -> T:
    """Builds, and asks the rules of the class."""
    missing = [field.name for field in fields(cast(Any, kind)) if required(field) and field.name not in values]
    if missing:
        wanted = ", ".join(f"{path}.{name}" if path else name for name in missing)
        raise ConfigError(f"{path or kind.__name__}={kind.__name__} has no default for {wanted}; set that too")
    try:
        return kind(**values)
    except ConfigError as error:
        told = str(error)
        head = f"{path}: " if path and not told.startswith(path) else ""
        raise type(error)(f"{head}{told}") from None


def no_field(path: str, names: list[str]) -> UnknownName:
    """Names the fields that end alike first: who writes "lr" means "optim.lr"."""
    last = path.rpartition(".")[2]
    alike = [name for name in names if name.rpartition(".")[2] == last]
    return unknown("setting", path, dict.fromkeys(alike or names))


def nothing_inside(value: Any, classes: list[type[Any]], change: Change, where: Where) -> ConfigError:
    inner = where.inner(next(iter(change.inside))).path
    if not classes:
        return ConfigError(f"{inner}: {where.path} is a plain value and has no fields")
    first = classes[0].__name__
    choice = " or ".join(kind.__name__ for kind in classes)
    return ConfigError(
        f"{inner}: {where.path} is {text_of(value)} now; choose {choice} for it too, as in {where.path}={first}"
    )


def required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def default_of(field: "Field[Any]") -> Any:
    """MISSING where there is none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def flat(config: Any, path: str = "") -> list[Line]:
    """Every field of a config and of the configs in it, in the order of the classes. A field that holds one of several
    classes has a line of its own, with the name of the class, before those of its fields."""
    lines: list[Line] = []
    for field in fields(config):
        value, name = getattr(config, field.name), f"{path}{field.name}"
        default = default_of(field)
        if is_dataclass(value):
            if is_choice(hints(type(config))[field.name]):
                lines.append(Line(name, text_of(value), type(value) is type(default)))
            lines += flat(value, f"{name}.")
        else:
            lines.append(Line(name, text_of(value), value == default))
    return lines


def plain(config: Any) -> dict[str, Any]:
    """A config as data for JSON, in the order of its fields; where one of several classes was chosen, its name is under
    "kind"."""
    kinds = hints(type(config))
    return {name: plain_value(getattr(config, name), is_choice(kinds[name])) for name in kinds}


def plain_value(value: Any, choice: bool = False) -> Any:
    if is_dataclass(value):
        return {**({KIND: type(value).__name__} if choice else {}), **plain(value)}
    if isinstance(value, tuple):
        return [plain_value(item) for item in cast(tuple[Any, ...], value)]
    return value


def restored(kind: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """The config that `plain` wrote. A field that is missing takes its default; an unknown one is refused. A class that
    is not named is that of the default: there was no other when the data were written."""
    kinds, usual = hints(kind), {field.name: default_of(field) for field in fields(cast(Any, kind))}
    for name in data:
        if name not in kinds:
            raise no_field(f"{path}{name}", [f"{path}{known}" for known in kinds])
    values = {name: restored_value(kinds[name], value, f"{path}{name}", usual[name]) for name, value in data.items()}
    return constructed(kind, values, path.rstrip("."))


def restored_value(hint: Any, value: Any, path: str, usual: Any) -> Any:
    classes = classes_of(hint)
    if classes and isinstance(value, Mapping):
        data = dict(cast(Mapping[str, Any], value))
        default = type(usual).__name__ if is_dataclass(usual) else None
        name = data.pop(KIND, default) if len(classes) > 1 else classes[0].__name__
        chosen = next((member for member in classes if member.__name__ == name), None)
        if chosen is None:
            raise unknown(f"{path}.{KIND}", str(name), [member.__name__ for member in classes])
        return restored(chosen, data, f"{path}.")
    if isinstance(value, list):
        value = tuple(cast(list[Any], value))
    if not any(fits(member, value) for member in members(hint)):
        raise ConfigError(f"{path}={value!r} must be {' or '.join(expected(hint))}")
    return float(value) if float in members(hint) and type(value) is int and int not in members(hint) else value


def fits(hint: Any, value: Any) -> bool:
    """Whether a value from JSON is of an annotated type; a whole number will do for any number."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        items = cast(tuple[Any, ...], value) if isinstance(value, tuple) else None
        if items is None:
            return False
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(items)
        return len(kinds) == len(items) and all(fits(kind, item) for kind, item in zip(kinds, items, strict=True))
    return type(value) is hint or (hint is float and type(value) is int)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """What differs between two plain configs, a line each: "optim.lr: 0.001 -> 0.003"."""
    lines: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, MISSING), new.get(name, MISSING)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(cast(Mapping[str, Any], before), cast(Mapping[str, Any], after), f"{path}{name}.")
        elif before != after or type(before) is not type(after):
            lines.append(f"{path}{name}: {brief(before)} -> {brief(after)}")
    return lines


def without_fields(lines: Iterable[str], fields: Iterable[str]) -> list[str]:
    """Lines of `differences` but for those of certain fields: "optim.lr" is one, "optim" are all that it has."""
    names = tuple(fields)
    kept = ((line, line.partition(":")[0]) for line in lines)
    return [line for line, field in kept if not any(field == name or field.startswith(f"{name}.") for name in names)]


def brief(value: Any) -> str:
    """A plain value in a line of text; of nested data the class, where it is told."""
    if value is MISSING or value is None:
        return ABSENT if value is MISSING else NOTHING
    if isinstance(value, Mapping):
        data = cast(Mapping[str, Any], value)
        return str(data.get(KIND, "{...}"))
    if isinstance(value, list):
        return text_of(tuple(cast(list[Any], value)))
    return text_of(value)


def changed(config: Any, base: Any) -> list[str]:
    """What a config has otherwise than another, as lines of `differences`."""
    return differences(plain(base), plain(config))
