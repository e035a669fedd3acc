"""How the step is compiled, and that graphs learn what other steps do."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.tiny import MODEL, tiny_run
from vitrail.core.errors import ConfigError
from vitrail.distributed.world import World, joined
from vitrail.train.config import Compile, Run
from vitrail.train.loop import train
from vitrail.train.resolve import compiled

CUDA = torch.device("cuda")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def chosen(run: Run, size: int = 1, device: torch.device = CUDA) -> Compile:
    return compiled(run, World(device=device, size=size, local_size=size))


def test_a_gpu_compiles_unless_it_is_told_otherwise() -> None:
    assert chosen(tiny_run()) == "on"
    assert chosen(tiny_run(), size=2) == "on"
    assert chosen(tiny_run(), device=torch.device("cpu")) == "off"


@pytest.mark.parametrize("asked", ["on", "graphs", "off"])
def test_what_was_asked_for_stays(asked: Compile) -> None:
    assert chosen(tiny_run(compile=asked)) == asked


@pytest.mark.parametrize(("size", "device"), [(2, CUDA), (1, torch.device("cpu"))])
def test_graphs_are_for_one_process_with_a_gpu(size: int, device: torch.device) -> None:
    with pytest.raises(ConfigError, match="compile=graphs is for one process with a GPU; use compile=auto"):
        chosen(tiny_run(compile="graphs"), size, device)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("micro", [16, 8])
def test_graphs_learn_the_same(micro: int, tmp_path: Path) -> None:
    """Also where gradients are added up over micro-batches, and with dropout."""
    run = tiny_run(model=replace(MODEL, width=32, heads=2), steps=12, micro=micro, precision="float32")
    losses: dict[str, list[float]] = {}
    for way in ("on", "graphs"):
        with joined() as world:
            train(replace(run, compile=way), out=tmp_path / way, world=world)
        found = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        losses[way] = [row["loss"] for row in found if row["kind"] == "train"]
    assert len(losses["on"]) >= 2
    assert losses["graphs"] == pytest.approx(losses["on"], rel=1e-3)
