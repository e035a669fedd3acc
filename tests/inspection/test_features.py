"""Patch features, their colours and likeness, and the norms of tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.inspection.test_tokens import ATTENTIVE
from tests.models.tiny import VIT, awake, images
from vitrail.core.errors import ConfigError
from vitrail.inspection.layer_taps import iterate_layers
from vitrail.inspection.weights_and_features import (
    distance_correlation,
    feature_colours,
    filter_components,
    patch_features,
    patch_similarity,
    token_norms,
)


@pytest.mark.parametrize("name", ["registers", "mean, no class token", "hybrid", "axial", "learned2d, every"])
def test_features_and_norms_are_those_of_the_layers(name: str) -> None:
    config = ATTENTIVE[name]
    model, pictures = awake(config), images(config)
    views = list(iterate_layers(model, pictures))
    norms = token_norms(model, pictures)
    assert norms.shape == (len(views) + 1, 2, config.tokens)
    torch.testing.assert_close(norms[0], views[0].before.square().sum(-1).sqrt())
    for layer, view in enumerate(views):
        found = patch_features(model, pictures, layer)
        wanted = model.norm(view.after)[:, config.prefix :].unflatten(1, config.grid)
        torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(norms[layer + 1], view.after.square().sum(-1).sqrt())
    assert torch.equal(patch_features(model, pictures), patch_features(model, pictures, len(views) - 1))
    if name == "registers":
        wanted = model.forward_features(pictures)[:, config.prefix :].unflatten(1, config.grid)
        torch.testing.assert_close(patch_features(model, pictures), wanted.detach())


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError):
        patch_features(awake(VIT), images(VIT), 2)


def test_colours_are_the_principal_components_of_all_pictures() -> None:
    axes = torch.linalg.qr(torch.randn(9, 3)).Q.T
    amount = torch.randn(2, 4, 5, 3)
    features = 7 + 100 * amount[..., :1] * axes[0] + 10 * amount[..., 1:2] * axes[1] + amount[..., 2:] * axes[2]
    shown = feature_colours(features)
    assert shown.shape == (2, 4, 5, 3)
    assert shown.min() >= 0
    assert shown.max() <= 1
    for part in range(3):
        both = torch.stack([shown[..., part].flatten(), amount[..., part].flatten()])
        assert abs(torch.corrcoef(both)[0, 1].item()) > 0.95
    torch.testing.assert_close(feature_colours(features.double()), shown, atol=1e-4, rtol=0)  # signs do not jump


def test_features_that_do_not_vary_have_no_colour() -> None:
    assert torch.equal(feature_colours(torch.ones(1, 2, 2, 6)), torch.full((1, 2, 2, 3), 0.5))
    flat = torch.zeros(1, 3, 3, 6)
    flat[0, 1, 1, 2] = 5
    assert torch.equal(feature_colours(flat)[..., 1:], torch.full((1, 3, 3, 2), 0.5))
    assert feature_colours(torch.randn(1, 2, 2, 2)).shape == (1, 2, 2, 3)


def test_likeness_to_a_patch() -> None:
    features = torch.randn(2, 3, 4, 8)
    found = patch_similarity(features, 1, 2)
    assert found.shape == (2, 3, 4)
    torch.testing.assert_close(found[:, 1, 2], torch.ones(2))
    wanted = torch.cosine_similarity(features[1, 1, 2], features[1, 0, 3], dim=0)
    torch.testing.assert_close(found[1, 0, 3], wanted)
    with pytest.raises(ConfigError):
        patch_similarity(features, 3, 0)


def test_an_artefact_shows_in_the_norms() -> None:
    model, pictures = awake(replace(VIT, position="learned")), images(VIT)
    with torch.no_grad():
        model.position.tables[0].table[0, 7] *= 1000
    norms = token_norms(model, pictures)
    assert norms[0].argmax(1).tolist() == [7, 7]


class Single(torch.Tensor):
    """As on a device that has no doubles."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.double:
            raise TypeError("Cannot convert a tensor to float64: the framework doesn't support it")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else found


def test_doubles_are_made_on_the_host() -> None:
    drawn = torch.rand(1, 3, 4, 8).as_subclass(Single)
    assert feature_colours(drawn).shape == (1, 3, 4, 3)
    similarity = torch.rand(3, 4, 3, 4).as_subclass(Single)
    assert -1 <= distance_correlation(similarity) <= 1
    model = awake(VIT)
    kernel = model.embedding.projection
    kernel.weight = torch.nn.Parameter(kernel.weight.detach().as_subclass(Single), requires_grad=False)
    assert filter_components(model, 2).shape[0] == 2
