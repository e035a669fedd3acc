"""The `vitrail` command: finds the command that was asked for, parses its options, imports its work, and turns errors
into one line.

Exit status: 0 done, 1 a part of a study failed, 2 a mistake of the user's, 130 interrupted, 141 the reader of a pipe
went away. With VITRAIL_TRACEBACK=1 in the environment a mistake also shows where it was noticed.
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, cast

from vitrail import __version__
from vitrail.cli.examples import EXAMPLES
from vitrail.cli.options.grammar import NeededWord, complain, missing_words
from vitrail.core.console import escape_line, escape_streams
from vitrail.core.errors import VitrailError, unknown_name

T = TypeVar("T")

LARGEST_NUMBER: Final = 2**53  # beyond it not even a float counts by ones


class Command(NamedTuple):
    """A line of the help text and the module that does the work."""

    group: str
    help: str
    module: str


class OptionsModule(Protocol):
    """What a module in `cli/options` offers; its docstring is the command's description."""

    OPTIONS: type[Any]  # a dataclass with a field for each option

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...


COMMANDS = {
    "demo": Command("Start here", "train a small ViT on digits, then at a higher resolution", "vitrail.cli.train.runs"),
    "doctor": Command("Start here", "say what is here, what is missing, and what to fix", "vitrail.cli.doctor"),
    "predict": Command("Use a model", "say what is on images, and show where it looked", "vitrail.cli.use.predict"),
    "fit": Command("Use a model", "make a classifier of your images in seconds, no training", "vitrail.cli.use.fit"),
    "embed": Command("Use a model", "write the features of a whole collection to a file", "vitrail.cli.use.fit"),
    "inspect": Command("Use a model", "show where a network looks and what it has learned", "vitrail.cli.use.inspect"),
    "finetune": Command("Train", "fine-tune weights on your images", "vitrail.cli.train.training"),
    "pretrain": Command("Train", "train a network from scratch after a recipe", "vitrail.cli.train.training"),
    "recipes": Command("Train", "list the recipes, or show every setting of one", "vitrail.cli.train.runs"),
    "report": Command("Train", "tell what became of a run", "vitrail.cli.train.runs"),
    "replay": Command("Train", "run one step of a training again and show its images", "vitrail.cli.train.runs"),
    "evaluate": Command("Evaluate", "score weights on labelled images", "vitrail.cli.evaluate.evaluate"),
    "fewshot": Command(
        "Evaluate", "closed-form accuracy of frozen features from a few shots", "vitrail.cli.evaluate.frozen"
    ),
    "probe": Command("Evaluate", "logistic regression on frozen features", "vitrail.cli.evaluate.frozen"),
    "knn": Command("Evaluate", "nearest neighbours among frozen features", "vitrail.cli.evaluate.frozen"),
    "vtab": Command("Evaluate", "fine-tune weights on the 19 tasks of VTAB-1k", "vitrail.cli.evaluate.evaluate"),
    "study": Command(
        "Evaluate", "run one of the paper's studies: a grid, a table, a figure", "vitrail.cli.evaluate.study"
    ),
    "compare": Command("Evaluate", "lay results side by side in one table", "vitrail.cli.evaluate.study"),
    "models": Command("Look at networks", "list the networks by name, size and cost", "vitrail.cli.networks"),
    "trace": Command("Look at networks", "follow one image through a network, shape by shape", "vitrail.cli.networks"),
    "cost": Command("Look at networks", "say what a network costs, and how fast it is here", "vitrail.cli.networks"),
    "data": Command("Look at data", "say what is in a set of images, and draw a contact sheet", "vitrail.cli.data"),
    "data pack": Command("Look at data", "write a set as tar shards", "vitrail.cli.data"),
    "data dedup": Command("Look at data", "find images of test sets in a training set", "vitrail.cli.data"),
    "serve": Command("Ship it", "serve a model over HTTP, with a page to try it", "vitrail.cli.serve"),
    "export": Command("Ship it", "write a network for other runtimes and libraries, checked", "vitrail.cli.export"),
    "convert": Command("Ship it", "rewrite a weight file in another library's format", "vitrail.cli.export"),
    "completion": Command("Your shell", "print a script that completes what you type", "vitrail.cli.completion"),
}


# What people type, and what it is called here.
MEANT = {
    "train": ("finetune", "pretrain", "fit"),
    "fine-tune": ("finetune",),
    "tune": ("finetune",),
    "resume": ("finetune", "pretrain"),
    "classify": ("predict", "fit"),
    "infer": ("predict",),
    "inference": ("predict",),
    "run": ("predict", "finetune"),
    "detect": ("predict", "inspect"),
    "label": ("predict",),
    "test": ("evaluate",),
    "eval": ("evaluate",),
    "val": ("evaluate",),
    "validate": ("evaluate",),
    "score": ("evaluate",),
    "benchmark": ("cost", "evaluate"),
    "list": ("models", "recipes", "data"),
    "ls": ("models", "recipes", "data"),
    "zoo": ("models",),
    "info": ("cost", "trace", "data"),
    "summary": ("trace", "cost"),
    "dataset": ("data",),
    "datasets": ("data",),
    "download": ("data",),
    "explain": ("inspect",),
    "attention": ("inspect",),
    "visualize": ("inspect",),
    "visualise": ("inspect",),
    "extract": ("embed",),
    "features": ("embed",),
    "deploy": ("serve", "export"),
    "onnx": ("export",),
    "check": ("doctor",),
}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints leave by the same door as all other mistakes."""

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Options and words in any order. What is misspelt is met with a suggestion, what is missing with its name."""
        found, extra = self.parse_known_intermixed_args(args, namespace)
        if extra:
            self.error(complain(extra, self._actions))
        if missing := missing_words(self._actions, found):
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return found

    def error(self, message: str) -> NoReturn:
        raise VitrailError(f"{message}{' ' if message.endswith('?') else '; '}see {self.prog} --help")


