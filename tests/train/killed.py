"""Trainings that are killed: by the clock, or at a chosen moment inside a save; resumed until they are done.

A child is forked from a process that has everything imported, so that a start costs next to nothing. It is killed with
SIGKILL, as a machine that loses power would: nothing of it runs afterwards.
"""

import hashlib
import os
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from tests.checkpoint.store.crash_points import CRASH_POINTS
from vitrail.checkpoint.store import layout as points
from vitrail.checkpoint.store.reader import latest
from vitrail.distributed.process_group import join_world
from vitrail.train.config import Run
from vitrail.train.loop import train


@dataclass(slots=True)
class Trial:
    """One training from start to end, with the kills on its way."""

    digest: str = ""  # of everything in its last checkpoint
    kills: list[str] = field(default_factory=list[str])  # "clock", or the point in a save
    starts: int = 0


def digest_of(out: Path) -> str:
    """Of the names and bytes of all tensors in the last checkpoint: weights, moments, averages."""
    notes: list[str] = []
    saved = latest(out / "checkpoints", notes.append)
    assert saved is not None
    found = hashlib.sha256(str(saved.step).encode())
    for name in sorted(saved.names):
        found.update(name.encode())
        found.update(saved.read(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def start(run: Run, out: Path, point: str = "", times: int = 1) -> int:
    """A child that trains; with a point it kills itself when a save comes there for the `times`-th time."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        left = [times]

        def reached(where: str) -> None:
            if where == point:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        if point:
            points.reached = reached
        with join_world("cpu") as world:
            train(run, out=out, world=world)
        status = 0
    except BaseException:
        traceback.print_exc()  # the child ends here, and nobody else would say why
    finally:
        os._exit(status)


def trial(run: Run, out: Path, seed: int, usual_s: float, points_share: float = 0.5) -> Trial:
    """Starts, kills and starts again until a start comes to its end. What kills is drawn from the seed."""
    draw, done = Random(seed), Trial()
    planned = draw.choice((1, 2, 3, 4))
    while True:
        done.starts += 1
        if len(done.kills) >= planned:
            child, point = start(run, out), ""
        elif draw.random() < points_share:
            # A process alone has no parts of others to wait for, and never replaces a checkpoint of the same step.
            usual = [name for name in CRASH_POINTS if not name.startswith(("part", "replaced"))]
            point = draw.choice(usual)
            child = start(run, out, point, times=draw.randint(1, 4))
        else:
            point = ""
            child = start(run, out)
            time.sleep(draw.uniform(0, usual_s))
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                break  # it was done before the clock
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            done.kills.append(point or "clock")
            continue
        assert code == 0, f"a start ended with {code}"
        break
    done.digest = digest_of(out)
    return done
