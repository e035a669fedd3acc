"""Pre-training without labels: the settings that are stated, and that every recipe fits its objective."""

from dataclasses import replace

import pytest
import torch

from vitrail.core.config_overrides import apply_settings
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.distributed.process_group import World
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import network_name
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.registry import count_weights
from vitrail.recipes.registry import list_recipes, load_recipe
from vitrail.train.resolve import fit_network

NAMES = [name for name in list_recipes() if name.startswith("selfsup/")]
KINDS = {"masked": "MaskedPatches", "mae": "MAE", "moco": "MoCo", "dino": "DINO"}
IMAGENET = 1_281_167


def test_there_is_one_of_each_kind_for_each_set() -> None:
    large = {"selfsup/masked-b16-jft", "selfsup/mae-b16-imagenet", "selfsup/moco-b16-imagenet"}
    small = {f"selfsup/{kind}-{data}" for kind in KINDS for data in ("cifar10", "digits")}
    grey = {"selfsup/masked-fashion-mnist", "selfsup/mae-fashion-mnist"}
    assert set(NAMES) == large | {"selfsup/dino-s16-imagenet"} | small | grey


@pytest.mark.parametrize("name", NAMES)
def test_the_network_has_no_head_and_suits_its_objective(name: str) -> None:
    run = load_recipe(name)
    kind = name.removeprefix("selfsup/").partition("-")[0]
    assert type(run.objective).__name__ == KINDS[kind]
    assert isinstance(run.model, ViTConfig)
    assert (run.model.head, run.model.classes) == ("none", 0)
    assert fit_network(run, 10) == run.model
    trained, kept = count_weights(run.objective, run.model, World(device=torch.device("cpu")))
    assert trained > 0
    assert (kept > 0.5 * trained) == (kind in ("moco", "dino"))  # a teacher
    assert run.objective.macs_per_image(run.model) > 0
    assert run.model.class_token == (kind == "dino" or "16" in name)


def test_masked_patches_as_stated_in_b12() -> None:
    run = load_recipe("selfsup/masked-b16-jft")
    assert run.model is not None
    assert network_name(run.model) == "ViT-B/16"
    assert run.objective == MaskedPatches(target="mean-colour", rate=0.5, mask=0.8, swap=0.1)
    assert (run.steps, run.batch, run.schedule.warmup, run.schedule.decay) == (1_000_000, 4096, 10_000, "cosine")
    assert (run.optim.kind, run.optim.lr, run.optim.momentum, run.optim.second) == ("adamw", 2e-4, 0.9, 0.999)
    crop = run.augmentation.crop
    assert isinstance(crop, InceptionCrop)
    assert (crop.size, crop.area, run.augmentation.flip) == ((224, 224), (0.05, 1.0), 0.5)
    assert 13 < run.steps * run.batch / 303e6 < 14  # "about 14 epochs"


@pytest.mark.parametrize(
    ("name", "lr", "batch", "warm"),
    [
        ("selfsup/mae-b16-imagenet", 1.5e-4, 4096, 40),
        ("selfsup/moco-b16-imagenet", 1.5e-4, 4096, 40),
        ("selfsup/dino-s16-imagenet", 5e-4, 1024, 10),
    ],
)
def test_rates_are_by_their_papers_rule(name: str, lr: float, batch: int, warm: int) -> None:
    """A base rate for 256 images, and a warm-up of so many epochs."""
    run = load_recipe(name)
    assert run.batch == batch
    assert run.optim.lr == pytest.approx(lr * batch / 256)
    assert run.schedule.warmup * batch / IMAGENET == pytest.approx(warm, rel=0.01)


def test_dino_sees_two_wide_views_and_eight_small_ones() -> None:
    run = load_recipe("selfsup/dino-s16-imagenet")
    sizes = [view.size for view in run.objective.views(run.augmentation)]
    assert sizes == [(224, 224)] * 2 + [(96, 96)] * 8


def test_a_field_of_the_objective_is_set_by_its_name() -> None:
    run = load_recipe("selfsup/masked-cifar10")
    changed = apply_settings(run, ["objective.rate=0.15", "objective.target=small-patch"])
    assert changed == replace(run, objective=MaskedPatches(rate=0.15, target="small-patch"))
