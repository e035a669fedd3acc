"""The shape legend of the code base, in the paper's letters, and how numbers and lists are written for people.

B batch   C H W image channels, height, width   P patch side   N patches   T tokens (N plus class token and registers)
D width   M MLP width   k heads   L depth   K classes   G grid (rows, columns)

A size is always (height, width); `pair` makes one from an int.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

from vitrail.core.errors import ConfigError

Pair: TypeAlias = tuple[int, int]
LARGEST_SIDE: Final = 4096  # pixels of an image for a network; 20000 x 20000 would fill the memory of any machine


def pair(size: int | Pair | list[int]) -> Pair:
    """(height, width) from one number or two."""
    if isinstance(size, int):
        return (size, size)
    if len(size) != 2:
        raise ConfigError(f"image or patch size {size!r} must be one number or (height, width)")
    return (int(size[0]), int(size[1]))


def format_size(size: Pair) -> str:
    """ "14x14", as the paper writes sizes."""
    return f"{size[0]}x{size[1]}"


def format_bytes(count: float) -> str:
    """ "812 bytes", "1.5 kB", "20.3 MB", "1.2 GB": powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit * 0.99995:  # 999,960 bytes are 1.0 MB, not 1,000.0 kB
            return f"{count / unit:,.1f} {name}"
    return pluralise(int(count), "byte")


def format_duration(seconds: float) -> str:
    """ "45 s", "12.5 min", "3.2 h"."""
    if round(seconds) < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if round(seconds) < 7200 else f"{seconds / 3600:,.1f} h"


def format_clock(seconds: float) -> str:
    """ "2:03" or "1:02:03"; "?" for times that are not finite or absurd."""
    if not seconds < 1e8:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def join_words(words: Iterable[object], *, limit: int = 0, last: str = "and") -> str:
    """ "a, b and c"; with limit=2 "a, b and 1 more"."""
    texts = [str(word) for word in words]
    if limit and len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit:,} more"
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


IRREGULAR: Final = {
    "person": "people", "man": "men", "woman": "women", "child": "children", "mouse": "mice", "knife": "knives",
    "leaf": "leaves", "shelf": "shelves", "foot": "feet", "tooth": "teeth",
}  # fmt: skip
SAME: Final = ("sheep", "fish", "deer", "aircraft", "scissors", "skis", "jeans", "trousers", "glasses", "stairs")


def plural_of(noun: str) -> str:
    """The plural of an English noun, by a few rules: "buses", "people"."""
    *before, last = noun.split(" ")
    if last in SAME or not last[-1:].isalpha():
        return noun
    found = IRREGULAR.get(last)
    if found is None and last.endswith(("s", "x", "z", "ch", "sh")):
        found = f"{last}es"
    if found is None and last.endswith("y") and last[-2:-1] not in ("", *"aeiou"):
        found = f"{last[:-1]}ies"
    return " ".join((*before, found or f"{last}s"))


def pluralise(count: int, singular: str, plural: str = "") -> str:
    """ "1 image", "3,000 images"; irregular plurals are given."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
