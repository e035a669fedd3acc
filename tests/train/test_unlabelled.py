"""A run without labels: how it is scored along the way, alone and on two processes, and what its report shows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.distributed.pair import together
from tests.train.tiny import MODEL, tiny_run
from vitrail.data.dataset import ArrayDataset, SubsetDataset
from vitrail.data.loader import eval_batches
from vitrail.data.transforms.augmentation import Mix, TrainViews
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.features import extract_features
from vitrail.evaluation.frozen.knn import find_nearest, measure_collapse, vote_classes
from vitrail.objectives.dino import DINO
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.moco import MoCo
from vitrail.optim.config import Optim, Schedule
from vitrail.train.assemble import assemble
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import DataSplits, open_splits
from vitrail.train.loop import train
from vitrail.train.resolve import resolve
from vitrail.train.scoring import Scorer, TrainingResult

ALONE = World(device=torch.device("cpu"))
OBJECTIVES: dict[str, Any] = {
    "masked": MaskedPatches(),
    "mae": MAE(decoder_width=16, decoder_depth=1, decoder_heads=2),
    "moco": MoCo(hidden=16, width=8),
    "dino": DINO(outputs=32, hidden=16, bottleneck=8, local_views=1, local_size=4),
}


def run_of(kind: str, **changes: Any) -> Run:
    """Four steps on some of the digits. Dropout, which each process draws for itself, is in one of them alone."""
    dropout = 0.1 if kind == "mae" else 0.0
    base = tiny_run(
        objective=OBJECTIVES[kind],
        model=replace(MODEL, classes=0, head="none", patch=(2, 2), dropout=dropout, stochastic_depth=dropout),
        mix=Mix(),
        optim=Optim(kind="sgd", lr=0.05, momentum=0.9, clip=1.0),
        schedule=Schedule(warmup=1),
        data=Data(source="digits", part=0.2, dev=0.25, watch="dev", test="none", workers=0),
        micro=16,
        steps=4,
        average=0.0,
        evaluation=Scoring(every=2),
        keep=Keep(steps=100),
        log=1,
    )
    return replace(base, **changes)


def work(world: World, run: Run, out: str) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    return train(run, out=Path(out), world=world).watch


def rows_in(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, TrainingResult]]:
    """One of each, on one thread."""
    folder, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    torch.set_num_threads(1)
    found = {kind: (folder / kind, train(run_of(kind), out=folder / kind, world=ALONE)) for kind in OBJECTIVES}
    torch.set_num_threads(threads)
    return found


@pytest.mark.slow
def test_a_row_tells_neighbours_rank_and_the_own_loss(runs: dict[str, tuple[Path, TrainingResult]]) -> None:
    for out, result in runs.values():
        first, second = rows_in(out, "watch")
        assert (first["step"], second["step"]) == (2, 4)
        assert second == result.watch
        assert {*second} == {
            *("kind", "step", "split", "measure", "accuracy", "count"),
            *("rank", "width", "similarity", "spread", "loss"),
        }
        assert (second["measure"], second["split"], second["count"], second["width"]) == ("k-NN", "dev", 72, 16)
        assert 1 <= second["rank"] <= 16
        assert first["loss"] != second["loss"]
        assert result.best.values["accuracy"] == max(first["accuracy"], second["accuracy"])
        assert (out / "best.safetensors").exists()


@pytest.mark.slow
def test_the_numbers_are_those_of_the_weights_that_were_written(runs: dict[str, tuple[Path, TrainingResult]]) -> None:
    for kind, (out, result) in runs.items():
        assert result.watch is not None
        run, splits = run_of(kind), open_splits(run_of(kind).data)
        network = vitrail.load(out / "last.safetensors")
        ready = resolve(run, splits, ALONE).preprocessing
        assert ready is not None
        assert splits.watch is not None
        near, mine = (
            extract_features(network, eval_batches(source, ready, batch=64), ready, "cpu")
            for source in (splits.train, splits.watch)
        )
        right = vote_classes(find_nearest(near.features, mine.features, 20), near.labels, 10, 20) == mine.labels
        assert result.watch["accuracy"] == pytest.approx(float(right.float().mean()), abs=0.02)
        found = measure_collapse(mine.features)
        assert result.watch["rank"] == pytest.approx(found.rank, rel=1e-4)
        assert result.watch["similarity"] == pytest.approx(found.similarity, abs=1e-5)


@pytest.mark.slow
def test_scoring_leaves_no_trace_in_training(tmp_path: Path, runs: dict[str, tuple[Path, TrainingResult]]) -> None:
    torch.set_num_threads(1)
    for kind, (out, _) in runs.items():
        often = tmp_path / kind
        train(run_of(kind, evaluation=Scoring(every=1)), out=often, world=ALONE)
        expected = vitrail.load(out / "last.safetensors").state_dict()
        for name, tensor in vitrail.load(often / "last.safetensors").state_dict().items():
            assert torch.equal(tensor, expected[name]), (kind, name)
        assert rows_in(often, "watch")[1::2] == rows_in(out, "watch"), "one is not like the other, whatever came before"


@pytest.mark.slow
def test_the_loss_is_the_objectives_own_on_views_that_stay_the_same(
    runs: dict[str, tuple[Path, TrainingResult]],
) -> None:
    for kind in ("mae", "moco"):
        splits = open_splits(run_of(kind).data)
        run = resolve(run_of(kind), splits, ALONE)
        parts = assemble(run, splits, ALONE, UnreadableLog(), saved=None)
        scorer = Scorer(parts)
        row = scorer.score("watch", 0)
        assert scorer.score("watch", 0) == row
        objective = parts.objective.eval()
        assert splits.watch is not None
        views, total, count = TrainViews(objective.views(run.augmentation)), 0.0, 0.0
        for batch in eval_batches(splits.watch, views, batch=16 if kind == "moco" else 72):
            with torch.no_grad():
                found = objective(*objective.inputs(batch, seed=0, step=3))
            total, count = total + float(found.total), count + float(found.count)
        assert count == 72
        assert row["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "sharding"), [("masked", "fsdp"), ("moco", "ddp"), pytest.param("dino", "fsdp", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_two_processes_have_the_row_of_one(
    tmp_path: Path, runs: dict[str, tuple[Path, TrainingResult]], kind: str, sharding: str
) -> None:
    one, other = together(work, run_of(kind, sharding=sharding, micro=8), str(tmp_path / "run"))
    assert one == other
    alone = runs[kind][1].watch
    assert alone is not None
    assert {name: value for name, value in one.items() if isinstance(value, str | int)} == {
        name: value for name, value in alone.items() if isinstance(value, str | int)
    }
    assert one["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert one["rank"] == pytest.approx(alone["rank"], rel=1e-2)
    assert one["accuracy"] == pytest.approx(alone["accuracy"], abs=0.05)


def unlabelled(watched: bool) -> DataSplits:
    """Images of digits, and nothing known of them."""
    known = open_splits(run_of("mae").data)
    parts = [SubsetDataset(known.train, range(60)), SubsetDataset(known.train, range(60, 90))]
    train_, watch = (ArrayDataset(np.stack([part.open_image(at).rgb() for at in range(len(part))])) for part in parts)
    return DataSplits(
        title="heap",
        class_names=(),
        train=train_,
        watch=watch if watched else None,
        test=None,
        watch_name="val" if watched else "",
        test_name="",
    )


def test_without_labels_there_is_no_accuracy_and_nothing_is_chosen(tmp_path: Path) -> None:
    result = train(run_of("mae"), out=tmp_path, world=ALONE, splits=unlabelled(watched=True))
    assert result.watch is not None
    assert "accuracy" not in result.watch
    assert result.watch["count"] == 30
    assert (result.best.step, (tmp_path / "best.safetensors").exists()) == (-1, False)
    text = (tmp_path / "report.html").read_text()
    for said in ("Reconstructions on val", "Nearest neighbours of val", "Collapse indicators", "60 images<"):
        assert said in text
    for absent in ("ccuracy", "the same", "green frame", "Confusion"):
        assert absent not in text


def test_where_nothing_is_watched_training_pictures_are_looked_at(tmp_path: Path) -> None:
    result = train(run_of("mae"), out=tmp_path, world=ALONE, splits=unlabelled(watched=False))
    assert result.watch is None
    rows = rows_in(tmp_path, "look")
    assert [row["step"] for row in rows] == [2, 4]
    assert {*rows[0]} == {"kind", "step", "split", "count", "rank", "width", "similarity", "spread"}
    text = (tmp_path / "report.html").read_text()
    assert "Reconstructions on train" in text
    assert "Nearest neighbours of train" in text


@pytest.mark.slow
def test_the_report_shows_what_the_objective_has_to_show(runs: dict[str, tuple[Path, TrainingResult]]) -> None:
    told = {
        "masked": ("Reconstructions on dev", "Hits"),
        "mae": ("Reconstructions on dev",),
        "moco": ("Agreement", "Spread"),
        "dino": ("Teacher entropy", "KL"),
    }
    for kind, (out, _) in runs.items():
        text = (out / "report.html").read_text()
        rebuilt = 36 if kind in ("masked", "mae") else 0
        assert text.count("<img") == rebuilt + 8 * 6, kind
        for said in (*told[kind], "Nearest neighbours of dev", "k-NN accuracy", "Feature rank", "labels unseen"):
            assert said in text, (kind, said)
        for absent in ("Confusion", "Worst answers", "http:", "https:", "<script"):
            assert absent not in text, (kind, absent)
        assert ("Reconstructions" in text) == bool(rebuilt)
