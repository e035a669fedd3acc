"""The one loop with objectives that need no labels: killed, resumed, shared out, and their weights used."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.distributed.pair import together
from tests.train.exactly import learnt
from tests.train.killed import digest_of, start
from tests.train.selfsup import UNLABELLED, selfsup_run
from tests.train.test_processes import ALONE, close, work
from vitrail.checkpoint.store.reader import latest
from vitrail.core.config_overrides import from_plain, to_plain
from vitrail.core.errors import BadLabels, ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.parallel import PrecisionWrapper
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.optim.config import Optim
from vitrail.recipes.run_overrides import with_changes
from vitrail.tasks.classification.objective import Classification
from vitrail.train.assemble import assemble
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run, replay
from vitrail.train.loop import train
from vitrail.train.resolve import estimate_memory, resolve, summarise_run
from vitrail.train.resume import read_run
from vitrail.train.run_folder.metric_rows import read_metrics
from vitrail.train.scoring import TrainingResult


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def go(run: Run, out: Path) -> TrainingResult:
    return train(run, out=out, world=ALONE)


def ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def plain_run(kind: str, sharding: str = "auto") -> Run:
    """Without dropout, with SGD, so that processes differ by rounding alone."""
    run = selfsup_run(kind, sharding=sharding)
    assert run.model is not None
    return replace(
        run,
        model=replace(run.model, dropout=0.0, stochastic_depth=0.0),
        optim=Optim(kind="sgd", lr=0.1, momentum=0.9, clip=1.0),
        micro=0 if run.objective.needs_whole_batch else 4,
        steps=6,
        keep=Keep(steps=3),
    )


def cut_back(out: Path) -> None:
    """As if the run had been killed after its first checkpoint."""
    shutil.rmtree(max((out / "checkpoints").iterdir()))
    (out / "last.safetensors").unlink()


@pytest.mark.parametrize("kind", UNLABELLED)
@pytest.mark.slow
def test_killed_in_a_save_and_gone_on_with_it_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    """Heads, teacher and centre included: the digest is of all that is in the checkpoint."""
    run = selfsup_run(kind)
    assert ended(start(run, tmp_path / "undisturbed")) == 0
    assert ended(start(run, tmp_path / "run", "manifest: after rename", times=2)) == -signal.SIGKILL
    assert ended(start(run, tmp_path / "run")) == 0
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "undisturbed")
    saved = latest(tmp_path / "run" / "checkpoints", lambda text: None)
    assert saved is not None
    beside = {name.removeprefix("model/").partition(".")[0] for name in saved.names if name.startswith("model/")}
    expected = {
        "masked": {"network", "head"},
        "mae": {"network", "decoder"},
        "moco": {"network", "projector", "predictor", "teacher"},
        "dino": {"network", "head", "teacher", "centre"},
    }
    assert beside == expected[kind]


@pytest.mark.parametrize("kind", ["masked", "mae"])
@pytest.mark.slow
def test_two_processes_end_where_one_does(tmp_path: Path, kind: str) -> None:
    """And a checkpoint of two is resumed by one."""
    go(plain_run(kind), tmp_path / "one")
    assert together(work, plain_run(kind, "ddp"), str(tmp_path / "two")) == ["done", "done"]
    close(tmp_path / "two", tmp_path / "one")
    cut_back(tmp_path / "two")
    assert go(plain_run(kind, "none"), tmp_path / "two").state == "done"
    close(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("kind", ["mae", pytest.param("dino", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_sharded_it_ends_where_it_does_whole(tmp_path: Path, kind: str) -> None:
    """The network and its teacher have no storage before they are sharded; heads have."""
    go(plain_run(kind), tmp_path / "one")
    run = plain_run(kind, "fsdp")
    assert together(work, run, str(tmp_path / "two")) == ["done", "done"]
    close(tmp_path / "two", tmp_path / "one")
    cut_back(tmp_path / "two")
    assert together(work, run, str(tmp_path / "two")) == ["done", "done"]
    close(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sharding"), [("moco", "ddp"), ("moco", "fsdp"), ("dino", "ddp")])
def test_with_a_teacher_too(tmp_path: Path, kind: str, sharding: str) -> None:
    """The loop runs; that two processes learn what one does shows in float64. In float32 six updates make thousands of
    times as much of a difference as it was: an entry that starts 1e-9 off ends 3e-6 off."""
    assert together(work, plain_run(kind, sharding), str(tmp_path / "two")) == ["done", "done"]
    (one,) = together(learnt, plain_run(kind), torch.float64, size=1)
    two = together(learnt, plain_run(kind, sharding), torch.float64)[0]
    assert two.keys() == one.keys()
    for name, tensor in one.items():
        assert two[name].dtype == tensor.dtype == torch.float64
        assert float((two[name] - tensor).abs().max()) < 1e-10, name


@pytest.mark.parametrize("kind", UNLABELLED)
def test_heads_and_teacher_begin_alike_whatever_was_drawn_before(kind: str) -> None:
    run = selfsup_run(kind)
    splits = open_splits(run.data)
    made = []
    for before in (0, 1):
        torch.manual_seed(before)
        state = torch.get_rng_state()
        parts = assemble(resolve(run, splits, ALONE), splits, ALONE, UnreadableLog(), saved=None)
        assert torch.equal(torch.get_rng_state(), state)
        made.append(parts.objective)
    for (name, one), other in zip(made[0].state_dict().items(), made[1].state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    learnt, network = made[0].eval_network.state_dict(), made[0].network.state_dict()
    assert all(torch.equal(learnt[name], network[name]) for name in network)  # a teacher is a copy of it


def test_another_seed_draws_other_heads() -> None:
    first, second = (
        assemble(resolve(run, open_splits(run.data), ALONE), open_splits(run.data), ALONE, UnreadableLog(), saved=None)
        for run in (selfsup_run("mae", seed=1), selfsup_run("mae", seed=2))
    )
    weights = [parts.objective.get_parameter("decoder.narrow.weight") for parts in (first, second)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize("kind", ["masked", "dino"])
@pytest.mark.slow
def test_what_is_written_is_a_network_without_a_head_that_can_be_fine_tuned(tmp_path: Path, kind: str) -> None:
    go(selfsup_run(kind, precision="bfloat16"), tmp_path / "run")
    network = vitrail.load(tmp_path / "run" / "last.safetensors")
    assert isinstance(network.config, ViTConfig)
    assert (network.config.head, network.config.classes) == ("none", 0)
    saved = latest(tmp_path / "run" / "checkpoints", lambda text: None)
    assert saved is not None
    where = "teacher.network" if kind == "dino" else "network"
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, saved.read(f"model/{where}.{name}")), name
    tuning = replace(
        selfsup_run("masked", weights=str(tmp_path / "run" / "last.safetensors"), baseline="off"),
        model=network.config,
        objective=Classification(),
    )
    assert go(tuning, tmp_path / "tuned").state == "done"
    assert vitrail.load(tmp_path / "tuned" / "last.safetensors").config.classes == 10


@pytest.mark.parametrize("kind", UNLABELLED)
@pytest.mark.slow
def test_the_run_is_stored_and_found_again(tmp_path: Path, kind: str) -> None:
    run = selfsup_run(kind, steps=6)
    go(run, tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert found.objective == run.objective
    assert go(found, tmp_path / "run").step == 6  # nothing is left to do, and nothing is refused
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["objective"]["kind"] == type(run.objective).__name__
    with pytest.raises(ConfigError, match=f"objective.kind: {config['objective']['kind']} -> Classification"):
        go(replace(run, objective=Classification()), tmp_path / "run")


@pytest.mark.slow
def test_a_config_from_before_there_was_a_choice_is_of_a_classification(tmp_path: Path) -> None:
    run = selfsup_run("masked", objective=Classification(smoothing=0.1))
    go(run, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    del config["objective"]["kind"], config["data"]["part"], config["data"]["part_seed"]
    path.write_text(json.dumps(config))
    assert read_run(tmp_path / "run").objective == Classification(smoothing=0.1)
    assert go(run, tmp_path / "run").state == "done"
    assert from_plain(Run, {**to_plain(run), "objective": {"smoothing": 0.3}}).objective == Classification(
        smoothing=0.3
    )


def unlabelled_folder(path: Path, count: int = 40) -> str:
    drawn = np.random.default_rng(0)
    path.mkdir()
    for number in range(count):
        Image.fromarray(drawn.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path / f"{number}.png")
    return str(path)


@pytest.mark.slow
def test_pictures_without_labels_are_learnt_from_and_nothing_is_chosen(tmp_path: Path) -> None:
    data = Data(source=unlabelled_folder(tmp_path / "photos"), dev=0.25, watch="dev", test="none", workers=0)
    run = selfsup_run("masked", data=data, evaluation=Scoring(every=4), keep=Keep(steps=4))
    splits = open_splits(data, None)
    assert (len(splits.train), splits.class_names, splits.can_select_best) == (30, (), False)
    assert (
        "30 images, no labels, 10 watched (dev)"
        in summarise_run(resolve(run, splits, ALONE), splits, ALONE, tmp_path)[2]
    )
    result = go(run, tmp_path / "run")
    assert (result.state, result.best.step) == ("done", -1)
    assert result.watch is not None
    assert "accuracy" not in result.watch
    assert not (tmp_path / "run" / "best.safetensors").exists()
    cut_back(tmp_path / "run")
    assert go(run, tmp_path / "run").best.step == -1
    with pytest.raises(BadLabels, match="has no labels"):
        go(replace(run, objective=Classification()), tmp_path / "other")
    with pytest.raises(ConfigError, match="patience"):
        go(replace(run, evaluation=Scoring(patience=1)), tmp_path / "other")


@pytest.mark.slow
def test_labels_score_the_features_and_choose(tmp_path: Path) -> None:
    data = Data(source="digits", part=0.2, dev=0.2, watch="dev", test="none", workers=0)
    result = go(selfsup_run("masked", data=data, evaluation=Scoring(every=4)), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl")[0] if row["kind"] == "watch"]
    assert [row["step"] for row in rows] == [4, 8]
    assert result.best.values["accuracy"] == max(row["accuracy"] for row in rows)
    assert vitrail.load(tmp_path / "run" / "best.safetensors").config.classes == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mix": Mix(mixup=0.2)}, "objective=MaskedPatches has no labels to mix; set mix.mixup=0"),
        ({"baseline": "on"}, "baseline=on"),
        ({"start": "closed-form"}, "start=closed-form"),
        ({"model": ResNetConfig(blocks=(1,), root="3x3", image=(8, 8))}, "objective=MaskedPatches is for a ViT"),
    ],
)
def test_what_goes_with_labels_alone_is_refused(changes: dict[str, object], told: str) -> None:
    run = selfsup_run("masked", **changes)
    with pytest.raises(ConfigError, match=told):
        resolve(run, open_splits(run.data), ALONE)


def test_samples_that_are_compared_stay_together() -> None:
    run = selfsup_run("moco", batch=256)
    splits = open_splits(run.data)
    assert resolve(run, splits, ALONE).micro == 256
    assert resolve(selfsup_run("mae", batch=256, micro=0), splits, ALONE).micro == 128  # as many as help
    with pytest.raises(ConfigError, match=r"micro=128 .* 256 samples"):
        assemble(resolve(replace(run, micro=128), splits, ALONE), splits, ALONE, UnreadableLog(), saved=None)


@pytest.mark.parametrize(
    "kind", ["masked", "mae", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("moco", "dino"))]
)
@pytest.mark.slow
def test_a_step_in_bfloat16_is_one_graph(kind: str) -> None:
    """As a GPU compiles it. Weights and the fixed tables of every network are cast; what the objective holds is not."""
    run = selfsup_run(kind)
    assert isinstance(run.model, ViTConfig)
    run = replace(run, model=replace(run.model, position="sincos2d", dropout=0.0, stochastic_depth=0.0))
    splits = open_splits(run.data)
    parts = assemble(resolve(run, splits, ALONE), splits, ALONE, UnreadableLog(), saved=None)
    whole = PrecisionWrapper(parts.objective, ALONE.device, "bfloat16", cast_weights=True)
    inputs = parts.objective.inputs(next(iter(parts.batches.iterate(0, 1))), seed=0, step=0)
    torch.compiler.reset()  # of what other tests have compiled
    compiled = torch.compile(whole, backend="eager", fullgraph=True, dynamic=False)
    assert compiled(*inputs).total.detach() == whole(*inputs).total.detach()
    low = whole._low()
    tables = {name.removeprefix("objective.").partition(".position")[0] for name in low if "position" in name}
    beside = {"mae": {"decoder"}, "moco": {"teacher.network"}, "dino": {"teacher.network"}}
    assert tables == {"network"} | beside.get(kind, set())
    own = {f"objective.{name}" for name, _ in parts.objective.named_buffers(recurse=False)}
    assert own >= {"objective.mean", "objective.std"}
    assert not own & set(low)


@pytest.mark.parametrize("kind", UNLABELLED)
def test_cost_and_memory_are_those_of_the_objective(kind: str) -> None:
    run = selfsup_run(kind)
    splits = open_splits(run.data)
    run = resolve(run, splits, ALONE)
    assert run.model is not None
    parts = assemble(run, splits, ALONE, UnreadableLog(), saved=None)
    assert parts.cost.macs == run.objective.macs_per_image(run.model)
    held = sum(tensor.numel() for tensor in parts.objective.state_dict().values())
    state, each = estimate_memory(run, ALONE)
    trained = sum(parameter.numel() for parameter in parts.objective.parameters() if parameter.requires_grad)
    assert state == 16 * trained + 4 * (held - trained)  # value, gradient and two moments; of a teacher the value
    assert each >= estimate_memory(replace(run, objective=Classification()), ALONE)[1]
    assert len(parts.batches.views) == {"moco": 2, "dino": 3}.get(kind, 1)
    assert not run.objective.labelled


def test_the_cost_of_a_classification_is_that_of_its_network() -> None:
    run = selfsup_run("masked", objective=Classification())
    splits = open_splits(run.data)
    run = resolve(run, splits, ALONE)
    assert run.model is not None
    assert assemble(run, splits, ALONE, UnreadableLog(), saved=None).cost.macs == run.model.macs


@pytest.mark.parametrize("kind", ["mae", "moco"])
@pytest.mark.slow
def test_a_dry_run_and_a_step_again(tmp_path: Path, kind: str) -> None:
    run = selfsup_run(kind, steps=6)
    forecast = dry_run(run, open_splits(run.data), ALONE)
    assert forecast.run.model is not None
    work = forecast.run.objective.macs_per_image(forecast.run.model)
    assert forecast.figures["compute"].startswith(f"{6 * work * 16 / 1e12:,.3g} TFLOP per step")
    go(run, tmp_path / "run")
    again = replay(run, open_splits(run.data), tmp_path / "run", 3, ALONE)
    assert again.is_finite
    assert len(again.images) == 16
    mean = sum(one.loss for one in again.images) / 16
    assert again.loss == pytest.approx(mean, rel=0.3)  # dropout draws otherwise


def test_objectives_are_chosen_and_changed_by_name() -> None:
    run = selfsup_run("masked")
    assert with_changes(run, ["objective.rate=0.15"]).objective == MaskedPatches(rate=0.15)
    changed = with_changes(run, ["objective=mae", "objective.decoder_depth=2", "objective.decoder_width=64"])
    assert changed.objective == MAE(decoder_depth=2, decoder_width=64)  # its own mask, not that of masked patches
    assert with_changes(changed, ["objective=MAE"]).objective == changed.objective
    with pytest.raises(ConfigError, match="objective=mea must be Classification"):
        with_changes(run, ["objective=mea"])
