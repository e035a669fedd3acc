"""Views of several sizes: how they are drawn, and how one network processes them all.

Small views keep the patch size: the grid has fewer rows and columns, and positions are resampled as for fine-tuning at
another resolution (3.2).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import InceptionCrop, Range
from vitrail.data.transforms.policy import Distort
from vitrail.models.family import ModelConfig
from vitrail.models.positions.embeddings import SineTable
from vitrail.models.resampling.interpolation import resize_grid
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig, vit_config


def split_views(augmentation: Augmentation) -> tuple[Augmentation, Augmentation]:
    """The augmentation for each of two views. Colour distortion is asymmetric, as MoCo v3 and DINO adopt it from BYOL:
    the first view is always blurred; the second is blurred one time in ten and solarised one time in five. An
    augmentation without blur stays without."""
    policy = augmentation.policy
    if not isinstance(policy, Distort):
        return augmentation, augmentation
    first = replace(policy, blur=1.0 if policy.blur else 0.0)
    second = replace(policy, blur=0.1 if policy.blur else 0.0, solarise=0.2)
    return replace(augmentation, policy=first), replace(augmentation, policy=second)


def with_crop(augmentation: Augmentation, size: Pair, area: Range) -> Augmentation:
    """The same with a crop of another size and share of the image."""
    crop = augmentation.crop
    if not isinstance(crop, InceptionCrop):
        crop = InceptionCrop(size=size, interpolation=crop.interpolation)
    return replace(augmentation, crop=replace(crop, size=size, area=area))


def check_resizable(model: ModelConfig, objective: str) -> ViTConfig:
    """The model as a ViT config; ConfigError if it cannot process images of other sizes than its own."""
    model = vit_config(model, f"objective {objective}")
    for bad, what in (
        (model.backbone is not None, "the backbone of a hybrid"),
        (model.attention != "full", "attention='axial'"),
        (model.position == "relative", "position='relative'"),
        (model.entry != "stem", f"placement='{model.entry}'"),
    ):
        if bad:
            why = f"objective {objective} has views of another size, which {what} cannot process"
            raise ConfigError(f"{why}; use a plain ViT with positions added at the stem, or local_views=0")
    return model


class PositionsAt(nn.Module):
    """Position embeddings for images of another size: [1, T, D]. Fixed tables are computed for the grid. Learned ones
    are resampled differentiably: resampling is linear, so it is a matrix, computed once."""

    table: Tensor
    rule: Tensor

    def __init__(self, config: ViTConfig, size: Pair) -> None:
        super().__init__()
        other = replace(config, image=size)
        self.kind, self.grid = config.position, other.grid
        self.own_grid = config.position_grid is None
        if self.kind == "sincos2d":
            self.register_buffer("table", SineTable(other)().detach(), persistent=False)
        elif self.kind != "none" and self.own_grid:
            unit = torch.eye(config.patches, dtype=torch.float64)
            rule = resize_grid(unit.unflatten(0, config.grid), other.grid, config.position_resample).flatten(0, 1)
            self.register_buffer("rule", rule, persistent=False)  # [patches there, patches here]

    def forward(self, network: ViT) -> Tensor | None:
        """Resamples the network's current table; None if the network has no positions."""
        if self.kind == "none":
            return None
        if self.kind == "sincos2d":
            return self.table
        if not self.own_grid:
            return network.position.tables[0](self.grid)
        whole: Tensor = network.position.tables[0]()
        prefix = network.config.prefix
        grid = self.rule @ whole[0, prefix:].to(self.rule.dtype)  # in float64, as weights are resized for good
        return torch.cat([whole[:, :prefix], grid[None].to(whole.dtype)], dim=1)


def represent_at(network: ViT, images: Tensor, at: PositionsAt) -> Tensor:
    """y (Eq. 4) of images of another size, those that `at` was made for: [B, C, H, W] -> [B, D]."""
    return network.represent(images, None if tuple(images.shape[2:]) == network.config.image else at(network))
