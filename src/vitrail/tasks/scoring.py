"""A network's score on a split, for `vitrail evaluate` and `vitrail.evaluate`: which images count, and the evaluation
by the network's task."""

from dataclasses import dataclass, replace
from typing import Final

from vitrail.checkpoint.bundle import get_card
from vitrail.core.text import pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.distributed.process_group import World
from vitrail.evaluation.result import Result
from vitrail.evaluation.scoring import (
    Advance,
    EvaluationOutcome,
    EvaluationSetting,
    Scope,
    ScoringOptions,
    Subject,
    choose_unseen,
    describe_scored_data,
    ignore_progress,
)
from vitrail.tasks.registry import find_task

NAMED: Final = 3  # unreadable images that are listed


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredNetwork:
    """One network at one size on one split."""

    about: Subject
    source: ImageDataset  # what was scored
    scope: Scope
    found: EvaluationOutcome
    result: Result
    notes: tuple[str, ...]


def score_network(
    about: Subject,
    collection: Collection,
    split: str,
    how: ScoringOptions,
    *,
    world: World,
    called: str,
    advance: Advance = ignore_progress,
) -> ScoredNetwork:
    """Scores one network at one size; the numbers are the same in all processes. `called` names the split in
    messages."""
    task = find_task(get_card(about.network).task)
    task.check_scoring(how, about)
    data = describe_scored_data(about, collection, split, how.deduplicated_by)
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
    setting = EvaluationSetting(
        about=about,
        collection=replace(collection, splits={**collection.splits, split: source}),
        split=split,
        how=how,
        world=world,
        advance=advance,
    )
    found, unreadable = task.assess(setting), setting.unreadable
    preprocessing = about.preprocessing
    settings = {
        "image": list(preprocessing.image),
        "preprocessing": preprocessing.to_dict(),
        "precision": how.precision,
    }
    result = Result(
        kind="evaluate",
        weights=about.facts,
        data=data,
        measures=found.measures,
        config={**settings, **found.settings},
        details={**found.details, "unreadable": list(unreadable)},
    )
    some = "; ".join(unreadable[:NAMED]) + ("; ..." if len(unreadable) > NAMED else "")
    skipped = [f"skipped {pluralise(len(unreadable), 'unreadable image')}: {some}"] if unreadable else []
    notes = (*found.outputs_notes, *skipped, *found.notes)
    return ScoredNetwork(about=about, source=source, scope=scope, found=found, result=result, notes=notes)
