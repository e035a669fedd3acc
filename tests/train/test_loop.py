"""The loop from outside: what a run leaves, how it ends, and that going on is the same as never having stopped."""

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from tests.train.killed import digest_of
from tests.train.selfsup import selfsup_run
from tests.train.tiny import tiny_run
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.store import layout as points
from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.checkpoint.store.reader import latest
from vitrail.core.errors import ConfigError, Diverged, OutOfMemory, TrainingError
from vitrail.data.randomness import EpochOrder
from vitrail.data.transforms.augmentation import Augmentation, Mix
from vitrail.data.transforms.crop import Squash
from vitrail.distributed.process_group import World
from vitrail.objectives.objective import ObjectiveOutput
from vitrail.optim.config import Optim
from vitrail.tasks.classification.objective import Classification, ClassificationObjective
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run, replay
from vitrail.train.grid.sweep import run_sweep
from vitrail.train.loop import train
from vitrail.train.observer import STEP
from vitrail.train.resume import read_run
from vitrail.train.scoring import TrainingResult
from vitrail.train.step import TrainingStep

ALONE = World(device=torch.device("cpu"))


class Watching:
    """Keeps what is told; `at` may do something at a row of metrics."""

    def __init__(self, at: Any = None) -> None:
        self.notes: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.at = at

    def log(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.at is not None:
            self.at(row)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def go(run: Run, out: Path, watching: Watching | None = None, force: bool = False) -> TrainingResult:
    return train(run, out=out, world=ALONE, observer=watching or Watching(), force=force)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_folder_that_tells_everything(tmp_path: Path) -> None:
    result = go(tiny_run(steps=10, data=Data(source="digits", dev=0.05, workers=0)), tmp_path / "run")
    out = result.folder
    assert result.state == "done"
    assert result.step == 10
    for name in ("config.json", "environment.json", "log.txt", "report.html", "best.safetensors", "last.safetensors"):
        assert (out / name).stat().st_size, name
    assert json.loads((out / "status.json").read_text())["state"] == "done"
    assert [row["step"] for row in rows(out) if row["kind"] == "train"] == [5, 10]
    last = [row for row in rows(out) if row["kind"] == "train"][-1]
    assert last["images"] == 160
    assert last["exaflops"] > 0
    network = vitrail.load(out / "last.safetensors")
    provenance = network.card.provenance  # type: ignore[union-attr]
    assert provenance["cost"]["images"] == 160
    assert network.card.labels == open_splits(Data(source="digits")).class_names  # type: ignore[union-attr]
    assert result.test is not None
    assert result.test["count"] == 360


class Counting(Watching):
    """Also hears of every step, and of what comes between steps."""

    def __init__(self, stop: int = -1) -> None:
        super().__init__()
        self.moves: list[tuple[str, int, int | None]] = []
        self.stop = stop

    def advance(self, what: str, done: int, total: int | None) -> None:
        self.moves.append((what, done, total))
        if what == STEP and done == self.stop:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_every_step_and_every_scored_batch_is_heard_of(tmp_path: Path) -> None:
    watching = Counting()
    go(tiny_run(log=10, steps=12, evaluation=Scoring(every=6)), tmp_path / "run", watching)
    assert [done for what, done, _ in watching.moves if what == STEP] == list(range(13))
    scored = [(done, total) for what, done, total in watching.moves if what == "scoring dev"]
    splits = open_splits(tiny_run().data)
    assert splits.watch is not None
    assert scored == [(0, len(splits.watch)), (len(splits.watch), len(splits.watch))] * 2


def test_an_interrupt_at_a_step_saves_that_step(tmp_path: Path) -> None:
    result = go(tiny_run(), tmp_path / "run", Counting(stop=7))
    assert (result.state, result.step) == ("interrupted", 7)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 7
    assert (tmp_path / "run" / "last.safetensors").exists()


@pytest.mark.slow
def test_the_written_weights_are_the_averaged_ones_and_score_as_the_run_said(tmp_path: Path) -> None:
    result = go(tiny_run(steps=12), tmp_path / "run")
    network = vitrail.load(result.folder / "last.safetensors")
    splits = open_splits(tiny_run().data)
    assert splits.watch is not None
    prepare = network.card.preprocessing  # type: ignore[union-attr]
    images = torch.stack([prepare(splits.watch.open_image(i).rgb()) for i in range(len(splits.watch))])
    with torch.inference_mode():
        said = network(images).argmax(-1).numpy()
    assert result.watch is not None
    assert np.mean(said == splits.watch.labels.values) == pytest.approx(result.watch["accuracy"])


@pytest.mark.parametrize(("moment", "steps"), [(5, 12), pytest.param(20, 40, marks=pytest.mark.slow)])
def test_a_signal_saves_and_going_on_gives_the_same_weights(tmp_path: Path, moment: int, steps: int) -> None:
    run = tiny_run(steps=steps)
    go(run, tmp_path / "whole")

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == moment:
            os.kill(os.getpid(), signal.SIGTERM)

    result = go(run, tmp_path / "cut", Watching(stop))
    assert result.state == "interrupted"
    assert moment <= result.step < steps
    assert json.loads((tmp_path / "cut/status.json").read_text())["state"] == "interrupted"
    assert go(run, tmp_path / "cut").state == "done"
    assert digest_of(tmp_path / "cut") == digest_of(tmp_path / "whole")
    for name in ("best.safetensors", "last.safetensors"):
        a, b = (vitrail.load(tmp_path / folder / name).state_dict() for folder in ("cut", "whole"))
        assert all(torch.equal(a[key], b[key]) for key in a)
    trained = [row["step"] for row in rows(tmp_path / "cut") if row["kind"] == "train"]
    assert trained == sorted(set(trained))


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def stop(row: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go(tiny_run(), tmp_path / "run", Watching(stop))
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"
    go(tiny_run(), tmp_path / "run")


PLAIN = {
    "model": replace(tiny_run().model, dropout=0.0, stochastic_depth=0.0),  # type: ignore[type-var]
    "optim": Optim(kind="sgd", lr=0.1, momentum=0.9, clip=1.0),
    "average": 0.0,
    "steps": 10,
    "keep": Keep(steps=10),
}


def weights(out: Path) -> dict[str, Tensor]:
    return vitrail.load(out / "last.safetensors").state_dict()


@pytest.mark.slow
def test_accumulation_is_exact(tmp_path: Path) -> None:
    for micro in (16, 8, 5, 1):  # with 5 the last micro-batch holds one image
        go(tiny_run(**PLAIN, micro=micro), tmp_path / str(micro))
    whole = weights(tmp_path / "16")
    for micro in ("8", "5", "1"):
        for name, tensor in weights(tmp_path / micro).items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_number_of_loader_processes_changes_nothing(tmp_path: Path) -> None:
    for workers in (0, 2):
        data = replace(tiny_run().data, resident="off", workers=workers)
        go(tiny_run(data=data, steps=8), tmp_path / str(workers))
    assert digest_of(tmp_path / "0") == digest_of(tmp_path / "2")


@pytest.mark.slow
def test_another_config_is_refused_by_field_unless_forced(tmp_path: Path) -> None:
    go(tiny_run(steps=8), tmp_path / "run")
    changed = tiny_run(steps=12, optim=replace(tiny_run().optim, lr=0.001), log=3)
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.003 -> 0\.001") as refused:
        go(changed, tmp_path / "run")
    assert "steps: 8 -> 12" in str(refused.value)
    assert "--force" in str(refused.value)
    assert "log" not in str(refused.value)  # may change freely
    assert go(changed, tmp_path / "run", force=True).step == 12


@pytest.mark.slow
def test_other_pictures_are_another_run(tmp_path: Path) -> None:
    go(tiny_run(steps=8), tmp_path / "run")
    other = tiny_run(steps=8, data=replace(tiny_run().data, dev=0.1))
    with pytest.raises(ConfigError, match=r"data\.fingerprint"):
        go(other, tmp_path / "run")


@pytest.mark.slow
def test_another_network_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    go(tiny_run(steps=8), tmp_path / "run")
    deeper = tiny_run(steps=12, model=replace(tiny_run().model, depth=3))  # type: ignore[type-var]
    with pytest.raises(vitrail.VitrailError, match=r"lacks average/network\.blocks\.2"):
        go(deeper, tmp_path / "run", force=True)


POISON = 5


def poisoned(monkeypatch: pytest.MonkeyPatch, run: Run) -> str:
    """Makes one training image give a loss that is not a number; its name."""
    source = open_splits(run.data).train
    pixels = torch.from_numpy(np.array(source.open_image(POISON).rgb())).permute(2, 0, 1)
    honest = ClassificationObjective.forward

    def forward(self: ClassificationObjective, *inputs: Tensor) -> ObjectiveOutput:
        outcome = honest(self, *inputs)
        hit = (inputs[0] == pixels).flatten(1).all(1).any()
        return outcome._replace(total=outcome.total * torch.where(hit, torch.nan, 1.0))

    monkeypatch.setattr(ClassificationObjective, "forward", forward)
    return source.name(POISON)


def seen_as_they_are(**changes: Any) -> Run:
    augmentation = Augmentation(crop=Squash(size=(8, 8)), flip=0.0)
    return tiny_run(augmentation=augmentation, mix=Mix(), **changes)


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = seen_as_they_are(steps=100, batch=64, micro=64, keep=Keep(steps=50))
    poisoned(monkeypatch, run)
    watching = Watching()
    result = go(run, tmp_path / "run", watching)
    assert result.state == "done"
    skipped = [row["skipped"] for row in watching.rows if row["kind"] == "train"][-1]
    order = EpochOrder(len(open_splits(run.data).train), run.seed).locate(np.arange(6400))
    assert skipped == (order.sample == POISON).sum() > 2
    assert any("skipped" in note for note in watching.notes)
    assert all(tensor.isfinite().all() for tensor in weights(result.folder).values())


@pytest.mark.slow
def test_too_many_of_them_end_the_run_which_names_step_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replace(tiny_run().data, part=0.2)
    run = seen_as_they_are(data=data, steps=100, batch=64, micro=64, keep=Keep(steps=2), bad_steps=2)
    name = poisoned(monkeypatch, run)
    with pytest.raises(Diverged, match="vitrail replay"):
        go(run, tmp_path / "run")
    out = tmp_path / "run"
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "diverged"
    bad = json.loads((out / "bad_batch.json").read_text())
    assert name in bad["pictures"]
    assert "diverged" in (out / "report.html").read_text()
    again = replay(read_run(out), open_splits(run.data), out, bad["step"], ALONE)
    assert not again.is_finite
    assert again.images[0].name == name
    assert sum(not np.isfinite(one.loss) for one in again.images) == 1


def test_out_of_memory_at_the_start_halves_the_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainingStep.compute_gradients

    def short(self: TrainingStep, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> ObjectiveOutput:
        if micro > 4:
            raise torch.OutOfMemoryError("no more")
        return honest(self, inputs, step, micro)

    monkeypatch.setattr(TrainingStep, "compute_gradients", short)
    watching = Watching()
    assert go(tiny_run(steps=8, micro=16), tmp_path / "run", watching).state == "done"
    assert [note for note in watching.notes if "out of memory" in note] == [
        "out of memory with 16 images at once: continuing with 8, in 2 micro-batches per step",
        "out of memory with 8 images at once: continuing with 4, in 4 micro-batches per step",
    ]


@pytest.mark.slow
def test_out_of_memory_halves_odd_micro_batches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seen = TrainingStep.compute_gradients, set[int]()

    def short(self: TrainingStep, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> ObjectiveOutput:
        if micro > 4:
            raise torch.OutOfMemoryError("no more")
        seen.add(micro)
        return honest(self, inputs, step, micro)

    monkeypatch.setattr(TrainingStep, "compute_gradients", short)
    watching = Watching()
    assert go(tiny_run(steps=8, batch=13, micro=13, mix=Mix()), tmp_path / "run", watching).state == "done"
    assert [note for note in watching.notes if "out of memory" in note] == [
        "out of memory with 13 images at once: continuing with 5, in 3 micro-batches per step",
        "out of memory with 5 images at once: continuing with 2, in 7 micro-batches per step",
    ]
    assert seen == {2}


@pytest.mark.parametrize(
    ("run", "from_step", "said"),
    [
        (tiny_run(steps=12, micro=16), 10, "at step 10 with 16 images at once; resume with .* --set micro=8"),
        (tiny_run(steps=12, micro=1), 0, "at step 0 with 1 image at once; use --set recompute"),
        (selfsup_run("moco"), 0, "at step 0 with 16 images at once; they cannot be split"),
    ],
    ids=["late", "one", "compared"],
)
def test_out_of_memory_that_halving_cannot_help_says_what_can(
    run: Run, from_step: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TrainingStep.compute_gradients

    def short(self: TrainingStep, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> ObjectiveOutput:
        if step is not None and step >= from_step:
            raise torch.OutOfMemoryError("no more")
        return honest(self, inputs, step, micro)

    monkeypatch.setattr(TrainingStep, "compute_gradients", short)
    with pytest.raises(OutOfMemory, match=said):
        go(run, tmp_path / "run")
    assert "out of memory at step" in json.loads((tmp_path / "run" / "status.json").read_text())["message"]
    assert "out of memory at step" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_checkpoint_that_is_being_written_when_a_run_fails_is_finished_before_the_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TrainingStep.compute_gradients

    def slow(point: str) -> None:
        if point == "shard: before sync":
            time.sleep(0.5)

    def short(self: TrainingStep, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> ObjectiveOutput:
        if step == 8:
            raise RuntimeError("something else")
        return honest(self, inputs, step, micro)

    monkeypatch.setattr(points, "reached", slow)
    monkeypatch.setattr(TrainingStep, "compute_gradients", short)
    with pytest.raises(RuntimeError, match="something else"):
        go(tiny_run(steps=12, keep=Keep(steps=4)), tmp_path / "run")
    assert sorted(list_checkpoints(tmp_path / "run" / FOLDER)) == [4, 8]


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = [0]

    def full(point: str) -> None:
        saves[0] += point == "saving: before make"
        if point == "shard: before sync" and 2 <= saves[0] <= 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(points, "reached", full)
    watching = Watching()
    assert go(tiny_run(), tmp_path / "run", watching).state == "done"
    told = [note for note in watching.notes if "No space left" in note]
    assert len(told) == 2
    assert all("step 4, is intact" in note for note in told), told
    assert "No space left" in (tmp_path / "run/log.txt").read_text()
    monkeypatch.undo()
    go(tiny_run(), tmp_path / "whole")
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    go(tiny_run(), tmp_path / "whole")

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = go(tiny_run(), tmp_path / "run", Watching(stop)).step
    newest = max((tmp_path / "run/checkpoints").iterdir())
    shard = next(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    watching = Watching()
    go(tiny_run(), tmp_path / "run", watching)
    assert any(f"step {stopped} is damaged" in note for note in watching.notes)
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "whole")


@pytest.mark.slow
def test_early_stopping_keeps_the_best_and_scores_it(tmp_path: Path) -> None:
    run = tiny_run(
        data=Data(source="digits", dev=0.02, workers=0),
        optim=Optim(lr=1e-12),
        evaluation=Scoring(every=2, patience=3),
    )
    result = go(run, tmp_path / "run")
    assert result.state == "done"
    assert result.step == 8  # the first scoring is the best; three more are not better
    assert result.best.step == 2
    assert result.test is not None
    assert result.test["step"] == 2


@pytest.mark.slow
def test_few_shot_accuracy_on_the_way(tmp_path: Path) -> None:
    run = tiny_run(steps=8, evaluation=Scoring(every=4, fewshot="digits", shots=(1, 5)))
    go(run, tmp_path / "run")
    few = [row for row in rows(tmp_path / "run") if row["kind"] == "fewshot"]
    assert [(row["step"], row["shots"]) for row in few] == [(4, 1), (4, 5), (8, 1), (8, 5)]
    assert all(0.1 < row["accuracy"] < 1 for row in few)


@pytest.mark.slow
def test_a_search_chooses_on_dev_and_ends_on_all_pictures(tmp_path: Path) -> None:
    run = tiny_run(steps=8, data=Data(source="digits", dev=0.1, workers=0))
    watching = Watching()
    found = run_sweep(run, {"optim.lr": (1e-9, 0.01)}, out=tmp_path / "run", world=ALONE, observer=watching)
    assert found.points[0].settings == ("optim.lr=0.01",)
    assert found.points[0].value > found.points[1].value
    assert found.final is not None
    assert found.final.test is not None
    assert read_run(tmp_path / "run").data.dev == 0
    assert read_run(tmp_path / "run").optim.lr == 0.01
    again = run_sweep(run, {"optim.lr": (1e-9, 0.01)}, out=tmp_path / "run", world=ALONE)
    assert [point.value for point in again.points] == [point.value for point in found.points]


@pytest.mark.slow
def test_a_dry_run_says_what_to_expect_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tiny_run(average=0.9999, batch=2000, micro=0)
    forecast = dry_run(run, open_splits(run.data), ALONE, base=tiny_run())
    assert forecast.images_per_s > 0
    assert forecast.seconds > 0
    text = " ".join(forecast.warnings)
    assert "average=0.9999" in text
    assert "far from the recipe's" in text
    assert "batch=2000 is more than" in text
    assert not list(tmp_path.iterdir())


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be split over 3 processes"):
        train(tiny_run(), out=tmp_path / "run", world=World(size=3, local_size=3, device=torch.device("cpu")))
    assert not (tmp_path / "run").exists()


def test_a_warm_up_that_outlasts_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmup"):
        go(tiny_run(steps=4), tmp_path / "run")


@pytest.mark.slow
def test_an_objective_that_compares_samples_refuses_accumulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Classification, "needs_whole_batch", True)
    with pytest.raises(ConfigError, match="which this objective compares"):
        go(tiny_run(steps=8), tmp_path / "run")
    assert go(tiny_run(steps=8, micro=16), tmp_path / "whole").state == "done"


def broken_folder(path: Path) -> Path:
    """Images of two classes, one of which cannot be read."""
    drawn = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (path / label).mkdir(parents=True)
        for number in range(30):
            pixels = drawn.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(path / label / f"{number}.png")
    (path / "cat/7.png").write_bytes(b"no image")
    return path


def test_an_unreadable_picture_is_left_out_and_named(tmp_path: Path) -> None:
    data = Data(source=str(broken_folder(tmp_path / "pictures")), resident="off", workers=0)
    watching = Watching()
    assert go(tiny_run(steps=8, data=data), tmp_path / "run", watching).state == "done"
    assert [note for note in watching.notes if "unreadable" in note and "cat/7.png" in note]
    assert "cat/7.png" in (tmp_path / "run/unreadable.jsonl").read_text()
    counts = [row["images"] for row in rows(tmp_path / "run") if row["kind"] == "train"]
    assert counts[-1] == 128  # places of batches; the loss leaves out the one without an image


def test_with_strict_data_the_run_fails_but_keeps_what_it_had(tmp_path: Path) -> None:
    data = Data(source=str(broken_folder(tmp_path / "pictures")), resident="off", workers=0, strict=True)
    run = tiny_run(steps=40, batch=4, micro=4, data=data, keep=Keep(minutes=100), mix=Mix())
    with pytest.raises(vitrail.VitrailError, match=r"cat/7\.png"):
        go(run, tmp_path / "run")
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    steps = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()]
    assert len(steps) == 1
    order = EpochOrder(60, run.seed).locate(np.arange(160))
    source = open_splits(run.data).train
    bad = next(index for index in range(60) if source.name(index).endswith("cat/7.png"))
    assert steps[0] == int(np.flatnonzero(order.sample == bad)[0]) // 4


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_loses_nothing_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(point: str) -> None:
        if point == "shard: before sync":
            raise OSError(errno.ENOSPC, "No space left on device")

    go(tiny_run(), tmp_path / "whole")
    monkeypatch.setattr(points, "reached", full)
    with pytest.raises(
        TrainingError, match=r"checkpoint could not be written \(last.safetensors was\); there is no earlier checkpoint"
    ):
        go(tiny_run(), tmp_path / "run")
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    monkeypatch.undo()
    assert go(tiny_run(), tmp_path / "run").state == "done"
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_failed_save_is_tried_again_between_those_that_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = [0]

    def full(point: str) -> None:
        saves[0] += point == "saving: before make"
        if point == "shard: before sync" and saves[0] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(points, "reached", full)
    monkeypatch.setattr("vitrail.checkpoint.store.writer.FIRST_RETRY", 0.0)
    go(tiny_run(keep=Keep(steps=10)), tmp_path / "run")
    assert saves[0] == 5  # the four that are due, and one again


@pytest.mark.slow
def test_weights_with_a_hidden_layer_in_their_head_are_fine_tuned_and_gone_on_with(tmp_path: Path) -> None:
    model = replace(tiny_run().model, head="tanh")  # type: ignore[type-var]
    first = go(tiny_run(steps=8, model=model), tmp_path / "first").folder / "last.safetensors"

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    tune = tiny_run(model=model, weights=str(first))
    assert go(tune, tmp_path / "cut", Watching(stop)).state == "interrupted"
    assert go(tune, tmp_path / "cut").state == "done"
    assert go(tune, tmp_path / "whole").state == "done"
    assert digest_of(tmp_path / "cut") == digest_of(tmp_path / "whole")
    for name in ("whole", "cut"):
        network = vitrail.load(tmp_path / name / "last.safetensors")
        assert network.config.head == "linear"  # type: ignore[union-attr]
        provenance = network.card.provenance  # type: ignore[union-attr]
        assert provenance["from"]["weights"] == str(first)
        assert provenance["from"]["cost"]["images"] == 128
        assert provenance["cost"]["images"] == 640


@pytest.mark.slow
def test_a_resume_keeps_its_micro_batch_unless_another_is_asked_for(tmp_path: Path) -> None:
    def stop(step: int) -> Watching:
        def look(row: dict[str, Any]) -> None:
            if row["kind"] == "train" and row["step"] == step:
                os.kill(os.getpid(), signal.SIGTERM)

        return Watching(look)

    def facts() -> int:
        found = latest(tmp_path / "run/checkpoints", print)
        assert found is not None
        return int(found.facts["micro"])

    go(tiny_run(micro=4), tmp_path / "run", stop(10))
    assert facts() == 4
    go(tiny_run(micro=0), tmp_path / "run", stop(20))
    assert facts() == 4
    go(tiny_run(micro=2), tmp_path / "run")
    assert facts() == 2


def test_a_few_shot_source_that_is_not_there_is_said_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(vitrail.VitrailError, match="nosuch"):
        go(tiny_run(evaluation=Scoring(fewshot="nosuch")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_weights_of_a_run_are_found_by_its_folder(tmp_path: Path) -> None:
    out = go(tiny_run(steps=8), tmp_path / "run").folder
    found, best = find_weights(str(out)).tensors, vitrail.load(out / "best.safetensors").state_dict()
    assert all(torch.equal(found[name], best[name]) for name in best)
