"""What the report of a run shows, gathered from its parts."""

import json
from collections.abc import Iterable
from typing import Any

from vitrail.core.errors import VitrailError
from vitrail.core.settings import plain
from vitrail.data.ledger import Ledger
from vitrail.data.source import Source
from vitrail.evaluation.accuracy import Answer, Score
from vitrail.report.panels import State
from vitrail.train.config import Run
from vitrail.train.cost import Cost
from vitrail.train.folder.run import RunFolder
from vitrail.train.pictures import Pictures
from vitrail.train.report import RunFacts, Shown, write_report


def present(
    folder: RunFolder,
    run: Run,
    pictures: Pictures,
    scored: tuple[str, Score] | None,
    ledger: Ledger,
    cost: Cost,
    state: State,
    message: str,
) -> None:
    """Writes report.html anew."""
    split, score = scored or ("", None)
    source = pictures.test if split == pictures.tested and split else pictures.watch
    lead = f"{run.name} on {pictures.title}: {len(pictures.train):,} pictures of {len(pictures.classes):,} classes"
    facts = RunFacts(
        title=f"{run.name}",
        lead=lead,
        status=state,
        message=message,
        notes=[note for note in folder.warnings if note != message],
        command=folder.next if state != "done" else "",
        steps=run.steps,
        config=plain(run),
        environment=environment(folder),
        cost=[("TPUv3-core-days at the pace of the paper's ViT-L/16", f"{cost.row()['tpuv3_core_days']:.3g}")],
        best=gallery(score.best if score else (), source, pictures.classes),
        worst=gallery(score.worst if score else (), source, pictures.classes),
        confusion=None if score is None else score.confusion,
        classes=pictures.classes,
        scored=split,
        unreadable=[str(entry) for entry in ledger.known.values()],
    )
    write_report(folder.path, facts)


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
        said = "" if answer.predicted == answer.label else f"said {classes[answer.predicted]}, "
        caption = f"{classes[answer.label]}\n{said}{answer.probability:.1%}"
        try:
            shown.append((None if source is None else source.picture(answer.sample).rgb(), caption))
        except VitrailError:
            shown.append((None, caption))
    return shown
