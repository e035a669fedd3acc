"""A last layer that computes the class token alone gives what the whole one gives it."""

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_every_variant import loss_of
from tests.models.tiny import VARIANTS, awake, images
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig

VITS = {name: config for name, config in VARIANTS.items() if isinstance(config, ViTConfig)}


def network(name: str) -> ViT:
    model = awake(VITS[name])
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize("name", VITS)
def test_training_computes_what_evaluation_computes(name: str) -> None:
    """Output and every gradient, through the short last layer and through the whole one."""
    model, x = network(name), images(VITS[name])
    model.class_token_only = True
    found: list[dict[str, Tensor]] = []
    for training in (True, False):
        model.train(training)
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append({"output": output.detach(), **grads})
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", VITS)
@pytest.mark.parametrize("queries", [1, 3])
def test_the_last_layer_gives_the_first_tokens_as_in_the_whole(name: str, queries: int) -> None:
    model = network(name)
    z = torch.randn(2, model.config.tokens, model.config.width, dtype=torch.float64)
    whole, first = (model.forward_blocks(z, first=model.config.depth - 1, queries=few) for few in (None, queries))
    assert first.shape == (2, queries, model.config.width)
    torch.testing.assert_close(first, whole[:, :queries], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "asked", "training", "tokens"),
    [("tanh", True, True, 1), ("tanh", True, False, None), ("mean", True, True, None), ("tanh", False, True, None)],
)
def test_where_the_last_layer_is_short(name: str, asked: bool, training: bool, tokens: int | None) -> None:
    """Only in training, and only where it was asked for: a hook sees the same in both modes otherwise."""
    model, seen = network(name).train(training), list[int]()
    if asked:
        model.class_token_only = True

    def look(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen.append(output.shape[1])

    for block in model.blocks:
        block.register_forward_hook(look)
    model(images(model.config))
    every = model.config.tokens
    assert seen == [every] * (model.config.depth - 1) + [tokens or every]
    seen.clear()
    model.forward_features(images(model.config))
    assert set(seen) == {every}
