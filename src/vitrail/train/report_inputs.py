"""What the report of a run shows, gathered from its parts.

What the report of a run without labels shows of its images: what they are rebuilt to, and which of them are near
each other to the network.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from vitrail.core.config_overrides import to_plain
from vitrail.core.errors import VitrailError
from vitrail.data.dataset import ImageDataset
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.report.page import Section
from vitrail.report.sections import ImageLike, ImageRow, ImageRows, Mood, State, make_pane
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import task_of
from vitrail.train.config import ResolvedRun
from vitrail.train.data import DataSplits
from vitrail.train.metrics import RunCost
from vitrail.train.report.page import RunFacts, write_report
from vitrail.train.run_folder.run import RunFolder
from vitrail.train.scoring import SplitScore
from vitrail.train.selfsup_scoring import ReportSamples

CLOSE: Final = 0.995  # from here on three digits would all be the same


def panels(seen: ReportSamples, split: str, classes: Sequence[str]) -> list[Section]:
    """Reconstructions, where there are some, and neighbours."""
    found: list[Section] = []
    if seen.rebuilt:
        found.append(reconstructions(seen, split))
    if seen.company:
        found.append(neighbours(seen, split, classes))
    return found


def reconstructions(seen: ReportSamples, split: str) -> ImageRows:
    names = ("picture", "as seen", "rebuilt")
    return ImageRows(
        title=f"Reconstructions on {split}",
        lead="Each image, what the network saw of it, and what it made of that; what it saw is left as it is.",
        strips=[
            ImageRow(panes=[make_pane(picture, name) for picture, name in zip(three, names, strict=True)])
            for three in seen.rebuilt
        ],
        sides=names,
    )


def neighbours(seen: ReportSamples, split: str, classes: Sequence[str]) -> ImageRows:
    """Each image next to the training images that are nearest to it, framed by whether the label is the same."""
    strips: list[ImageRow] = []
    framed = False
    for query in seen.company:
        name = label(seen.source, query.sample, classes)
        panes = [make_pane(picture(seen.source, query.sample), name or "an image")]
        right = [one.same for one in query.neighbours if one.same is not None]
        for one in query.neighbours:
            mood: Mood = "" if one.same is None else "right" if one.same else "wrong"
            called = label(seen.beside, one.sample, classes)
            caption = f"{one.similarity:.3f}" if one.similarity < CLOSE else f"{one.similarity:.5f}"
            panes.append(
                make_pane(picture(seen.beside, one.sample), called or "a neighbour", caption=caption, mood=mood)
            )
        framed = framed or bool(right)
        strips.append(
            ImageRow(panes=panes, caption=name, note=f"{sum(right)} of {len(right)} the same" if right else "")
        )
    frames = " A green frame is the same label, a red one another." if framed else ""
    return ImageRows(
        title=f"Nearest neighbours of {split}",
        lead=f"Images next to the training images whose features are nearest, with their cosine.{frames}",
        strips=strips,
        apart=True,
    )


def label(source: ImageDataset, sample: int, classes: Sequence[str]) -> str:
    return ", ".join(classes[at] for at in source.labels[sample] if at < len(classes))


def picture(source: ImageDataset, sample: int) -> ImageLike | None:
    """None where it cannot be read any more."""
    try:
        return source.open_image(sample).rgb()
    except VitrailError:
        return None


def paper_cost(cost: RunCost) -> tuple[str, str]:
    """The unit of Table 2, for a pre-training."""
    return "TPUv3-core-days at the pace of the paper's ViT-L/16", f"{cost.row()['tpuv3_core_days']:.3g}"


def present(
    folder: RunFolder,
    run: ResolvedRun,
    splits: DataSplits,
    scored: SplitScore | None,
    ledger: UnreadableLog,
    cost: RunCost,
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
        lead=lead_of(run, splits),
        status=state,
        message=message,
        notes=[note for note in folder.warnings if note != message],
        command=folder.next if state != "done" else "",
        step=step,
        steps=run.steps,
        config=to_plain(run),
        environment=environment(folder),
        cost=[] if run.weights else [paper_cost(cost)],
        chosen=chosen,
        criteria=() if task is None else task.criteria,
        panels=[] if scored is None else score_panels(run, splits, scored, chosen),
        unreadable=[str(entry) for entry in ledger.known.values()],
    )
    write_report(folder.path, facts)


def score_panels(run: ResolvedRun, splits: DataSplits, scored: SplitScore, chosen: int) -> list[Section]:
    """What the task shows of a score, or a run without one of its features."""
    task, split = task_of(run.objective), scored.split
    title = split if chosen < 0 else f"{split}, {name_weights(scored.step, chosen)}"
    if isinstance(scored.found, ReportSamples):
        return panels(scored.found, title, splits.class_names)
    source = splits.test if split == splits.test_name and split else splits.watch
    return [] if task is None else task.report_sections(scored.found, source, splits.class_names, title)


def name_weights(step: int, chosen: int) -> str:
    """Which of the weights of a run that chooses some are meant."""
    return f"best weights (step {step:,})" if step == chosen else f"weights of step {step:,}, not the best"


def lead_of(run: ResolvedRun, splits: DataSplits) -> str:
    """What is trained on what."""
    task, classes = task_of(run.objective), len(splits.class_names)
    if task is None:
        learnt = f" of {classes:,} classes, labels unseen" if classes else ""
    else:
        learnt = f"{' of' if task is CLASSIFICATION else ','} {task.describe_outputs(splits.class_names)}"
    return f"{run.name} on {splits.title}: {len(splits.train):,} images{learnt}"


def environment(folder: RunFolder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder.path / "environment.json").read_text())
    except (OSError, ValueError):
        return {}
    return found
