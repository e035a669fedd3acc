"""Least squares from patch tokens to shares of classes: the sums are those of plain algebra, offsets are the best."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.targets import IGNORED
from vitrail.evaluation.frozen import ridge_patches
from vitrail.evaluation.frozen.ridge_patches import (
    HeldOutPixels,
    PatchSums,
    count_shares,
    draw_pixels,
    find_offsets,
    fit_patch_head,
    measure_miou,
)


def noisy(count: int, seed: int = 0, far: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose first three numbers say the shares of three classes, the first one common."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.from_numpy(np.random.default_rng(seed).dirichlet([3.0, 1.0, 0.5], count)).float()
    tokens = torch.randn(count, 6, generator=generator)
    tokens[:, :3] += 4 * shares
    return tokens + far, shares, torch.rand(count, generator=generator)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_sums_over_batches_give_weighted_ridge_regression(far: float) -> None:
    tokens, shares, weights = noisy(300, far=far)
    sums = PatchSums(tokens[:7].mean(0), 3)
    for part in zip(*(one.split(64) for one in (tokens, shares, weights)), strict=True):
        sums.add(*part)
    weight, bias = sums.decompose().solve(5.0)

    x, y, w = tokens.double(), shares.double(), weights.double()[:, None]
    mean = (w * x).sum(0) / w.sum()
    std = ((w * (x - mean).square()).sum(0) / w.sum()).sqrt() + ridge_patches.EPS
    z, centred = (x - mean) / std, y - (w * y).sum(0) / w.sum()
    expected = torch.linalg.solve(z.T @ (w * z) + 5.0 * torch.eye(6), z.T @ (w * centred))
    torch.testing.assert_close(weight, (expected / std[:, None]).T, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(bias, (w * y).sum(0) / w.sum() - weight @ mean, rtol=1e-6, atol=1e-6)
    assert sums.weight == pytest.approx(float(weights.sum()), rel=1e-5)


def test_joined_sums_are_those_of_everything() -> None:
    tokens, shares, weights = noisy(100)
    whole, *parts = (PatchSums(tokens.mean(0), 3) for _ in range(3))
    whole.add(tokens, shares, weights)
    for sums, mine in zip(parts, (slice(0, 30), slice(30, None)), strict=True):
        sums.add(tokens[mine], shares[mine], weights[mine])
    joined = parts[0].join(parts[1])
    torch.testing.assert_close(joined.gram, whole.gram)
    torch.testing.assert_close(joined.targets, whole.targets)


def test_shares_of_patches_are_counted_without_ignored_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(0, 4, (2, 6, 8), generator=generator).to(torch.uint8)
    masks[masks == 3] = IGNORED
    shares, weights = count_shares(masks, (3, 2), 3)
    for at, (image, row, column) in enumerate(itertools.product(range(2), range(3), range(2))):
        patch = masks[image, 2 * row : 2 * row + 2, 4 * column : 4 * column + 4].flatten()
        seen = patch[patch != IGNORED].long()
        assert weights[at] == pytest.approx(len(seen) / 8)
        expected = torch.bincount(seen, minlength=3) / max(len(seen), 1)
        torch.testing.assert_close(shares[at], expected.float())


def test_drawn_pixels_are_what_the_head_resizes() -> None:
    """A linear head on drawn tokens gives the resized logits at those pixels."""
    tokens, mask = torch.randn(5, 3, 4), torch.randint(0, 3, (12, 20)).to(torch.uint8)
    mask[::3] = IGNORED
    weight = torch.randn(3, 5)
    logits = F.interpolate((weight @ tokens.flatten(1)).view(1, 3, 3, 4), mask.shape, mode="bilinear")[0]
    seen = mask != IGNORED
    found, truth = draw_pixels(tokens, mask, 10**6, 0)
    torch.testing.assert_close(found @ weight.T, logits[:, seen].T, rtol=1e-5, atol=1e-5)
    assert torch.equal(truth, mask[seen].long())
    some, few = draw_pixels(tokens, mask, 9, 0)
    assert some.shape == (9, 5)
    assert torch.equal(draw_pixels(tokens, mask, 9, 0)[0], some)
    assert few.max() < 3
    nothing, none = draw_pixels(tokens, torch.full((4, 4), IGNORED, dtype=torch.uint8), 9, 0)
    assert (len(nothing), len(none)) == (0, 0)


def test_offsets_are_the_best_of_all_of_two_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(4000, generator=generator) < 0.1).long()
    scores = torch.stack([1 - 0.2 * truth, 0.2 * truth + 0.4], 1) + 0.15 * torch.randn(4000, 2, generator=generator)
    offsets = find_offsets(scores, truth)
    reached = measure_miou((scores + offsets).argmax(1), truth, 2)
    assert reached > measure_miou(scores.argmax(1), truth, 2) + 0.05
    tried = [measure_miou((scores + torch.tensor([0.0, at / 50])).argmax(1), truth, 2) for at in range(-50, 51)]
    assert reached >= max(tried) - 0.005


def test_offsets_never_harm_and_leave_missing_classes_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randint(0, 4, (2000,), generator=generator)
    scores = F.one_hot(truth, 6) + 0.6 * torch.randn(2000, 6, generator=generator)
    offsets = find_offsets(scores, truth)
    assert offsets[4:].tolist() == [0, 0]
    before, after = (measure_miou(one.argmax(1), truth, 6) for one in (scores, scores + offsets))
    assert after >= before
    clear = F.one_hot(truth, 6).float()  # nothing to gain
    assert find_offsets(clear, truth).tolist() == [0] * 6


def held_out(seed: int = 1) -> HeldOutPixels:
    tokens, shares, _ = noisy(800, seed)
    return HeldOutPixels(tokens=tokens, truth=shares.argmax(1), images=8)


def test_a_head_is_chosen_on_held_out_pixels_and_fitted_on_all() -> None:
    rest, held = (PatchSums(torch.zeros(6), 3) for _ in range(2))
    rest.add(*noisy(500))
    held.add(*noisy(100, 2))
    head, pixels = fit_patch_head(rest, held, held_out()), held_out()
    weight, bias = rest.join(held).decompose().solve(head.penalty)
    torch.testing.assert_close(head.weight, (head.scale * weight).float())
    torch.testing.assert_close(head.bias, (head.scale * (bias + head.offsets)).float())
    assert head.held is not None
    assert (head.held.pixels, head.held.images) == (800, 8)
    logits = F.linear(pixels.tokens, head.weight, head.bias)
    assert measure_miou(logits.argmax(1), pixels.truth, 3) == pytest.approx(head.held.miou, abs=0.03)
    sure, right = logits.softmax(1).amax(1).mean(), (logits.argmax(1) == pixels.truth).float().mean()
    assert abs(float(sure - right)) < 0.05  # the scale is that of probabilities
    assert fit_patch_head(rest, held, held_out(), penalty=3.0).penalty == 3.0


def test_without_held_out_pixels_there_are_defaults() -> None:
    rest, held = (PatchSums(torch.zeros(6), 3) for _ in range(2))
    rest.add(*noisy(50))
    for pixels in (None, replace(held_out(), tokens=torch.zeros(0, 6), truth=torch.zeros(0, dtype=torch.long))):
        head = fit_patch_head(rest, held, pixels)
        assert head.held is None
        assert head.penalty == ridge_patches.PENALTY
        assert head.offsets.tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="penalty=-1"):
        fit_patch_head(rest, held, None, penalty=-1.0)


def test_nothing_to_learn_from_is_refused() -> None:
    empty = PatchSums(torch.zeros(6), 3)
    with pytest.raises(BadLabels):
        empty.decompose()
    empty.add(torch.full((2, 6), torch.inf), torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(DataError, match="overflows"):
        empty.decompose()
