"""The three families of 4.3 and 4.4 for small pictures, each made of a ViT's image and classes."""

from dataclasses import replace

from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import backbone, mini_bit
from vitrail.recipes.change import resized
from vitrail.train.config import Run


def vit_of(model: ViTConfig, width: int, depth: int) -> ViTConfig:
    """The same ViT in another shape, with an MLP of twice its width as all small ones have."""
    heads = width // 64 if width % 64 == 0 else max(width // 32, 2)
    return replace(model, width=width, depth=depth, mlp_width=2 * width, heads=heads)


def resnet_of(model: ViTConfig, blocks: tuple[int, ...], factor: float) -> ResNetConfig:
    """A BiT ResNet with a 3x3 root."""
    small = replace(mini_bit("mini-R14"), image=model.image, classes=model.classes)
    return replace(small, blocks=blocks, factor=factor, groups=groups_at(factor))


def hybrid_of(model: ViTConfig, blocks: tuple[int, ...], factor: float, width: int, depth: int) -> ViTConfig:
    """A ViT on the feature map of a small ResNet, a patch a position."""
    small = replace(backbone(blocks, model.image), root="3x3", factor=factor, groups=groups_at(factor))
    return replace(vit_of(model, width, depth), patch=(1, 1), backbone=small)


def groups_at(factor: float) -> int:
    """As many as divide the narrowest layer, up to the 8 of the small ResNets."""
    return min(8, round(64 * factor))


def at_8_px(run: Run) -> Run:
    """A run on 16 px brought down to 8 and patches of 2: as many tokens, and a quarter of the time for a ResNet."""
    return resized(replace(run, model=replace(vit_config(run.model), patch=(2, 2))), 8)
