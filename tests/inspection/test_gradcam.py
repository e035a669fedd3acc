"""Grad-CAM on ResNets."""

from dataclasses import replace

import pytest
import torch

from tests.models.tiny import BACKBONE, RESNET, RESNETS, VIT, awake, images
from vitrail.core.errors import ConfigError
from vitrail.inspection.rollout import grad_cam
from vitrail.models.resnet_config import ResNetConfig


@pytest.mark.parametrize("config", [RESNET, replace(BACKBONE, classes=5), RESNETS["axial resnet"]])
def test_behind_mean_pooling_it_is_the_class_activation_map(config: ResNetConfig) -> None:
    """With a linear head on the mean, ∂y/∂F is the class's weight over the number of places."""
    model, pictures = awake(config), images(config)
    classes = torch.tensor([4, 0])
    found = grad_cam(model, pictures, classes)
    features = model.forward_features(pictures).detach()
    rows, columns = features.shape[2:]
    assert found.shape == (2, rows, columns) == (2, *config.grid)
    weight = model.head.weight.detach()[classes]
    wanted = torch.einsum("bc,bcrs->brs", weight, features).clamp(min=0) / (rows * columns)
    torch.testing.assert_close(found, wanted)


def test_the_class_is_by_default_the_one_that_is_said_and_the_model_stays() -> None:
    model, pictures = awake(RESNET).train(), images(RESNET, 3)
    found = grad_cam(model, pictures)
    assert model.training
    assert not found.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(found, grad_cam(model, pictures, model.eval()(pictures).argmax(1)))
    with torch.inference_mode():
        torch.testing.assert_close(grad_cam(model, pictures), found)


def test_what_has_no_map_or_no_classes_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_rollout"):
        grad_cam(awake(VIT), images(VIT))
    with pytest.raises(ConfigError):
        grad_cam(awake(replace(RESNET, classes=0)), images(RESNET))
