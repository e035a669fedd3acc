"""Eq. 4 and D.3: pooling, heads, and the names that timm's users know."""

from dataclasses import replace

import pytest
import torch

from tests.models.tiny import RESNET, SOME, VARIANTS, VIT, awake, images
from vitrail.models.family import ModelConfig
from vitrail.models.layers import pool
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig


def vit(**changes: object) -> ViT:
    model = awake(replace(VIT, **changes))
    assert isinstance(model, ViT)
    return model


def test_token_pooling_reads_the_first_row() -> None:
    z = torch.randn(2, 16, 16)
    assert torch.equal(pool(z, replace(VIT, registers=3)), z[:, 0])


@pytest.mark.parametrize(("class_token", "registers"), [(True, 0), (True, 3), (False, 0), (False, 2)])
def test_mean_pooling_leaves_out_class_token_and_registers(class_token: bool, registers: int) -> None:
    config = replace(VIT, pool="mean", class_token=class_token, registers=registers)
    z = torch.randn(2, config.tokens, 16)
    expected = z[:, -12:].mean(dim=1)
    z[:, : config.tokens - 12] = 1e9
    torch.testing.assert_close(pool(z, config), expected)


@pytest.mark.parametrize("after", [False, True])
def test_order_of_norm_and_mean(after: bool) -> None:
    model = vit(pool="mean", norm_after_pool=after)
    x = images(VIT)
    z = model.encode(x)
    normed_first, normed_last = model.norm(z)[:, 1:].mean(dim=1), model.norm(z[:, 1:].mean(dim=1))
    assert (normed_first - normed_last).abs().max() > 1e-3
    torch.testing.assert_close(model.represent(x), normed_last if after else normed_first)


def test_tanh_head_bounds_what_the_last_layer_reads() -> None:
    model = vit(head="tanh")
    head = model.head
    y = 3 * torch.randn(4, 16, dtype=torch.float64)
    assert head.hidden is not None
    assert head.classifier is not None
    hidden = torch.tanh(y @ head.hidden.weight.T + head.hidden.bias)
    torch.testing.assert_close(head.features(y), hidden)
    torch.testing.assert_close(head(y), hidden @ head.classifier.weight.T + head.classifier.bias)


def test_without_head_the_output_is_the_representation() -> None:
    model = vit(head="none", classes=0)
    x = images(VIT)
    assert model(x).shape == (2, 16)
    assert torch.equal(model(x), model.represent(x))
    assert not [name for name, _ in model.named_parameters() if name.startswith("head")]


@pytest.mark.parametrize("name", SOME)
def test_forward_is_features_then_head(name: str) -> None:
    config = VARIANTS[name]
    model, x = awake(config), images(config)
    features = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features), model(x), atol=1e-12, rtol=0)
    ready = model.forward_head(features, pre_logits=True)
    assert ready.shape == (2, model.num_features)
    torch.testing.assert_close(ready, model.features(x), atol=1e-12, rtol=0)
    last = model.head.classifier if isinstance(model, ViT) else model.head
    if config.has_patch_head or (isinstance(config, ViTConfig) and config.head == "distilled"):
        last = None  # reads patches, or two tokens one by one
        ready = model(x)
    torch.testing.assert_close(model(x), ready if last is None else last(ready), atol=1e-12, rtol=0)
    if isinstance(config, ViTConfig):
        assert features.shape == (2, config.tokens, config.width)
    else:
        assert features.shape == (2, config.features, *config.grid)


def test_representation_is_what_the_head_reads() -> None:
    model = vit()
    x = images(VIT)
    torch.testing.assert_close(model.represent(x), model.forward_features(x)[:, 0], atol=1e-12, rtol=0)
    torch.testing.assert_close(model(x), model.head(model.represent(x)))


@pytest.mark.parametrize("classes", [7, 0])
@pytest.mark.parametrize(
    "name", ["tanh", "patches", "mean", "no head", "hybrid", "bit", "bit without head", "post-activation"]
)
def test_reset_classifier_throws_the_whole_head_away(name: str, classes: int) -> None:
    """3.2: one zero-initialised linear layer, the hidden one gone, the rest untouched."""
    config: ModelConfig = VARIANTS[name]
    model, x = awake(config, torch.float32), images(config, dtype=torch.float32)
    body = model.forward_features(x)
    model.reset_classifier(classes)
    assert torch.equal(model.forward_features(x), body)
    assert model.config.classes == classes
    if classes:
        assert torch.equal(model(x), torch.zeros(2, classes, *(config.image if config.has_patch_head else ())))
    else:
        assert model(x).shape == (2, model.num_features)
    if isinstance(model.config, ViTConfig):
        kept = "patches" if config.has_patch_head else "linear"
        assert model.config.head == (kept if classes else "none")
    heads = {key for key in model.state_dict() if key.startswith("head.")}
    prefix = "head.classifier." if isinstance(config, ViTConfig) else "head."
    assert heads == ({f"{prefix}weight", f"{prefix}bias"} if classes else set())


@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "resnet"])
def test_new_head_has_the_networks_type(config: ViTConfig | ResNetConfig) -> None:
    model = awake(config, torch.bfloat16)
    model.reset_classifier(3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(images(config, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_resnet_head_reads_the_mean_over_positions() -> None:
    model, x = awake(RESNET), images(RESNET)
    assert isinstance(model, ResNet)
    features = model.forward_features(x)
    mean = torch.stack([features[..., r, c] for r in range(3) for c in range(4)]).mean(dim=0)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), mean, atol=1e-12, rtol=0)
    assert features.min() >= 0  # behind a ReLU
