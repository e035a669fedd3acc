"""From what a person typed to a run: choices follow from the images that there are to train on."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.core.errors import ConfigError
from vitrail.recipes.decoders import OBJECTIVES
from vitrail.recipes.run_request import RunCommand, build_plan


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("weights") / "nano.safetensors"
    vitrail.save(vitrail.create_model("ViT-Nano/4", classes=10), path)
    return str(path)


def tuned(weights: str, *settings: str) -> RunCommand:
    return RunCommand(verb="finetune", weights=weights, data="digits", settings=settings)


def test_a_share_of_the_labels_is_what_the_choices_are_for(weights: str) -> None:
    """1,437 digits take batches of 64, a tenth of them of 16."""
    whole, part = build_plan(tuned(weights)), build_plan(tuned(weights, "data.part=0.1"))
    assert (whole.run.batch, part.run.batch) == (64, 16)
    assert whole.run.data.dev == part.run.data.dev == 0.1
    assert "130 training images" in "\n".join(part.why)
    assert part.run.steps < whole.run.steps


def test_what_is_typed_stays(weights: str) -> None:
    run = build_plan(tuned(weights, "data.part=0.1", "batch=32", "steps=40", "schedule.warmup=7", "data.dev=0")).run
    assert (run.batch, run.steps, run.schedule.warmup, run.data.dev) == (32, 40, 7, 0.0)


@pytest.mark.parametrize(
    ("settings", "steps", "warmup"),
    [((), 244, 24), (("steps=30",), 30, 3), (("epochs=2",), 16, 1), (("steps=2",), 2, 0)],
)
def test_the_warm_up_is_a_tenth_of_the_run_however_long(
    settings: tuple[str, ...], steps: int, warmup: int, weights: str
) -> None:
    plan = build_plan(tuned(weights, "data.part=0.1", *settings))
    assert plan.run.schedule.warmup == warmup
    assert f"{steps} steps (" in "\n".join(plan.why)


def test_a_part_that_is_none_is_refused_here(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.part=2"):
        build_plan(tuned(weights, "data.part=2"))


@pytest.fixture
def masks(tmp_path: Path) -> str:
    for folder, shape in (("images", (8, 8, 3)), ("masks", (8, 8))):
        (tmp_path / folder).mkdir()
        for name in ("a.png", "b.png"):
            Image.fromarray(np.ones(shape, np.uint8)).save(tmp_path / folder / name)
    return str(tmp_path)


def test_data_with_masks_and_no_labels_mean_segmentation(weights: str, masks: str) -> None:
    for asked in (
        RunCommand(recipe="digits", data=masks),
        RunCommand(verb="finetune", recipe="finetune-digits", weights=weights, data=masks),
        RunCommand(verb="finetune", weights=weights, data=masks),
    ):
        assert build_plan(asked).run.objective.task == "segmentation"
    for asked in (
        RunCommand(recipe="digits", data=masks, task="classification"),
        RunCommand(recipe="digits", data="shapes"),  # has both
        RunCommand(recipe="digits", data="nowhere"),
    ):
        assert build_plan(asked).run.objective.task == "classification"
    assert build_plan(RunCommand(recipe="segment-shapes", data="digits")).run.objective.task == "segmentation"


@pytest.mark.parametrize("task", ["segmentation", "instances", "panoptic"])
def test_a_recipe_with_queries_learns_any_task_of_segments_with_them(task: str) -> None:
    run = build_plan(RunCommand(recipe="scenes-panoptic", data="scenes/64", task=task)).run
    assert run.objective.task == task
    assert isinstance(run.objective, OBJECTIVES[task])


def test_a_recipe_with_queries_does_not_classify() -> None:
    with pytest.raises(ConfigError, match="scenes-panoptic"):
        build_plan(RunCommand(recipe="scenes-panoptic", data="digits", task="classification"))