class Paragraphs(argparse.HelpFormatter):
    """Wraps what a command says of itself paragraph by paragraph; what is indented, as examples are, stays as it is."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        text = super()._format_args(action, default_metavar)
        return text.strip("[]") if isinstance(action, NeededWord) and action.nargs == "?" else text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part if part.startswith((" ", "examples:")) else super(Paragraphs, self)._fill_text(part, width, indent)
            for part in parts
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    with escape_streams():
        return run(list(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """The command, with every way in which it may end turned into a status."""
    try:
        status = dispatch(argv)
        sys.stdout.flush()  # a pipe that broke late is noticed here, not in the interpreter's shutdown
    except (VitrailError, OSError, MemoryError, RecursionError, OverflowError) as error:
        if isinstance(error, BrokenPipeError):
            return silence()
        if os.environ.get("VITRAIL_TRACEBACK") == "1":
            import traceback

            traceback.print_exc()
        print(f"vitrail: error{speaker()}: {escape_line(trouble(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vitrail: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich's way of saying so
            return silence()
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    return status


def trouble(error: Exception) -> str:
    """What went wrong, in one line. Of what a command did not foresee, what the machine could not do."""
    if isinstance(error, VitrailError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "out of memory; ask for less at once: fewer images, a smaller network or image"
    if isinstance(error, OSError):
        named = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        place = f"{named}: " if len(named) < 256 else f"{named[:60]}...: "
        return f"{place if named else ''}{error.strerror or 'the system refused'}; name another file or folder"
    return "a number or a nesting is beyond what this machine computes with; give a smaller one"


def check_numbers(values: Mapping[str, object]) -> None:
    """Refuses numbers that no option can mean."""
    for name, value in values.items():
        for one in cast("list[object]", value) if isinstance(value, list) else [value]:
            option = f"--{name.replace('_', '-')}"
            if isinstance(one, int) and abs(one) > LARGEST_NUMBER:
                raise VitrailError(f"{option} is more than {LARGEST_NUMBER:,}; give a smaller number")
            if isinstance(one, float) and not math.isfinite(one):
                raise VitrailError(f"{option} {one} is not a finite number")


def speaker() -> str:
    """Which of several processes says so, where it is not the first."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f" (rank {rank})"


def dispatch(argv: list[str]) -> int:
    """Parses what stands before the command, then leaves the rest to the command's own parser."""
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    top = Parser(
        prog="vitrail",
        usage="vitrail <command> [options]",
        description="Vision Transformers: use them, train them, see what they do, ship them.",
        epilog=overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"vitrail {__version__}")
    top.parse_intermixed_args(argv[:at])
    if at == len(argv):
        top.print_help()
        return 0
    name = argv[at]
    if " ".join(argv[at : at + 2]) in COMMANDS:  # data pack
        name, at = " ".join(argv[at : at + 2]), at + 1
    if name not in COMMANDS:
        raise unknown_command(name)
    options = parse_options(name, argv[at + 1 :])
    return getattr(import_module(COMMANDS[name].module), f"run_{name.rpartition(' ')[2]}")(options)


def unknown_command(name: str) -> VitrailError:
    """The error for a command that is called otherwise here, or misspelt."""
    meant = MEANT.get(name.lower(), ())
    if not meant:
        return unknown_name("command", name, COMMANDS)
    lines = [f"`vitrail {each}` ({COMMANDS[each].help})" for each in meant]
    return VitrailError(f"unknown command {name!r}; did you mean {' or '.join(lines)}?")


def parse_options(name: str, words: Sequence[str]) -> Any:
    """What was typed behind a command, as the dataclass of its options."""
    values = vars(parser_of(name).parse_intermixed_args(words))  # vitrail predict W --topk 1 a.jpg
    check_numbers(values)
    return build_options(cast(OptionsModule, import_module(options_module(name))).OPTIONS, values)


def options_module(name: str) -> str:
    """The module that declares the options; it imports nothing heavy, so that help does not wait for torch."""
    return f"vitrail.cli.options.{name.replace(' ', '_')}"


def build_options(kind: type[T], values: Mapping[str, object]) -> T:
    """A dataclass from values of the same names, lists as tuples. A field without a value and a value without a field
    are mistakes of the program."""
    names = {field.name for field in fields(cast(Any, kind))}
    if different := names.symmetric_difference(values):
        raise TypeError(f"{kind.__name__}: fields and options differ in {', '.join(sorted(different))}")
    lists = {name: tuple(cast("list[object]", value)) for name, value in values.items() if isinstance(value, list)}
    return kind(**{**values, **lists})


def parser_of(name: str) -> Parser:
    """The parser of a command, without the modules that do its work."""
    module = import_module(options_module(name))
    parser = Parser(
        prog=f"vitrail {name}",
        description=module.__doc__,
        epilog="\n".join(["examples:", *(f"  vitrail {line}" for line in EXAMPLES[name])])
        if name in EXAMPLES
        else None,
        formatter_class=Paragraphs,
        allow_abbrev=False,
    )
    cast(OptionsModule, module).add_arguments(parser)
    return parser


def overview() -> str:
    """The commands, under what a person would want of them."""
    lines: list[str] = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"{group}:")
        lines += [f"  {name:<11} {c.help}" for name, c in COMMANDS.items() if c.group == group]
        lines.append("")
    return "\n".join([*lines, "vitrail <command> --help says more about one of them, with examples."])


def silence() -> int:
    """Gives stdout a place to flush to, so that nothing is said about a reader that has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
