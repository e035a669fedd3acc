"""The folder of a run: a new one, or one to go on in, if it is of the same run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.store.saved import Saved, latest
from vitrail.core.errors import ConfigError
from vitrail.core.settings import plain, restored
from vitrail.distributed.world import World
from vitrail.tasks.registry import task_of
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.folder.layout import command_in, read_json
from vitrail.train.folder.run import CONFIG, RunFolder, compare
from vitrail.train.pictures import Pictures, find_pictures
from vitrail.train.resolve import resolve

FINGERPRINT, CONTENT = "fingerprint", "content"

# What may change between two starts of a run without changing what it learns.
FREE = frozenset(
    {"name", "micro", "log", "keep", "evaluation", "bad_steps", "compile", "sharding", "recompute", "data.workers"}
    | {"baseline", "data.strict", "data.watch", "data.test", "data.source", "data.without", "data.names"}
)


def run_in(folder: Path) -> Run:
    """The run of a folder, with every choice as it was made."""
    command_in(folder)  # says so where the folder is none of a run
    config = read_json(folder / CONFIG)
    data = {name: value for name, value in config.get("data", {}).items() if name not in (FINGERPRINT, CONTENT)}
    return restored(Run, {**config, "data": data})


def elsewhere(run: Run, typed: Iterable[str], processes: int) -> Run:
    """The run of a folder, to go on with on another machine or with other processes: what was chosen for those it had,
    and nobody typed, is chosen anew, and a micro-batch is no more than a process has. A checkpoint keeps its own all
    the same."""
    named = {text.partition("=")[0].strip() for text in typed}
    fits = {"micro": 0, "sharding": "auto", "compile": "auto"}
    run = replace(run, **{name: value for name, value in fits.items() if name not in named})
    return replace(run, micro=min(run.micro, max(run.batch // processes, 1)))


def config_of(run: ResolvedRun, pictures: Pictures) -> dict[str, Any]:
    """The run as plain data, with the fingerprints of its pictures and a digest of what they contain: other pictures,
    another run."""
    config = plain(run)
    data = {**config["data"], FINGERPRINT: pictures.fingerprint, CONTENT: pictures.content}
    return {**config, "data": data}


def free_in(folder: Path) -> frozenset[str]:
    """What may differ from the run in a folder. One of 0.1.0 does not know the content of its pictures."""
    try:
        known = CONTENT in read_json(folder / CONFIG).get("data", {})
    except ConfigError:  # none is there yet, or `compare` will say what is wrong with it
        known = True
    return FREE if known else FREE | {f"data.{CONTENT}"}


def open_folder(
    out: Path,
    run: ResolvedRun,
    pictures: Pictures,
    world: World,
    *,
    command: Mapping[str, Any],
    force: bool,
    tell: Callable[[str], None],
) -> RunFolder:
    """Locked, and compared with what lies there. What the first process is refused, all are."""
    folder, refused = None, ""
    try:
        folder = RunFolder.open(
            out,
            rank=world.rank,
            config=config_of(run, pictures) if world.first else {},
            command=dict(command),
            force=force,
            tell=tell,
            free=free_in(out) if world.first else FREE,
        )
    except ConfigError as error:
        refused = str(error)
    refused = world.agree(refused)
    if refused or folder is None:
        raise ConfigError(refused)
    return folder


def same_run(out: Path, run: Run, world: World) -> None:
    """Refuses a run that differs from the one in the folder."""
    pictures = find_pictures(run.data, task_of(run.objective))
    compare(out, config_of(resolve(run, pictures, world), pictures), free=free_in(out), force=False)


def resume(folder: RunFolder, world: World) -> Saved | None:
    """The newest checkpoint that is whole, the same for all processes, each of which checks a part of it."""

    def agree(said: str | None) -> str | None:
        return next((each for each in world.gather(said) if each is not None), None)

    return latest(folder.path / "checkpoints", folder.note, part=world.rank, parts=world.size, agree=agree)
