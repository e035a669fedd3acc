"""Runs of queries: from scratch, killed and resumed, in two processes of which one has no segment to learn."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.distributed.pair import together
from tests.models.tiny import awake
from tests.train.dense import QUERIES, dense_run
from tests.train.killed import digest_of, start
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.find_weights import find_weights
from vitrail.core.errors import ConfigError
from vitrail.data.annotations.segments import Segments
from vitrail.data.datasets.scenes import SceneDataset
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import EpochOrder
from vitrail.distributed.process_group import World
from vitrail.models.query_configs import QueryKind, query_config
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary
from vitrail.optim.config import Optim
from vitrail.recipes.finetune_dense import DenseData, choose_dense_defaults
from vitrail.tasks.mask_queries.objective import InstanceQueries, SemanticQueries
from vitrail.train.assemble import load_starting_network
from vitrail.train.config import Keep, Run
from vitrail.train.data import DataSplits
from vitrail.train.loop import train
from vitrail.train.resolve import resolve
from vitrail.train.scoring import Best, Scorer

ALONE = World(device=torch.device("cpu"))
COUNT = 24


def scene_splits(train_on: SceneDataset | None = None) -> DataSplits:
    """A few scenes to train on, and others to score."""
    source = train_on or SceneDataset(COUNT, size=32)
    names = tuple(one.name for one in source.segment_classes)
    watch = SceneDataset(4, size=32, seed=1)
    roles: dict[str, Any] = {"watch": watch, "test": watch, "watch_name": "test", "test_name": "test"}
    return DataSplits(title="scenes", class_names=names, train=source, **roles)


@pytest.mark.slow
def test_a_run_from_scratch_learns_and_its_weights_need_no_mask(tmp_path: Path) -> None:
    result = train(dense_run(steps=6, keep=Keep(steps=6)), out=tmp_path / "run", world=ALONE, splits=scene_splits())
    assert result.state == "done"
    assert result.test is not None
    assert 0 <= result.test["pq"] <= 1
    network = vitrail.load(result.weights)
    assert (network.config.family, network.config.classes) == ("eomt", 10)
    assert getattr(network.config, "masked_blocks", None) == 0
    assert network.card.task == "panoptic"
    assert network.card.things == (True,) * 8 + (False, False)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def read_masked_blocks(run: Path, name: str) -> Any:
    return getattr(vitrail.load(run / f"{name}.safetensors").config, "masked_blocks", None)


@pytest.mark.parametrize("patience", [0, 1])
def test_weights_are_scored_and_written_with_the_masks_of_their_step(
    patience: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early weights mask attention in more blocks than late ones; also where a run that stopped early starts again."""
    update, score, masked = Best.update, Scorer.score, list[int]()
    monkeypatch.setattr(
        Best,
        "update",
        lambda self, row, names, step: update(self, row if step == 4 else dict.fromkeys(row, 0.0), names, step),
    )

    def watch(self: Scorer, part: str, *more: Any, **named: Any) -> Any:
        if part == "test":
            masked.append(self.network.config.masked_blocks)
        row = score(self, part, *more, **named)
        return {**row, "pq": 1.0} if part == "watch" else row

    monkeypatch.setattr(Scorer, "score", watch)
    splits = replace(scene_splits(), watch_name="dev", test=SceneDataset(4, size=32, seed=2))
    run = dense_run(evaluation=replace(dense_run().evaluation, every=4, patience=patience))
    result = train(run, out=tmp_path / "run", world=ALONE, splits=splits)
    best, last = (read_masked_blocks(tmp_path / "run", name) for name in ("best", "last"))
    assert result.best.step == 4
    assert masked == [best]
    assert best > last
    assert (last == 0) is (patience == 0)
    train(run, out=tmp_path / "run", world=ALONE, splits=splits)
    assert (read_masked_blocks(tmp_path / "run", "best"), read_masked_blocks(tmp_path / "run", "last")) == (best, last)
    assert set(masked) == {best}


@pytest.mark.slow  # reads ten thousand scenes for their record
@pytest.mark.parametrize("objective", [InstanceQueries(points=32), SemanticQueries(points=32)])
def test_other_tasks_of_the_same_scenes(tmp_path: Path, objective: Any) -> None:
    data = replace(dense_run().data, part=1.0, watch="none", test="none")
    run = dense_run(objective=objective, data=data, steps=6)
    result = train(run, out=tmp_path / "run", world=ALONE)
    assert result.state == "done"
    assert vitrail.load(result.weights).card.task == objective.task


