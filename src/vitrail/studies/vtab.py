"""VTAB-1k (4.1, Table 9): weights fine-tuned on each of 19 tasks, a thousand pictures each, after one fixed recipe.

    study = Study(base=base_run("vit.safetensors"), out=Path("runs/vtab"))
    outcome = go(study, world=world)

One run folder a task, below `out`. The same call again goes on: a task that is done stays, one that was interrupted
goes on from its checkpoint. A task whose pictures are not there is passed over, and what it lacks is kept.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from vitrail.checkpoint.pretrained import find_weights
from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.core.errors import ConfigError, DataError, Exploded
from vitrail.core.settings import differences, plain
from vitrail.core.storage import write_file
from vitrail.data.collection import open_collection
from vitrail.data.readers.named.catalogue import SETS
from vitrail.data.readers.named.tasks import TASKS, Task
from vitrail.distributed.world import World
from vitrail.recipes.asked import Asked
from vitrail.recipes.change import on_data, resized, started_from, with_changes
from vitrail.recipes.registry import recipe
from vitrail.train.config import Run
from vitrail.train.folder.layout import CONFIG, METRICS, is_done, read_json
from vitrail.train.loop import train
from vitrail.train.observer import Observer, Silent
from vitrail.train.pictures import Pictures, cut
from vitrail.train.report import read_metrics
from vitrail.train.resume import FREE
from vitrail.train.signals import heard

RECIPE: Final = "finetune-vtab"
STUDY: Final = "study.json"

State: TypeAlias = Literal["done", "stopped", "waiting", "missing", "failed"]
Progress: TypeAlias = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What to do and where. `base` is the run of any task but for its pictures; `root` holds a folder for each data
    set, and is $VITRAIL_DATA where there is none; `weights_hash` tells the weights from others under the same name."""

    base: Run
    out: Path
    tasks: tuple[str, ...] = tuple(TASKS)
    root: Path | None = None
    weights_hash: str = ""
    image_size: int = 0  # as it was typed, for the command that goes on with one task
    settings: tuple[str, ...] = ()
    go_on: str = ""  # the command that goes on with all

    def folder(self, task: str) -> Path:
        return self.out / task


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What became of a task on its whole test split."""

    task: Task
    accuracy: float
    count: int
    loss: float
    step: int
    fingerprint: str  # of the test split

    @property
    def right(self) -> int:
        return round(self.accuracy * self.count)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How every task stands, the scores of those that are done, and why others are not."""

    states: dict[str, State]
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def stopped(self) -> bool:
        return "stopped" in self.states.values()

    def of(self, *states: State) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


def base_run(weights: str, *, image_size: int = 0, seed: int | None = None, settings: tuple[str, ...] = ()) -> Run:
    """The paper's recipe on the given weights: 2,500 steps of 512 at 0.01, 384 px, and what is changed of it."""
    run, bundle = recipe(RECIPE), find_weights(weights)
    if image_size:
        run = resized(run, image_size)
    run = started_from(run, weights, bundle.config, bundle.card.preprocessing)
    if seed is not None:
        run = replace(run, seed=seed)
    return with_changes(run, settings)


def changed(study: Study) -> list[str]:
    """Where a study is not the paper's recipe: "steps: 2500 -> 100"."""
    free = (*FREE, "seed", "model", "weights", "preprocessing")
    found = [line for line in differences(plain(recipe(RECIPE)), plain(study.base)) if not _is_free(line, free)]
    return found + [text for text in study.settings if text.startswith("model.")]


def _is_free(line: str, free: tuple[str, ...]) -> bool:
    name = line.partition(":")[0]
    return any(name == other or name.startswith(f"{other}.") for other in free)


def place(task: Task, root: Path | None) -> str:
    """Where a task's pictures are: SOURCE as every command takes it. Below a root they lie in a folder of the set's
    name, or as torchvision keeps them."""
    if root is None:
        return f"vtab/{task.name}"
    entry, home = SETS[task.source], root / SETS[task.source].folder
    beside = not home.is_dir() and any((root / folder).is_dir() for folder in entry.folders)
    return f"vtab/{task.name}:{root if beside else home}"


def task_run(study: Study, task: Task) -> Run:
    """The run of one task: without the crop or the flip that would change its answer."""
    return replace(on_data(study.base, place(task, study.root)), name=f"vtab-{task.name}")


def pictures_of(
    study: Study, task: Task, *, download: bool = False, progress: Progress | None = None
) -> Pictures | str:
    """The pictures of a task; why there are none, with what to put where, if so."""
    try:
        return cut(open_collection(place(task, study.root), download=download, progress=progress), study.base.data)
    except DataError as error:
        return str(error)


