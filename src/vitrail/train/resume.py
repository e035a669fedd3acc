"""The folder of a run: a new one, or one to go on in, if it is of the same run.

All that a run must remember, as named tensors, and how they go to a checkpoint and come back.

Parameters, the optimiser's moments, the average: nothing else. Order, augmentation, mixing and dropout are computed
from the seed and the step. Any number of processes may write, and any other number read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.files.safetensors import first_unsound
from vitrail.checkpoint.store.layout import TensorPiece
from vitrail.checkpoint.store.reader import SavedCheckpoint, latest
from vitrail.core.config_overrides import from_plain, to_plain
from vitrail.core.errors import ConfigError, MismatchedWeights
from vitrail.distributed.meta_init import copy_rows, is_writer, local_rows
from vitrail.distributed.process_group import World
from vitrail.objectives.objective import Objective
from vitrail.optim.averaging import Average
from vitrail.optim.optimiser import Optimiser
from vitrail.tasks.registry import task_of
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.data import DataSplits, open_splits
from vitrail.train.resolve import resolve
from vitrail.train.run_folder.files import read_command, read_json
from vitrail.train.run_folder.run import CONFIG, RunFolder, compare_config

FINGERPRINT, CONTENT = "fingerprint", "content"

# What may change between two starts of a run without changing what it learns.
FREE = frozenset(
    {"name", "micro", "log", "keep", "evaluation", "bad_steps", "compile", "sharding", "recompute", "data.workers"}
    | {"baseline", "data.strict", "data.watch", "data.test", "data.source", "data.without", "data.names"}
)


def read_run(folder: Path) -> Run:
    """The run of a folder, with every choice as it was made."""
    read_command(folder)  # says so where the folder is none of a run
    config = read_json(folder / CONFIG)
    data = {name: value for name, value in config.get("data", {}).items() if name not in (FINGERPRINT, CONTENT)}
    return from_plain(Run, {**config, "data": data})


def adapt_to_machine(run: Run, typed: Iterable[str], processes: int) -> Run:
    """The run of a folder, to go on with on another machine or with other processes: what was chosen for those it had,
    and nobody typed, is chosen again, and a micro-batch is no more than a process has. A checkpoint keeps its own all
    the same."""
    named = {text.partition("=")[0].strip() for text in typed}
    fits = {"micro": 0, "sharding": "auto", "compile": "auto"}
    run = replace(run, **{name: value for name, value in fits.items() if name not in named})
    return replace(run, micro=min(run.micro, max(run.batch // processes, 1)))


def config_with_fingerprints(run: ResolvedRun, splits: DataSplits) -> dict[str, Any]:
    """The run as plain data, with the fingerprints of its images and a digest of what they contain: other images,
    another run."""
    config = to_plain(run)
    data = {**config["data"], FINGERPRINT: splits.fingerprint, CONTENT: splits.content}
    return {**config, "data": data}


def free_fields(folder: Path) -> frozenset[str]:
    """What may differ from the run in a folder. One of 0.1.0 does not know the content of its images."""
    try:
        known = CONTENT in read_json(folder / CONFIG).get("data", {})
    except ConfigError:  # none is there yet, or `compare` will say what is wrong with it
        known = True
    return FREE if known else FREE | {f"data.{CONTENT}"}


def open_folder(
    out: Path,
    run: ResolvedRun,
    splits: DataSplits,
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
            config=config_with_fingerprints(run, splits) if world.is_main else {},
            command=dict(command),
            force=force,
            tell=tell,
            free=free_fields(out) if world.is_main else FREE,
        )
    except ConfigError as error:
        refused = str(error)
    refused = world.broadcast(refused)
    if refused or folder is None:
        raise ConfigError(refused)
    return folder


def check_same_run(out: Path, run: Run, world: World) -> None:
    """Refuses a run that differs from the one in the folder."""
    splits = open_splits(run.data, task_of(run.objective))
    compare_config(
        out, config_with_fingerprints(resolve(run, splits, world), splits), free=free_fields(out), force=False
    )


def find_checkpoint(folder: RunFolder, world: World) -> SavedCheckpoint | None:
    """The newest checkpoint that is whole, the same for all processes, each of which checks a part of it."""

    def agree(said: str | None) -> str | None:
        return next((each for each in world.gather(said) if each is not None), None)

    return latest(folder.path / "checkpoints", folder.note, part=world.rank, parts=world.size, agree=agree)


def collect_state(objective: Objective, optimiser: Optimiser, average: Average | None) -> dict[str, Tensor]:
    """The live tensors by name; under sharding each process has its part of them."""
    model = {f"model/{name}": tensor for name, tensor in objective.state_dict(keep_vars=True).items()}
    optim = {f"optim/{name}": tensor for name, tensor in optimiser.state().items()}
    averages = {} if average is None else average.state()
    return {**model, **optim, **averages}


def own_pieces(state: Mapping[str, Tensor], world: World) -> dict[str, TensorPiece]:
    """What this process writes of it."""
    found: dict[str, TensorPiece] = {}
    for name, tensor in state.items():
        if is_writer(tensor, world):
            part, shape, start = local_rows(tensor.detach())
            found[name] = TensorPiece(tensor=part, shape=shape, start=start)
    return found


def find_non_finite(state: Mapping[str, Tensor]) -> str:
    """The first tensor that is not finite in what this process holds, in words; nothing where all are sound."""
    unsound = first_unsound({name: local_rows(tensor.detach())[0] for name, tensor in state.items()})
    return "" if unsound is None else f"{unsound[0]} holds {unsound[1]}"


def restore_state(state: Mapping[str, Tensor], saved: SavedCheckpoint) -> None:
    """Puts a checkpoint's values in their places. Names and shapes must be the same, all of them."""
    names = set(saved.names)
    for what, left in (("lacks", sorted(set(state) - names)), ("also holds", sorted(names - set(state)))):
        if left:
            raise MismatchedWeights(
                f"the checkpoint of step {saved.step} {what} {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: "
                "it is of another network or optimiser; start in another folder"
            )
    for name, tensor in state.items():
        part, shape, start = local_rows(tensor.detach())
        found = saved.names[name][0]
        if tuple(found) != tuple(shape):
            raise MismatchedWeights(
                f"the checkpoint of step {saved.step} holds {name} as {tuple(found)}, the network as {tuple(shape)}"
            )
        copy_rows(tensor.detach(), saved.read(name, start, part.shape[0]) if shape else saved.read(name))
