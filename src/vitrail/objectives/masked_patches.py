"""Masked patch prediction (4.6, B.1.2), which the paper describes and its authors never released.

Half of an image's patch embeddings are corrupted: of those 80 % become a learnable mask embedding, 10 % the embedding
of another patch, 10 % stay. The output token of each corrupted patch predicts the patch's original content, by default
its mean colour at 3 bits per channel: 512 classes.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.text import format_size
from vitrail.data.loader import Batch
from vitrail.models.backbone import Backbone, eval_mode
from vitrail.models.family import ModelConfig
from vitrail.models.layers import initialise
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives import patch_ops as ops
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput

LEVELS = 8  # of a channel: 3 bits
COLOURS = LEVELS**3


def to_colour_classes(patches: Tensor, side: int) -> Tensor:
    """Colour classes of patches shrunk to side x side by the mean over areas: uint8 [..., P, P, 3] -> [..., side²].

    With the mean m of a channel in [0, 1]: b = min(7, ⌊8·m⌋), and the class is 64·R + 8·G + B. This is computed in
    integers, so that a mean on the edge of two bins falls into the upper one on every device. If the side does not
    divide the patch, areas overlap by a pixel, as in adaptive average pooling."""
    cells = [
        LEVELS * patches[..., top:bottom, left:right, :].sum((-3, -2)) // (255 * (bottom - top) * (right - left))
        for top, bottom in cell_bounds(patches.shape[-3], side)
        for left, right in cell_bounds(patches.shape[-2], side)
    ]
    red, green, blue = torch.stack(cells, -2).clamp(max=LEVELS - 1).unbind(-1)
    return LEVELS**2 * red + LEVELS * green + blue


def cell_bounds(length: int, count: int) -> list[tuple[int, int]]:
    """The bounds of `count` equal parts of a side."""
    return [(part * length // count, -(-(part + 1) * length // count)) for part in range(count)]


def bin_centres(classes: Tensor) -> Tensor:
    """The colour in the middle of each class's bin, red, green and blue from 0 to 1: [...] -> [..., 3]."""
    bins = torch.stack([classes // LEVELS**2, classes // LEVELS % LEVELS, classes % LEVELS], -1)
    return (bins.float() + 0.5) / LEVELS


Target: TypeAlias = Literal["mean-colour", "small-patch", "pixels"]

SIDES: dict[Target, int] = {"mean-colour": 1, "small-patch": 4}  # of the downsized patch whose colours are classified


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedPatches(ObjectiveConfig):
    """What a corrupted patch predicts: its mean colour at 3 bits per channel, the colours of the patch downsized to
    4x4, or its pixels (L2). round(rate·N) patches of each image are corrupted, drawn again in each epoch. Each of them
    is masked with probability `mask`, swapped with probability `swap`, and otherwise stays as it is, independently of
    the others."""

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return MaskedPatchesObjective(network, self, context)

    target: Target = "mean-colour"
    rate: float = 0.5
    mask: float = 0.8
    swap: float = 0.1

    def __post_init__(self) -> None:
        if self.target not in get_args(Target):
            raise unknown_name("objective.target", str(self.target), get_args(Target))
        self.check_numbers("be above 0 and at most 1", lambda value: 0 < value <= 1, "rate")
        if min(self.mask, self.swap) < 0 or self.mask + self.swap > 1 + 1e-9:
            shares = f"objective.mask={self.mask} and swap={self.swap} are shares of the corrupted patches"
            raise ConfigError(f"{shares}: neither below 0, together at most 1")

    def check_model(self, model: ModelConfig) -> ViTConfig:
        """The model as a ViT config; raises where this objective cannot train it."""
        config = ops.check_patch_model(model, "masked patches")
        self.num_masked(config)
        if self.swap and config.patches < 2:
            raise ConfigError(f"objective.swap={self.swap} takes another patch, but the image has only one; use swap=0")
        if min(config.patch) < (side := SIDES.get(self.target, 1)):
            why = f"makes {side}x{side} of a patch, and patch={format_size(config.patch)} is smaller"
            raise ConfigError(f"objective.target='{self.target}' {why}; use larger patches or another target")
        return config

    def num_masked(self, model: ViTConfig) -> int:
        """How many patches of an image are corrupted."""
        return ops.count_masked(model, self.rate, "rate", most=model.patches)

    def outputs(self, model: ViTConfig) -> int:
        """How many outputs the head has for a patch."""
        if self.target == "pixels":
            return model.patch[0] * model.patch[1] * 3
        return SIDES[self.target] ** 2 * COLOURS

    def macs_per_image(self, model: ModelConfig) -> float:
        """MACs per image: the network on all tokens, the head on the corrupted ones."""
        config = self.check_model(model)
        head = self.num_masked(config) * config.width * self.outputs(config)
        return replace(config, head="none", classes=0).macs + head


class PatchHead(nn.Module):
    """What the objective adds to the network: the mask embedding and the prediction layer. That layer starts at zero,
    like every last layer in this package."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.empty(1, 1, width))
        self.predict = nn.Linear(width, outputs)

    def initialise(self) -> None:
        nn.init.normal_(self.mask, std=0.02)
        nn.init.zeros_(self.predict.weight)
        nn.init.zeros_(self.predict.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.predict(tokens)


class MaskedPatchesObjective(ops.ViTObjective):
    """The loss of an image is the mean over its corrupted patches and over everything that each of them predicts."""

    config: MaskedPatches

    def __init__(self, network: Backbone, config: MaskedPatches, context: ObjectiveContext) -> None:
        super().__init__(network, config, context)
        self.freeze_readout()
        self.count = config.num_masked(self.model)
        self.head = PatchHead(self.model.width, config.outputs(self.model))
        initialise(self.head)

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Pixels as bytes [B, 3, H, W], the index of the patch whose embedding is at each place, or N for the mask [B,
        N], the corrupted places [B, M], and which images count [B]."""
        source, corrupted = self.draw(seed=seed, step=step, epoch=batch.epoch, sample=batch.sample)
        return batch.pixels, source, corrupted, batch.valid

    def draw(self, *, seed: int, step: int, epoch: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Draws, for the samples [B], the source of each place and the corrupted places."""
        patches, count = self.model.patches, self.count
        bits = ops.draw_bits("masked patches", patches + 2 * count, seed=seed, step=step, epoch=epoch, sample=sample)
        which, how, other = bits.split([patches, count, count], 1)
        corrupted = ops.draw_permutations(which)[:, :count]
        chance = ops.to_uniform(how)
        # From 1 to N - 1 places further on, around the end: every patch but itself.
        swapped = (corrupted + 1 + ops.to_integers(other, max(patches - 1, 1))) % patches
        chosen = torch.where(chance < self.config.mask + self.config.swap, swapped, corrupted)
        chosen = chosen.masked_fill(chance < self.config.mask, patches)
        itself = torch.arange(patches, device=sample.device).expand(len(sample), -1)
        return itself.scatter(1, corrupted, chosen), corrupted

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, source, corrupted, valid = inputs
        predicted = self.predict(pixels, source, corrupted)
        truth = ops.gather_tokens(ops.cut_patches(pixels, self.model.patch), corrupted)
        if self.config.target == "pixels":
            losses = (predicted - truth.float() / 255).square().mean((1, 2))
            tallies: dict[str, Tensor] = {}
        else:
            classes = to_colour_classes(truth.unflatten(2, (*self.model.patch, 3)), SIDES[self.config.target])
            logits = predicted.unflatten(2, (-1, COLOURS))  # [B, M, cells, 512]
            losses = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), reduction="none")
            losses = losses.view(len(pixels), -1).mean(1)
            hits = (logits.argmax(-1) == classes).float().mean((1, 2))
            tallies = {"hits": torch.where(valid, hits, 0.0).sum()}
        # Places that do not count may hold anything, NaN included, so they are replaced rather than multiplied by 0.
        return ObjectiveOutput(torch.where(valid, losses, 0.0).sum(), valid.float().sum(), tallies)

    def predict(self, pixels: Tensor, source: Tensor, corrupted: Tensor) -> Tensor:
        """Predictions of the corrupted patches from their own output tokens: float32 [B, M, outputs]."""
        # Patches are embedded independently: a swapped embedding is that of the other patch's pixels in this place. As
        # bytes they are swapped without any gradient to propagate.
        images = self.cast(self.normalise(self.swap_patches(pixels, source)))
        masked = source == self.model.patches
        z = self.network.forward_blocks(self.network.embed(images, masked=masked, mask_token=self.head.mask))
        return self.head(self.network.norm(ops.gather_tokens(z, corrupted + self.model.prefix))).float()

    def swap_patches(self, pixels: Tensor, source: Tensor) -> Tensor:
        """The images with swapped patches in place; masked patches still show their own pixels."""
        patches, patch = self.model.patches, self.model.patch
        places = torch.where(source == patches, torch.arange(patches, device=source.device), source)
        return ops.join_patches(ops.gather_tokens(ops.cut_patches(pixels, patch), places), patch, self.model.grid)

    @torch.no_grad()
    def pictures(self, pixels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures for reports, uint8 [B, 3, H, W] each: the images, what the network sees of them (masked patches
        grey), and the images with its predictions in place of everything that it does not see."""
        sample = torch.arange(len(pixels), device=pixels.device)
        source, corrupted = self.draw(seed=seed, step=0, epoch=torch.zeros_like(sample), sample=sample)
        with eval_mode(self):
            outputs = self.predict(pixels, source, corrupted)
        patch, grid = self.model.patch, self.model.grid
        truth, masked = ops.cut_patches(pixels, patch), (source == self.model.patches)[:, :, None]
        seen = ops.cut_patches(self.swap_patches(pixels, source), patch).masked_fill(masked, ops.GREY)
        unseen = source != torch.arange(self.model.patches, device=source.device)
        drawn = torch.where(unseen[:, :, None], ops.scatter_patches(truth, corrupted, self.as_patches(outputs)), truth)
        return pixels, ops.join_patches(seen, patch, grid), ops.join_patches(drawn, patch, grid)

    def as_patches(self, outputs: Tensor) -> Tensor:
        """Predictions [B, M, outputs] as bytes [B, M, P·P·3]; a colour class is the middle of its bin."""
        if self.config.target == "pixels":
            return ops.to_bytes(outputs)
        classes = outputs.unflatten(2, (-1, COLOURS)).argmax(-1)  # [B, M, cells]
        small = bin_centres(classes).flatten(0, 1)  # [B M, cells, 3]
        side = SIDES[self.config.target]
        blown = F.interpolate(small.mT.unflatten(2, (side, side)), self.model.patch)
        return ops.to_bytes(blown.permute(0, 2, 3, 1).flatten(1).unflatten(0, outputs.shape[:2]))
