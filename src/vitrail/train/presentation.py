"""What the report of a run shows, gathered from its parts."""

import json
from collections.abc import Iterable
from typing import Any

from vitrail.core.errors import VitrailError
from vitrail.core.settings import plain
from vitrail.data.ledger import Ledger
from vitrail.data.source import Source
from vitrail.evaluation.accuracy import Answer, Score
from vitrail.report.panels import Mood, State
from vitrail.train.config import ResolvedRun
from vitrail.train.cost import Cost
from vitrail.train.folder.run import RunFolder
from vitrail.train.pictures import Pictures
from vitrail.train.report import RunFacts, Shown, write_report
from vitrail.train.scoring import Scored
from vitrail.train.selfsup_panels import panels


def paper_cost(cost: Cost) -> tuple[str, str]:
    """The unit of Table 2, for a pre-training."""
    return "TPUv3-core-days at the pace of the paper's ViT-L/16", f"{cost.row()['tpuv3_core_days']:.3g}"


def present(
    folder: RunFolder,
    run: ResolvedRun,
    pictures: Pictures,
    scored: Scored | None,
    ledger: Ledger,
    cost: Cost,
    state: State,
    message: str,
    *,
    step: int,
    chosen: int,
) -> None:
    """Writes report.html. `chosen` is the step of the best weights, below 0 where the last ones count."""
    split, found = ("", None) if scored is None else (scored.split, scored.found)
    score, seen = (found, None) if isinstance(found, Score) else (None, found)
    whose = "" if scored is None or chosen < 0 else name_weights(scored.step, chosen)
    source = pictures.test if split == pictures.tested and split else pictures.watch
    facts = RunFacts(
        title=f"{run.name}",
        lead=lead_of(run, pictures),
        status=state,
        message=message,
        notes=[note for note in folder.warnings if note != message],
        command=folder.next if state != "done" else "",
        step=step,
        steps=run.steps,
        config=plain(run),
        environment=environment(folder),
        cost=[] if run.weights else [paper_cost(cost)],
        best=gallery(score.best if score else (), source, pictures.classes),
        worst=gallery(score.worst if score else (), source, pictures.classes),
        confusion=None if score is None else score.confusion,
        classes=pictures.classes,
        scored=split,
        weights=whose,
        chosen=chosen,
        labelled=run.objective.labelled,
        panels=[] if seen is None else panels(seen, f"{split}{f', {whose}' if whose else ''}", pictures.classes),
        unreadable=[str(entry) for entry in ledger.known.values()],
    )
    write_report(folder.path, facts)


def name_weights(step: int, chosen: int) -> str:
    """Which of the weights of a run that chooses some are meant."""
    return f"best weights (step {step:,})" if step == chosen else f"weights of step {step:,}, not the best"


def lead_of(run: ResolvedRun, pictures: Pictures) -> str:
    """What is trained on what."""
    classes = f" of {len(pictures.classes):,} classes" if pictures.classes else ""
    unused = ", labels unseen" if classes and not run.objective.labelled else ""
    return f"{run.name} on {pictures.title}: {len(pictures.train):,} pictures{classes}{unused}"


def environment(folder: RunFolder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder.path / "environment.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def gallery(answers: Iterable[Answer], source: Source | None, classes: tuple[str, ...]) -> list[Shown]:
    """Each picture with what it shows and what was said."""
    shown: list[Shown] = []
    for answer in answers:
        mood: Mood = "right" if answer.predicted == answer.label else "wrong"
        said = "" if mood == "right" else f"said {classes[answer.predicted]}, "
        caption = f"{classes[answer.label]}\n{said}{answer.probability:.1%}"
        try:
            shown.append((None if source is None else source.picture(answer.sample).rgb(), caption, mood))
        except VitrailError:
            shown.append((None, caption, mood))
    return shown
