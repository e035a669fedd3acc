"""The closed-form segmenter as the linear head of a network: least squares from patch tokens to shares of classes.

For a patch with p pixels, c of which count, the target y [K] is the share of each class among those c, and the weight
is w = c / p. Least squares needs only two sums over patches, with x̃ = [x - m, 1] and any fixed m,

    G = Σ w x̃ x̃ᵀ  [D + 1, D + 1]     and     T = Σ w x̃ yᵀ  [D + 1, K],

so memory does not depend on the number of images. The last row of G holds the weighted mean of the features, its
diagonal their standard deviations σ, and T the mean shares ȳ. For whitened features z the coefficients are
V = (C + λI)⁻¹ B with C = Σ w z zᵀ and B = Σ w z (y - ȳ)ᵀ; an eigendecomposition of C serves every λ. The constant is
not penalised.

Held-out images choose the rest, each by pixels drawn from it: tokens at a pixel are interpolated as the head's logits
are, which is the same, since both are linear. λ is the one with the highest mean IoU. Shares of a class that covers
little are small even where it is likely, so the largest share favours common classes; an offset for each class, found
one class at a time by the mean IoU over a grid of offsets, corrects that. Last comes the scale of the logits, as for
classes of whole images (ridge_head.py).
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.text import Pair
from vitrail.data.targets import IGNORED
from vitrail.distributed.process_group import widest_float
from vitrail.evaluation.frozen.fewshot import EPS, PENALTIES, PENALTY
from vitrail.evaluation.frozen.ridge_head import CLEAR, find_scale

TRIED: Final = PENALTIES[::3]
REACH, STEP = 0.5, 0.01  # of the offsets that are tried, in shares of a patch
ROUNDS: Final = 2  # through all classes
WORK: Final = 1 << 31  # pixels times squared classes for the offsets, at most


class PatchSums:
    """G and T of the patches seen so far, on the device of the origin m [D]. It should be near the mean of tokens, so
    that nothing cancels."""

    def __init__(self, origin: Tensor, classes: int) -> None:
        kind, width = widest_float(origin.device), len(origin)
        self.origin, self.classes = origin.to(kind), classes
        self.gram = origin.new_zeros(width + 1, width + 1, dtype=kind)
        self.targets = origin.new_zeros(width + 1, classes, dtype=kind)

    def add(self, tokens: Tensor, shares: Tensor, weights: Tensor) -> None:
        """Adds patches with tokens [N, D], shares [N, K] and weights [N]."""
        kind = self.gram.dtype
        x = F.pad(tokens.to(kind) - self.origin, (0, 1), value=1.0)
        weighted = (x * weights.to(kind)[:, None]).T
        self.gram += weighted @ x
        self.targets += weighted @ shares.to(kind)

    def join(self, other: "PatchSums") -> "PatchSums":
        """The sums over the patches of both, which must share an origin."""
        joined = PatchSums(self.origin, self.classes)
        joined.gram, joined.targets = self.gram + other.gram, self.targets + other.targets
        return joined

    @property
    def weight(self) -> float:
        """The number of patches, each weighted by the share of its pixels that count."""
        return float(self.gram[-1, -1])

    def decompose(self) -> "PatchDecomposition":
        """Decomposes the sums, to solve for any penalty."""
        gram, targets = self.gram.double().cpu(), self.targets.double().cpu()
        if not gram.isfinite().all():
            raise DataError("the patch tokens are not finite; the network overflows on some image")
        if not self.weight:
            raise BadLabels("no pixel of the training images counts; masks need class indices other than 255")
        count = gram[-1, -1]
        mean, shares = gram[-1, :-1] / count, targets[-1] / count
        covariance = gram[:-1, :-1] - count * mean[:, None] * mean
        std = (covariance.diagonal().clamp(min=0) / count).sqrt() + EPS
        eigenvalues, q = torch.linalg.eigh(covariance / std / std[:, None])
        b = q.T @ ((targets[:-1] - mean[:, None] * targets[-1]) / std[:, None])
        return PatchDecomposition(mean + self.origin.double().cpu(), std, shares, q, eigenvalues.clamp(min=0), b)


@dataclass(frozen=True, slots=True, eq=False)
class PatchDecomposition:
    """Whitening, mean shares ȳ [K], C = Q diag(e) Qᵀ, and QᵀB [D, K]."""

    mean: Tensor
    std: Tensor
    shares: Tensor
    q: Tensor
    eigenvalues: Tensor
    b: Tensor

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Weight [K, D] and bias [K] in float64: tokens to shares."""
        coefficients = self.q @ (self.b / (self.eigenvalues + penalty)[:, None])
        weight = (coefficients / self.std[:, None]).T
        return weight, self.shares - weight @ self.mean


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOutPixels:
    """Pixels of held-out images: their tokens [P, D], interpolated, and their classes [P]."""

    tokens: Tensor
    truth: Tensor
    images: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutIoU:
    """The mean IoU on drawn pixels of held-out images, with the chosen offsets."""

    miou: float
    pixels: int
    images: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PatchHead:
    """A linear layer, weight [K, D] and bias [K] in float32, from patch tokens to logits. `held` is None if nothing was
    held out; then penalty, offsets and scale are defaults."""

    weight: Tensor
    bias: Tensor
    penalty: float
    scale: float
    offsets: Tensor  # [K], in shares
    held: HeldOutIoU | None


