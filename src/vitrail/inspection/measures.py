"""Measures of a network's layers and maps: attention distance and entropy, CKA between layers, faithfulness of maps.

Attention distance is how far heads look (Figure 7 right, Figure 11, D.7); entropy is how widely.

CKA, linear centred kernel alignment, is how alike two layers are (Kornblith et al.). The unbiased estimator of HSIC of
Song et al. is summed over minibatches as by Nguyen, Raghu and Kornblith, so images are compared only within a
minibatch. Centring a Gram matrix K by

    K̃_ij = K_ij - Σ_j K_ij / (n-2) - Σ_i K_ij / (n-2) + Σ_ij K_ij / ((n-1)(n-2))    and    K̃_ii = 0

with K_ii = 0 before, gives HSIC(K, L) = <K̃, L̃> / (n(n-3)): an inner product, so CKA lies in [-1, 1].

Faithfulness is deletion and insertion after Petsiuk et al. (RISE). The cells of a map are ranked; in equal steps the
first of them are covered (deletion: the sooner the probability falls, the better the map) or uncovered on a covered
image (insertion: the sooner it rises, the better). A random map is the control.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, DataError, unknown_name
from vitrail.core.text import Pair, format_size
from vitrail.inspection import layer_taps
from vitrail.models.backbone import eval_mode

MIN_IMAGES = 4  # needed by the estimator of CKA
Fill: TypeAlias = Literal["mean", "blur"]
BLUR = 1 / 20  # of the longer side: 11 px of 224, which leaves no shape


def distance_matrix(grid: Pair, patch: Pair) -> Tensor:
    """Distances between the centres of any two patches, in pixels: [N, N], float32."""
    rows = torch.arange(grid[0], dtype=torch.float64) * patch[0]
    columns = torch.arange(grid[1], dtype=torch.float64) * patch[1]
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)  # [N, 2]
    return (places[:, None] - places[None]).square().sum(dim=-1).sqrt().float()


def attention_distance(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Mean over images and queries of Σ_j A_ij d_ij, in pixels: batches of [B, C, H, W] prepared -> [L, k].

    The authors' recipe: only weights between patches count, and the class token's share is not redistributed, so a head
    that looks at the class token has a small distance."""
    tokens = layer_taps.get_token_layout(model)
    distances = distance_matrix(tokens.grid, tokens.patch).to(next(model.parameters()).device)
    between = slice(tokens.prefix, None)
    # Row by row: one long product rounds at the 4th digit.
    measure = lambda attention: (attention[..., between, between].float() * distances).sum(-1).mean(-1)  # noqa: E731
    return average_layers(model, batches, measure)


