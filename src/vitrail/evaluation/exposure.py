"""Images that the weights were trained on are no test: what is left out of a score, and what is said about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError
from vitrail.data.dataset import ImageDataset, Subset, total_bytes
from vitrail.data.splits import Selection
from vitrail.data.training_record import (
    MOST_BYTES,
    MOST_IMAGES,
    Exposure,
    Hashes,
    find_exposure,
    hash_contents,
    interleave,
)
from vitrail.distributed.process_group import World

Advance: TypeAlias = Callable[[str, int, int | None], None]  # what is being done, how much of it is done, of how much


def ignore_progress(what: str, done: int, total: int | None) -> None:
    """The progress of somebody who does not want to hear of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What of the given images is scored."""

    given: int
    exposure: Exposure
    included: bool  # whether images that were trained on are scored
    dropped: int = 0  # left out by --without
    without: str = ""  # the hash of its selection

    @property
    def seen(self) -> int | None:
        """How many of the given images were trained on; none where nobody knows."""
        return None if not self.exposure.count and "" in self.exposure.unrecorded else self.exposure.count

    @property
    def tainted(self) -> bool:
        """Whether the score counts images that were trained on."""
        return self.included and bool(self.exposure.count)

    def facts(self) -> dict[str, Any]:
        """For a result."""
        unrecorded = [name or "the weights" for name in self.exposure.unrecorded]
        facts: dict[str, Any] = {
            "given": self.given,
            "seen": self.seen,
            "seen_are_scored": self.tainted,
            "unrecorded": unrecorded,
        }
        return facts | ({"dropped": self.dropped, "without": self.without} if self.without else {})

    def lines(self) -> list[str]:
        """For people."""
        given, seen = self.given, self.exposure.count
        lines = list[str]()
        if self.without:
            lines.append(f"{count_images(self.dropped)} left out as copies (--without)")
        if self.tainted:
            share = f"{seen:,} of the {count_images(given)}"
            lines.append(f"WARNING: {share} scored here were used in training")
        elif seen:
            rest = f"scoring the {given - seen:,} held out"
            lines.append(f"{seen:,} of {count_images(given)} were used in training; {rest}")
        elif self.seen is not None:
            lines.append(f"none of the {count_images(given)} was used in training")
        else:
            lines.append("unknown whether the weights have seen these images: they have no record that can tell")
        names = [name for name in self.exposure.unrecorded if name or self.seen is not None]
        if names:
            known = ", ".join(name or "these weights" for name in names)
            lines.append(f"not recorded: the training images of {known}")
        return lines


def count_images(count: int) -> str:
    return f"{count:,} {'image' if count == 1 else 'images'}"


def choose_unseen(
    source: ImageDataset,
    called: str,
    *,
    weights: str,
    provenance: dict[str, Any],
    include_seen: bool,
    without: Path | None = None,
    world: World | None = None,
    advance: Advance = ignore_progress,
) -> tuple[ImageDataset, Scope]:
    """The images to score: without those of `without`, and without those that the weights were trained on, unless they
    are asked for. Where none is left, that is an error. All processes call it."""
    dropped, selection = 0, ""
    if without is not None:
        kept, selection = drop_images(source, without)
        dropped, source = len(source) - len(kept), kept
    exposure = find_exposure(provenance, source, lambda one: hash_in_parallel(one, world, advance))
    scope = Scope(given=len(source), exposure=exposure, included=include_seen, dropped=dropped, without=selection)
    if include_seen or not exposure.count:
        return source, scope
    if exposure.count == len(source):
        raise DataError(
            f"all {count_images(len(source))} of {called} were used to train {weights}, so a score would say "
            "nothing about new images; give images that it has not seen, or add --include-seen"
        )
    return Subset(source, np.flatnonzero(~exposure.seen)), scope


def find_shared(train: ImageDataset, test: ImageDataset) -> "NDArray[np.int64] | None":
    """The places of the images of `train` that are in `test`, too; none where there are too many to look."""
    if any(len(one) > MOST_IMAGES or total_bytes(one) > MOST_BYTES for one in (train, test)):
        return None
    learnt, scored = hash_contents(train), hash_contents(test)
    return np.flatnonzero(np.isin(learnt, scored[scored != 0]))


def hash_in_parallel(source: ImageDataset, world: World | None, advance: Advance) -> Hashes:
    """The content hashes of a source; several processes share the reading."""
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    tell = (lambda done: advance("which images were seen", done, len(source))) if rank == 0 else None
    share = hash_contents(source, rank=rank, world=size, advance=tell)
    return share if world is None else interleave(world.gather(share))


def drop_images(source: ImageDataset, path: Path) -> tuple[ImageDataset, str]:
    """The images that a drop.json leaves, and its hash."""
    selection = Selection.load(path)
    if not selection.drop:
        raise DataError(f"--without {path} says which images to take, and none to leave out")
    try:
        kept = selection.apply(source)
    except DataError as error:
        raise DataError(f"--without {path}: {error}") from None
    if not len(kept):
        raise DataError(f"--without {path} leaves none of {count_images(len(source))} to score")
    return kept, selection.hash
