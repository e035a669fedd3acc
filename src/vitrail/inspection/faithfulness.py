"""How faithful a map is: what becomes of the class when the places it marks are taken away, or alone are left.

Deletion and insertion after Petsiuk et al. (RISE). The cells of a map are ranked; in equal steps the first of them are
covered (deletion: the sooner the probability falls, the better the map) or uncovered on a covered image (insertion:
the sooner it rises, the better). A map that says nothing does as well as a random one, which is the control.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, unknown
from vitrail.inspection.layer_taps import check_maps, choose_classes, mean_logits, move_to_model, to_float32
from vitrail.models.backbone import resting

Fill: TypeAlias = Literal["mean", "blur"]
BLUR = 1 / 20  # of the longer side: 11 px of 224, in which no shape is left


@dataclass(frozen=True, slots=True)
class FaithfulnessCurves:
    """The class's probability with the first 0, 1/steps, ..., all of the cells taken away, or put in."""

    deletion: Tensor  # [B, steps+1]
    insertion: Tensor  # [B, steps+1]

    @property
    def deletion_area(self) -> Tensor:
        """The mean probability on the way [B]: lower is better."""
        return _area(self.deletion)

    @property
    def insertion_area(self) -> Tensor:
        """The mean probability on the way [B]: higher is better."""
        return _area(self.insertion)


def faithfulness_curves(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    classes: Tensor | None = None,
    *,
    steps: int = 14,
    fill: Fill = "mean",
) -> FaithfulnessCurves:
    """Both curves of any maps [B, rows, columns] of prepared images [B, C, H, W], for the given classes or those that
    the network says of the whole images. What covers is each image's mean colour, or the image blurred."""
    if fill not in get_args(Fill):
        raise unknown("fill", str(fill), get_args(Fill))
    check_maps(maps, images)
    images = move_to_model(images, model)
    cells = maps.shape[1] * maps.shape[2]
    if not 1 <= steps <= cells:
        raise ConfigError(f"steps={steps}: from 1 to the {cells} cells of a map")
    rank = rank_cells(maps.to(images.device))
    with resting(model), torch.no_grad():
        cover = _cover(images, fill)
        logits = mean_logits(model(images))
        if logits.shape[1] < 2:
            raise ConfigError("the curves follow the probability of a class, and this network has one output alone")
        picked = choose_classes(logits, classes)
        deletion, insertion = list[Tensor](), list[Tensor]()
        for step in range(steps + 1):
            first = F.interpolate((rank < round(cells * step / steps))[:, None].float(), images.shape[2:]) > 0
            deletion.append(_probability(model, torch.where(first, cover, images), picked))
            insertion.append(_probability(model, torch.where(first, images, cover), picked))
    return FaithfulnessCurves(torch.stack(deletion, dim=1), torch.stack(insertion, dim=1))


def random_maps(maps: Tensor, seed: int = 0) -> Tensor:
    """Maps of the same shape that know nothing: the control."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(maps.shape, generator=generator).to(maps.device)


def rank_cells(maps: Tensor) -> Tensor:
    """0 for the largest cell of each map, 1 for the next; of equals the first in raster order: [B, rows, columns]."""
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1).view(maps.shape)


def _cover(images: Tensor, fill: Fill) -> Tensor:
    if fill == "mean":
        return images.mean(dim=(2, 3), keepdim=True).expand_as(images)
    from torchvision.transforms.v2 import functional as vision

    spread = max(max(images.shape[2:]) * BLUR, 0.5)
    # The border is mirrored, which takes a kernel that is smaller than the image.
    reach = min(math.ceil(3 * spread), min(images.shape[2:]) - 1)
    blurred: Any = vision.gaussian_blur(images, [2 * reach + 1] * 2, [spread] * 2)
    return blurred


def _probability(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return to_float32(mean_logits(model(images))).softmax(dim=-1).gather(1, classes[:, None])[:, 0]


def _area(curve: Tensor) -> Tensor:
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)
