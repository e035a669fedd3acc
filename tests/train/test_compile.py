"""How the step is compiled, and that graphs learn what other steps do."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.selfsup import UNLABELLED, selfsup_run
from tests.train.tiny import MODEL, tiny_run
from vitrail.core.errors import ConfigError
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World, join_world
from vitrail.optim.config import Kind
from vitrail.optim.schedules import Rates
from vitrail.recipes.registry import load_recipe
from vitrail.train.assemble import assemble
from vitrail.train.config import Compilation, Compile, Data, Keep, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.loop import train
from vitrail.train.resolve import choose_compilation, resolve
from vitrail.train.step import RecordedUpdate, StepResult

CUDA = torch.device("cuda")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def chosen(run: Run, size: int = 1, device: torch.device = CUDA) -> Compile:
    return choose_compilation(run, World(device=device, size=size, local_size=size))


def test_a_gpu_compiles_unless_it_is_told_otherwise_and_records_small_steps() -> None:
    assert chosen(tiny_run()) == "graphs"
    assert chosen(load_recipe("cifar10")) == "graphs"
    assert chosen(tiny_run(), size=2) == "on"
    assert chosen(load_recipe("vit-b16-imagenet21k")) == "on"
    assert chosen(tiny_run(), device=torch.device("cpu")) == "off"


@pytest.mark.parametrize("asked", ["on", "graphs", "recorded", "off"])
def test_what_was_asked_for_stays(asked: Compile) -> None:
    assert chosen(tiny_run(compile=asked)) == asked


@pytest.mark.parametrize("asked", ["graphs", "recorded"])
@pytest.mark.parametrize(("size", "device"), [(2, CUDA), (1, torch.device("cpu"))])
def test_graphs_are_for_one_process_with_a_gpu(size: int, device: torch.device, asked: Compile) -> None:
    with pytest.raises(ConfigError, match=f"compile={asked} is for one process with a GPU; use compile=auto"):
        chosen(tiny_run(compile=asked), size, device)


def test_only_steps_of_new_shapes_are_built() -> None:
    splits, world = open_splits(tiny_run().data), World(device=torch.device("cpu"))
    run = resolve(tiny_run(), splits, world)
    parts = assemble(run, splits, world, UnreadableLog(), saved=None)
    batch = next(parts.batches.iterate(0, 1))

    def builds(compile: Compilation, *micros: int) -> list[bool]:
        """Uncompiled all the same, because what happens is not the question."""
        step = replace(parts.step, run=replace(run, compile=compile), compiled=set())
        found: list[bool] = []
        for micro in micros:
            step(batch, step=0, rates=Rates(0.0, 0.0), micro=micro)
            found.append(step.building_s is not None)
        return found

    assert builds("on", 8, 8, 4, 8, 4) == [True, False, True, False, False]
    assert builds("off", 8, 8) == [False, False]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("micro", "dropout"), [(16, 0.1), (16, 0.0), (8, 0.0)])
def test_graphs_learn_the_same(micro: int, dropout: float, kind: Kind, tmp_path: Path) -> None:
    """Also with dropout, whose draws a recording takes from the same seeds, and where gradients are added up over
    micro-batches, which then draw one after another. What is not compiled draws other numbers from a seed."""
    model = replace(MODEL, width=32, heads=2, dropout=dropout, stochastic_depth=dropout)
    run = tiny_run(model=model, steps=40, micro=micro, precision="float32", log=10)
    run = replace(run, optim=replace(run.optim, kind=kind))
    losses: dict[str, list[float]] = {}
    for way in ("on", "graphs", "off", "recorded"):
        with join_world() as world:
            train(replace(run, compile=way), out=tmp_path / way, world=world)
        found = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        losses[way] = [row["loss"] for row in found if row["kind"] == "train"]
    assert len(losses["on"]) >= 4
    assert losses["graphs"] == pytest.approx(losses["on"], rel=1e-4)
    assert losses["recorded"] == pytest.approx(losses["off"], rel=1e-4)


@pytest.mark.gpu
@GPU
def test_a_thread_that_pins_memory_meanwhile_spoils_no_recording() -> None:
    """As that of a loader does for the batches to come."""
    now, over = threading.Event(), threading.Event()

    def pin() -> None:
        assert now.wait(60)
        try:
            torch.empty(12_345_678, dtype=torch.uint8, pin_memory=True)
        finally:
            over.set()

    def update(inputs: tuple[torch.Tensor, ...], rates: Rates) -> StepResult:
        total = inputs[0] * rates.head
        if torch.cuda.is_current_stream_capturing():
            now.set()
            assert over.wait(60)
        return StepResult(names=("loss",), sums=total.sum()[None], norm=total.norm(), ok=total.isfinite().all())

    recording = RecordedUpdate(update, CUDA)
    with ThreadPoolExecutor(1) as pool:
        pinning = pool.submit(pin)
        losses = [float(recording((torch.ones(4, device=CUDA),), Rates(2.0, 0.0)).sums[0]) for _ in range(6)]
        pinning.result()
    assert recording.graph is not None
    assert losses == [8.0] * 6


@pytest.mark.gpu
@GPU
def test_graphs_are_fed_by_loader_processes(tmp_path: Path) -> None:
    data = Data(source="digits", dev=0.02, watch="dev", test="none", resident="off", workers=2)
    with join_world() as world:
        result = train(tiny_run(data=data, compile="graphs"), out=tmp_path / "run", world=world)
    assert result.step == 40


@pytest.mark.gpu
@GPU
def test_a_run_of_graphs_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A resume records again; what it learns from there is what it would have learnt."""
    model, keep = replace(MODEL, width=32, heads=2), Keep(steps=20)
    run = tiny_run(model=model, steps=40, micro=16, precision="float32", compile="graphs", keep=keep)
    with join_world() as world:
        train(run, out=tmp_path / "whole", world=world)
        train(run, out=tmp_path / "parts", world=world)
        for name in ("status.json", "last.safetensors"):
            (tmp_path / "parts" / name).unlink(missing_ok=True)
        for newer in sorted((tmp_path / "parts" / "checkpoints").glob("*"))[-1:]:
            shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
        train(run, out=tmp_path / "parts", world=world)
    ends = [load_file(tmp_path / name / "last.safetensors") for name in ("whole", "parts")]
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-5) for name in ends[0])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", UNLABELLED)
def test_graphs_learn_the_same_without_labels(kind: str, tmp_path: Path) -> None:
    """Teachers follow and centres move outside of what is recorded."""
    losses: dict[str, list[float]] = {}
    for way in ("off", "graphs", "recorded"):
        model = replace(MODEL, patch=(2, 2), classes=0, head="none", dropout=0.0, stochastic_depth=0.0)
        run = selfsup_run(
            kind, model=model, steps=20, precision="float32", log=5, evaluation=Scoring(every=20), compile=way
        )
        with join_world() as world:
            train(run, out=tmp_path / way, world=world)
        found = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        losses[way] = [row["loss"] for row in found if row["kind"] == "train"]
    assert len(losses["off"]) >= 4
    assert losses["graphs"] == pytest.approx(losses["off"], rel=1e-3)
    assert losses["recorded"] == pytest.approx(losses["off"], rel=1e-3)
