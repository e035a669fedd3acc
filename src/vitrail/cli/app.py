"""The `vitrail` command: finds the command, parses its options, imports its code, and prints errors in one line.

Exit status: 0 success, 1 partial failure or a failed check, 2 user error, 130 interrupted, 141 broken pipe. With
VITRAIL_TRACEBACK=1 in the environment, an error also prints its traceback.
"""

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

from vitrail import __version__
from vitrail.cli.options.grammar import Parser, build_options, build_parser
from vitrail.core.console import escape_line, escape_streams
from vitrail.core.errors import VitrailError, unknown_name

LARGEST_NUMBER: Final = 2**53  # beyond it, floats skip integers


class Command(NamedTuple):
    """A line of the overview, the module that does the work, and the module that declares the options."""

    group: str
    help: str
    module: str
    options: str


COMMANDS = {
    "demo": Command("Start here", "train a small ViT, on digits or to segment scenes", "train.demo", "train"),
    "doctor": Command("Start here", "check the installation", "doctor", "look"),
    "predict": Command("Use a model", "classify images and show attention", "use.predict", "use"),
    "fit": Command("Use a model", "build a classifier from your images", "use.fit", "use"),
    "embed": Command("Use a model", "write the features of a whole collection to a file", "use.fit", "use"),
    "inspect": Command("Use a model", "show where a network looks and what it has learned", "use.inspect", "use"),
    "finetune": Command("Train", "fine-tune weights on your images", "train.training", "train"),
    "pretrain": Command("Train", "train a network from scratch following a recipe", "train.training", "train"),
    "recipes": Command("Train", "list the recipes, or show every setting of one", "train.training", "train"),
    "report": Command("Train", "show a run's status", "train.training", "train"),
    "replay": Command("Train", "repeat one training step and show its images", "train.training", "train"),
    "evaluate": Command("Evaluate", "score weights on labelled images", "evaluate.evaluate", "evaluate"),
    "fewshot": Command("Evaluate", "few-shot accuracy of frozen features", "evaluate.frozen", "evaluate"),
    "probe": Command("Evaluate", "logistic regression on frozen features", "evaluate.frozen", "evaluate"),
    "knn": Command("Evaluate", "nearest neighbours among frozen features", "evaluate.frozen", "evaluate"),
    "vtab": Command("Evaluate", "fine-tune weights on the 19 tasks of VTAB-1k", "evaluate.evaluate", "evaluate"),
    "study": Command("Evaluate", "run one of the paper's studies: grid, table, figure", "evaluate.study", "evaluate"),
    "compare": Command("Evaluate", "compare results in one table", "evaluate.study", "evaluate"),
    "models": Command("Look at networks", "list the networks by name, size and cost", "networks", "look"),
    "trace": Command("Look at networks", "follow one image through a network, shape by shape", "networks", "look"),
    "cost": Command("Look at networks", "show what a network costs, and measure its speed", "cost", "look"),
    "data": Command("Look at data", "show what is in a data set, and draw a contact sheet", "data", "look"),
    "data pack": Command("Look at data", "write a data set as tar shards", "data", "look"),
    "data dedup": Command("Look at data", "find images of test sets in a training set", "data", "look"),
    "serve": Command("Ship it", "serve a model over HTTP, with a page to try it", "serve", "use"),
    "export": Command("Ship it", "write a network for other runtimes and libraries", "export", "use"),
    "convert": Command("Ship it", "rewrite a weight file in another library's format", "export", "use"),
    "completion": Command("Your shell", "print a completion script for your shell", "completion", "look"),
}

