"""What changes at each layer: linear centred kernel alignment (CKA) of every two layers.

After Kornblith et al., with the unbiased estimator of HSIC of Song et al. summed over minibatches as Nguyen, Raghu and
Kornblith do it, so that no image need meet all others. A Gram matrix K that is centred by

    K̃_ij = K_ij - Σ_j K_ij / (n-2) - Σ_i K_ij / (n-2) + Σ_ij K_ij / ((n-1)(n-2))    and    K̃_ii = 0

with K_ii = 0 before, gives HSIC(K, L) = <K̃, L̃> / (n(n-3)): an inner product, so CKA lies in [-1, 1].
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from vitrail.core.errors import DataError
from vitrail.inspection.layer_taps import to_float32, iterate_states, get_token_layout, require_transformer

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
