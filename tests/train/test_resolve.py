"""The choices that a run leaves open: what a process takes at once, and how it is said."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.tiny import MODEL, tiny_run
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import ZOO, model_config, network_name
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run
from vitrail.train.resolve import balance_micro_batch, resolve, summarise_run

ALONE = World(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("local", "most", "taken"),
    [
        (64, 64, 64),
        (64, 1000, 64),
        (512, 200, 128),  # a divisor, where one is not far below
        (96, 64, 48),
        (97, 64, 49),  # a prime: two parts, as even as can be
        (13, 6, 5),
        (13, 1, 1),
        (1, 1, 1),
    ],
)
def test_a_batch_is_taken_in_parts_that_are_as_even_as_can_be(local: int, most: int, taken: int) -> None:
    assert balance_micro_batch(local, most) == taken


@pytest.mark.parametrize("micro", range(1, 17))
def test_any_micro_batch_up_to_the_batch_will_do(micro: int) -> None:
    run = tiny_run(micro=micro)
    assert resolve(run, open_splits(run.data), ALONE).micro == micro


@pytest.mark.parametrize(("size", "local"), [(1, 16), (2, 8)])
def test_one_that_is_more_than_a_process_has_is_refused(size: int, local: int) -> None:
    world, run = World(device=torch.device("cpu"), size=size, local_size=size), tiny_run(micro=local + 1)
    with pytest.raises(ConfigError, match=f"micro={local + 1} is more than the {local} images .* use {local} or"):
        resolve(run, open_splits(run.data), world)


@pytest.mark.parametrize(("micro", "said"), [(8, "(1 x 2 x 8)"), (6, "(1 x 3 x at most 6)"), (16, "(1 x 1 x 16)")])
def test_how_a_batch_is_taken_apart_is_said(micro: int, said: str) -> None:
    run = tiny_run(micro=micro)
    splits = open_splits(run.data)
    assert f"40 steps of 16 {said}," in summarise_run(resolve(run, splits, ALONE), splits, ALONE, Path("run"))[-1]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (model_config("ViT-Ti/16", classes=3, image_size=64, head="tanh", dropout=0.1), "ViT-Ti/16"),
        (model_config("ViT-B/32", pool="mean", class_token=False), "ViT-B/32"),
        (model_config("R50+ViT-B/16", image_size=64), "R50+ViT-B/16"),
        (model_config("BiT-R50x1", classes=5), "BiT-R50x1"),
        (MODEL, "ViT of 2 layers, width 16, patch 4"),
        (replace(MODEL, patch=(4, 2)), "ViT of 2 layers, width 16, patch 4x2"),
        (model_config("mini-R11+ViT-Nano/4", depth=3), "hybrid ViT of 3 layers, width 96"),
        (replace(model_config("BiT-R50x1"), blocks=(1, 2)), "ResNet of 1+2 blocks, width factor 1"),
        # Of networks that are the same, the first is named: ViT-b/32 is ViT-S/32, SigLIP2-B/16 is SigLIP-B/16.
        *({config.shape: (config, name) for name, config in reversed(ZOO.items())}.values()),
    ],
)
def test_a_network_is_called_by_its_shape(config: ModelConfig, name: str) -> None:
    assert network_name(config) == name


def test_the_network_is_said_at_the_start() -> None:
    run = tiny_run(name="mine", model=model_config("ViT-Nano/4", image_size=8, depth=2))
    splits = open_splits(run.data)
    lines = summarise_run(resolve(run, splits, ALONE), splits, ALONE, Path("run"))
    assert lines[1].startswith("ViT of 2 layers, width 96, patch 4: 1")
    assert lines[1].endswith(" parameters, 8x8 px, from scratch")


@pytest.mark.slow
def test_a_dry_run_says_it_too() -> None:
    run = tiny_run(micro=6, mix=Mix())
    figures = dry_run(run, open_splits(run.data), ALONE).figures
    assert figures["network"].startswith("ViT of 2 layers, width 16, patch 4: ")
    assert figures["batch"] == "16: 1 process x 3 micro-batches x at most 6 images"
