"""Where tokens lie, what is refused, and that a model comes out as it went in."""

import pytest
import torch

from tests.models.tiny import HYBRID, RESNET, VARIANTS, VIT, awake, images
from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.inspection.layer_taps import (
    TokenLayout,
    choose_classes,
    get_token_layout,
    iterate_layers,
    iterate_states,
    read_output,
    select_output,
    to_grid,
)
from vitrail.models.build import build_on_meta
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config

ATTENTIVE = {name: config for name, config in VARIANTS.items() if isinstance(config, ViTConfig)}


@pytest.mark.slow
def test_tokens_of_the_networks_of_the_paper() -> None:
    assert get_token_layout(build_on_meta(model_config("ViT-L/16"))) == TokenLayout(1, (14, 14), 1, (16, 16))
    assert get_token_layout(build_on_meta(model_config("ViT-L/16", image_size=512))) == TokenLayout(
        1, (32, 32), 1, (16, 16)
    )
    assert get_token_layout(build_on_meta(model_config("ViT-B/32"))) == TokenLayout(1, (7, 7), 1, (32, 32))
    assert get_token_layout(build_on_meta(model_config("R50+ViT-L/16"))) == TokenLayout(1, (14, 14), 1, (16, 16))
    assert get_token_layout(build_on_meta(HYBRID)) == TokenLayout(
        1, (3, 4), 1, (8, 8)
    )  # 20x28 px, so the last ones hang over
    assert get_token_layout(build_on_meta(ATTENTIVE["hybrid, 3x3 root"])).patch == (2, 2)
    assert get_token_layout(build_on_meta(ATTENTIVE["hybrid, patch 2x1"])).patch == (16, 8)
    assert get_token_layout(build_on_meta(VIT)) == TokenLayout(1, (3, 4), 1, (2, 3))
    assert get_token_layout(build_on_meta(ATTENTIVE["registers"])) == TokenLayout(4, (3, 4), 1, (2, 3))
    assert get_token_layout(build_on_meta(ATTENTIVE["mean, no class token"])) == TokenLayout(0, (3, 4), 0, (2, 3))


def test_prefix_tokens_are_told_apart() -> None:
    several = get_token_layout(build_on_meta(ATTENTIVE["two class tokens"]))
    assert (several.class_tokens, several.prefix, several.distilled) == (2, 4, False)
    distilled = get_token_layout(build_on_meta(ATTENTIVE["deit, distilled"]))
    assert (distilled.class_tokens, distilled.prefix, distilled.distilled) == (1, 2, True)


def test_patches_go_to_their_grid_along_any_axis() -> None:
    tokens = TokenLayout(2, (2, 3), 1, (4, 4))
    z = torch.arange(8.0)
    assert to_grid(z, tokens).tolist() == [[2, 3, 4], [5, 6, 7]]
    assert to_grid(z[:, None].expand(8, 5), tokens, dim=0).shape == (2, 3, 5)


def test_the_output_is_read_as_the_head_reads_it() -> None:
    rows = torch.arange(13.0)[:, None].expand(13, 2)
    assert select_output(rows, build_on_meta(VIT)).tolist() == [0, 0]
    assert select_output(rows, build_on_meta(ATTENTIVE["mean"])).tolist() == [
        6.5,
        6.5,
    ]  # there is a class token, but none reads it
    assert select_output(rows, build_on_meta(ATTENTIVE["patches"])).tolist() == [6.5, 6.5]
    assert select_output(rows, build_on_meta(ATTENTIVE["two class tokens"])).tolist() == [0.5, 0.5]
    assert select_output(rows, build_on_meta(ATTENTIVE["deit, distilled"])).tolist() == [0.5, 0.5]
    assert select_output(rows, build_on_meta(ATTENTIVE["dinov2, registers"])).tolist() == [0, 0]


@torch.no_grad()
def test_attention_pooling_reads_by_its_own_weights() -> None:
    model, z = awake(ATTENTIVE["pe"]), torch.randn(2, 13, 16, dtype=torch.float64)
    found = read_output(torch.eye(13).double().expand(2, -1, -1), z, model)
    torch.testing.assert_close(found, model.map_pool.weights(model.norm(z)).mean(1))
    torch.testing.assert_close(found.sum(1), torch.ones(2).double())
    rows = torch.randn(2, 13, 3, dtype=torch.float64)
    torch.testing.assert_close(read_output(rows, z, awake(VIT)), rows[:, 0])


def test_what_has_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError):
        get_token_layout(build_on_meta(RESNET))
    with pytest.raises(ConfigError):
        next(iterate_layers(torch.nn.Linear(2, 2), torch.zeros(1, 3, 6, 12)))


def test_pictures_come_prepared() -> None:
    model = awake(VIT)
    with pytest.raises(ConfigError, match=r"uint8.*normalise"):
        next(iterate_layers(model, torch.zeros(1, 3, 6, 12, dtype=torch.uint8)))
    with pytest.raises(ConfigError):
        next(iterate_layers(model, torch.zeros(3, 6, 12)))
    with pytest.raises(ImageSizeError):
        next(iterate_layers(model, torch.zeros(1, 3, 12, 6)))


def test_classes_are_checked() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    assert choose_classes(logits, None).tolist() == [1, 0]
    assert choose_classes(logits, torch.tensor([1, 1], dtype=torch.int32)).tolist() == [1, 1]
    with pytest.raises(ConfigError):
        choose_classes(logits, torch.tensor([0, 2]))
    with pytest.raises(ConfigError):
        choose_classes(logits, torch.tensor([0]))


@pytest.mark.parametrize("config", [VIT, HYBRID, ATTENTIVE["axial"]])
def test_a_model_is_left_as_it_was(config: ViTConfig) -> None:
    """Between two layers as well, and when nobody asks for the rest: a run may be training."""
    model = awake(config).train()
    model.blocks[0].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    looking = iterate_layers(model, images(config))
    for _ in range(2):
        view = next(looking)
        assert {name: part.training for name, part in model.named_modules()} == modes
        assert torch.is_grad_enabled()
        assert not view.after.requires_grad
    list(iterate_states(model, images(config)))
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert all(parameter.grad is None for parameter in model.parameters())
