"""What a network has learned about pixels and places (Figure 7 left and centre, Figure 10), and its patch features:
colours by principal components, similarity to one patch, and token norms."""

import itertools

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.inspection.layer_taps import get_token_layout, iterate_states, require_transformer, to_float32, to_grid
from vitrail.models.backbone import unwrap_backbone


def filter_components(model: nn.Module, count: int = 28) -> Tensor:
    """The leading principal components of the filters that see the image, largest first: [n, P, P, 3] in [0, 1].

    The D filters are samples in the space of a patch's pixels: the patch embedding of a ViT, the standardised root
    convolution of a hybrid or a ResNet. Each component is stretched to [0, 1] separately; its sign is arbitrary, so the
    entry farthest from 0 is made positive. n is below `count` if there are fewer components."""
    if count < 1:
        raise ConfigError(f"count={count} must be at least 1")
    kernel = unwrap_backbone(model).kernel.detach()
    if kernel.shape[1] not in (1, 3):
        raise ConfigError(f"filters over {kernel.shape[1]} channels have no colours; only 1 or 3 channels can be shown")
    flat = kernel.permute(0, 2, 3, 1).flatten(1).cpu().double()  # [D, P·P·C]
    count = min(count, max(flat.shape[0] - 1, 1), flat.shape[1])
    rows = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False).Vh[:count]
    rows = rows * torch.where(rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)) < 0, -1.0, 1.0)
    low, high = rows.aminmax(dim=1, keepdim=True)
    rows = torch.where(high > low, (rows - low) / (high - low).clamp(min=torch.finfo(rows.dtype).tiny), 0.5)
    tiles = rows.unflatten(1, (*kernel.shape[2:], kernel.shape[1]))
    return tiles.float().to(kernel.device).expand(*tiles.shape[:3], 3).contiguous()


def position_similarity(model: nn.Module) -> Tensor:
    """Cosine similarity of each patch's position embedding with every other: [rows, columns, rows, columns]. If each
    layer has its own table, the first one counts."""
    network = require_transformer(model)
    tables = network.position.tables
    if network.config.position in ("none", "relative") or not len(tables):
        why = f"position={network.config.position!r} has no embedding per place"
        raise ConfigError(f"{why}; use a network with learned or sine-cosine positions")
    grid = get_token_layout(network).grid
    with torch.no_grad():
        table: Tensor = tables[0]()
        unit = F.normalize(table[0, network.config.prefix :].float(), dim=-1)
        return (unit @ unit.T).clamp(-1, 1).unflatten(1, grid).unflatten(0, grid)


def row_column_score(similarity: Tensor) -> float:
    """How much more similar two places in one row or column are than two others at the same distance:
    [rows, columns, rows, columns] -> from -2 to 2.

    For each distance along a row or column: the mean similarity there, minus that of the places off it, interpolated
    between their distances; then the mean over the pairs on rows and columns. 0 if similarity depends on distance only,
    however fast it falls; 1/2 for two half-width tables of rows and columns that are each orthogonal; 0 for a grid
    below 3x3, which is too small to tell."""
    rows, columns = similarity.shape[:2]
    if min(rows, columns) < 3:
        return 0.0
    value, across, down = _pairs(similarity)
    square = across.square() + down.square()
    on = (across == 0) | (down == 0)
    far = square.sqrt()
    places, index = far[~on].unique(return_inverse=True)  # the distances that occur, and the mean value at each
    profile = torch.zeros_like(places).index_add_(0, index, value[~on]) / torch.bincount(index)
    inside = on & (far >= places[0]) & (far <= places[-1])
    return float(np.mean(value[inside].numpy() - np.interp(far[inside].numpy(), places.numpy(), profile.numpy())))


def distance_correlation(similarity: Tensor) -> float:
    """Spearman's rank correlation of similarity with distance over all pairs of places: -1 if nearer places are always
    more similar, 0 if distance has no influence. [rows, columns, rows, columns], in patches."""
    value, across, down = _pairs(similarity)
    if not value.numel():
        return 0.0
    ranks = torch.stack([_ranks(value), _ranks(across.square() + down.square())])
    ranks = F.normalize(ranks - ranks.mean(dim=1, keepdim=True), dim=1)
    return float(ranks[0] @ ranks[1])


