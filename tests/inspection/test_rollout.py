"""Rollout: by hand, against the matrices written out, and for a class through gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.inspection.test_tokens import ATTENTIVE
from tests.models.tiny import FAMILIES, HYBRID, RESNET, VIT, awake, images
from vitrail import inspection
from vitrail.core.errors import ConfigError
from vitrail.inspection.layer_taps import has_token_readout, iterate_layers, read_output
from vitrail.inspection.rollout import class_attention, combine_layers, gradient_rollout, rollout, rollout_by_layer
from vitrail.models.build import build
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig


def test_two_layers_by_hand() -> None:
    """Â = (A + I)/2 for each; R_2 = Â_2 Â_1, the first layer on the right."""
    first = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    second = torch.tensor([[[0.2, 0.8], [1.0, 0.0]]])
    # Â_1 = [[.5, .5], [.25, .75]], Â_2 = [[.6, .4], [.5, .5]]
    wanted = torch.tensor([[[0.6 * 0.5 + 0.4 * 0.25, 0.6 * 0.5 + 0.4 * 0.75], [0.375, 0.625]]])
    torch.testing.assert_close(combine_layers([first, second]), wanted)
    torch.testing.assert_close(combine_layers([first]), torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]))


def test_rows_are_renormalised() -> None:
    """Weights that do not sum to 1, as where something was cut away: (0.5 + 1)/2 and 0.5/2."""
    seen = torch.tensor([[[0.5, 0.5], [0.0, 0.0]]])
    torch.testing.assert_close(combine_layers([seen]), torch.tensor([[[0.75, 0.25], [0.0, 1.0]]]))
    torch.testing.assert_close(combine_layers([seen / 4]), torch.tensor([[[1.125 / 1.25, 0.125 / 1.25], [0.0, 1.0]]]))


def test_no_layers_are_refused() -> None:
    with pytest.raises(ConfigError):
        combine_layers([])


@pytest.mark.parametrize("name", ATTENTIVE)
def test_a_network_is_its_layers_joined(name: str) -> None:
    config = ATTENTIVE[name]
    model, pictures = awake(config), images(config)
    views = list(iterate_layers(model, pictures))
    seen = [view.attention.mean(1) for view in views]
    maps = rollout_by_layer(model, pictures)
    assert maps.shape == (2, len(seen), *config.grid)
    for layer in range(len(seen)):
        whole = combine_layers(seen[: layer + 1])
        if config.pool == "map" or config.class_tokens > 1 or config.head == "distilled":
            row = read_output(whole, views[layer].after, model)
        else:
            row = whole[:, 0] if has_token_readout(model) else whole[:, config.prefix :].mean(1)
        torch.testing.assert_close(maps[:, layer].flatten(1), row[:, config.prefix :])
    assert torch.equal(rollout(model, pictures), maps[:, -1])
    assert (maps > 0).all() or config.attention == "axial"


@pytest.mark.parametrize("config", [VIT, HYBRID, ATTENTIVE["registers"], ATTENTIVE["mean, registers, norm last"]])
def test_heads_apart(config: ViTConfig) -> None:
    model, pictures = awake(config), images(config)
    maps = class_attention(model, pictures)
    assert maps.shape == (2, config.depth, config.heads, *config.grid)
    for view in iterate_layers(model, pictures):
        rows = view.attention[:, :, 0] if config.pool == "token" else view.attention[:, :, config.prefix :].mean(2)
        torch.testing.assert_close(maps[:, view.layer].flatten(2), rows[..., config.prefix :])


def test_identity_attention_keeps_the_class_token_to_itself() -> None:
    """Keys and queries so large that each token sees itself alone: nothing comes in from the patches."""
    eye = torch.eye(13)[None]
    assert combine_layers([eye] * 5)[0, 0].tolist() == [1.0] + [0.0] * 12


def reference(model: ViT, pictures: Tensor, classes: Tensor) -> Tensor:
    """All layers at once, as a whole graph: heads' weights by hand, gradients by autograd."""
    config, seen = model.config, []
    z = model.position(model.tokens(pictures), 0)
    for index, block in enumerate(model.blocks):
        z = model.position(z, index) if index else z
        q, k, v = block.attention.project(block.norm_attention(z))
        seen.append((q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1))
        seen[-1].retain_grad()
        z = z + block.attention.out((seen[-1] @ v).transpose(1, 2).flatten(2))
        z = z + block.mlp(block.norm_mlp(z))
    z = z if config.norm_after_pool else model.norm(z)
    logits = model.forward_head(z)
    logits = logits.mean((2, 3)) if config.has_patch_head else logits
    logits[torch.arange(len(classes)), classes].sum().backward()
    through = torch.eye(config.tokens).to(z).expand(len(classes), -1, -1)
    for weights in seen:
        assert weights.grad is not None
        through = through + (weights.grad * weights).clamp(min=0).mean(1) @ through
    through = through - torch.eye(config.tokens).to(z)
    row = through[:, 0] if has_token_readout(model) else through[:, config.prefix :].mean(1)
    return row[:, config.prefix :].unflatten(1, config.grid).detach()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "registers",
            "mean",
            "mean, no class token",
            "mean, registers, norm last",
            "tanh",
            "hybrid",
            "learned, every",
        ),
        *("patches", "patches, registers, norm last", "hybrid, patches"),
    ],
)
def test_for_a_class_it_is_the_formula(name: str) -> None:
    config = ATTENTIVE[name]
    model, pictures = awake(config), images(config)
    classes = torch.tensor([3, 1])
    maps = gradient_rollout(model, pictures, classes)
    torch.testing.assert_close(maps, reference(model, pictures, classes))
    assert maps.max() > 0
    assert maps.min() >= 0


