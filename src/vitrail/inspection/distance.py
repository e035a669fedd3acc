"""How far heads look (Figure 7 right, Figure 11, D.7), and how widely."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vitrail.core.errors import DataError
from vitrail.core.text import Pair
from vitrail.inspection.layer_taps import iterate_layers, get_token_layout


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
