"""What the report of a run shows, gathered from its parts."""

import json
from typing import Any

from vitrail.core.settings import plain
from vitrail.data.ledger import Ledger
from vitrail.report.page import Section
from vitrail.report.panels import State
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import task_of
from vitrail.train.config import ResolvedRun
from vitrail.train.cost import Cost
from vitrail.train.folder.run import RunFolder
from vitrail.train.pictures import Pictures
from vitrail.train.report import RunFacts, write_report
from vitrail.train.scoring import Scored
from vitrail.train.selfsup_panels import panels
from vitrail.train.unlabelled import Seen


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
    task = task_of(run.objective)
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
        chosen=chosen,
        criteria=() if task is None else task.criteria,
        panels=[] if scored is None else score_panels(run, pictures, scored, chosen),
        unreadable=[str(entry) for entry in ledger.known.values()],
    )
    write_report(folder.path, facts)


def score_panels(run: ResolvedRun, pictures: Pictures, scored: Scored, chosen: int) -> list[Section]:
    """What the task shows of a score, or a run without one of its features."""
    task, split = task_of(run.objective), scored.split
    title = split if chosen < 0 else f"{split}, {name_weights(scored.step, chosen)}"
    if isinstance(scored.found, Seen):
        return panels(scored.found, title, pictures.classes)
    source = pictures.test if split == pictures.tested and split else pictures.watch
    return [] if task is None else task.report_sections(scored.found, source, pictures.classes, title)


def name_weights(step: int, chosen: int) -> str:
    """Which of the weights of a run that chooses some are meant."""
    return f"best weights (step {step:,})" if step == chosen else f"weights of step {step:,}, not the best"


def lead_of(run: ResolvedRun, pictures: Pictures) -> str:
    """What is trained on what."""
    task, classes = task_of(run.objective), len(pictures.classes)
    if task is None:
        learnt = f" of {classes:,} classes, labels unseen" if classes else ""
    else:
        learnt = f"{' of' if task is CLASSIFICATION else ','} {task.describe_outputs(pictures.classes)}"
    return f"{run.name} on {pictures.title}: {len(pictures.train):,} pictures{learnt}"


def environment(folder: RunFolder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder.path / "environment.json").read_text())
    except (OSError, ValueError):
        return {}
    return found
