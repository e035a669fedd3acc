"""The closed form next to a fine-tuning: what it says is right, it costs no bit of the training, a resume keeps it, and
a run may start from it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.distributed.pair import together
from tests.train.killed import digest_of
from tests.train.tiny import MODEL, tiny_run
from vitrail.checkpoint.weights import load
from vitrail.core.errors import ConfigError, TrainingError
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Augmentation, Mix
from vitrail.data.transforms.crop import Squash
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.features import extract_features
from vitrail.evaluation.frozen.ridge_head import fit_head
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.classification.objective import Classification
from vitrail.train import closed_form_baseline as module
from vitrail.train.closed_form_baseline import is_enabled, load_frozen_network, prepare_baseline, read_head
from vitrail.train.config import Data, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.dry_run import replay
from vitrail.train.loop import train
from vitrail.train.resolve import resolve
from vitrail.train.run_folder.run import RunFolder
from vitrail.train.scoring import TrainingResult

ALONE = World(device=torch.device("cpu"))
PLAIN = replace(MODEL, dropout=0.0, stochastic_depth=0.0)


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a network that knows digits a little."""
    out = tmp_path_factory.mktemp("start") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    still = Augmentation(crop=Squash(size=(8, 8)), flip=0.0)
    run = replace(tiny_run(), model=PLAIN, steps=120, mix=Mix(), average=0.0, augmentation=still)
    train(run, out=out, world=ALONE)
    torch.set_num_threads(threads)
    return str(out / "last.safetensors")


def tuning(weights: str, **changes: Any) -> Run:
    """Fine-tuning on a part of the digits, scored on a dev part and on test."""
    run = tiny_run(
        weights=weights,
        model=PLAIN,
        augmentation=Augmentation(crop=Squash(size=(8, 8)), flip=0.0),
        objective=Classification(),
        data=Data(source="digits", dev=0.1, workers=0),
        optim=Optim(kind="sgd", lr=0.01, momentum=0.9, clip=1.0),
        schedule=Schedule(warmup=2),
        mix=Mix(),
        average=0.0,
        baseline="on",
        steps=8,
        evaluation=Scoring(every=4),
    )
    return replace(run, **changes)


