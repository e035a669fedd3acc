"""Attention weights from a fused network: what they are, that the output follows from them, and what they cost."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.inspection.test_tokens import ATTENTIVE
from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES, FEW, VIT, awake, images
from vitrail.inspection.layer_taps import iterate_layers, iterate_states
from vitrail.inspection.measures import attention_distance
from vitrail.inspection.rollout import class_attention, gradient_rollout, rollout
from vitrail.models.backbone import Taps
from vitrail.models.blocks import Block
from vitrail.models.build import build
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that come up inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak(work: Callable[[], object]) -> int:
    gc.collect()
    with Held() as held:
        work()
    return held.peak


@pytest.mark.parametrize(
    "name", rest_slow(ATTENTIVE, *(name for name in ATTENTIVE if name in FEW or name not in FAMILIES))
)
def test_the_whole_network_is_gone_through(name: str) -> None:
    config = ATTENTIVE[name]
    model, pictures = awake(config), images(config)
    views = list(iterate_layers(model, pictures))
    assert [view.layer for view in views] == list(range(config.depth * (2 if config.attention == "axial" else 1)))
    torch.testing.assert_close(views[-1].after, model.encode(pictures).detach())  # with gradients, another kernel
    for view in views:
        assert view.attention.shape == (2, config.heads, config.tokens, config.tokens)
        assert view.before.shape == view.after.shape == (2, config.tokens, config.width)
        total = view.attention.sum(-1)
        if config.windows is None:
            torch.testing.assert_close(total, torch.ones_like(total))
        else:  # some of it goes to the padding of a window
            assert total.min() > 0
            assert total.max() < 1 + 1e-9
        torch.testing.assert_close(view.mean_attention, view.attention.mean(1))
    through = list(iterate_states(model, pictures))
    assert torch.equal(through[0], views[0].before)
    for z, view in zip(through[1:], views, strict=True):
        assert torch.equal(z, view.after)


@pytest.mark.parametrize("config", [VIT, ATTENTIVE["registers"], ATTENTIVE["hybrid"], ATTENTIVE["no qkv bias"]])
def test_weights_are_the_softmax_written_out(config: ViTConfig) -> None:
    """Head by head from the parameters, Eqs. 5 and 6."""
    model = awake(config)
    inner = config.width // config.heads
    for view, block in zip(iterate_layers(model, images(config)), model.blocks, strict=True):
        norm, layer = block.norm_attention, block.attention.qkv
        centred = view.before - view.before.mean(-1, keepdim=True)
        z = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
        z = z @ layer.weight.T + (0 if layer.bias is None else layer.bias)
        for head in range(config.heads):
            q = z[..., head * inner : (head + 1) * inner]
            k = z[..., config.width + head * inner : config.width + (head + 1) * inner]
            raised = (q @ k.transpose(1, 2) / inner**0.5).exp()
            torch.testing.assert_close(view.attention[:, head], raised / raised.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    "name", rest_slow(ATTENTIVE, *(name for name in ATTENTIVE if name in FEW or name not in FAMILIES))
)
def test_the_fused_output_is_the_one_rebuilt_from_the_weights(name: str) -> None:
    config = ATTENTIVE[name]
    model, pictures = awake(config), images(config)
    taps = Taps(attention=True, explicit=True)
    with torch.no_grad():
        torch.testing.assert_close(model.encode(pictures, taps=taps), model.encode(pictures))
    if config.windows is not None or config.norm_order != "pre":
        return
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    for view, block, rebuilt in zip(iterate_layers(model, pictures), blocks, taps.layers, strict=True):
        torch.testing.assert_close(rebuilt.after, view.after)
        torch.testing.assert_close(rebuilt.attention, view.attention)
        v = block.attention.qkv(block.norm_attention(view.before))[..., 2 * config.attention_width :]
        mixed = (view.attention @ v.unflatten(-1, (config.heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
        inner = block.attention.norm
        z = view.before + block.scale_attention(block.attention.out(mixed if inner is None else inner(mixed)))
        torch.testing.assert_close(z + block.scale_mlp(block.mlp(block.norm_mlp(z))), view.after)


def test_axial_layers_see_their_row_then_their_column() -> None:
    config = replace(ATTENTIVE["axial"], depth=1)
    rows, columns = config.grid
    row, column = (view.attention.unflatten(3, config.grid).unflatten(2, config.grid) for view in _views(config))
    for r in range(rows):
        for c in range(columns):
            assert (row[:, :, r, c, r] > 0).all()
            assert not row[:, :, r, c, [i for i in range(rows) if i != r]].any()
            assert (column[:, :, r, c, :, c] > 0).all()
            assert not column[:, :, r, c, :, [i for i in range(columns) if i != c]].any()


def _views(config: ViTConfig) -> Any:
    return iterate_layers(awake(config), images(config))


def test_dropout_of_a_training_model_does_not_reach_it() -> None:
    config = replace(VIT, dropout=0.5, attention_dropout=0.5, stochastic_depth=0.5)
    model, pictures = awake(config), images(config)
    calm = [view.attention for view in iterate_layers(model, pictures)]
    model.train()
    for view, wanted in zip(iterate_layers(model, pictures), calm, strict=True):
        assert torch.equal(view.attention, wanted)


LONG = ViTConfig(width=32, depth=2, mlp_width=64, heads=4, image=(64, 64), patch=(2, 2), classes=3)
ONE = 4 * 4 * 1025**2  # bytes of one layer's weights: 4 heads, 4 bytes


def last_view(model: ViT, pictures: Tensor) -> None:
    for view in iterate_layers(model, pictures):
        assert view.attention.shape == (1, 4, 1025, 1025)
        del view


@pytest.mark.slow
@pytest.mark.parametrize("work", [rollout, last_view, class_attention, gradient_rollout])
def test_a_long_sequence_takes_memory_for_one_layer(work: Callable[[ViT, Tensor], object]) -> None:
    """1,025 tokens, as ViT-L at 512 px has: five layers peak where two do, at a few times one layer's weights."""
    assert LONG.tokens == 1025
    pictures = torch.zeros(1, 3, 64, 64)
    peaks = [peak(lambda depth=depth: work(build(replace(LONG, depth=depth)), pictures)) for depth in (2, 5)]
    tokens = 4 * 1025 * 32  # what one layer was given is all that may be kept of each
    fixed = 3 * 3 * tokens
    assert peaks[1] - peaks[0] < fixed
    assert ONE < peaks[1] < (6 if work is gradient_rollout else 3) * ONE


@pytest.mark.slow
def test_so_does_the_distance_over_many_pictures() -> None:
    pictures = [torch.zeros(1, 3, 64, 64)] * 2
    assert peak(lambda: attention_distance(build(LONG), pictures)) < 4 * ONE
