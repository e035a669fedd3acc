"""Resuming: whether a folder holds the same run, and how the state of a run goes to a checkpoint and back.

The state is parameters, the optimiser's moments and the average, as named tensors, and nothing else: order,
augmentation, mixing and dropout are computed from the seed and the step. Any number of processes may write it, and any
other number read it.
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping
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
from vitrail.optim.optimiser import Average, Optimiser
from vitrail.tasks.registry import task_of
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.data import DataSplits, open_splits
from vitrail.train.resolve import resolve
from vitrail.train.run_folder.files import CONFIG, Tell, read_command, read_json
from vitrail.train.run_folder.run import NullRunFolder, RunFolder, compare_config

FINGERPRINT, CONTENT = "fingerprint", "content"

# Fields that may change between two starts of a run without changing what it learns.
FREE = frozenset(
    {"name", "micro", "log", "keep", "evaluation", "bad_steps", "compile", "sharding", "recompute", "data.workers"}
    | {"baseline", "data.strict", "data.watch", "data.test", "data.source", "data.without", "data.names"}
)


def read_run(folder: Path) -> Run:
    """The run of a folder, with every choice as it was made. ConfigError if the folder holds no run."""
    read_command(folder)
    config = read_json(folder / CONFIG)
    data = {name: value for name, value in config.get("data", {}).items() if name not in (FINGERPRINT, CONTENT)}
    return from_plain(Run, {**config, "data": data})


def adapt_to_machine(run: Run, typed: Iterable[str], processes: int) -> Run:
    """Adapts a run to another machine or another number of processes: choices that depend on them are made again unless
    they were `typed`, and the micro-batch is limited to a process's share. A checkpoint keeps its own."""
    fixed = {text.partition("=")[0].strip() for text in typed}
    automatic = {"micro": 0, "sharding": "auto", "compile": "auto"}
    run = replace(run, **{name: value for name, value in automatic.items() if name not in fixed})
    return replace(run, micro=min(run.micro, max(run.batch // processes, 1)))


def config_with_fingerprints(run: ResolvedRun, splits: DataSplits) -> dict[str, Any]:
    """The run as plain data, with fingerprints of its images and a digest of their contents: a run on other images is
    another run."""
    config = to_plain(run)
    return {**config, "data": {**config["data"], FINGERPRINT: splits.fingerprint, CONTENT: splits.content}}


def free_fields(folder: Path) -> frozenset[str]:
    """The fields that may differ from the run in a folder. Version 0.1.0 did not record the content of the images."""
    try:
        known = CONTENT in read_json(folder / CONFIG).get("data", {})
    except ConfigError:  # it does not exist yet, or `compare_config` will report what differs
        known = True
    return FREE if known else FREE | {f"data.{CONTENT}"}


def open_folder(
    out: Path, run: ResolvedRun, splits: DataSplits, world: World, *, command: Mapping[str, Any], force: bool, log: Tell
) -> RunFolder:
    """Opens the folder, locked, if it holds the same run. An error of the main process is raised in all of them."""
    folder: RunFolder = NullRunFolder(out)
    with raise_everywhere(world):
        if world.is_main:
            config, free = config_with_fingerprints(run, splits), free_fields(out)
            folder = RunFolder.open(out, config=config, command=command, force=force, tell=log, free=free)
    return folder


@contextlib.contextmanager
def raise_everywhere(world: World) -> Generator[None]:
    """A ConfigError of the main process inside the block is raised in all processes."""
    problem = ""
    try:
        yield
    except ConfigError as error:
        problem = str(error)
    if problem := world.broadcast(problem):
        raise ConfigError(problem)


def check_same_run(out: Path, run: Run, world: World) -> None:
    """ConfigError if a run differs from the one in the folder."""
    splits = open_splits(run.data, task_of(run.objective))
    config = config_with_fingerprints(resolve(run, splits, world), splits)
    compare_config(out, config, free=free_fields(out), force=False)


def find_checkpoint(folder: RunFolder, world: World) -> SavedCheckpoint | None:
    """The newest intact checkpoint, the same for all processes, each of which checks a part of it."""

    def agree(problem: str | None) -> str | None:
        return next(filter(None, world.gather(problem)), None)

    return latest(folder.path / "checkpoints", folder.note, part=world.rank, parts=world.size, agree=agree)


def collect_state(objective: Objective, optimiser: Optimiser, average: Average | None) -> dict[str, Tensor]:
    """The live tensors by name; with sharding each process has a part of them."""
    model = {f"model/{name}": tensor for name, tensor in objective.state_dict(keep_vars=True).items()}
    optim = {f"optim/{name}": tensor for name, tensor in optimiser.state().items()}
    averages = {} if average is None else average.state()
    return {**model, **optim, **averages}


def own_pieces(state: Mapping[str, Tensor], world: World) -> dict[str, TensorPiece]:
    """The parts of the state that this process writes."""
    mine = {name: tensor.detach() for name, tensor in state.items() if is_writer(tensor, world)}
    return {name: TensorPiece(*local_rows(tensor)) for name, tensor in mine.items()}


def find_non_finite(state: Mapping[str, Tensor]) -> str:
    """The first tensor of this process that is not finite, and what it holds; "" if all are finite."""
    unsound = first_unsound({name: local_rows(tensor.detach())[0] for name, tensor in state.items()})
    return "" if unsound is None else f"{unsound[0]} holds {unsound[1]}"


def restore_state(state: Mapping[str, Tensor], saved: SavedCheckpoint) -> None:
    """Restores the state from a checkpoint. MismatchedWeights unless all names and shapes are the same."""
    names, fault = set(saved.names), f"the checkpoint of step {saved.step}"
    for verb, others in (("lacks", set(state) - names), ("also holds", names - set(state))):
        if others:
            listed = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
            raise MismatchedWeights(f"{fault} {verb} {listed}: another network or optimiser; start in another folder")
    for name, tensor in state.items():
        part, shape, start = local_rows(tensor.detach())
        if (found := tuple(saved.names[name][0])) != shape:
            raise MismatchedWeights(f"{fault} holds {name} as {found}, not as {shape}; start in another folder")
        copy_rows(tensor.detach(), saved.read(name, start, part.shape[0]) if shape else saved.read(name))