KINDS = ["axial", "hybrid, axial", "relative, every", "relative with registers"]


@pytest.mark.parametrize("name", [*KINDS, *(name for name in FAMILIES if ATTENTIVE[name].classes)])
def test_for_a_class_it_takes_every_kind_of_attention(name: str) -> None:
    config = ATTENTIVE[name]
    maps = gradient_rollout(awake(config), images(config))
    assert maps.shape == (2, *config.grid)
    assert maps.max() > 0


def test_the_class_is_by_default_the_one_that_is_said() -> None:
    model, pictures = awake(VIT), images(VIT, batch=4)
    said = model(pictures).argmax(1)
    by_default = gradient_rollout(model, pictures)
    assert torch.equal(by_default, gradient_rollout(model, pictures, said))
    assert not torch.allclose(by_default, gradient_rollout(model, pictures, (said + 1) % 5))


def test_gradients_stay_out_of_the_model() -> None:
    model = awake(VIT).train()
    for parameter in list(model.parameters())[:5]:
        parameter.requires_grad_(False)
    maps = gradient_rollout(model, images(VIT))
    assert not maps.requires_grad
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert gradient_rollout(model, images(VIT)).max() > 0
    with torch.inference_mode():
        assert gradient_rollout(model, images(VIT)).max() > 0


def test_half_precision_comes_out_whole() -> None:
    model, pictures = awake(VIT, torch.bfloat16), images(VIT, dtype=torch.float32)
    for maps in (rollout(model, pictures), gradient_rollout(model, pictures)):
        assert maps.dtype == torch.float32
        assert maps.isfinite().all()


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ConfigError, match="grad_cam"):
        rollout(build(RESNET), images(RESNET, dtype=torch.float32))
    with pytest.raises(ConfigError):
        gradient_rollout(awake(replace(VIT, head="none", classes=0)), images(VIT))


def test_the_package_offers_functions_not_modules() -> None:
    import vitrail.inspection.layer_taps  # noqa: F401

    assert inspection.rollout is rollout
    assert callable(inspection.overlay)
    assert inspection.iterate_layers is iterate_layers
    assert inspection.__all__ == sorted(inspection.__all__)
    assert all(callable(getattr(inspection, name)) for name in inspection.__all__)
