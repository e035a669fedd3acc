"""The weights that a run stands for: the best ones where a held-out split chooses, else the last.

`RUN` means them everywhere, so the score of the end and everything that the report shows belong to them.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.source import read_bundle
from vitrail.core.errors import VitrailError
from vitrail.distributed.pieces import local, put
from vitrail.distributed.world import World
from vitrail.train.build import Parts
from vitrail.train.folder.layout import BEST
from vitrail.train.folder.run import RunFolder
from vitrail.train.scoring import Scored, Scorer


class FinalScore(NamedTuple):
    """The row of the split for the end, where there is one, and what the report shows."""

    row: dict[str, Any] | None
    shown: Scored | None


def score_chosen(
    scorer: Scorer, folder: RunFolder, *, step: int, current: dict[str, Any] | None, shown: Scored | None
) -> FinalScore:
    """Scores the weights that the run stands for on the split for the end. `current` is the watched score of the last
    weights, those of `step`. Without such a split the report is completed, where it does not show them yet, as after a
    resume."""
    pictures = scorer.pictures
    best = read_best(folder.path / BEST, scorer.world, folder.note)
    chosen = step if best is None else int(best.card.provenance.get("step", step))
    if best is None and current is not None and pictures.watched == pictures.tested:
        return FinalScore({**current, "kind": "test", "weights": "last"}, shown)
    with contextlib.nullcontext() if best is None else in_place(best.tensors, scorer.parts):
        if pictures.test is None:
            if best is not None and pictures.chooses and (shown is None or shown.step != chosen):
                scorer.score("watch", chosen, as_is=True)
                return FinalScore(None, scorer.latest)
            return FinalScore(None, shown)
        row = scorer.score("test", chosen, as_is=best is not None)
        return FinalScore({**row, "weights": "last" if best is None else "best"}, scorer.latest)


def read_best(path: Path, world: World, tell: Callable[[str], None]) -> Bundle | None:
    """The best weights of a run, in every process; none where there are none, or where one cannot read them."""
    found, refused = None, ""
    if world.agree(path.exists()):
        try:
            found = read_bundle(path)
        except (OSError, VitrailError) as error:
            refused = str(error)
    if refused := next(filter(None, world.gather(refused)), ""):
        tell(f"the best weights cannot be read, so the last ones are scored: {refused}")
        return None
    return found


@contextlib.contextmanager
def in_place(tensors: Mapping[str, Tensor], parts: Parts) -> Generator[None]:
    """The network with these weights while the context lasts."""
    live = parts.objective.learnt.state_dict(keep_vars=True)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    try:
        with torch.no_grad():
            for name, tensor in live.items():
                part, shape, start = local(tensor.detach())
                put(tensor.detach(), tensors[name][start : start + part.shape[0]] if shape else tensors[name])
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.detach().copy_(before[name])
