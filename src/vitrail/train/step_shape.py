"""Patch and image sizes that vary from step to step: drawn for every step (FlexiViT), or in stages with few tokens
first, because what is learnt early can be learnt from fewer tokens.

They depend only on the step and the seed, so they are the same in every process and after a resume.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size, join_words
from vitrail.data.loader import Batch
from vitrail.data.randomness import hash_keys, hash_word
from vitrail.models.build import build_on_meta
from vitrail.tasks.registry import targets_of
from vitrail.train.config import Run


def patch_at(run: Run, step: int) -> int | None:
    """The patch size of a step; None for the network's own."""
    if not run.patches:
        return None
    if run.patch_order == "listed":
        return stage_of(run.patches, step, run.steps)
    return draw_patch(run.patches, run.seed, step)


def draw_patch(patches: Sequence[int], seed: int, step: int) -> int:
    return patches[int(hash_keys(hash_word("patch"), seed, step)[0] % np.uint64(len(patches)))]


def stage_of(listed: Sequence[int], step: int, steps: int) -> int:
    """The entry for a step: each has an equal share of the steps, in order."""
    return listed[min(step * len(listed) // steps, len(listed) - 1)]


def list_stages(run: Run) -> list[range]:
    """The steps of each stage; a single range without stages."""
    listed = run.sizes or (run.patches if run.patch_order == "listed" else ())
    count = max(len(listed), 1)
    ends = [-(-stage * run.steps // count) for stage in range(count + 1)]
    return [range(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]


def resize_batch(batch: Batch, run: Run) -> Batch:
    """Resizes a batch to the image size of its step."""
    if not run.sizes:
        return batch
    side = stage_of(run.sizes, batch.step, run.steps)
    return replace(batch, views=tuple(resize_pixels(view, side) for view in batch.views))


def resize_pixels(pixels: Tensor, side: int) -> Tensor:
    """Resizes bytes with antialiasing: [B, 3, H, W] -> [B, 3, side, side]."""
    if tuple(pixels.shape[2:]) == (side, side):
        return pixels
    resized = F.interpolate(pixels.float(), (side, side), mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)


def check_step_shapes(run: Run) -> None:
    """ConfigError unless the network can be trained at each of the patch or image sizes."""
    if run.patch_order == "listed" and not run.patches:
        raise ConfigError("patch_order=listed needs the patch sizes; give patches=8,4, or leave it out")
    for name, listed, check in (("patches", run.patches, check_patches), ("sizes", run.sizes, check_sizes)):
        if not listed:
            continue
        given = f"{name}={','.join(map(str, listed))}"
        if not run.objective.labelled:
            kind = type(run.objective).__name__
            raise ConfigError(f"{given} is for objectives with targets; objective={kind} counts on one grid of patches")
        try:
            check(run)
        except ConfigError as error:
            raise ConfigError(f"{given}: {error}") from None


def check_patches(run: Run) -> None:
    own = run.model.patch_pixels
    if run.patch_order == "listed" and own != (run.patches[-1],) * 2:
        raise ConfigError(f"the last must be the network's own patch size, {format_size(own)}; --patch changes that")
    network = build_on_meta(run.model)
    for patch in run.patches:
        network.set_patch(patch)


def check_sizes(run: Run) -> None:
    model = run.model
    if run.patches:
        raise ConfigError("give patches or sizes, not both")
    if targets_of(run.objective).moves:
        raise ConfigError("masks and segments are not resized; use patches with patch_order=listed")
    if model.image != (run.sizes[-1],) * 2:
        raise ConfigError(f"the last must be the image size, {format_size(model.image)}; --image-size changes that")
    step = model.open_sizes.step
    if step is None:
        raise ConfigError(model.open_sizes.why)
    if bad := [size for size in run.sizes if size % step[0] or size % step[1]]:
        fit = f"use multiples of {step[0]}" if step[0] == step[1] else "use other sizes"
        raise ConfigError(f"{join_words(bad)} px cannot be cut into {format_size(step)} patches; {fit}")


def describe_step_shapes(run: Run) -> str:
    """For the summary of a run; empty if all steps have the same sizes."""
    if run.sizes:
        return f", images of {', then '.join(map(str, run.sizes))} px"
    if run.patches and run.patch_order == "listed":
        return f", patches of {', then '.join(map(str, run.patches))} px"
    return f", patches of {join_words(run.patches)} px in turn" if run.patches else ""
