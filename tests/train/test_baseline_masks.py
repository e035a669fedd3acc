"""The closed form next to a fine-tuning for classes of pixels: it is what `fit` makes, and a run may start from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import VIT, awake
from tests.tasks.segmentation.drawn import draw_folder
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import load, save
from vitrail.core.errors import ConfigError
from vitrail.data.collection import open_collection
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Augmentation, Mix
from vitrail.data.transforms.crop import Squash
from vitrail.distributed.process_group import World
from vitrail.models.query_configs import query_config
from vitrail.models.zoo import adapt_config
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.segmentation.closed_form import fit_segmenter
from vitrail.tasks.segmentation.task import SEGMENTATION, Segmentation
from vitrail.train.closed_form_baseline import can_start, sample_evenly
from vitrail.train.config import Data, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.loop import train
from vitrail.train.resolve import resolve

SIZE = (16, 18)
ALONE = World(device=torch.device("cpu"))


def tuning(place: Path, **changes: Any) -> Run:
    """Fine-tuning for a few steps from a network that has learned nothing, on drawn shapes."""
    torch.manual_seed(0)
    network = awake(adapt_config(VIT, image_size=SIZE), torch.float32)
    network.card = Card(preprocessing=Preprocessing(image=SIZE))
    save(network, place / "start.safetensors")
    run = Run(
        model=network.config,
        weights=str(place / "start.safetensors"),
        objective=Segmentation(),
        augmentation=Augmentation(crop=Squash(size=SIZE), flip=0.0),
        preprocessing=Preprocessing(image=SIZE),
        data=Data(source=str(draw_folder(place / "drawn")), workers=0),
        optim=Optim(kind="sgd", lr=1e-9),
        schedule=Schedule(),
        mix=Mix(),
        batch=8,
        steps=2,
        evaluation=Scoring(every=2),
        name="masks",
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


@pytest.mark.parametrize("start", ["zero", "closed-form"])
@pytest.mark.slow
def test_a_run_shows_it_and_may_start_from_it(tmp_path: Path, start: str) -> None:
    watching, run = Watching(), tuning(tmp_path, start=start)
    result = train(run, out=tmp_path / "run", world=ALONE, observer=watching)
    made = fit_segmenter(load(run.weights), run.data.source)
    assert made.scored is not None
    closed = result.baseline["test"]
    assert closed["miou"] == pytest.approx(made.scored.score.miou)
    assert (closed["score"], closed["count"], closed["learnt_from"]) == ("miou", 8, 24)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["miou"] for row in rows if row["kind"] == "baseline"] == [closed["miou"]]
    assert result.test is not None
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"without training: {100 * closed['miou']:.2f}%" in page
    assert "test, without training" in page
    if start == "closed-form":
        assert result.test["miou"] == pytest.approx(closed["miou"], abs=0.005)  # nothing moved
    else:
        assert result.test["miou"] < closed["miou"]
        assert any(f"{closed['miou']:.2%} against" in note for note in watching.notes)


def test_only_a_linear_head_starts_from_it(tmp_path: Path) -> None:
    run = tuning(tmp_path)
    splits = open_splits(run.data, SEGMENTATION)
    assert resolve(run, splits, ALONE).baseline == "on"
    assert can_start(run)
    assert resolve(replace(run, baseline="off"), splits, ALONE).baseline == "off"
    queries = replace(run, model=query_config(run.model, "eomt", 3))
    assert not can_start(queries)
    with pytest.raises(ConfigError, match="has queries"):
        resolve(replace(queries, start="closed-form"), splits, ALONE)


def test_large_sets_are_sampled_evenly(tmp_path: Path) -> None:
    source = open_collection(draw_folder(tmp_path / "drawn")).splits["train"]
    assert sample_evenly(source, 24) is source
    few = sample_evenly(source, 5)
    assert [few.name(at) for at in (0, 4)] == [source.name(0), source.name(23)]
    assert len(few) == 5