def count_shares(masks: Tensor, grid: Pair, classes: int) -> tuple[Tensor, Tensor]:
    """Masks [B, H, W] to the shares of classes in each patch [B N, K], and the weights of patches [B N]."""
    (height, width), (rows, columns) = masks.shape[1:], grid
    down = torch.arange(height, device=masks.device) * rows // height
    across = torch.arange(width, device=masks.device) * columns // width
    patch = (down[:, None] * columns + across).flatten()  # [H W]
    seen = (masks != IGNORED).flatten(1)
    cell = patch * classes + torch.where(seen, masks.flatten(1), 0).long()
    counts = torch.zeros(len(masks), rows * columns * classes, device=masks.device)
    counts = counts.scatter_add_(1, cell, seen.float()).view(-1, classes)
    known = counts.sum(1)
    return counts / known.clamp(min=1)[:, None], known * (rows * columns / (height * width))


def draw_pixels(tokens: Tensor, mask: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens [P, D] at `count` pixels of an image that count, or at all of them, and their classes [P], of its token
    map [D, rows, columns] and mask [H, W]."""
    places = (mask.cpu() != IGNORED).flatten().nonzero()[:, 0]
    if len(places) > count:
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        places = places[order[:count].sort().values]
    places = places.to(mask.device)
    height, width = mask.shape
    y, x = places // width, places % width
    at = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1).to(tokens.dtype)
    found = F.grid_sample(tokens[None], at[None, None], "bilinear", "border", align_corners=False)  # [1, D, 1, P]
    return found[0, :, 0].T, mask.flatten()[places].long()


def fit_patch_head(
    rest: PatchSums, held: PatchSums, pixels: HeldOutPixels | None, *, penalty: float | None = None
) -> PatchHead:
    """The head of the patches in `rest` and `held`. Pixels of the latter choose the penalty, unless one is given, the
    offsets and the scale."""
    if penalty is not None and not 0 < penalty < math.inf:
        raise ConfigError(f"penalty={penalty} must be above 0 and finite")
    classes, whole = rest.classes, rest.join(held).decompose()
    if pixels is None or not len(pixels.truth) or not rest.weight:
        taken, offsets = PENALTY if penalty is None else penalty, torch.zeros(classes, dtype=torch.float64)
        scale = math.log(CLEAR / (1 - CLEAR) * (classes - 1)) if classes > 1 else 1.0
        return fold_patch_head(*whole.solve(taken), offsets, scale, taken, None)
    part, truth = rest.decompose(), pixels.truth.cpu()
    tokens = pixels.tokens.float().cpu()

    def score(one: float) -> Tensor:
        weight, bias = part.solve(one)
        return F.linear(tokens, weight.float(), bias.float())

    tried = TRIED if penalty is None else (penalty,)
    mious = [measure_miou(score(one).argmax(1), truth, classes) for one in tried]
    taken = tried[max(range(len(tried)), key=lambda at: (mious[at], tried[at]))]
    scores = score(taken)
    offsets = find_offsets(scores, truth)
    scores += offsets
    scale = find_scale(scores.double(), truth) if classes > 1 else 1.0
    miou = measure_miou(scores.argmax(1), truth, classes)
    found = HeldOutIoU(miou=miou, pixels=len(truth), images=pixels.images)
    return fold_patch_head(*whole.solve(taken), offsets.double(), scale, taken, found)


def fold_patch_head(
    weight: Tensor, bias: Tensor, offsets: Tensor, scale: float, penalty: float, held: HeldOutIoU | None
) -> PatchHead:
    """Folds offsets and scale into the layer."""
    folded = {"weight": (scale * weight).float().contiguous(), "bias": (scale * (bias + offsets)).float()}
    return PatchHead(**folded, penalty=penalty, scale=scale, offsets=offsets, held=held)


def measure_miou(predicted: Tensor, truth: Tensor, classes: int) -> float:
    """The mean IoU over the classes that occur in predictions or truth, both [P]."""
    cells = torch.bincount(truth * classes + predicted, minlength=classes**2).view(classes, classes).double()
    return float(average_ious(cells.diagonal(), cells.sum(0), cells.sum(1)))


def average_ious(both: Tensor, predicted: Tensor, truth: Tensor) -> Tensor:
    """The mean IoU from pixel counts [..., K], over the classes that occur."""
    either = predicted + truth - both
    return (both / either.clamp(min=1)).sum(-1) / (either > 0).sum(-1).clamp(min=1)


def find_offsets(scores: Tensor, truth: Tensor) -> Tensor:
    """The offsets of the scores [P, K] of each class that maximise the mean IoU; 0 for classes that do not occur. Of
    equally good offsets the smallest is taken."""
    classes = scores.shape[1]
    most = max(WORK // classes**2, 1)
    scores, truth = (part[:: -(-len(truth) // most)] for part in (scores, truth))
    sizes = torch.bincount(truth, minlength=classes).double()
    offsets = scores.new_zeros(classes)
    reach = round(REACH / STEP)
    grid = torch.arange(-reach, reach + 1) * STEP
    for _ in range(ROUNDS):
        before = offsets.clone()
        for at in sizes.nonzero()[:, 0].tolist():
            values = score_offsets(scores + offsets, offsets[at], truth, at, sizes, grid)
            best = grid[values == values.max()]
            offsets[at] = best[best.abs().argmin()]
        if torch.equal(before, offsets):
            break
    return offsets


def score_offsets(scores: Tensor, own: Tensor, truth: Tensor, at: int, sizes: Tensor, grid: Tensor) -> Tensor:
    """The mean IoU for each of some rising offsets [S] of class `at`, whose present one is `own`, given the scores
    [P, K] with all present offsets and the pixels of each class [K]."""
    classes, steps = scores.shape[1], len(grid)
    others = scores.clone()
    others[:, at] = -math.inf
    best, runner = others.max(1)
    step = torch.searchsorted(grid, best - (scores[:, at] - own), right=True)  # the first that wins the pixel, if any

    def count(which: Tensor, kind: Tensor) -> Tensor:
        """Counts the pixels [S, K] that are won up to each step, by their class."""
        cells = torch.bincount(step[which] * classes + kind[which], minlength=(steps + 1) * classes)
        return cells.view(steps + 1, classes)[:steps].cumsum(0).double()

    right = runner == truth
    lost, lost_right = count(torch.ones_like(right), runner), count(right, runner)
    said = torch.bincount(runner, minlength=classes) - lost
    both = torch.bincount(runner[right], minlength=classes) - lost_right
    said[:, at], both[:, at] = lost.sum(1), count(truth == at, truth)[:, at]
    return average_ious(both, said, sizes)
