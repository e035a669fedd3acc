"""What a study reports of its cells, and how it chooses among them: never by what it reports."""

from collections.abc import Iterable, Sequence
from typing import Final

from vitrail.studies.framework.results import Gap, Group, Spread, gap
from vitrail.train.grid.plan import CellOutcome, Coordinate

WATCHED: Final = "watch"
FEWSHOT: Final = "fewshot-5"
WORDS: Final = {"accuracy": "test accuracy", FEWSHOT: "5-shot accuracy", WATCHED: "dev accuracy"}
EXTENT: Final = 0.02  # a margin wider than this, as a share, hides what the paper's studies look for


def measure(outcomes: Iterable[CellOutcome]) -> str:
    """The value that is reported: closed-form few-shot accuracy where it was taken, as on JFT-300M, which has no test
    split; else the accuracy on the split for the end."""
    return FEWSHOT if any(FEWSHOT in one.values for one in outcomes) else "accuracy"


def selected(found: Iterable[Group], at: dict[str, Coordinate], value: str) -> Group | None:
    """Of the groups that stand there, the one with the best mean on the watched split; it must have `value` too. None
    where none has both."""
    best: tuple[float, Group] | None = None
    for group in found:
        if not at.items() <= group.at.items() or group.mean(value) is None:
            continue
        watched = group.mean(WATCHED)
        if watched is not None and (best is None or watched > best[0]):
            best = (watched, group)
    return None if best is None else best[1]


def chosen(found: Iterable[Group], at: dict[str, Coordinate], value: str) -> Spread | None:
    group = selected(found, at, value)
    return None if group is None else group.spread(value)


def known(spreads: Iterable[Spread | None]) -> list[Spread]:
    return [spread for spread in spreads if spread is not None]


def apart(one: Spread | None, other: Spread | None, among: Iterable[Spread | None] = ()) -> Gap | None:
    """One mean less another; none where one of the two is missing. The deviation is pooled over the two, or over those
    of a study that may be held to share it, the two among them."""
    return None if one is None or other is None else gap(one, other, known(among))


def in_words(found: Gap) -> str:
    """What can be said of a difference by its spread over the seeds."""
    if found.margin is None:
        return "one seed, so that nothing is decided"
    if found.open:
        wide = ", and the spread is too wide for a small one" if found.margin > EXTENT else ""
        return f"no difference beyond the spread over seeds{wide}"
    return "a difference beyond the spread over seeds"


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def missing(outcomes: Sequence[CellOutcome]) -> str:
    """A remark on cells that failed, to go behind a sentence; "" where none did."""
    faults = [one.cell for one in outcomes if one.fault]
    if not faults:
        return ""
    some = f"{listed(faults[:3])}{' and others' if len(faults) > 3 else ''}"
    return f" {len(faults)} of {len(outcomes)} cells failed ({some}) and are not counted."
