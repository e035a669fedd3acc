"""What patches have become inside: colours by principal components, likeness to a chosen one, and tokens' norms."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.inspection.stream import states
from vitrail.inspection.tokens import patches, precise, tokens_of, transformer

TAIL = 0.01  # of all values, on either side, that colours leave out: a few tokens far off would grey all others


def patch_features(model: nn.Module, images: Tensor, layer: int = -1) -> Tensor:
    """Patches behind a layer, through the network's last norm, so that layers compare: [B, C, H, W] prepared ->
    [B, rows, columns, D]. Layers count from 0, or from the end."""
    network = transformer(model)
    count = network.depth
    if not -count <= layer < count:
        raise ConfigError(f"layer={layer}: this network has {count}, from 0 to {count - 1} or from -1 backwards")
    z = next(itertools.islice(states(network, images), layer % count + 1, None))
    with torch.no_grad():
        return patches(precise(network.norm(z)), tokens_of(network), dim=1)


def colours(features: Tensor) -> Tensor:
    """The first three principal components of all pictures' patches together, as red, green and blue:
    [B, rows, columns, D] -> [B, rows, columns, 3] in [0, 1]. Like patches have like colours, in one picture and across
    them; each component's sign is such that its entry farthest from 0 is positive."""
    flat = features.detach().cpu().double().flatten(0, 2)  # [n, D]
    if not flat.numel():
        raise ConfigError(f"features of {list(features.shape)} hold no patches")
    flat = flat - flat.mean(dim=0)
    axes = torch.linalg.eigh(flat.T @ flat).eigenvectors.flip(1)[:, :3]  # the largest first
    far = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    shades = F.pad(flat @ (axes * torch.where(far < 0, -1.0, 1.0)), (0, 3 - axes.shape[1]))  # [n, 3]
    ordered = shades.sort(dim=0).values
    cut = int(TAIL * (len(ordered) - 1))
    low, high = ordered[cut], ordered[-1 - cut]
    spread = (high - low).clamp(min=1e-9 * float(flat.norm() + 1))  # noise alone is no colour
    shown = torch.where(high - low >= spread, (shades - low) / spread, 0.5).clamp(0, 1)
    return shown.float().unflatten(0, features.shape[:3]).to(features.device)


def patch_similarity(features: Tensor, row: int, column: int) -> Tensor:
    """Cosine of one patch of each picture with all others of it: [B, rows, columns, D] -> [B, rows, columns]."""
    rows, columns = features.shape[1:3]
    if not (0 <= row < rows and 0 <= column < columns):
        raise ConfigError(f"patch ({row}, {column}) lies outside the grid of {rows}x{columns}")
    unit = F.normalize(precise(features), dim=-1)
    return torch.einsum("brcd,bd->brc", unit, unit[:, row, column])


def token_norms(model: nn.Module, images: Tensor) -> Tensor:
    """The length of every token as it enters the first layer and behind each: [B, C, H, W] prepared -> [L+1, B, T].
    Patches far above their neighbours are artefacts: they hold something other than their place."""
    return torch.stack([precise(z).norm(dim=-1) for z in states(model, images)])
