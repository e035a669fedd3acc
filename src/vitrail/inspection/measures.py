"""How far heads look (Figure 7 right, Figure 11, D.7), and how widely.

What changes at each layer: linear centred kernel alignment (CKA) of every two layers.

After Kornblith et al., with the unbiased estimator of HSIC of Song et al. summed over minibatches as Nguyen, Raghu and
Kornblith do it, so that no image need meet all others. A Gram matrix K that is centred by

    K̃_ij = K_ij - Σ_j K_ij / (n-2) - Σ_i K_ij / (n-2) + Σ_ij K_ij / ((n-1)(n-2))    and    K̃_ii = 0

with K_ii = 0 before, gives HSIC(K, L) = <K̃, L̃> / (n(n-3)): an inner product, so CKA lies in [-1, 1].

How faithful a map is: what becomes of the class when the places it marks are taken away, or alone are left.

Deletion and insertion after Petsiuk et al. (RISE). The cells of a map are ranked; in equal steps the first of them are
covered (deletion: the sooner the probability falls, the better the map) or uncovered on a covered image (insertion:
the sooner it rises, the better). A map that says nothing does as well as a random one, which is the control.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, DataError, unknown
from vitrail.core.text import Pair
from vitrail.inspection.layer_taps import (
    check_maps,
    choose_classes,
    get_token_layout,
    iterate_layers,
    iterate_states,
    mean_logits,
    move_to_model,
    require_transformer,
    to_float32,
)
from vitrail.models.backbone import resting


def distance_matrix(grid: Pair, patch: Pair) -> Tensor:
    """Between the middles of any two patches, in pixels: [N, N], float32."""
    rows = torch.arange(grid[0], dtype=torch.float64) * patch[0]
    columns = torch.arange(grid[1], dtype=torch.float64) * patch[1]
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)  # [N, 2]
    return (places[:, None] - places[None]).square().sum(dim=-1).sqrt().float()


def attention_distance(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Mean over images and queries of Σ_j A_ij d_ij, in pixels: batches of [B, C, H, W] prepared -> [L, k].

    The author's recipe: between patches alone, and what the class token takes is not given to the others, so a head
    that looks at the class token looks near."""
    tokens = get_token_layout(model)
    far = distance_matrix(tokens.grid, tokens.patch).to(next(model.parameters()).device)

    def measured(attention: Tensor) -> Tensor:
        between = attention[..., tokens.prefix :, tokens.prefix :].float()
        return (between * far).sum(dim=-1).mean(dim=-1)  # row by row: one long product would round at the fourth digit

    return average_layers(model, batches, measured)


def attention_entropy(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Mean over images and all queries of -Σ_j A_ij log2 A_ij, in bits: 0 for a look at one token, log2 T for a look
    at all alike. Batches of [B, C, H, W] prepared -> [L, k]."""

    def measured(attention: Tensor) -> Tensor:
        return torch.special.entr(attention.float()).sum(dim=-1).mean(dim=-1) / math.log(2)

    return average_layers(model, batches, measured)


def average_layers(model: nn.Module, batches: Iterable[Tensor], measured: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over all images of a number [B, k] of each layer."""
    total: Tensor | None = None
    count = 0
    for images in batches:
        sums: list[Tensor] = []
        for view in iterate_layers(model, images):
            sums.append(measured(view.attention).sum(dim=0))
            del view
        summed = torch.stack(sums).cpu().double()  # one wait for the device a batch
        total = summed if total is None else total + summed
        count += images.shape[0]
    if total is None or not count:
        raise DataError("there are no images to look at; give at least one")
    return (total / count).float().to(next(model.parameters()).device)


LEAST = 4  # images that the estimator needs


def layer_cka(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """CKA of the mean over the patches as it enters the first layer and behind each: batches of [B, C, H, W] prepared
    -> [L+1, L+1]. (The class token enters as the same for all images, so it would say nothing of the first.)"""
    network = require_transformer(model)
    return cka(_represented(network, images) for images in batches).to(next(network.parameters()).device)


def cka(batches: Iterable[Tensor]) -> Tensor:
    """Of several representations of the same images, a minibatch at a time: [X, B, D] each -> [X, X]. Minibatches of
    fewer than four join the one before."""
    total: Tensor | None = None
    for rows in _joined(batches):
        centred = _centred(rows).flatten(1)  # [X, n·n]
        count = rows.shape[1]
        product = centred @ centred.T / (count * (count - 3)) * count
        total = product if total is None else total + product
    if total is None:
        raise DataError(f"CKA compares images with each other: give {LEAST} or more")
    scale = total.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 1e-12 * scale.amax(), scale, torch.inf)  # one that does not vary is like none
    found = total / (scale[:, None] * scale[None])
    found.fill_diagonal_(1.0)
    return found.clamp(-1, 1).float()


def _joined(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Minibatches of at least four."""
    held: Tensor | None = None
    for rows in batches:
        if held is not None and held.shape[1] >= LEAST and rows.shape[1] >= LEAST:
            yield held
            held = None
        held = rows if held is None else torch.cat([held, rows], dim=1)
    if held is not None and held.shape[1] >= LEAST:
        yield held


def _centred(rows: Tensor) -> Tensor:
    """K̃ of each representation's linear kernel: [X, n, D] -> [X, n, n]."""
    rows = (rows.cpu() if rows.device.type == "mps" else rows).double()
    rows = rows - rows.mean(dim=1, keepdim=True)  # changes nothing but the rounding
    gram = rows @ rows.transpose(1, 2)
    gram.diagonal(dim1=1, dim2=2).zero_()
    count = gram.shape[1]
    sums = gram.sum(dim=2, keepdim=True) / (count - 2)
    gram = gram - sums - sums.transpose(1, 2) + gram.sum(dim=(1, 2), keepdim=True) / ((count - 1) * (count - 2))
    gram.diagonal(dim1=1, dim2=2).zero_()
    return gram


def _represented(model: nn.Module, images: Tensor) -> Tensor:
    """[B, C, H, W] -> [L+1, B, D], on the host: doubles are not to be had everywhere."""
    prefix = get_token_layout(model).prefix
    return torch.stack([to_float32(z[:, prefix:]).mean(dim=1) for z in iterate_states(model, images)]).cpu()


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
