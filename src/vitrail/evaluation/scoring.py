"""A network's score on a split, as `vitrail evaluate` and `vitrail.evaluate` give it: which images count, what the
network says to each, and what that is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.bundle import card_of
from vitrail.checkpoint.naming import other_names
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import Collection
from vitrail.data.labels import Labels
from vitrail.data.ledger import Ledger
from vitrail.data.readers.named.real import real_rows
from vitrail.data.source import Source
from vitrail.distributed.world import World
from vitrail.evaluation.answers import Answers, answers, judge
from vitrail.evaluation.assessment import Assessment
from vitrail.evaluation.exposure import Advance, Scope, choose_unseen, stay_silent
from vitrail.evaluation.matching import Matching, match
from vitrail.evaluation.multi_label import THRESHOLD, MultiLabel, assess
from vitrail.evaluation.rest import Precision
from vitrail.evaluation.result import Result
from vitrail.evaluation.subject import Subject, data_of, read_all

NAMED: Final = 3  # unreadable pictures that are named
ORIGINAL: Final = "original"
REAL: Final = "ReaL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How a network is scored. `labels` name its outputs where its card does not, or otherwise; `by_number` takes class
    7 for output 7 whatever they are called; `real` is the file of ReaL labels; `batch` and `workers` change nothing but
    the time it takes."""

    labels: tuple[str, ...] | None = None
    by_number: bool = False
    real: Path | None = None
    threshold: float | None = None
    precision: Precision = "float32"
    seed: int = 0  # of the bootstrap
    include_seen: bool = False
    without: Path | None = None
    deduplicated_by: Path | None = None
    batch: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} must be at least 0")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold {self.threshold:g} must be between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One network at one size on one split."""

    about: Subject
    source: Source  # what was scored
    scope: Scope
    matching: Matching
    said: Answers
    found: Assessment | MultiLabel
    result: Result
    notes: tuple[str, ...]


def score(
    about: Subject,
    collection: Collection,
    split: str,
    how: Scoring,
    *,
    world: World,
    called: str,
    advance: Advance = stay_silent,
) -> Scored:
    """Everything of one network at one size; the answers are the same in all processes. `called` is what the split is
    called in messages."""
    outputs = about.network.config.classes
    if how.threshold is not None and not about.multi_label:
        raise ConfigError(f"a threshold of {how.threshold:g} is for multi-label weights, which {about.name} is not")
    names = about.labels if how.labels is None else how.labels
    also = other_names(card_of(about.network)) if how.labels is None else []
    data = data_of(about, collection, split, how.deduplicated_by)
    source, scope = choose_unseen(
        collection.splits[split],
        called,
        weights=about.name,
        provenance=about.provenance,
        include_seen=how.include_seen,
        without=how.without,
        world=world,
        advance=advance,
    )
    data |= {"pictures": len(source), "fingerprint": source.fingerprint, "seen": scope.facts()}
    collection = replace(collection, splits={**collection.splits, split: source})
    labels, matching = labellings(how, names, outputs, collection, split, also)
    about.computing_in(how.precision)
    said, unreadable = ask(about, source, labels, how, world, advance)
    if world.first:
        advance("computing intervals", 0, None)
    found = assessed(how, said, labels, matching)
    return Scored(
        about=about,
        source=source,
        scope=scope,
        matching=matching,
        said=said,
        found=found,
        result=result_of(how, about, data, matching, found, unreadable, next(iter(labels))),
        notes=(*matching.notes, *remarks(said, labels, found, unreadable)),
    )


