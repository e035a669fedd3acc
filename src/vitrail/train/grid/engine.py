"""Runs a grid: every cell to its end, in this process or spread over processes and devices, whatever happens to one.

    plan = Plan(cells=cells, out=out, cells_in=out / "cells", record=out / "study.json", job=job)
    report = run_grid(plan, World(device=torch.device("cpu")), watcher=QuietWatcher())

The same call again resumes: a finished cell stays, one that was interrupted resumes from its checkpoint, one that
failed is tried again. A cell that fails is reported and the others finish; only what starts from its weights is not
run. What a grid is for (a sweep's last run, VTAB's mean, a study's table) is up to its caller.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Final

import torch

from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import World, find_device
from vitrail.train.grid.board import Board
from vitrail.train.grid.plan import Plan, Present, Report, Watcher, present_nothing
from vitrail.train.grid.pool import Pool
from vitrail.train.grid.worker import Moved, Place, cores, run_cell, tidy
from vitrail.train.run_folder.files import Lock
from vitrail.train.runtime.observer import Stop, heard

ON_A_GPU: Final = 4  # processes: a small network does not fill the card


def places_for(device: str, jobs: int = 0) -> tuple[Place, ...]:
    """Where the processes work, one entry each: `jobs` of them, or as many as make sense."""
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs} must be at least 1, or 0 for as many as make sense")
    found = find_device(device)
    if found.type == "mps":  # one process uses all of it
        count = jobs or 1
        return (Place(device=str(found), on_device=count, on_machine=count),) * count
    if found.type != "cuda":
        count = jobs or max(cores() // 2, 1)
        return (Place(device=str(found), on_device=count, on_machine=count),) * count
    cards = [str(found)] if ":" in device else [f"cuda:{at}" for at in range(torch.cuda.device_count())]
    count = jobs or ON_A_GPU * len(cards)
    return tuple(
        Place(device=cards[at % len(cards)], on_device=-(-count // len(cards)), on_machine=count) for at in range(count)
    )


def run_grid(
    plan: Plan, where: World | Sequence[Place], *, watcher: Watcher, present: Present = present_nothing
) -> Report:
    """Runs what is left of a grid: in a world, cell after cell, or in a process for each place. `present` is called now
    and then and at the end, with what there is."""
    world = where if isinstance(where, World) else World(device=torch.device("cpu"))
    with taken(plan, world, watcher):
        board = Board(plan, world, watcher, present)
        if board.outcomes:
            watcher.told(f"{len(board.outcomes)} of {len(plan.cells)} {plan.unit} are finished already")
        with heard() as stop:
            stopped = run_here(board, where, stop) if isinstance(where, World) else spread(board, where, stop)
        return board.close(stopped=stopped)


@contextlib.contextmanager
def taken(plan: Plan, world: World, watcher: Watcher) -> Generator[None]:
    """Holds the grid's folder, by the first process. What that one is refused, all are."""
    lock, refused = None, ""
    try:
        if world.is_main:
            try:
                plan.out.mkdir(parents=True, exist_ok=True)
                lock = Lock(plan.out, watcher.told)
                plan.open(watcher.told)
            except ConfigError as error:
                refused = str(error)
            except OSError as error:
                refused = f"{plan.out} cannot be written ({error.strerror or error}); give another --out"
        if refused := world.agree(refused):
            raise ConfigError(refused)
        yield
    finally:
        if lock is not None:
            lock.release()


def run_here(board: Board, world: World, stop: Stop) -> bool:
    """One cell after another in this world; whether a signal ended it."""
    while not any(world.gather(bool(stop))):
        cell = board.next()
        if cell is None:
            return False
        board.begun(cell)
        board.ended(run_cell(board.plan.task(cell), world, board.listener(cell)))
        tidy(world.device)
    return True


def spread(board: Board, places: Sequence[Place], stop: Stop) -> bool:
    """Over processes, each of which takes the next cell when it is done with one; whether a signal ended it."""
    with Pool(places, most=board.left) as pool:
        while True:
            if stop:
                pool.stop()
            while not stop and pool.idle and (cell := board.next()) is not None:
                board.begun(cell)
                pool.give(board.plan.task(cell))
            if not pool.busy:
                return bool(stop)
            for message in pool.messages():
                if isinstance(message, Moved):
                    board.moved(message)
                else:
                    board.ended(message)
