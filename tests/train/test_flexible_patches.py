"""Training at several patch sizes (FlexiViT): what is drawn, what is learnt, what is kept, what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.distributed.pair import together
from tests.distributed.test_parallel import quick_compiler
from tests.train.tiny import MODEL, tiny_run
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World, join_world
from vitrail.models.resnet_config import ResNetConfig
from vitrail.objectives.mae import MAE
from vitrail.optim.config import Optim, Schedule
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.dry_run import replay
from vitrail.train.loop import train
from vitrail.train.resolve import resolve
from vitrail.train.step import TrainingStep
from vitrail.train.step_shape import draw_patch

ALONE = World(device=torch.device("cpu"))
PATCHES = (2, 4, 8)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flexible_run(**changes: Any) -> Run:
    plain = replace(MODEL, dropout=0.0, stochastic_depth=0.0)
    return replace(tiny_run(model=plain, patches=PATCHES, steps=12), **changes)


def weights(out: Path) -> dict[str, Tensor]:
    return vitrail.load(out / "last.safetensors").state_dict()


def test_every_step_draws_a_patch_by_itself() -> None:
    drawn = [draw_patch(PATCHES, 7, step) for step in range(3000)]
    assert drawn[500:600] == [draw_patch(PATCHES, 7, step) for step in range(500, 600)]
    assert drawn != [draw_patch(PATCHES, 8, step) for step in range(3000)]
    assert min(Counter(drawn).values()) > 900
    assert set(drawn) == set(PATCHES)


@pytest.mark.slow
def test_the_network_learns_at_all_of_them(tmp_path: Path) -> None:
    """And is kept at its own, from which every other is resized. A table of positions can be finer than its grid."""
    plain: Any = {"dropout": 0.0, "stochastic_depth": 0.0, "class_token": False, "pool": "mean"}
    model = replace(MODEL, width=32, mlp_width=64, patch=(8, 8), position_grid=(4, 4), **plain)
    run = flexible_run(model=model, patches=(4, 8), steps=240, batch=64, micro=64, mix=Mix(), average=0.0, log=40)
    run = replace(run, augmentation=replace(run.augmentation, flip=0.0), schedule=Schedule(warmup=10))
    run = replace(run, optim=Optim(kind="adamw", lr=5e-3, clip=1.0), keep=Keep(steps=240))
    run = replace(run, data=Data(source="digits", workers=0), evaluation=Scoring(every=240))
    out = train(run, out=tmp_path / "run", world=ALONE).folder
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    assert vitrail.load(out).config.patch == (8, 8)  # type: ignore[union-attr]
    scores = {patch: vitrail.evaluate(out, "digits@test", patch=patch, device="cpu").top1 for patch in (4, 8)}
    assert min(score or 0 for score in scores.values()) > 0.4, scores
    own = next(row["accuracy"] for row in rows if row["kind"] == "test")
    assert scores[8] == pytest.approx(own)


@pytest.mark.slow
def test_between_steps_the_network_is_at_its_own_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seen, between = TrainingStep.compute_gradients, list[tuple[int, int]](), set[Any]()

    def watch(self: TrainingStep, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> Any:
        seen.append((step or 0, self.objective.network.embedding.patch[0]))  # type: ignore[union-attr]
        return honest(self, inputs, step, micro)

    def look(self: TrainingStep, *given: Any, **named: Any) -> Any:
        between.add(self.objective.network.embedding.patch)  # type: ignore[union-attr]
        return call(self, *given, **named)

    call = TrainingStep.__call__
    monkeypatch.setattr(TrainingStep, "compute_gradients", watch)
    monkeypatch.setattr(TrainingStep, "__call__", look)
    train(flexible_run(), out=tmp_path / "run", world=ALONE)
    assert seen == [(step, draw_patch(PATCHES, 7, step)) for step in range(12)]
    assert between == {(4, 4)}


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    run = flexible_run(keep=Keep(steps=4, last=9))
    whole = train(run, out=tmp_path / "whole", world=ALONE).folder
    cut = train(run, out=tmp_path / "cut", world=ALONE).folder
    for place in sorted((cut / "checkpoints").iterdir())[1:]:  # as if it had been killed after the first
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    (cut / "last.safetensors").unlink()
    train(run, out=cut, world=ALONE)
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(cut).items())


@pytest.mark.slow
def test_a_step_is_replayed_at_its_patch(tmp_path: Path) -> None:
    run = flexible_run(keep=Keep(steps=12))
    out = train(run, out=tmp_path / "run", world=ALONE).folder
    splits = open_splits(run.data)
    at = {draw_patch(PATCHES, 7, step): step for step in range(12)}
    found = {patch: replay(run, splits, out, step, ALONE) for patch, step in at.items()}
    alone = replay(replace(run, patches=(), seed=7), splits, out, at[2], ALONE)
    assert found[2].loss != alone.loss
    assert all(one.is_finite for one in found.values())


def test_memory_and_work_count_every_patch() -> None:
    splits, run = open_splits(flexible_run().data), flexible_run()
    resolved = resolve(run, splits, ALONE)
    assert [network.patch[0] for network in resolved.networks] == list(PATCHES)  # type: ignore[union-attr]
    macs = [run.objective.macs_per_image(network) for network in run.networks]
    assert run.macs_per_image == pytest.approx(sum(macs) / 3)
    assert replace(run, patches=()).macs_per_image == macs[1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"patches": (4, 4)}, "different patch sizes"),
        ({"patches": (0, 4)}, "each at least 1"),
        ({"patches": (3, 4)}, "patches=3,4: image 8x8 leaves 2 pixels over"),
        ({"model": replace(MODEL, position="relative")}, "tied to one size"),
        ({"model": ResNetConfig(blocks=(1,), factor=0.125, groups=4, image=(8, 8), root="3x3", classes=10)}, "patch"),
        ({"objective": MAE(), "mix": Mix()}, "objective=MAE counts on one grid"),
    ],
)
def test_runs_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(flexible_run(**changes), open_splits(flexible_run().data), ALONE)


def work(world: World, run: Run, out: str) -> str:
    torch.set_num_threads(1)
    return train(run, out=Path(out), world=world).state


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(tmp_path: Path, sharding: str) -> None:
    run = flexible_run(micro=4, optim=Optim(kind="sgd", lr=0.1, momentum=0.9, clip=1.0))
    train(run, out=tmp_path / "one", world=ALONE)
    assert together(work, replace(run, sharding=sharding), str(tmp_path / "two")) == ["done", "done"]
    wanted = weights(tmp_path / "one")
    for name, tensor in weights(tmp_path / "two").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_compiled_run_has_a_graph_for_every_patch(tmp_path: Path, precision: Any) -> None:
    """However many there are; and it learns what the plain one does."""
    run = flexible_run(patches=(1, 2, 4, 8), micro=16, steps=12, precision=precision)
    run = replace(run, optim=Optim(kind="sgd", lr=0.1, momentum=0.9, clip=1.0))
    train(run, out=tmp_path / "plain", world=ALONE)
    frames, before = torch._dynamo.utils.counters["frames"], dict(torch._dynamo.utils.counters["frames"])
    with quick_compiler(), torch._dynamo.config.patch(recompile_limit=2):
        train(replace(run, compile="on"), out=tmp_path / "compiled", world=ALONE)
    assert frames["ok"] - before.get("ok", 0) >= 4
    assert frames["total"] - before.get("total", 0) == frames["ok"] - before.get("ok", 0)
    wanted, room = weights(tmp_path / "plain"), 1e-4 if precision == "float32" else 0.05
    for name, tensor in weights(tmp_path / "compiled").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=room, atol=room)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_every_patch_is_recorded_by_itself(tmp_path: Path) -> None:
    """A recording of each learns what steps without one do."""
    losses: dict[str, list[float]] = {}
    for way in ("on", "graphs", "off", "recorded"):
        run = flexible_run(micro=16, steps=60, precision="float32", log=10, compile=way)
        with join_world() as world:
            train(run, out=tmp_path / way, world=world)
        rows = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        losses[way] = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses["graphs"] == pytest.approx(losses["on"], rel=1e-4)
    assert losses["recorded"] == pytest.approx(losses["off"], rel=1e-4)


@pytest.mark.slow
def test_a_grey_network_is_trained_on_the_luma(tmp_path: Path) -> None:
    run = flexible_run(patches=(), model=replace(flexible_run().model, channels=1), steps=6)
    out = train(run, out=tmp_path / "run", world=ALONE).folder
    network = vitrail.load(out)
    assert network.config.channels == 1
    assert network.card.preprocessing.mean == (0.5,)
    assert vitrail.evaluate(network, "digits@test", device="cpu").count == 360
