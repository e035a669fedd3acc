"""`forward_intermediates`, `patch_map` and names that people know from timm, against the network and against timm."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models.tiny import RESNET, SOME, VARIANTS, VIT, awake, images
from vitrail.checkpoint.formats.key_table import export_tensors
from vitrail.checkpoint.formats.timm import vit as timm_format
from vitrail.core.errors import ConfigError
from vitrail.models.backbone import Taps
from vitrail.models.build import build
from vitrail.models.family import ModelConfig
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig

REGISTERS = replace(VIT, registers=2)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_the_last_layer_is_what_the_network_gives(name: str) -> None:
    config: ModelConfig = VARIANTS[name]
    model, x = awake(config), images(config)
    out, found = model.forward_intermediates(x)
    assert torch.equal(out, model.forward_features(x))
    neck = getattr(model, "neck", None)
    assert torch.equal(found.maps[-1] if neck is None else neck(found.maps[-1]), model.patch_map(x))
    assert found.maps[-1].shape == (2, model.embed_dim, *config.grid)
    assert len(found.maps) == len(found.tokens) == len(found.layers)


@torch.no_grad()
def test_layers_are_chosen_by_number_from_either_end() -> None:
    model, x = awake(REGISTERS), images(REGISTERS)
    _, every = model.forward_intermediates(x)
    for layers, wanted in (([0], [0]), ([-1, 0], [1, 0]), (1, [1]), (2, [0, 1])):
        _, some = model.forward_intermediates(x, layers)
        assert list(some.layers) == wanted
        assert all(torch.equal(z, every.tokens[layer]) for z, layer in zip(some.tokens, wanted, strict=True))
    for wrong in (0, 3, [2], [-3]):
        with pytest.raises(ConfigError):
            model.forward_intermediates(x, wrong)


@torch.no_grad()
def test_norm_and_prefix_are_left_out_on_request() -> None:
    model, x = awake(REGISTERS), images(REGISTERS)
    taps = Taps()
    model.encode(x, taps=taps)
    _, raw = model.forward_intermediates(x, norm=False)
    _, bare = model.forward_intermediates(x, prefix=False)
    for tap, z, patches in zip(taps.layers, raw.tokens, bare.tokens, strict=True):
        assert torch.equal(z, tap.after)
        assert torch.equal(patches, model.norm(tap.after)[:, 3:])


@torch.no_grad()
def test_attention_and_qkv_fit_together() -> None:
    model, x = awake(VIT), images(VIT)
    _, found = model.forward_intermediates(x, attention=True, qkv=True)
    for weights, (q, k, _) in zip(found.attention, found.qkv, strict=True):
        torch.testing.assert_close(weights, (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
    with pytest.raises(ConfigError):
        awake(RESNET).forward_intermediates(images(RESNET), attention=True)


def test_gradients_reach_the_weights_that_a_pass_is_built_on() -> None:
    """Those of a pass by the fused kernel do not: nothing is computed from them there."""
    model, x = awake(VIT), images(VIT)
    for explicit in (True, False):
        taps = Taps(attention=True, explicit=explicit)
        total = model.encode(x, taps=taps).square().sum()
        slopes = torch.autograd.grad(total, [tap.weights for tap in taps.layers], allow_unused=True)
        assert [slope is not None and bool(slope.any()) for slope in slopes] == [explicit] * 2


def test_timm_finds_the_same_intermediates() -> None:
    timm = pytest.importorskip("timm")
    config = ViTConfig(
        width=32, depth=3, mlp_width=64, heads=2, image=(32, 48), patch=(16, 16), classes=5, gelu="erf", registers=2,
        position_prefix=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = build(config).eval()
    name, args = timm_format.architecture(config)
    theirs = timm.create_model(name, **args).eval()
    theirs.load_state_dict(export_tensors(timm_format.build_table(config), dict(ours.state_dict())), strict=True)
    x = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        for norm in (False, True):
            _, found = ours.forward_intermediates(x, [0, 2], norm=norm)
            _, wanted = theirs.forward_intermediates(x, indices=[0, 2], norm=norm, return_prefix_tokens=True)
            for mine, tokens, (map, prefix) in zip(found.maps, found.tokens, wanted, strict=True):
                torch.testing.assert_close(mine, map, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(tokens[:, :3], prefix, atol=1e-5, rtol=1e-5)
        maps = ours.get_intermediate_layers(x, 2, reshape=True)
        for mine, wanted in zip(maps, theirs.get_intermediate_layers(x, 2, reshape=True, norm=True), strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
    assert (ours.num_prefix_tokens, ours.embed_dim, ours.num_features) == (3, theirs.embed_dim, theirs.num_features)
    assert {"class_token", "registers"} <= ours.no_weight_decay() <= set(dict(ours.named_parameters()))


def test_class_tokens_come_beside_the_patches() -> None:
    model, x = awake(VIT), images(VIT)
    ((patches, token),) = model.get_intermediate_layers(x, 1, return_class_token=True)
    whole = model.forward_features(x)
    assert torch.equal(patches, whole[:, 1:])
    assert torch.equal(token, whole[:, 0])


@pytest.mark.parametrize("config", [RESNET, replace(VIT, class_token=False, pool="mean", registers=2)])
def test_without_a_class_token_nothing_is_given_out_as_one(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="no class token"):
        awake(config).get_intermediate_layers(images(config), 1, return_class_token=True)


def test_prefix_tokens_come_beside_the_patches_as_in_timm() -> None:
    model, x = awake(REGISTERS), images(REGISTERS)
    ((patches, prefix),) = model.get_intermediate_layers(x, 1, return_prefix_tokens=True)
    whole = model.forward_features(x)
    assert torch.equal(patches, whole[:, 3:])
    assert torch.equal(prefix, whole[:, :3])
    with pytest.raises(ConfigError, match="not both"):
        model.get_intermediate_layers(x, 1, return_class_token=True, return_prefix_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("config", [REGISTERS, RESNET])
def test_intermediates_compile_as_one_graph(config: ModelConfig) -> None:
    model, x = awake(config), images(config)
    compiled = torch.compile(model.forward_intermediates, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, [0])[1].maps[0], model.forward_intermediates(x, [0])[1].maps[0])


@pytest.mark.parametrize("name", ["VIT", "registers"])
def test_checkpointing_computes_the_same_and_keeps_less(name: str) -> None:
    model = awake(VIT if name == "VIT" else REGISTERS).train()
    x = images(model.config)
    plain, kept = _trained(model, x)
    model.set_grad_checkpointing()
    again, less = _trained(model, x)
    assert less < kept
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def _trained(model: ViT, x: Tensor) -> tuple[list[Tensor], int]:
    """Gradients, and how many numbers the forward pass left for the backward pass."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters()))), kept
