"""Whether features have collapsed: three numbers that need no labels.

    found = indicators(features)          # [N, D]
    found.rank, found.similarity, found.spread

A network that learns without labels can cheat by giving every image the same features, or features along a few
directions alone. With σ the singular values of the centred features and p = σ / Σσ, the rank is exp(-Σ p log p): D
where all directions are used alike, 1 where one is, whatever the scale and the rotation. The similarity is the mean
cosine between two images, 1 where all look the same. The spread is the standard deviation over images of features
of length 1, the mean over the D of them, times √D: 1 where they point everywhere alike, 0 where they all point one way.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import widest_float

# Relative to the length of all features; below is the rounding of float32, which has every direction and no meaning.
NOTHING: Final = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class CollapseIndicators:
    """Of N features of `width` numbers each. A rank of 0 says that all images have the very same ones."""

    rank: float
    similarity: float
    spread: float
    width: int


def measure_collapse(features: Tensor, *, device: torch.device | str = "cpu") -> CollapseIndicators:
    """All three of features [N, D], of two images or more."""
    if features.ndim != 2 or len(features) < 2:
        raise ConfigError(f"features of shape {tuple(features.shape)}: two images or more can be compared, [N, D]")
    exact = widest_float(torch.device(device))
    values = features.to(device, exact)
    return CollapseIndicators(
        rank=effective_rank(values), similarity=mean_similarity(values), spread=feature_spread(values), width=int(values.shape[1])
    )


def effective_rank(features: Tensor) -> float:
    """The effective rank, from 1 to min(N - 1, D). By the smaller Gram matrix, whose eigenvalues are σ²."""
    centred = features - features.mean(0)
    gram = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    if not gram.isfinite().all():
        return math.nan
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    singular = singular[singular > NOTHING * features.norm()]
    if not len(singular):
        return 0.0
    share = singular / singular.sum()
    return float(torch.special.entr(share).sum().exp())


def mean_similarity(features: Tensor) -> float:
    """The mean cosine over all pairs of two: of unit vectors, |Σ z|² counts every pair twice and each one with
    itself."""
    count = len(features)
    return float((F.normalize(features, dim=1).sum(0).square().sum() - count) / (count * (count - 1)))


def feature_spread(features: Tensor) -> float:
    """The standard deviation over images of features of length 1, the mean over features, times the root of their
    number."""
    return float(F.normalize(features, dim=1).std(0, correction=0).mean()) * math.sqrt(features.shape[1])