def open_study(study: Study) -> None:
    """Makes the folder, or takes up one that holds the same study: other weights or settings are refused, other tasks
    are not."""
    path, now = study.out / STUDY, {"weights": study.weights_hash, "run": plain(study.base)}
    if path.exists():
        before = read_json(path)
        freed = (*(f"run.{name}" for name in FREE), "run.weights")
        found = [line for line in differences(before, json.loads(json.dumps(now))) if not _is_free(line, freed)]
        if found:
            raise ConfigError(
                f"{study.out} holds a study with another config ({'; '.join(found[:12])}); give another --out"
            )
    elif (study.out / CONFIG).exists():
        raise ConfigError(f"{study.out} holds a run, not a study of VTAB; give another --out")
    write_file(path, json.dumps(now, indent=1).encode() + b"\n")


def score_in(folder: Path, task: Task) -> Score | None:
    """What a finished run says of its test split; none where the task is not done."""
    if not is_done(folder):
        return None
    rows = [row for row in read_metrics(folder / METRICS)[0] if row["kind"] == "test"]
    if not rows:
        return None
    prints = read_json(folder / CONFIG)["data"]["fingerprint"]
    last = rows[-1]
    return Score(
        task=task,
        accuracy=float(last["accuracy"]),
        count=int(last["count"]),
        loss=float(last["loss"]),
        step=int(last["step"]),
        fingerprint=str(prints.get("test", "")),
    )


def so_far(study: Study) -> Outcome:
    """What lies in the folder: all tasks that are done, whichever were asked for this time."""
    found = {name: score for name in TASKS if (score := score_in(study.folder(name), TASKS[name])) is not None}
    states: dict[str, State] = {**dict.fromkeys(study.tasks, "waiting"), **dict.fromkeys(found, "done")}
    return Outcome(states=states, scores=found)


def go(
    study: Study,
    *,
    world: World,
    observer: Observer | None = None,
    noted: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Every task that is not done, one after the other; `noted` is called when something has changed. A signal ends the
    task behind its step, and the study with it."""
    observer = observer or Silent()
    refused = ""
    if world.first:
        try:
            open_study(study)
        except ConfigError as error:
            refused = str(error)
    if refused := world.agree(refused):
        raise ConfigError(refused)
    outcome = world.agree(so_far(study))
    with heard() as stop:
        for number, name in enumerate(study.tasks, 1):
            if outcome.states[name] == "done":
                continue
            if world.agree(bool(stop)):
                outcome.states[name] = "stopped"
                return outcome
            observer.told(f"task {number} of {len(study.tasks)}: {TASKS[name].title} ({TASKS[name].group})")
            one_task(study, TASKS[name], outcome, world, observer)
            if world.first:
                noted(outcome)
            if outcome.states[name] == "stopped":
                return outcome
    return outcome


def one_task(study: Study, task: Task, outcome: Outcome, world: World, observer: Observer) -> None:
    """Trains on a task and scores it. What fails of itself, in its data or its numbers, leaves the others alone."""
    name, folder = task.name, study.folder(task.name)
    pictures = pictures_of(study, task)
    reason = next(filter(None, world.gather(pictures if isinstance(pictures, str) else "")), "")
    if isinstance(pictures, str) or reason:
        outcome.states[name], outcome.reasons[name] = "missing", reason
        observer.told(f"passed over: {reason.splitlines()[0]}")
        return
    run = task_run(study, task)
    try:
        result = train(run, out=folder, world=world, command=command(study, run), observer=observer, pictures=pictures)
    except (DataError, Exploded) as error:
        if isinstance(error, DataError) and world.size > 1:
            raise  # the others wait in this task, and would never meet this process in the next
        outcome.states[name], outcome.reasons[name] = "failed", str(error)
        observer.told(f"failed: {error}")
        return
    if result.state != "done":
        outcome.states[name] = "stopped"
        return
    if world.first:  # of a task that is done they are of no more use, and 19 tasks would fill a disk
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    score = world.agree(score_in(folder, task))
    assert score is not None, "a run that is done has scored its test split"
    outcome.states[name], outcome.scores[name] = "done", score
    observer.told(f"{task.title}: {score.accuracy:.2%} of {score.count:,}")


def command(study: Study, run: Run) -> dict[str, Any]:
    """What the folder of a task keeps: the same run as a plain fine-tuning, and the command that goes on with all."""
    asked = Asked(
        verb="finetune",
        recipe=RECIPE,
        weights=run.weights,
        data=run.data.source,
        image_size=study.image_size,
        seed=run.seed,
        settings=study.settings,
    )
    return {**asdict(asked), "go_on": study.go_on}