def ask(
    about: Subject, source: Source, labels: dict[str, Labels], how: Scoring, world: World, advance: Advance
) -> tuple[Answers, list[str]]:
    """What the network says to every image, and which images cannot be read."""
    ledger = Ledger()
    tell = lambda done: advance("pictures", min(done * world.size, len(source)), len(source))  # noqa: E731
    if world.first:
        tell(0)
    given = read_all(
        source,
        about.preprocessing,
        world.device,
        batch=how.batch,
        workers=how.workers,
        rank=world.rank,
        world=world.size,
        ledger=ledger,
    )
    said = answers(
        about.network,
        given,
        about.preprocessing,
        count=len(source),
        classes=about.network.config.classes,
        labels=labels,
        device=world.device,
        world=world,
        precision=how.precision,
        progress=tell if world.first else None,
        multi_label=about.multi_label,
    )
    return said, sorted(str(entry) for part in world.gather(list(ledger.known.values())) for entry in part)


def assessed(how: Scoring, said: Answers, labels: dict[str, Labels], matching: Matching) -> Assessment | MultiLabel:
    """One class for each image, or each class by itself where the weights are multi-label."""
    main = next(iter(labels))
    if said.scores is not None:
        threshold = THRESHOLD if how.threshold is None else how.threshold
        return assess(said.scores, said.seen, labels[main], matching.names, threshold=threshold, seed=how.seed)
    return Assessment(
        judged=judge(said, labels[main], main),
        names=matching.names,
        real=judge(said, labels[REAL], REAL) if REAL in labels and main != REAL else None,
        seed=how.seed,
    )


def labellings(
    how: Scoring,
    names: Sequence[str] | None,
    outputs: int,
    collection: Collection,
    split: str,
    also: Sequence[Sequence[str]],
) -> tuple[dict[str, Labels], Matching]:
    """The labels to score by, as numbers of the network's outputs: the data's own, where they have some, and ReaL's."""
    source = collection.splits[split]
    if not source.classes and how.real is None:
        collection.need_labels()
        raise DataError(f"{collection.name}@{split} has no labels; choose another split")
    classes = source.classes or tuple(map(str, range(outputs)))
    matching = match(outputs, names, classes, collection.name, by_number=how.by_number, also=also)
    labels: dict[str, Labels] = {}
    if source.classes:
        labels[ORIGINAL] = matching.relabelled(source.labels)
    if how.real is not None:
        labels[REAL] = matching.usual(real_rows(source, how.real), str(how.real))
    return labels, matching


def remarks(
    said: Answers, labels: dict[str, Labels], found: Assessment | MultiLabel, unreadable: Sequence[str]
) -> list[str]:
    """What a reader should know of the count."""
    notes: list[str] = []
    if unreadable:
        some = "; ".join(unreadable[:NAMED]) + ("; ..." if len(unreadable) > NAMED else "")
        are = "picture is unreadable and counts" if len(unreadable) == 1 else "pictures are unreadable and count"
        notes.append(f"{len(unreadable):,} {are} for nothing: {some}")
    judgements = (
        [(ORIGINAL, found.judged if ORIGINAL in labels else None), (REAL, found.real)]
        if (isinstance(found, Assessment))
        else []
    )
    for name, judged in judgements:
        left = 0 if judged is None else int(said.seen.sum()) - len(judged)
        if left:
            word = "ReaL label" if name == REAL else "label"
            notes.append(f"{left:,} pictures have no {word} and count for nothing{' there' if name == REAL else ''}")
    if unsound := int((said.top[said.seen, 0] < 0).sum()):
        notes.append(f"{unsound:,} answers are no numbers and count as wrong")
    return notes


def result_of(
    how: Scoring,
    about: Subject,
    data: dict[str, Any],
    matching: Matching,
    found: Assessment | MultiLabel,
    unreadable: Sequence[str],
    labels: str,
) -> Result:
    config: dict[str, Any] = {
        "image": list(about.preprocessing.image),
        "preprocessing": about.preprocessing.to_dict(),
        "precision": how.precision,
        "labels": labels,
        "classes": matching.how,
        "seed": how.seed,
    }
    if isinstance(found, MultiLabel):
        config["threshold"] = found.threshold
    details = {**found.details(), "unreadable": list(unreadable)}
    return Result(
        kind="evaluate",
        weights=about.facts,
        data=data,
        measures=found.measures,
        config=config,
        details=details,
    )