@pytest.mark.slow
@pytest.mark.parametrize("sets", ["panoptic", "semantic"])
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path, sets: str) -> None:
    run = dense_run() if sets == "panoptic" else dense_run(objective=SemanticQueries(points=32))
    for name in ("whole", "parts"):
        out = tmp_path / name
        if name == "parts":
            _, status = os.waitpid(start(run, out, "checkpoint: after rename", times=2), 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        _, status = os.waitpid(start(run, out), 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert digest_of(tmp_path / "parts") == digest_of(tmp_path / "whole")


class PartlyEmpty(SceneDataset):
    """Scenes of which some have no segments."""

    empty: frozenset[int] = frozenset()

    def segments(self, index: int) -> Segments:
        found = super().segments(index)
        if index not in self.empty:
            return found
        none = np.zeros(0, np.int64)
        return replace(found, classes=none, boxes=np.zeros((0, 4)), crowd=none.astype(bool), masks=())


def plain_run() -> Run:
    """Without draws of the network's own, and SGD, which does not amplify rounding."""
    return dense_run(
        model=replace(QUERIES, stochastic_depth=0.0),
        optim=Optim(kind="sgd", lr=1e-3, momentum=0.9, clip=1.0),
        steps=6,
        micro=2,
        average=0.0,
        keep=Keep(steps=6),
    )


def half_empty(run: Run) -> PartlyEmpty:
    """Scenes without segments wherever the second of two processes looks."""
    source = PartlyEmpty(COUNT, size=32)
    at = np.arange(run.batch * run.steps, dtype=np.int64)
    order = EpochOrder(COUNT, run.seed, 1).locate(at).sample.reshape(run.steps, run.batch)
    source.empty = frozenset(order[:, run.batch // 2 :].flatten().tolist())
    assert set(order[:, : run.batch // 2].flatten().tolist()) - source.empty  # one epoch: no scene is seen twice
    return source


def work(world: World, out: str) -> str:
    torch.set_num_threads(1)
    run = plain_run()
    return train(run, out=Path(out), world=world, splits=scene_splits(half_empty(run))).state


@pytest.mark.slow
def test_a_process_without_a_segment_neither_waits_nor_biases(tmp_path: Path) -> None:
    run = plain_run()
    train(run, out=tmp_path / "one", world=ALONE, splits=scene_splits(half_empty(run)))
    assert together(work, str(tmp_path / "two")) == ["done", "done"]
    one, two = (vitrail.load(tmp_path / name / "last.safetensors").state_dict() for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("decoder", ["eomt", "pmt"])
def test_queries_start_from_the_weights_of_an_encoder(tmp_path: Path, decoder: QueryKind) -> None:
    """Its blocks are where they were before the first step; the queries are drawn from the seed."""
    encoder = ViTConfig(width=16, depth=2, mlp_width=32, heads=2, patch=(8, 8), image=(32, 32), classes=5)
    torch.manual_seed(0)
    network = vitrail.create_model(encoder)
    vitrail.save(network, tmp_path / "encoder.safetensors")
    model = query_config(encoder, decoder, 10, queries=12)
    run = dense_run(model=model, weights=str(tmp_path / "encoder.safetensors"))
    splits = scene_splits()
    starts = [load_starting_network(resolve(replace(run, seed=seed), splits, ALONE), 10)[0] for seed in (3, 3, 4)]
    before = network.state_dict()
    for name, tensor in starts[0].state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, before[name]), name
        assert torch.equal(tensor, starts[1].state_dict()[name]), name
    assert not torch.equal(starts[0].state_dict()["head.queries"], starts[2].state_dict()["head.queries"])


ENCODER = ViTConfig(width=16, depth=2, mlp_width=32, heads=2, patch=(8, 8), image=(32, 32), head="none", classes=0)
NUMERICS: dict[str, dict[str, Any]] = {
    "paper's": {},
    "exact GELU, larger eps": {"gelu": "erf", "norm_eps": 1e-3},
    "RMS norm, quick GELU, tiny eps": {"gelu": "quick", "norm": "rms", "norm_eps": 1e-12},
    "DINOv3": {"position": "none", "rotary": Rotary(coordinates="unit"), "layer_scale": 1e-2, "registers": 2},
    "DINOv2": {"layer_scale": 1e-2, "registers": 2, "position_resample": "bicubic", "gelu": "erf"},
    "mean, behind the norm": {"pool": "mean", "norm_after_pool": True, "class_token": False},
}


@torch.no_grad()
@pytest.mark.parametrize("name", NUMERICS)
@pytest.mark.parametrize("decoder", ["eomt", "pmt"])
def test_a_dense_run_computes_as_the_weights_it_starts_from(tmp_path: Path, name: str, decoder: QueryKind) -> None:
    network, path = awake(replace(ENCODER, **NUMERICS[name]), torch.float32), str(tmp_path / "encoder.safetensors")
    network.card = Card(preprocessing=Preprocessing(image=(32, 32)))
    vitrail.save(network, path)
    bundle = find_weights(path)
    dense = DenseData(task="panoptic", samples=COUNT, classes=10, segments=4)
    choices: dict[str, Any] = {"decoder": decoder, "weights": path, "source": "scenes/32"}
    run = choose_dense_defaults(bundle.config, bundle.card.preprocessing, dense, **choices)
    started = load_starting_network(resolve(run, scene_splits(), ALONE), 10)[0].eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(started.features(images), network.features(images))
    assert torch.equal(started.patch_map(images), network.patch_map(images))


@pytest.mark.parametrize("change", [{"gelu": "erf"}, {"norm_eps": 1e-12}, {"norm": "rms"}])
def test_a_dense_run_with_other_numerics_than_its_weights_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    vitrail.save(vitrail.create_model(ENCODER), tmp_path / "encoder.safetensors")
    model = query_config(replace(ENCODER, **change), "eomt", 10, queries=12)
    run = resolve(dense_run(model=model, weights=str(tmp_path / "encoder.safetensors")), scene_splits(), ALONE)
    with pytest.raises(ConfigError):
        load_starting_network(run, 10)
    freer = replace(run, model=query_config(replace(ENCODER, stochastic_depth=0.2), "eomt", 10, queries=12))
    assert load_starting_network(freer, 10)[0].config.stochastic_depth == 0.2
