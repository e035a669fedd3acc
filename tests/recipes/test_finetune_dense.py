"""The choices for images with masks: how many queries, how long, with which warm-up, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.data.collection import open_collection
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.data.transforms.crop import ScaleJitter
from vitrail.models.query_configs import EoMTConfig, PMTConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config
from vitrail.recipes.decoders import choose_decoder, choose_queries, count_segments, with_queries
from vitrail.recipes.finetune_dense import DenseData, choose_dense_defaults, explain_dense_choices
from vitrail.recipes.registry import load_recipe
from vitrail.tasks.registry import find_task
from vitrail.train.config import Run, configure

DEIT = model_config("ViT-Ti/16", gelu="erf")
CARD = Preprocessing(image=(224, 224), resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic")
TASKS = ("segmentation", "instances", "panoptic")


def chosen(samples: int = 3_680, task: str = "panoptic", decoder: Any = "eomt", **more: Any) -> Run:
    about = {"segments": 6, "classes": 10, "has_val": False}
    dense = DenseData(task=task, samples=samples, **{name: more.pop(name, value) for name, value in about.items()})
    return choose_dense_defaults(DEIT, CARD, dense, decoder=decoder, weights="w", source="s", **more)


def chosen_queries(**about: Any) -> int:
    model = chosen(**about).model
    assert isinstance(model, EoMTConfig)
    return model.queries


# samples, batch, steps, warm-up of the head and of the encoder
RULE = [
    (2, 2, 2_000, 100, 200),
    (20, 4, 2_000, 100, 200),
    (100, 4, 2_000, 100, 200),
    (200, 8, 2_000, 100, 200),
    (3_680, 16, 6_417, 320, 641),
    (20_210, 16, 35_241, 500, 1_000),
    (118_287, 16, 90_000, 500, 1_000),
]


@pytest.mark.parametrize(("samples", "batch", "steps", "head", "encoder"), RULE)
def test_rule(samples: int, batch: int, steps: int, head: int, encoder: int) -> None:
    run = chosen(samples)
    assert (run.batch, run.steps) == (batch, steps)
    assert (run.schedule.decay, run.schedule.power) == ("poly", 0.9)
    assert (run.schedule.warmup, run.schedule.encoder_warmup) == (head, encoder)
    optim = run.optim
    assert (optim.kind, optim.lr, optim.weight_decay, optim.layer_decay) == ("adamw", 1e-4, 0.05, 0.8)
    assert (optim.clip, optim.freeze) == (0.01, "")


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(2, 20_000_000), task=st.sampled_from(TASKS), decoder=st.sampled_from(["eomt", "pmt"]))
def test_bounds(samples: int, task: str, decoder: str) -> None:
    run = chosen(samples, task, decoder)
    assert 1 <= run.batch <= min(16, samples)
    assert 2_000 <= run.steps <= 90_000
    assert run.schedule.warmup + run.schedule.encoder_warmup < run.steps / 5
    assert run.objective.task == task


@pytest.mark.parametrize("task", TASKS)
def test_what_each_task_sees(task: str) -> None:
    run = chosen(task=task)
    assert isinstance(run.model, EoMTConfig)
    assert (run.model.classes, run.model.upscale, run.model.query_blocks) == (10, 2, 4)
    crop, preprocessing = run.augmentation.crop, run.preprocessing
    assert isinstance(crop, ScaleJitter)
    assert preprocessing is not None
    assert (crop.size, crop.interpolation) == ((224, 224), "bicubic")
    is_semantic = task == "segmentation"
    assert crop.scale == ((0.5, 2.0) if is_semantic else (0.1, 2.0))
    assert (run.augmentation.policy is not None) == is_semantic
    assert (preprocessing.resize, preprocessing.fit) == (None, "squash" if is_semantic else "pad")
    assert (preprocessing.mean, preprocessing.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert run.objective.task == task


def test_pmt_leaves_the_encoder_as_it_is() -> None:
    run = chosen(decoder="pmt")
    assert isinstance(run.model, PMTConfig)
    assert (run.optim.freeze, run.optim.layer_decay, run.schedule.encoder_warmup) == ("all", 1.0, 0)


@pytest.mark.parametrize(
    ("task", "segments", "queries"),
    [("panoptic", 1, 20), ("panoptic", 6, 30), ("instances", 90, 200), ("segmentation", 90, 100), ("panoptic", 0, 200)],
)
def test_queries_follow_the_image_with_the_most_segments(task: str, segments: int, queries: int) -> None:
    assert choose_queries(task, segments) == queries
    if task != "segmentation":
        assert chosen_queries(task=task, segments=segments) == queries


@pytest.mark.parametrize(("classes", "queries"), [(2, 20), (9, 45), (150, 100)])
def test_queries_for_classes_of_pixels_follow_their_number(classes: int, queries: int) -> None:
    assert chosen_queries(task="segmentation", segments=0, classes=classes) == queries


def test_segments_are_counted() -> None:
    source = open_collection("scenes/64").splits["test"]
    assert count_segments(source, 8) == max(len(source.segments(at)) for at in (0, 142, 285, 428, 570, 713, 856, 999))


def test_the_image_size_is_one_that_the_patch_divides() -> None:
    run = chosen(image_size=320)
    assert run.model.image == run.augmentation.size == (320, 320)
    assert run.preprocessing is not None
    assert run.preprocessing.image == (320, 320)
    with pytest.raises(ImageSizeError):
        chosen(image_size=230)


def test_decoders_are_chosen_by_the_task() -> None:
    found = {task: choose_decoder("", find_task(task), DEIT) for task in ("classification", *TASKS)}
    assert found == {"classification": "linear", "segmentation": "linear", "instances": "eomt", "panoptic": "eomt"}
    for task in TASKS:
        assert choose_decoder("pmt", find_task(task), DEIT) == "pmt"
        assert choose_decoder("", find_task(task), chosen(decoder="pmt").model) == "pmt"
    assert choose_decoder("linear", find_task("segmentation"), DEIT) == "linear"


@pytest.mark.parametrize(
    ("decoder", "task", "typed"),
    [
        ("linear", "panoptic", []),
        ("linear", "instances", []),
        ("eomt", "classification", []),
        ("unet", "segmentation", []),
        ("eomt", "segmentation", ["objective=Segmentation"]),
        ("pmt", "panoptic", ["optim.freeze=blocks:2"]),
    ],
)
def test_contradictions_are_refused(decoder: str, task: str, typed: list[str]) -> None:
    with pytest.raises(ConfigError):
        choose_decoder(decoder, find_task(task), DEIT, typed)


def test_recipes_take_a_decoder() -> None:
    run = configure(load_recipe("segment-shapes"))
    model = replace(run.model, backbone=None, patch=(8, 8))
    assert isinstance(model, ViTConfig)
    found = with_queries(replace(run, model=model), "pmt", "segmentation", 9, 1)
    assert isinstance(found.model, PMTConfig)
    assert (found.model.queries, found.optim.freeze, found.objective.task) == (45, "all", "segmentation")
    again = with_queries(found, "pmt", "segmentation", 4, 90)
    assert again.model == replace(found.model, classes=4)


def test_mistakes() -> None:
    for about in ({"samples": 1}, {"classes": 0}):
        with pytest.raises(ConfigError):
            chosen(**about)


def test_it_is_said() -> None:
    run, dense = chosen(), DenseData(task="panoptic", samples=3_680, classes=10, segments=6)
    lines = explain_dense_choices(run, DEIT, dense, (480, 640), count=3_312, given=False)
    assert len(lines) == 7
    assert "30 queries" in lines[0]
    assert "6,417 steps (31.0 epochs" in lines[4]
    assert "0.1 to 2" in lines[6]