# Words that people may type for commands, and the commands to suggest.
ALIASES = {
    **dict.fromkeys(("infer", "inference", "label"), ("predict",)),
    **dict.fromkeys(("fine-tune", "tune"), ("finetune",)),
    **dict.fromkeys(("test", "eval", "val", "validate", "score"), ("evaluate",)),
    **dict.fromkeys(("list", "ls"), ("models", "recipes", "data")),
    **dict.fromkeys(("dataset", "datasets", "download"), ("data",)),
    **dict.fromkeys(("explain", "attention", "visualize", "visualise"), ("inspect",)),
    **dict.fromkeys(("extract", "features"), ("embed",)),
    "train": ("finetune", "pretrain", "fit"),
    "resume": ("finetune", "pretrain"),
    "classify": ("predict", "fit"),
    "run": ("predict", "finetune"),
    "detect": ("predict", "inspect"),
    "benchmark": ("cost", "evaluate"),
    "zoo": ("models",),
    "info": ("cost", "trace", "data"),
    "summary": ("trace", "cost"),
    "deploy": ("serve", "export"),
    "onnx": ("export",),
    "check": ("doctor",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    # Advice of torch's compiler to authors: the few products in float32 are meant to be exact.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    with escape_streams():
        return run(list(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Runs the command, prints errors in one line, and returns the exit status."""
    try:
        status = dispatch(argv)
        sys.stdout.flush()  # notices a broken pipe here rather than during the interpreter's shutdown
    except (VitrailError, OSError, MemoryError, RecursionError, OverflowError) as error:
        if isinstance(error, BrokenPipeError):
            return silence_stdout()
        if os.environ.get("VITRAIL_TRACEBACK") == "1":
            import traceback

            traceback.print_exc()
        process = f" (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
        print(f"vitrail: error{process}: {escape_line(describe_error(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vitrail: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits this way
            return silence_stdout()
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    return status


def describe_error(error: Exception) -> str:
    """Describes an error in one line, including errors of the system that no command handles."""
    if isinstance(error, VitrailError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "out of memory; use fewer images at once, a smaller network or smaller images"
    if isinstance(error, OSError):
        file = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        place = f"{file}: " if len(file) < 256 else f"{file[:60]}...: "
        return f"{place if file else ''}{error.strerror or 'the operation failed'}; name another file or folder"
    return "a number is too large, or data too deeply nested, for this machine; give less"


def dispatch(argv: list[str]) -> int:
    """Parses what precedes the command, then runs the command with the rest."""
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    top = Parser(
        prog="vitrail",
        usage="vitrail <command> [options]",
        description="Vision Transformers: use them, train them, see what they do, ship them.",
        epilog=format_overview(),
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
        meant = [f"`vitrail {each}` ({COMMANDS[each].help})" for each in ALIASES.get(name.lower(), ())]
        known = VitrailError(f"unknown command {name!r}; did you mean {' or '.join(meant)}?")
        raise known if meant else unknown_name("command", name, COMMANDS)
    options = parse_options(name, argv[at + 1 :])
    from vitrail.core.processes import keep_freed_memory  # not needed for help

    keep_freed_memory()
    module = import_module(f"vitrail.cli.{COMMANDS[name].module}")
    return getattr(module, f"run_{name.rpartition(' ')[2]}")(options)


def options_type(name: str) -> type[Any]:
    """The dataclass of a command's options: `DedupOptions` of `data dedup`."""
    module = import_module(f"vitrail.cli.options.{COMMANDS[name].options}")
    return getattr(module, f"{name.rpartition(' ')[2].capitalize()}Options")


def parse_options(command: str, words: Sequence[str]) -> Any:
    """Parses the words after a command into the dataclass of its options; refuses numbers that are out of range."""
    values = vars(command_parser(command).parse_intermixed_args(words))  # vitrail predict W --topk 1 a.jpg
    for name, value in values.items():
        for one in cast("list[object]", value) if isinstance(value, list) else [value]:
            option = f"--{name.replace('_', '-')}"
            if isinstance(one, int) and abs(one) > LARGEST_NUMBER:
                raise VitrailError(f"{option} is more than {LARGEST_NUMBER:,}; give a smaller number")
            if isinstance(one, float) and not math.isfinite(one):
                raise VitrailError(f"{option} {one} is not a finite number")
    return build_options(options_type(command), values)


def command_parser(name: str) -> Parser:
    """The parser of a command, built without importing the modules that do its work."""
    return build_parser(options_type(name), f"vitrail {name}")


def format_overview() -> str:
    """Lists the commands by group."""
    lines: list[str] = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += [f"{group}:", *(f"  {name:<11} {c.help}" for name, c in COMMANDS.items() if c.group == group), ""]
    return "\n".join([*lines, "vitrail <command> --help describes a command, with examples."])


def silence_stdout() -> int:
    """Redirects stdout to the null device, so that nothing is printed about a broken pipe; returns its status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