def attention_entropy(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Mean over images and all queries of -Σ_j A_ij log2 A_ij, in bits: 0 for a look at one token, log2 T for even
    attention. Batches of [B, C, H, W] prepared -> [L, k]."""
    return average_layers(
        model, batches, lambda attention: torch.special.entr(attention.float()).sum(-1).mean(-1) / math.log(2)
    )


def average_layers(model: nn.Module, batches: Iterable[Tensor], measure: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over all images of a number [B, k] of each layer."""
    total, count = torch.zeros(()), 0
    for images in batches:
        sums: list[Tensor] = []
        for layer in layer_taps.iterate_layers(model, images):
            sums.append(measure(layer.attention).sum(dim=0))
            del layer
        total = total + torch.stack(sums).cpu().double()  # waits for the device once per batch
        count += images.shape[0]
    if not count:
        raise DataError("there are no images to measure; give at least one")
    return (total / count).float().to(next(model.parameters()).device)


def layer_cka(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """CKA of the mean patch as it enters the first layer and after each: batches of [B, C, H, W] prepared ->
    [L+1, L+1]. (The class token enters the first layer equal for all images, so it has nothing to compare there.)"""
    prefix = layer_taps.get_token_layout(model).prefix
    states = (layer_taps.iterate_states(model, images) for images in batches)
    patches = ([layer_taps.to_float32(z[:, prefix:]).mean(dim=1) for z in layers] for layers in states)
    # [L+1, B, D], on the host: not every device has doubles
    return cka(torch.stack(layers).cpu() for layers in patches).to(next(model.parameters()).device)


def cka(batches: Iterable[Tensor]) -> Tensor:
    """CKA between several representations of the same images, one minibatch at a time: [X, B, D] each -> [X, X].
    Minibatches of fewer than four images join the one before."""
    total: Tensor | None = None
    for rows in _merge_small_batches(batches):
        centred = _centre_gram(rows).flatten(1)  # [X, n·n]
        count = rows.shape[1]
        product = centred @ centred.T / (count * (count - 3)) * count
        total = product if total is None else total + product
    if total is None:
        raise DataError(f"CKA compares images with each other; give at least {MIN_IMAGES}")
    scale = total.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 1e-12 * scale.amax(), scale, torch.inf)  # a constant representation is similar to none
    similarity = total / (scale[:, None] * scale[None])
    similarity.fill_diagonal_(1.0)
    return similarity.clamp(-1, 1).float()


def _merge_small_batches(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    held: Tensor | None = None
    for rows in batches:
        if held is not None and held.shape[1] >= MIN_IMAGES and rows.shape[1] >= MIN_IMAGES:
            yield held
            held = None
        held = rows if held is None else torch.cat([held, rows], dim=1)
    if held is not None and held.shape[1] >= MIN_IMAGES:
        yield held


def _centre_gram(rows: Tensor) -> Tensor:
    """K̃ of each representation's linear kernel: [X, n, D] -> [X, n, n]."""
    rows = (rows.cpu() if rows.device.type == "mps" else rows).double()
    rows = rows - rows.mean(dim=1, keepdim=True)  # changes only the rounding
    gram = rows @ rows.transpose(1, 2)
    gram.diagonal(dim1=1, dim2=2).zero_()
    count = gram.shape[1]
    sums = gram.sum(dim=2, keepdim=True) / (count - 2)
    gram = gram - sums - sums.transpose(1, 2) + gram.sum(dim=(1, 2), keepdim=True) / ((count - 1) * (count - 2))
    gram.diagonal(dim1=1, dim2=2).zero_()
    return gram


@dataclass(frozen=True, slots=True)
class FaithfulnessCurves:
    """The class's probability with the first 0, 1/steps, ..., all of the cells deleted, or inserted."""

    deletion: Tensor  # [B, steps+1]
    insertion: Tensor  # [B, steps+1]

    @property
    def deletion_area(self) -> Tensor:
        """The mean probability along the curve [B]: lower is better."""
        return torch.trapezoid(self.deletion, dx=1 / (self.deletion.shape[1] - 1), dim=1)

    @property
    def insertion_area(self) -> Tensor:
        """The mean probability along the curve [B]: higher is better."""
        return torch.trapezoid(self.insertion, dx=1 / (self.insertion.shape[1] - 1), dim=1)


def faithfulness_curves(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    classes: Tensor | None = None,
    *,
    steps: int = 14,
    fill: Fill = "mean",
) -> FaithfulnessCurves:
    """Both curves of any maps [B, rows, columns] of prepared images [B, C, H, W], for the given classes or those
    predicted for the whole images. Cells are covered with the image's mean colour, or with the blurred image."""
    if fill not in get_args(Fill):
        raise unknown_name("fill", str(fill), get_args(Fill))
    batch, _, height, width = images.shape
    if maps.ndim != 3 or maps.shape[0] != batch or maps.shape[1] > height or maps.shape[2] > width:
        size = format_size((height, width))
        raise ConfigError(f"maps of {list(maps.shape)} do not fit {batch} images of {size}; give [B, rows, columns]")
    images = layer_taps.move_to_model(images, model)
    cells = maps.shape[1] * maps.shape[2]
    if not 1 <= steps <= cells:
        raise ConfigError(f"steps={steps} must be between 1 and the {cells} cells of a map")
    rank = rank_cells(maps.to(images.device))
    with eval_mode(model), torch.no_grad():
        cover = _make_cover(images, fill)
        logits = layer_taps.mean_logits(model(images))
        if logits.shape[1] < 2:
            raise ConfigError("the curves follow the probability of a class, and this network has a single output")
        picked = layer_taps.choose_classes(logits, classes)[:, None]

        def probability(images: Tensor) -> Tensor:
            return layer_taps.to_float32(layer_taps.mean_logits(model(images))).softmax(dim=-1).gather(1, picked)[:, 0]

        deletion, insertion = list[Tensor](), list[Tensor]()
        for step in range(steps + 1):
            first = F.interpolate((rank < round(cells * step / steps))[:, None].float(), images.shape[2:]) > 0
            deletion.append(probability(torch.where(first, cover, images)))
            insertion.append(probability(torch.where(first, images, cover)))
    return FaithfulnessCurves(torch.stack(deletion, dim=1), torch.stack(insertion, dim=1))


def random_maps(maps: Tensor, seed: int = 0) -> Tensor:
    """Random maps of the same shape: the control."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(maps.shape, generator=generator).to(maps.device)


def rank_cells(maps: Tensor) -> Tensor:
    """0 for the largest cell of each map, 1 for the next; ties in raster order: [B, rows, columns]."""
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1).view(maps.shape)


def _make_cover(images: Tensor, fill: Fill) -> Tensor:
    if fill == "mean":
        return images.mean(dim=(2, 3), keepdim=True).expand_as(images)
    from torchvision.transforms.v2 import functional as vision

    spread = max(max(images.shape[2:]) * BLUR, 0.5)
    # The border is mirrored, which needs a kernel smaller than the image.
    reach = min(math.ceil(3 * spread), min(images.shape[2:]) - 1)
    blurred: Any = vision.gaussian_blur(images, [2 * reach + 1] * 2, [spread] * 2)
    return blurred
