"""Converts images to patches and back, draws the hidden patches, and is the base of objectives on patches.

Hidden patches are drawn on the batch's device, as a pure function of (seed, step, epoch, sample).

The random numbers are those of data/randomness.py, computed by torch, so that the host never waits for the device to
learn which samples a batch holds. A sample's draws do not depend on the rest of its batch: micro-batches and processes
change nothing. Everything that a step draws comes from one call, because every such operation is a kernel launch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.randomness import GOLDEN, as_int64, hash_keys, hash_word, shift_right, splitmix64_tensor
from vitrail.models.family import ModelConfig
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.objectives.objective import Objective, ObjectiveContext

GREY = 128  # of hidden patches in a report


def cut_patches(pictures: Tensor, patch: Pair) -> Tensor:
    """Patches in raster order, each as (row, column, channel): [B, C, H, W] -> [B, N, P·P·C]."""
    rows, columns = patch
    split = pictures.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))  # [B, C, H/P, P, W/P, P]
    return split.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def join_patches(patches: Tensor, patch: Pair, grid: Pair) -> Tensor:
    """Joins patches to images, the inverse of `cut_patches`: [B, N, P·P·C] -> [B, C, H, W]."""
    split = patches.unflatten(2, (*patch, -1)).unflatten(1, grid)  # [B, H/P, W/P, P, P, C]
    return split.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def gather_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """Some tokens of each sample: [B, T, D] at [B, M] -> [B, M, D]."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))


def scatter_patches(patches: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """A copy of patches [B, N, D] with `values` [B, M, D] at places [B, M]."""
    return patches.scatter(1, places[:, :, None].expand_as(values), values)


class ViTObjective(Objective):
    """The base of objectives that learn from images alone: a ViT without a head, whose config is checked."""

    network: ViT  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, as built
    model: ViTConfig

    def __init__(self, network: nn.Module, config: Any, context: ObjectiveContext) -> None:
        name = f"objective {type(config).__name__}"
        if not isinstance(network, ViT):
            raise ConfigError(f"{name} trains a ViT, not a {type(network).__name__}; use a ViT")
        if (head := network.config.head) != "none":
            raise ConfigError(f"{name} leaves the head={head!r} untrained; use head='none', classes=0")
        super().__init__(network, context.preprocessing)
        self.config, self.model = config, config.check_model(network.config)
        self.steps, self.world = context.steps, context.world

    def freeze_readout(self) -> None:
        """For an objective that reads patch tokens: freezes the layers after them, which would get no gradients."""
        for part in (self.network.neck, self.network.map_pool, self.network.projection):
            if part is not None:
                part.requires_grad_(False)

    def cast(self, images: Tensor) -> Tensor:
        """Casts images to the current type of the network's weights: that of bfloat16 copies in a bfloat16 run."""
        return images.to(self.network.embedding.projection.weight.dtype)


def check_patch_model(model: ModelConfig, objective: str) -> ViTConfig:
    """The model as a ViT config; ConfigError if its tokens are not patches of the image."""
    model = vit_config(model, f"objective {objective}, which hides patches,")
    if model.backbone is not None:
        why = f"objective {objective} hides patches of the image, and a hybrid's tokens come from its feature map"
        raise ConfigError(f"{why}; use a ViT without a backbone")
    if model.channels != 3:
        raise ConfigError(f"objective {objective} predicts pixels of 3 channels; the model takes {model.channels}")
    return model


def count_masked(model: ViTConfig, rate: float, field: str, *, most: int) -> int:
    """How many patches of an image are hidden: rate·N, rounded. ConfigError unless that is from 1 to `most`."""
    count = round(rate * model.patches)
    if not 1 <= count <= most:
        found = f"objective.{field}={rate} hides {count} of {model.patches} patches, which must be 1 to {most}"
        raise ConfigError(f"{found}; use another {field} or smaller patches")
    return count


def to_bytes(values: Tensor) -> Tensor:
    """Values from 0 to 1 as bytes; values outside are clamped."""
    return (values.float() * 255).round().clamp(0, 255).byte()


STEP = as_int64(int(GOLDEN))
ROOM = 40  # bits for the sample; an epoch's number comes above


def draw_bits(purpose: str, count: int, *, seed: int, step: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """Draws int64 numbers of 64 random bits [B, count] for samples [B] in their epochs [B]. The numbers of a sample are
    distinct, since `splitmix64_tensor` is a bijection."""
    start = as_int64(int(hash_keys(hash_word(purpose), seed, step)[0]))
    keys = splitmix64_tensor(((epoch << ROOM) + sample) * STEP + start)
    return splitmix64_tensor(keys[:, None] + torch.arange(1, count + 1, device=keys.device) * STEP)


def to_uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1) as float32: the upper 24 bits."""
    return shift_right(bits, 40).float() * 2.0**-24


def to_integers(bits: Tensor, limit: int) -> Tensor:
    """Whole numbers in [0, limit): the upper 63 bits modulo the limit, so the bias is negligible."""
    return shift_right(bits, 1) % limit


def draw_permutations(bits: Tensor) -> Tensor:
    """Draws a permutation for each row, all equally likely."""
    return bits.argsort(1)
