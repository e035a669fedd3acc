"""Training in stages, few tokens first: what each step sees, what is kept, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.distributed.pair import together
from tests.lanes import rest_slow
from tests.train.test_flexible_patches import ALONE, flexible_run, weights, work
from tests.train.tiny import MODEL
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.models.resnet_config import ResNetConfig
from vitrail.objectives.mae import MAE
from vitrail.optim.config import Optim
from vitrail.train.config import Data, Keep, Run
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run, replay
from vitrail.train.loop import train
from vitrail.train.resolve import resolve
from vitrail.train.step import TrainingStep
from vitrail.train.step_shape import list_stages, resize_pixels, stage_of

SIZES, PATCHES = {"patches": (), "sizes": (4, 8)}, {"patches": (8, 4), "patch_order": "listed"}
BOTH = pytest.mark.parametrize("stages", [SIZES, PATCHES], ids=["sizes", "patches"])
SIZES_FIRST = pytest.mark.parametrize("stages", rest_slow([SIZES, PATCHES]), ids=["sizes", "patches"])


def staged_run(stages: dict[str, Any], **changes: Any) -> Run:
    return flexible_run(**stages, **changes)


def test_every_stage_has_an_equal_share() -> None:
    assert [stage_of((1, 2, 3), step, 9) for step in range(9)] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [stage_of((1, 2, 3), step, 10) for step in range(10)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [stage_of((1, 2, 3), step, 2) for step in range(2)] == [1, 2]
    assert stage_of((1, 2), 99, 10) == 2  # a run that was made longer


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11])
def test_stages_are_listed_as_steps_are_told(steps: int) -> None:
    run = flexible_run(patches=(), sizes=(2, 4, 8), steps=steps)
    told = [stage_of(run.sizes, step, steps) for step in range(steps)]
    stages = list_stages(run)
    assert [step for stage in stages for step in stage] == list(range(steps))
    assert all(len({told[step] for step in stage}) == 1 for stage in stages)
    assert len(stages) == len(set(told))
    assert list_stages(flexible_run(steps=steps)) == [range(steps)]


@pytest.mark.slow
@SIZES_FIRST
def test_a_dry_run_times_every_stage(monkeypatch: pytest.MonkeyPatch, stages: dict[str, Any]) -> None:
    run, seen, honest = staged_run(stages, steps=20), set[int](), TrainingStep.__call__

    def watch(self: TrainingStep, batch: Any, *, step: int, **more: Any) -> Any:
        seen.add(step)
        return honest(self, batch, step=step, **more)

    monkeypatch.setattr(TrainingStep, "__call__", watch)
    dry_run(run, open_splits(run.data), ALONE)
    assert seen & set(range(10))
    assert seen & set(range(10, 20))


def test_pixels_are_averaged_not_picked() -> None:
    checks = (torch.arange(8)[:, None] + torch.arange(8)) % 2 * 200
    pixels = checks.to(torch.uint8).expand(2, 3, 8, 8)
    small = resize_pixels(pixels, 4)
    assert small.shape == (2, 3, 4, 4)
    assert small.dtype == torch.uint8
    assert ((small > 80) & (small < 120)).all()
    assert resize_pixels(pixels, 8) is pixels


@SIZES_FIRST
def test_steps_see_few_tokens_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: dict[str, Any]) -> None:
    honest, seen = TrainingStep.compute_gradients, list[tuple[int, int, int]]()

    def watch(self: TrainingStep, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> Any:
        embedding: Any = self.objective.network.embedding
        seen.append((step or 0, inputs[0].shape[-1], embedding.patch[0]))
        return honest(self, inputs, step, micro)

    monkeypatch.setattr(TrainingStep, "compute_gradients", watch)
    run = staged_run(stages, data=Data(source="digits", workers=0))
    out = train(run, out=tmp_path / "run", world=ALONE).folder
    first = (4, 4) if stages is SIZES else (8, 8)
    assert seen == [(step, *(first if step < 6 else (8, 4))) for step in range(12)]
    network: Any = vitrail.load(out)
    assert (network.config.image, network.config.patch) == ((8, 8), (4, 4))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    again = vitrail.evaluate(out, "digits@test", device="cpu")
    assert next(row["accuracy"] for row in rows if row["kind"] == "test") == pytest.approx(again.top1)


@pytest.mark.slow
@BOTH
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stages: dict[str, Any]) -> None:
    run = staged_run(stages, keep=Keep(steps=4, last=9))
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
@BOTH
def test_two_processes_learn_what_one_does(tmp_path: Path, stages: dict[str, Any]) -> None:
    run = staged_run(stages, micro=4, optim=Optim(kind="sgd", lr=0.1, momentum=0.9, clip=1.0))
    train(run, out=tmp_path / "one", world=ALONE)
    assert together(work, replace(run, sharding="ddp"), str(tmp_path / "two")) == ["done", "done"]
    wanted = weights(tmp_path / "one")
    for name, tensor in weights(tmp_path / "two").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_step_is_replayed_at_its_size(tmp_path: Path) -> None:
    run = staged_run(SIZES, keep=Keep(steps=12))
    out = train(run, out=tmp_path / "run", world=ALONE).folder
    splits = open_splits(run.data)
    found = [replay(run, splits, out, step, ALONE) for step in (0, 11)]
    assert [one.images[0].pixels.shape for one in found] == [(4, 4, 3), (8, 8, 3)]


def test_work_is_the_mean_over_the_stages() -> None:
    for stages, plain in ((SIZES, MODEL.image), (PATCHES, MODEL.image)):
        run = staged_run(stages)
        assert run.model.image == plain
        small = replace(run.model, image=(4, 4)) if stages is SIZES else replace(run.model, patch=(8, 8))
        macs = [run.objective.macs_per_image(network) for network in (small, run.model)]
        assert macs[0] < 0.5 * macs[1]
        assert run.macs_per_image == pytest.approx(sum(macs) / 2)


RESNET = ResNetConfig(blocks=(1,), factor=0.125, groups=4, image=(8, 8), root="3x3", classes=10)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sizes": (8, 8)}, "different image sizes"),
        ({"sizes": (0, 8)}, "each at least 1"),
        ({"sizes": (8, 4)}, "sizes=8,4: the last must be the image size, 8x8"),
        ({"sizes": (2, 6, 8)}, "2 and 6 px cannot be cut into 4x4 patches"),
        ({"sizes": (4, 8), "patches": (8, 4)}, "not both"),
        ({"sizes": (4, 8), "model": replace(MODEL, position="relative")}, "tied to one size"),
        ({"sizes": (4, 8), "objective": MAE(), "mix": Mix()}, "objective=MAE counts on one grid"),
        ({"patches": (4, 8), "patch_order": "listed"}, "the last must be the network's own patch size, 4x4"),
        ({"patches": (8, 4), "patch_order": "sorted"}, "listed"),
        ({"patch_order": "listed"}, "needs the patch sizes"),
    ],
)
def test_runs_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(flexible_run(**{"patches": (), **changes}), open_splits(flexible_run().data), ALONE)


@pytest.mark.slow
def test_a_resnet_can_grow(tmp_path: Path) -> None:
    run = staged_run({"patches": (), "sizes": (4, 8)}, model=RESNET, average=0.0)
    assert train(run, out=tmp_path / "run", world=ALONE).state == "done"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_every_size_is_recorded_by_itself(tmp_path: Path) -> None:
    from vitrail.distributed.process_group import join_world

    losses: dict[str, list[float]] = {}
    for way in ("on", "graphs"):
        run = staged_run(SIZES, micro=16, steps=60, precision="float32", log=10, compile=way)
        with join_world() as world:
            train(run, out=tmp_path / way, world=world)
        rows = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        losses[way] = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses["graphs"] == pytest.approx(losses["on"], rel=1e-4)
