"""A last layer that computes the class token alone gives what the whole one gives it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lanes import rest_slow
from tests.models.test_every_variant import loss_of
from tests.models.tiny import FEW, VARIANTS, awake, images
from vitrail.models.blocks import Block
from vitrail.models.streams import Stream
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig

VITS = {name: config for name, config in VARIANTS.items() if isinstance(config, ViTConfig)}
SOME = rest_slow(VITS, *(name for name in FEW if name in VITS))


def network(name: str) -> ViT:
    model = awake(VITS[name])
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize("name", SOME)
def test_training_computes_what_evaluation_computes(name: str) -> None:
    """Output and every gradient, through the short last layer and through the whole one."""
    model, x = network(name), images(VITS[name])
    found: list[dict[str, Tensor]] = []
    for training, asked in ((True, True), (True, None), (False, None), (False, False)):
        model.train(training)
        model.class_token_only = asked
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append({"output": output.detach(), **grads})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("queries", [1, 3])
def test_the_last_layer_gives_the_first_tokens_as_in_the_whole(name: str, queries: int) -> None:
    model = network(name)
    z = torch.randn(2, model.config.tokens, model.config.width, dtype=torch.float64)
    whole, first = (model.forward_blocks(z, first=model.config.depth - 1, queries=few) for few in (None, queries))
    assert first.shape == (2, queries, model.config.width)
    torch.testing.assert_close(first, whole[:, :queries], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "asked", "training", "tokens"),
    [
        ("tanh", True, True, 1),
        ("tanh", True, False, 1),
        ("tanh", None, False, 1),
        ("tanh", None, True, None),
        ("tanh", False, True, None),
        ("tanh", False, False, None),
        ("mean", True, True, None),
        ("mean", None, False, None),
    ],
)
def test_where_the_last_layer_is_short(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: bool | None, training: bool, tokens: int | None
) -> None:
    """In inference by itself, in training where it is asked for."""
    model, seen = network(name).train(training), list[int]()
    model.class_token_only = asked
    whole = Block.forward

    def look(self: Block, *args: Any) -> Tensor | Stream:
        output = whole(self, *args)
        assert isinstance(output, Tensor)
        seen.append(output.shape[1])
        return output

    monkeypatch.setattr(Block, "forward", look)
    model(images(model.config))
    every = model.config.tokens
    assert seen == [every] * (model.config.depth - 1) + [tokens or every]
    seen.clear()
    model.forward_features(images(model.config))
    assert set(seen) == {every}


@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_sees_all_tokens(inside: bool) -> None:
    model, seen = network("tanh").eval(), list[int]()
    part = model.blocks[-1]
    assert isinstance(part, Block)

    def look(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen.append(output.shape[1])

    (part.mlp.contract if inside else part).register_forward_hook(look)
    model(images(model.config))
    assert seen == [model.config.tokens]