def _pairs(similarity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The similarity of every two places and their distance along either axis: [pairs] each, float64."""
    rows, columns = similarity.shape[:2]
    if similarity.shape[2:] != (rows, columns) or similarity.ndim != 4:
        raise ConfigError(f"a similarity of {list(similarity.shape)} must be [rows, columns, rows, columns]")
    first, second = torch.triu_indices(rows * columns, rows * columns, offset=1).unbind()
    value = similarity.detach().cpu().double().flatten(2, 3).flatten(0, 1)[first, second]
    return value, (first % columns - second % columns).double(), (first // columns - second // columns).double()


def _ranks(value: Tensor) -> Tensor:
    """Ranks; ties share their mean rank."""
    _, index, count = value.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[index]


TAIL = 0.01  # share of values clipped on either side: a few outlying tokens would turn all others grey


def patch_features(model: nn.Module, images: Tensor, layer: int = -1) -> Tensor:
    """Patches after a layer, through the network's last norm so that layers are comparable: [B, C, H, W] prepared ->
    [B, rows, columns, D]. Layers count from 0, or from the end if negative."""
    network = require_transformer(model)
    count = network.depth
    if not -count <= layer < count:
        known = f"0 to {count - 1}, or -1 to -{count} from the end"
        raise ConfigError(f"layer={layer} is out of range; the network has layers {known}")
    z = next(itertools.islice(iterate_states(network, images), layer % count + 1, None))
    with torch.no_grad():
        return to_grid(to_float32(network.norm(z)), get_token_layout(network), dim=1)


def feature_colours(features: Tensor) -> Tensor:
    """The first three principal components of all images' patches together, as red, green and blue:
    [B, rows, columns, D] -> [B, rows, columns, 3] in [0, 1]. Similar patches have similar colours, within an image and
    across images; the entry of each component farthest from 0 is positive."""
    flat = features.detach().cpu().double().flatten(0, 2)  # [n, D]
    if not flat.numel():
        raise ConfigError(f"features of {list(features.shape)} contain no patches")
    flat = flat - flat.mean(dim=0)
    axes = torch.linalg.eigh(flat.T @ flat).eigenvectors.flip(1)[:, :3]  # the largest first
    far = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    shades = F.pad(flat @ (axes * torch.where(far < 0, -1.0, 1.0)), (0, 3 - axes.shape[1]))  # [n, 3]
    ordered = shades.sort(dim=0).values
    cut = int(TAIL * (len(ordered) - 1))
    low, high = ordered[cut], ordered[-1 - cut]
    spread = (high - low).clamp(min=1e-9 * float(flat.norm() + 1))  # noise alone gets no colour
    shown = torch.where(high - low >= spread, (shades - low) / spread, 0.5).clamp(0, 1)
    return shown.float().unflatten(0, features.shape[:3]).to(features.device)


def patch_similarity(features: Tensor, row: int, column: int) -> Tensor:
    """Cosine similarity of one patch of each image with all its others: [B, rows, columns, D] -> [B, rows, columns]."""
    rows, columns = features.shape[1:3]
    if not (0 <= row < rows and 0 <= column < columns):
        raise ConfigError(f"patch ({row}, {column}) is outside the grid of {rows}x{columns}")
    unit = F.normalize(to_float32(features), dim=-1)
    return torch.einsum("brcd,bd->brc", unit, unit[:, row, column])


def token_norms(model: nn.Module, images: Tensor) -> Tensor:
    """The norm of every token as it enters the first layer and after each: [B, C, H, W] prepared -> [L+1, B, T].
    Patches far above their neighbours are artefacts: they store something other than their place."""
    return torch.stack([to_float32(z).norm(dim=-1) for z in iterate_states(model, images)])
