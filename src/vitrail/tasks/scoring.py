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
    source, scope = choose_unseen(collection.splits[split], called, about, how, world, advance)
    data |= {"pictures": len(source), "fingerprint": source.fingerprint, "seen": scope.facts()}
    scored = replace(collection, splits={**collection.splits, split: source})
    setting = EvaluationSetting(about=about, collection=scored, split=split, how=how, world=world, advance=advance)
    found, unreadable = task.assess(setting), setting.unreadable
    views = about.preprocessing
    settings = {"image": list(views.image), "preprocessing": views.to_dict()}
    settings |= {"precision": about.numbers or about.precision}
    settings |= {} if about.patch is None else {"patch": about.patch}
    config, details = {**settings, **found.settings}, {**found.details, "unreadable": list(unreadable)}
    measures, weights = found.measures, about.facts
    result = Result(kind="evaluate", weights=weights, data=data, measures=measures, config=config, details=details)
    some = "; ".join(unreadable[:NAMED]) + ("; ..." if len(unreadable) > NAMED else "")
    skipped = [f"skipped {pluralise(len(unreadable), 'unreadable image')}: {some}"] if unreadable else []
    notes = (*found.outputs_notes, *skipped, *found.notes)
    return ScoredNetwork(about=about, source=source, scope=scope, found=found, result=result, notes=notes)
