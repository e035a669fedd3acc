"""Every mistake a user can make, as a small tree.

VitrailError
├── ConfigError            a field has a value that its rule forbids
│   ├── UnknownName        no such model, weights, format or field; the nearest ones are named
│   └── ImageSizeError     the image does not fit the patch grid
├── DataError              a collection of images cannot be used as requested; names the file or the sample
│   ├── SourceNotFound     neither a path nor a known name, or its files are missing; says which file goes where
│   ├── BadImage           one file that is not a readable image: the reason, and the name if known
│   ├── BadLabels          an empty class, a class that train lacks, a label outside the range
│   └── WorkerDied         a loader process ended; names the sample it was reading
├── TrainingError          a run cannot continue; its folder records how far it got
│   ├── Diverged           loss or gradient was not finite too often, or weights overflowed
│   └── RankLost           a process of a job died or hung; names the rank
├── OutOfMemory            a step does not fit into device memory; says what to change
└── WeightsError           a weight file cannot be used; names the file and the first offending tensor
    ├── UnsafeWeights      the file asks for code to run, or for memory beyond any honest need
    ├── CorruptWeights     truncated, torn, flipped, not finite, or not a weight file at all
    ├── MismatchedWeights  well-formed, but tensors are missing, unexpected or of the wrong shape
    ├── ExportFailed       the export does not compute what the network does; no file is left
    ├── ExportRefused      the target format cannot hold a field of this model
    └── WeightsNotFound    neither cached nor downloadable; says which file to put where

The command line prints the message in one line and exits 2, so a message carries the value, the rule and the remedy.
"""

import difflib
import re
from collections.abc import Iterable


class VitrailError(Exception):
    """Base of all errors that vitrail raises on purpose."""


class ConfigError(VitrailError, ValueError):
    """A configuration field has a value that its rule forbids."""


class UnknownName(ConfigError):
    """An unknown name; the message lists the nearest known ones."""


class ImageSizeError(ConfigError):
    """An image size that the patch does not divide, or that a model was not built for."""


class DataError(VitrailError):
    """A collection of images that cannot be used as requested."""


class SourceNotFound(DataError):
    """A source that is neither a path nor a known name, or whose files are not there."""


class BadImage(DataError):
    """A file that is not an image, or not one that is safe or sensible to decode."""


class BadLabels(DataError):
    """Classes or labels that contradict each other."""


class WorkerDied(DataError):
    """A loader process that ended while it read a sample."""


class TrainingError(VitrailError):
    """A run that cannot continue."""


class Diverged(TrainingError):
    """A run whose loss or gradient was not finite too often, or whose weights overflowed."""


class RankLost(TrainingError):
    """A process of a job that died or hung."""


class OutOfMemory(VitrailError, MemoryError):
    """A step that does not fit into device memory and cannot be split further automatically."""


class WeightsError(VitrailError):
    """A weight file that cannot be used."""


class UnsafeWeights(WeightsError):
    """A weight file that would run code or take memory out of proportion to its size."""


class CorruptWeights(WeightsError):
    """A weight file that is truncated, altered or not finite."""


class MismatchedWeights(WeightsError):
    """A sound weight file whose tensors do not fit the network."""


class ExportRefused(WeightsError):
    """A network that a foreign format cannot express."""


class ExportFailed(WeightsError):
    """An export that does not compute what the network does."""


class WeightsNotFound(WeightsError):
    """Public weights that are neither cached nor downloadable now."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for a misspelt name, with the nearest known names."""
    names = list(known)
    folded = {n.lower(): n for n in reversed(names)}
    near = [folded[n] for n in difflib.get_close_matches(name.lower(), list(folded), n=4, cutoff=0.4)]
    hint = f"known: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
    hint = f"did you mean {', '.join(near)}?" if near else hint
    return UnknownName(f"unknown {kind} {name!r}; {hint}")


# Messages about Python's internals; the user wants to know about the file.
INTERNAL = re.compile(
    r"literal for|could not convert|unpack|buffer|not enough values|too many values|object is not|keyword argument|"
    r"required|has no attribute|reshape|out of range|codec can't|positional|indices must|operand|Expecting|Extra data|"
    r"Exceeds the limit|not supported between|NoneType|broadcast|iterable|argument"
)


def describe_error(error: BaseException) -> str:
    """Why a file could not be read, in terms of the file rather than of Python."""
    text = " ".join(str(error).split())
    if isinstance(error, VitrailError) or type(error).__module__.startswith("vitrail."):
        return text
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing" if error.args else "a part is missing"
    kinds = (
        (UnicodeError, "it is not UTF-8 text"),
        (MemoryError, "it needs more memory than is available"),
        (RecursionError, "it is nested too deeply"),
        ((EOFError, IndexError), "it ends too early"),
    )
    for kind, words in kinds:
        if isinstance(error, kind):
            return words
    if type(error).__name__ == "JSONDecodeError":
        return "it is not JSON"
    return "its content is malformed" if not text or INTERNAL.search(text) else text
