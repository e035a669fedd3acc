"""A linear layer on every patch token: logits per pixel, at any size, written again from `patch_map`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.tiny import HYBRID, RESNET, VIT, awake, images
from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.models.build import build
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import adapt_config, model_config
from vitrail.train.resolve import image_bytes

PATCHES = replace(VIT, head="patches")
KINDS = {
    "plain": PATCHES,
    "registers": replace(PATCHES, registers=2),
    "mean, norm last": replace(PATCHES, pool="mean", norm_after_pool=True),
    "axial": replace(PATCHES, attention="axial", class_token=False, pool="mean"),
    "hybrid": adapt_config(replace(HYBRID, head="patches"), image_size=(32, 48)),
}


def vit(config: ViTConfig) -> ViT:
    model = awake(config)
    assert isinstance(model, ViT)
    return model


def by_hand(model: ViT, x: Tensor) -> Tensor:
    found = model.patch_map(x)
    rows, columns = found.shape[2:]
    last = model.get_classifier()
    logits = torch.stack([last(found[:, :, r, c]) for r in range(rows) for c in range(columns)], dim=2)
    return F.interpolate(logits.unflatten(2, (rows, columns)), x.shape[2:], mode="bilinear", align_corners=False)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("further", [(0, 0), (2, -1), (-1, 3)])
@torch.no_grad()
def test_logits_of_pixels_are_those_of_patches_resized(name: str, further: tuple[int, int]) -> None:
    config = KINDS[name]
    if config.open_sizes.step is None and any(further):
        pytest.skip("tied to its size")
    rows, columns = config.patch_pixels
    size = (config.image[0] + further[0] * rows, config.image[1] + further[1] * columns)
    model = vit(config)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    out = model(x)
    assert out.shape == (2, 5, *size)
    torch.testing.assert_close(out, by_hand(model, x), atol=1e-12, rtol=0)
    assert model.features(x).shape == (2, config.width)
    whole = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(whole, image_size=size), out, atol=1e-12, rtol=0)
    torch.testing.assert_close(model.forward_head(whole, pre_logits=True), model.features(x), atol=1e-12, rtol=0)


@torch.no_grad()
def test_tokens_of_another_size_need_that_size() -> None:
    model = vit(PATCHES)
    whole = model.forward_features(torch.randn(1, 3, 8, 12, dtype=torch.float64))
    for size in (None, (6, 12)):
        with pytest.raises(ImageSizeError):
            model.forward_head(whole, image_size=size)


@torch.no_grad()
def test_a_new_head_is_of_the_same_kind_unless_it_pools() -> None:
    model, x = vit(PATCHES), images(PATCHES)
    classifier = model.get_classifier()
    assert isinstance(classifier, torch.nn.Linear)
    assert classifier.weight.shape == (5, 16)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3, 6, 12)
    assert model.num_classes == 3
    assert not model(x).any()
    model.reset_classifier(4, "token")
    assert model(x).shape == (2, 4)
    assert model.config.head == "linear"
    model.reset_classifier(0)
    assert torch.equal(model(x), model.features(x))


def test_checkpointing_gives_the_same_gradients() -> None:
    model, x = vit(PATCHES).train(), images(PATCHES)
    found: list[list[Tensor]] = []
    for again in (False, True):
        model.set_grad_checkpointing(again)
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0)


def test_the_names_are_those_of_a_linear_head() -> None:
    ours, linear = (dict(build(config).state_dict()) for config in (PATCHES, VIT))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in linear.items()}


def test_who_can_have_such_a_head() -> None:
    assert adapt_config(VIT, **VIT.patch_head(7)) == replace(VIT, head="patches", classes=7)
    assert adapt_config(PATCHES, **PATCHES.patch_head(0)) == replace(VIT, head="none", classes=0)
    assert adapt_config(PATCHES, **PATCHES.linear_head(5)) == VIT
    assert not VIT.has_patch_head
    with pytest.raises(ConfigError, match="patch tokens"):
        RESNET.patch_head(7)
    with pytest.raises(ConfigError, match="classes=0"):
        replace(PATCHES, classes=0)


def kept_bytes(config: ViTConfig) -> int:
    """What the backward pass of one image keeps in a real step, parameters left out."""
    model, kept = build(config), dict[int, int]()
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(torch.randn(1, 3, *config.image))
        F.cross_entropy(logits, torch.zeros(1, *config.image, dtype=torch.int64))
    return sum(kept.values())


def test_memory_of_logits_is_counted() -> None:
    """Of what grows with the classes a step keeps the log-softmax; its gradient and the logits come with it, and the
    logits of the patches before they are resized."""
    few, many = replace(PATCHES, classes=1), replace(PATCHES, classes=11)
    measured = kept_bytes(many) - kept_bytes(few)
    counted = image_bytes(many, low=False, recompute=False) - image_bytes(few, low=False, recompute=False)
    assert counted == 3 * measured + 10 * 12 * 4
    assert image_bytes(many, low=True, recompute=False) < image_bytes(many, low=False, recompute=False)


def test_a_named_network_takes_it() -> None:
    config = model_config("ViT-Ti/16", classes=21, head="patches")
    assert config.has_patch_head
    assert config.classes == 21
