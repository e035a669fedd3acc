"""Declares each option once, as a field of a frozen dataclass from which the parser is generated.

    @command_options
    class KnnOptions(FrozenOptions):
        '''The command's description, and its examples.'''

        data: str = word(..., "images to score", "DATA", older="--data")
        temperature: float = option(0.07, "temperature of the votes", "T")

The annotation decides how a value is parsed: a bool is a switch, a Literal has choices, a tuple takes several values.
WEIGHTS and DATA are positional and outputs are --out. Older forms are still accepted; giving both is an error.
"""

import argparse
import difflib
import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, Never, TypeVar, cast, dataclass_transform, get_args, get_origin, get_type_hints

from vitrail.core.errors import VitrailError

T = TypeVar("T")

# Words that people may type for options. The first option of these that the command has is suggested.
SYNONYMS: Final = {
    **dict.fromkeys(("--learning-rate", "--learning_rate", "--rate"), ("--lr",)),
    **dict.fromkeys(("--batch-size", "--batch_size", "--bs"), ("--batch",)),
    **dict.fromkeys(("--max-steps", "--iterations"), ("--steps",)),
    **dict.fromkeys(("--img-size", "--size", "--resolution"), ("--image-size",)),
    **dict.fromkeys(("--patch-size", "--patch_size"), ("--patch", "--patch-size")),
    **dict.fromkeys(("--in-chans", "--num-channels"), ("--channels",)),
    **dict.fromkeys(("--output", "--save", "-o"), ("--out",)),
    **dict.fromkeys(("--gpu", "--cuda"), ("--device",)),
    **dict.fromkeys(("--classes", "--names"), ("--labels",)),
    "--num-epochs": ("--epochs",),
    "--top": ("--topk",),
    "--format": ("--to", "--json"),
    "--time": ("--minutes",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """How a field appears on the command line."""

    help: str
    metavar: str | None = None
    flag: str = ""  # default: the field's name
    usually: str = ""  # the default as the help shows it; default: its value
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    nargs: str | None = None
    repeated: bool = False  # given several times, once per value
    hidden: bool = False
    group: str = ""  # a heading of its own in the help
    exclusive: str = ""  # options with the same name here exclude each other
    word: bool = False
    older: str = ""  # an option that means the same as the word
    order: int = 1  # the order of words and options in the help
    completes: str = ""  # the kind of names that the shell completes


def option(default: Any, help: str, metavar: str | None = None, **about: Any) -> Any:
    """Declares an option; it is required if the default is `...`."""
    declared = Declaration(help=help, metavar=metavar, **about)
    return field(default=MISSING if default is ... else default, metadata={"cli": declared})


def word(default: Any, help: str, metavar: str | None = None, **about: Any) -> Any:
    """Declares a positional argument; if the default is `...`, it or its older form is required."""
    return option(default, help, metavar, word=True, **about)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def command_options(cls: type[T]) -> type[T]:
    """Makes the options of a command, or a group of options, a dataclass."""
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)


class Word(argparse.Action):
    """A positional argument, or the older option with the same meaning."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        del option_string
        if values is None or values == []:
            return
        before = getattr(namespace, self.dest, None)
        if isinstance(values, list):
            values = [*(before or []), *values]
        elif before is not None and before != self.default and before != values:
            parser.error(f"{name_argument(self)} is given twice, as {before} and as {values}; give it once")
        setattr(namespace, self.dest, values)


class NeededWord(Word):
    """A positional argument that is required, in either form."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are reported like all other errors."""

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses options and words in any order. The error for a misspelt option suggests a name, and that for a
        missing word gives its name."""
        found, extra = self.parse_known_intermixed_args(args, namespace)
        if extra:
            self.error(describe_extra_words(extra, self._actions))
        needed = [action for action in self._actions if isinstance(action, NeededWord) and not action.option_strings]
        missing = [action for action in needed if not getattr(found, action.dest, None)]
        if missing:
            names = [("--out " if one.help == argparse.SUPPRESS else "") + name_argument(one) for one in missing]
            self.error(f"the following arguments are required: {', '.join(names)}")
        return found

    def error(self, message: str) -> Never:
        raise VitrailError(f"{message}{' ' if message.endswith('?') else '; '}see {self.prog} --help")


class ParagraphFormatter(argparse.HelpFormatter):
    """Wraps a description paragraph by paragraph; indented text such as examples stays as it is."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        text = super()._format_args(action, default_metavar)
        return text.strip("[]") if isinstance(action, NeededWord) and action.nargs == "?" else text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts, fill = text.strip("\n").split("\n\n"), super()._fill_text
        return "\n\n".join(part if part.startswith((" ", "examples:")) else fill(part, width, "") for part in parts)


def build_parser(kind: type[Any], prog: str) -> Parser:
    """Builds the parser of a command from the dataclass of its options."""
    description, _, examples = inspect.cleandoc(kind.__doc__ or "").partition("\n\nexamples:\n")
    parser = Parser(
        prog=prog,
        usage=getattr(kind, "USAGE", None),
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=ParagraphFormatter,
        allow_abbrev=False,
    )
    hints, places = get_type_hints(kind), dict[str, Any]()
    declared = [(one, cast(Declaration, one.metadata["cli"])) for one in fields(kind)]
    for one, about in sorted(declared, key=lambda each: (not each[1].word, each[1].order)):
        key = about.group or about.exclusive
        if key and key not in places:
            places[key] = parser.add_argument_group(key) if about.group else parser.add_mutually_exclusive_group()
        place = places[key] if key else parser
        add_declared(place, one.name, about, hints[one.name], one.default)
    return parser


def add_declared(place: Any, name: str, about: Declaration, hint: Any, default: Any) -> None:
    """Adds the argument of one field, and its older form."""
    required = default is MISSING
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    kind = kinds[0]
    several = get_origin(kind) is tuple
    kind = get_args(kind)[0] if several else kind
    flag, text = about.flag or f"--{name.replace('_', '-')}", describe(about, default)
    if kind is bool:
        place.add_argument(flag, dest=name, action="store_true", help=text)
        return
    settings: dict[str, Any] = {"dest": name, "metavar": about.metavar, "help": text}
    if not required:
        settings["default"] = list(default) if isinstance(default, tuple) else default
    choices = about.choices or (get_args(kind) if get_origin(kind) is Literal else ())
    if choices:
        settings["choices"] = choices
    reader = about.parse or (kind if kind in (int, float, Path) else None)
    if reader is not None:
        settings["type"] = reader
    if about.word:
        add_word(place, settings, about, required=required, several=several)
        return
    settings["required"] = required
    if about.repeated:
        settings["action"] = "append"
    elif several or about.nargs:
        settings["nargs"] = about.nargs or "+"
        if about.nargs == "?":
            settings["const"] = ""
    place.add_argument(flag, **settings)


def add_word(place: Any, settings: dict[str, Any], about: Declaration, *, required: bool, several: bool) -> None:
    """Adds a positional argument; if it has an older form, either of them may be given."""
    dest, text = settings.pop("dest"), settings["help"]
    if about.older:
        action = NeededWord if required else Word
        place.add_argument(dest, **{**settings, "action": action, "nargs": "*" if several else "?"})
        older = {**settings, "action": Word, "dest": dest, "nargs": 1 if several else None, "help": argparse.SUPPRESS}
        if about.older == "--out":  # here the option is the usual form, and the last word is the older one
            place._actions[-1].help, older["help"] = argparse.SUPPRESS, text
        place.add_argument(about.older, **older)
        return
    if several:
        settings["nargs"] = "+" if required else "*"
    elif not required:
        settings |= {"nargs": "?", "action": Word}
    place.add_argument(dest, **settings)


def describe(about: Declaration, default: Any) -> str:
    """The help text of an argument, with its default."""
    if about.hidden:
        return argparse.SUPPRESS
    text = about.usually
    if not text and isinstance(default, str | int | float | Path) and not isinstance(default, bool) and default != "":
        text = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{about.help} (default: {text})".replace("%", "%%") if text else about.help.replace("%", "%%")


def build_options(kind: type[T], values: Mapping[str, object]) -> T:
    """Builds the dataclass of options from parsed values; lists become tuples."""
    lists = {name: tuple(cast("list[object]", value)) for name, value in values.items() if isinstance(value, list)}
    return kind(**{**values, **lists})


def pass_options(options: Any, kind: Callable[..., T], **others: object) -> T:
    """Builds another dataclass from the fields that it shares with the options, and from `others`."""
    shared = {one.name for one in fields(cast(Any, kind))} & {one.name for one in fields(options)}
    return kind(**{name: getattr(options, name) for name in shared} | others)


def format_command(name: str, options: Any) -> str:
    """The command line that gives these options."""
    words = ["vitrail", name]
    for one in sorted(fields(options), key=lambda one: not one.metadata["cli"].word):
        value, about = getattr(options, one.name), one.metadata["cli"]
        if value != one.default:
            flag = [] if about.word else [about.flag or f"--{one.name.replace('_', '-')}"]
            texts = [] if value is True else list(map(str, value)) if isinstance(value, tuple) else [str(value)]
            words += [word for text in texts for word in (*flag, text)] if about.repeated else [*flag, *texts]
    return shlex.join(words)


def name_argument(action: argparse.Action) -> str:
    """The name of an argument, as in the help."""
    return action.metavar if isinstance(action.metavar, str) else action.dest


def describe_extra_words(extra: Sequence[str], actions: Iterable[argparse.Action]) -> str:
    """The error for words that a command does not take."""
    options = [option for action in actions for option in action.option_strings]
    wrong = next((word for word in extra if word.startswith("-") and word != "-"), None)
    if wrong is None:
        return f"unexpected argument {' '.join(extra)}"
    typed = wrong.partition("=")[0]
    near = [option for option in SYNONYMS.get(typed.lower(), ()) if option in options][:1]
    near = near or difflib.get_close_matches(typed.lower(), options, n=2, cutoff=0.6)
    near = near or [option for option in options if len(typed) > 3 and option.startswith(typed)]
    return f"unknown option {typed}" + (f"; did you mean {' or '.join(near)}?" if near else "")