class Watching:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def log(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def go(run: Run, out: Path, watching: Watching | None = None) -> TrainingResult:
    return train(run, out=out, world=ALONE, observer=watching or Watching())


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def expected(run: Run) -> dict[str, float]:
    """Written out: features of the start, least squares, accuracy on both splits."""
    splits = open_splits(run.data)
    model = load(run.weights)
    assert model.card is not None
    prepared = model.card.preprocessing

    def of(source: Any) -> Any:
        from vitrail.data.loader import eval_batches

        found = extract_features(model, eval_batches(source, prepared, batch=64), prepared, "cpu")
        return found.features, found.labels

    head = fit_head(*of(splits.train), 10)
    found: dict[str, float] = {}
    for name, source in (("dev", splits.watch), ("test", splits.test)):
        x, labels = of(source)
        found[name] = float((head.predict(x)[0] == labels).double().mean())
    return found


class Counting(Watching):
    def __init__(self, stop: str = "") -> None:
        super().__init__()
        self.moves: list[tuple[str, int, int | None]] = []
        self.stop = stop

    def advance(self, what: str, done: int, total: int | None) -> None:
        self.moves.append((what, done, total))
        if what == self.stop:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_it_says_how_far_it_is(tmp_path: Path, weights: str) -> None:
    watching = Counting()
    go(tuning(weights, steps=3), tmp_path / "run", watching)
    moves = [(done, total) for what, done, total in watching.moves if what == "closed form"]
    assert len(moves) > 10  # batches, not splits
    assert all(total and 0 <= done <= total for done, total in moves)
    assert {total for done, total in moves if done == total} == {total for _, total in moves}


@pytest.mark.slow
def test_an_interrupt_meanwhile_leaves_a_run_that_can_be_resumed(tmp_path: Path, weights: str) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        go(tuning(weights, steps=3), out, Counting(stop="closed form"))
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert "second" not in status["message"]
    assert not list(out.glob("*.safetensors"))
    assert go(tuning(weights, steps=3), out).state == "done"


@pytest.mark.slow
def test_a_run_shows_it_everywhere(tmp_path: Path, weights: str) -> None:
    watching = Watching()
    result = go(tuning(weights), tmp_path / "run", watching)
    found = {row["split"]: row["accuracy"] for row in rows(result.folder, "baseline")}
    assert found == pytest.approx(expected(tuning(weights)))
    assert found["test"] > 0.5
    assert {name: row["accuracy"] for name, row in result.baseline.items()} == found
    assert [row["split"] for row in watching.rows if row["kind"] == "baseline"] == ["dev", "test"]
    assert any("1,293 images to learn from, 504 to score" in note
               for note in watching.notes)  # fmt: skip
    page = (result.folder / "report.html").read_text()
    assert f"without training: {100 * found['test']:.2f}%" in page
    assert "dev, without training" in page
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 2  # train and dev are of one set


@pytest.mark.slow
def test_training_is_the_same_with_it_and_without(tmp_path: Path, weights: str) -> None:
    for name in ("on", "off"):
        go(tuning(weights, baseline=name), tmp_path / name)
    assert digest_of(tmp_path / "on") == digest_of(tmp_path / "off")
    assert not (tmp_path / "off" / "baseline.safetensors").exists()
    assert not rows(tmp_path / "off", "baseline")


@pytest.mark.slow
def test_a_resume_keeps_it_and_computes_nothing(tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    first = go(tuning(weights), out)
    newest = max((out / "checkpoints").iterdir())
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    monkeypatch.setattr(module, "compute_baseline", None)
    result = go(tuning(weights), out)
    assert result.baseline == first.baseline
    assert len(rows(out, "baseline")) == 2
    go(tuning(weights, baseline="off"), out)  # a field that may change freely


@pytest.mark.slow
def test_a_start_that_was_killed_early_takes_what_is_kept(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tuning(weights, start="closed-form")
    splits = open_splits(run.data)
    run = resolve(run, splits, ALONE)
    out = tmp_path / "run"

    def begin() -> Any:
        with RunFolder.open(out, config={}, command={}, tell=lambda text: None) as folder:
            return prepare_baseline(run, splits, ALONE, folder, Watching(), resumed=False)

    first = begin()
    monkeypatch.setattr(module, "load_or_extract", None)
    again = begin()
    assert first[0] == again[0]
    assert all(torch.equal(*both) for both in zip(first[1], again[1], strict=True))
    assert len(rows(out, "baseline")) == 2
    (out / "baseline.safetensors").write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    assert begin()[0] == first[0]


@pytest.mark.slow
def test_a_run_may_start_from_it(tmp_path: Path, weights: str) -> None:
    zero = go(tuning(weights), tmp_path / "zero")
    still = tuning(weights, start="closed-form", optim=Optim(kind="sgd", lr=1e-12, momentum=0.9), name="still")
    warm = go(still, tmp_path / "still")
    for split in ("dev", "test"):  # nothing has moved yet: the network is the closed form
        row = warm.watch if split == "dev" else warm.test
        assert row is not None
        assert row["accuracy"] == pytest.approx(warm.baseline[split]["accuracy"], abs=0.005)
    gentle = Optim(kind="sgd", lr=0.001, momentum=0.9, clip=1.0)
    moving = go(tuning(weights, start="closed-form", steps=40, optim=gentle), tmp_path / "moving")
    first = rows(tmp_path / "moving", "watch")[0]
    assert first["accuracy"] >= warm.baseline["dev"]["accuracy"] - 0.03
    assert first["accuracy"] > rows(tmp_path / "zero", "watch")[0]["accuracy"]
    assert moving.test is not None
    assert moving.test["accuracy"] >= moving.baseline["test"]["accuracy"] - 0.02
    assert zero.test is not None
    for change in ("zero", "closed-form"):
        other = tuning(weights, start=change, steps=9)
        with pytest.raises(ConfigError, match="steps"):
            go(other, tmp_path / "zero")
    with pytest.raises(ConfigError, match="start: zero -> closed-form"):
        go(tuning(weights, start="closed-form"), tmp_path / "zero")
    older = json.loads((tmp_path / "zero" / "config.json").read_text())  # a folder from before there was a choice
    del older["start"], older["baseline"]
    (tmp_path / "zero" / "config.json").write_text(json.dumps(older))
    assert go(tuning(weights), tmp_path / "zero").state == "done"


@pytest.mark.slow
def test_the_start_is_replayed_with_its_head(tmp_path: Path, weights: str) -> None:
    run = tuning(weights, start="closed-form")
    out = tmp_path / "run"
    go(run, out)
    for place in (out / "checkpoints").iterdir():
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    again = replay(run, open_splits(run.data), out, 0, ALONE)
    assert again.weights_step == -1
    assert again.loss < 1.5  # ten classes at zero would be 2.3
    assert read_head(out)[0].shape == (10, 16)


@pytest.mark.slow
def test_by_itself_it_is_there_however_short_the_run(weights: str) -> None:
    splits = open_splits(Data(source="digits", dev=0.1))
    auto = tuning(weights, baseline="auto")
    assert is_enabled(replace(auto, steps=1), splits)
    assert not is_enabled(replace(auto, baseline="off"), splits)
    assert not is_enabled(replace(auto, weights=""), splits)
    assert not is_enabled(auto, replace(splits, watch=None, test=None))
    assert is_enabled(replace(auto, start="closed-form"), splits)
    assert resolve(auto, splits, ALONE).baseline == "on"
    for change in ({"baseline": "on"}, {"start": "closed-form"}):
        with pytest.raises(ConfigError, match="needs the features"):
            is_enabled(replace(auto, weights="", **change), splits)


@pytest.mark.slow
def test_a_run_without_it_says_why(tmp_path: Path, weights: str) -> None:
    watching = Watching()
    alone = Data(source="digits", test="none", workers=0)
    go(tuning(weights, baseline="auto", data=alone, steps=2, schedule=Schedule()), tmp_path / "run", watching)
    assert len([note for note in watching.notes if "no linear classifier to compare with" in note]) == 1
    assert rows(tmp_path / "run", "baseline") == []


@pytest.mark.slow
def test_where_the_closed_form_is_better_the_run_says_so(tmp_path: Path, weights: str) -> None:
    watching = Watching()
    slow = Optim(kind="sgd", lr=1e-9)
    result = go(tuning(weights, baseline="auto", steps=2, schedule=Schedule(), optim=slow), tmp_path / "run", watching)
    assert result.test is not None
    assert result.test["accuracy"] < result.baseline["test"]["accuracy"]
    said = [note for note in watching.notes if f"{result.baseline['test']['accuracy']:.2%} against" in note]
    assert len(said) == 1
    assert said[0] in (tmp_path / "run/log.txt").read_text()
    assert "beats this fine-tuning" in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
def test_a_start_at_the_closed_form_that_only_gets_worse_is_kept(tmp_path: Path, weights: str) -> None:
    """The start is scored, so that the run stands for it where no later weights are better."""
    harmful = Optim(kind="sgd", lr=30.0)
    run = tuning(weights, start="closed-form", steps=4, schedule=Schedule(decay="constant"), optim=harmful)
    watching = Watching()
    result = go(replace(run, evaluation=Scoring(every=2)), tmp_path / "run", watching)
    assert any("keeps its initial weights" in note for note in watching.notes)
    assert [row["step"] for row in rows(tmp_path / "run", "watch")] == [0, 2, 4]
    assert result.best.step == 0
    assert result.test is not None
    assert (result.test["step"], result.test["accuracy"]) == (
        0,
        pytest.approx(result.baseline["test"]["accuracy"], abs=0.005),
    )


@pytest.mark.slow
def test_large_sets_are_sampled(tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEARNT", 200)
    monkeypatch.setattr(module, "SCORED", 50)
    watching = Watching()
    result = go(tuning(weights), tmp_path / "run", watching)
    assert {name: (row["learnt_from"], row["count"]) for name, row in result.baseline.items()} == {
        "dev": (200, 50),
        "test": (200, 50),
    }
    assert any("200 of 1,293 images to learn from, 100 of 504 to score" in note for note in watching.notes)


@pytest.mark.slow
def test_one_that_fails_does_not_stop_a_run(tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **more: Any) -> Any:
        raise vitrail.core.errors.DataError("the network overflows")

    monkeypatch.setattr(module, "load_or_extract", failing)
    watching = Watching()
    assert go(tuning(weights), tmp_path / "run", watching).state == "done"
    assert "no closed-form baseline: the network overflows" in watching.notes
    with pytest.raises(TrainingError, match=r"head to start with .*the network overflows.*start=zero"):
        go(tuning(weights, start="closed-form"), tmp_path / "warm")


@pytest.mark.slow
def test_a_hidden_layer_goes_with_the_head(tmp_path: Path, weights: str) -> None:
    model = load(weights)
    config = replace(model.config, head="tanh")
    torch.manual_seed(0)
    from vitrail.checkpoint.weights import build_fresh, save

    save(build_fresh(config), tmp_path / "tanh.safetensors", preprocessing=Preprocessing(image=(8, 8)))
    run = resolve(tuning(str(tmp_path / "tanh.safetensors")), open_splits(tuning(weights).data), ALONE)
    assert load_frozen_network(run).config.head == "none"  # type: ignore[union-attr]


def work(world: World, run: Run, out: str, cache: str) -> dict[str, Any]:
    import os

    os.environ["VITRAIL_CACHE"] = cache
    torch.set_num_threads(1)
    return train(run, out=Path(out), world=world).baseline


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.slow
def test_two_processes_agree_on_it(tmp_path: Path, weights: str, sharding: str) -> None:
    run = tuning(weights, start="closed-form", sharding=sharding)
    one, other = together(work, run, str(tmp_path / "pair"), str(tmp_path / "cache"))
    assert one == other
    alone = go(replace(run, sharding="auto"), tmp_path / "alone")
    assert one == alone.baseline
    mine, theirs = (load(tmp_path / name / "last.safetensors").state_dict() for name in ("alone", "pair"))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-4)
