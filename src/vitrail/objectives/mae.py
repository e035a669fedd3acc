"""Masked autoencoders (He et al. 2022, arXiv 2111.06377): a practitioner's choice instead of B.1.2.

The encoder sees a quarter of the patches and nothing of the others, not even mask tokens. A light decoder takes its
output tokens, with a learnable mask token in every empty place, and predicts the hidden pixels.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.data.loader import Batch
from vitrail.models.attention import Places
from vitrail.models.backbone import Backbone, eval_mode
from vitrail.models.blocks import Block
from vitrail.models.family import ModelConfig
from vitrail.models.layers import initialise
from vitrail.models.positions.embeddings import SineTable
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives import patch_ops as ops
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput

EPS = 1e-6  # on the variance of a patch, as published


@dataclass(frozen=True, kw_only=True, slots=True)
class MAE(ObjectiveConfig):
    """round(mask·N) patches of each image are hidden. The decoder's MLP is four times as wide as the decoder. With
    `normalise`, the targets are patches normalised by their own mean and deviation."""

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return MAEObjective(network, self, context)

    mask: float = 0.75
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    normalise: bool = True

    def __post_init__(self) -> None:
        self.check_numbers("lie between 0 and 1", lambda value: 0 < value < 1, "mask")
        sizes = ("decoder_width", "decoder_depth", "decoder_heads")
        self.check_numbers("be at least 1", lambda value: value >= 1, *sizes)
        self.check_numbers("be divisible by 4, for sine-cosine positions", lambda value: not value % 4, "decoder_width")
        if (width := self.decoder_width) % self.decoder_heads:
            raise ConfigError(f"objective.decoder_heads={self.decoder_heads} does not divide decoder_width={width}")

    def check_model(self, model: ModelConfig) -> ViTConfig:
        """The model as a ViT config; ConfigError if its encoder cannot run on a subset of the tokens."""
        config = ops.check_patch_model(model, "MAE")
        if config.attention != "full":
            raise ConfigError("objective MAE drops tokens, and attention='axial' needs the whole grid; use 'full'")
        if config.position == "relative" or config.entry != "stem":
            why = f"position='{config.position}' enters at '{config.entry}'"
            raise ConfigError(f"objective MAE drops tokens after the stem, and {why}; use another kind at the stem")
        if config.windows is not None or config.position_bias != "none":
            what = "windows need" if config.windows is not None else f"position_bias={config.position_bias!r} needs"
            raise ConfigError(f"objective MAE drops tokens, and {what} the whole grid; use a network without")
        self.num_masked(config)
        return config

    def num_masked(self, model: ViTConfig) -> int:
        """How many patches of an image are hidden."""
        return ops.count_masked(model, self.mask, "mask", most=model.patches - 1)

    def decoder(self, model: ViTConfig) -> ViTConfig:
        """The decoder's layers as a config: the encoder's numerics, and no regularisers."""
        width = self.decoder_width
        return replace(
            model.without_parts("class_tokens"),
            dropout=0.0,
            attention_dropout=0.0,
            stochastic_depth=0.0,
            pool="mean",
            norm_after_pool=False,
            width=width,
            depth=self.decoder_depth,
            mlp_width=4 * width,
            heads=self.decoder_heads,
            head="none",
            classes=0,
            position="sincos2d",
            placement="stem",
        )

    def macs_per_image(self, model: ModelConfig) -> float:
        """MACs per image: the embedding of all patches, the encoder's layers on the visible ones, the decoder's on all,
        the last layer on the hidden ones."""
        config = self.check_model(model)
        decoder, count = self.decoder(config), self.num_masked(config)
        pixels = config.patch[0] * config.patch[1] * 3
        seen = config.tokens - count
        ends = config.patches * pixels * config.width + count * decoder.width * pixels
        layers = blocks_macs(config, seen) + blocks_macs(decoder, config.tokens)
        return ends + layers + seen * config.width * decoder.width


def blocks_macs(config: ViTConfig, tokens: int) -> int:
    """MACs of all layers for a number of tokens: projections, attention, MLP."""
    hidden = (3 if config.gated else 2) * config.mlp_width
    return config.depth * tokens * (config.attention_width * (4 * config.width + 2 * tokens) + hidden * config.width)


class Decoder(nn.Module):
    """Predicts the pixels of the hidden patches from the encoder's tokens of the visible ones."""

    def __init__(self, encoder: ViTConfig, config: ViTConfig) -> None:
        super().__init__()
        self.prefix = config.prefix
        self.places = Places(config.grid)
        self.narrow = nn.Linear(encoder.width, config.width)
        self.mask = nn.Parameter(torch.empty(1, 1, config.width))
        self.position = SineTable(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.predict = nn.Linear(config.width, config.patch[0] * config.patch[1] * 3)

    def initialise(self) -> None:
        nn.init.normal_(self.mask, std=0.02)
        for layer in (self.narrow, self.predict):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor, masked: Tensor, restore: Tensor) -> Tensor:
        """Predicts [B, M, P·P·3] from the tokens of class token, registers and visible patches [B, T - M, D], the
        indices of the hidden patches [B, M], and the index of each patch in (visible, hidden) [B, N]."""
        y = self.narrow(tokens)
        empty = self.mask.to(y.dtype).expand(*masked.shape, -1)
        patches = ops.gather_tokens(torch.cat([y[:, self.prefix :], empty], 1), restore)
        y = torch.cat([y[:, : self.prefix], patches], 1)
        y = y + self.position().to(y.dtype)
        for block in self.blocks:
            y = block(y, self.places)
        return self.predict(self.norm(ops.gather_tokens(y, masked + self.prefix)))


class MAEObjective(ops.ViTObjective):
    """The loss of an image is the mean squared error over the pixels of its hidden patches. A class token learns only
    through attention from the other tokens, as published."""

    config: MAE

    def __init__(self, network: Backbone, config: MAE, context: ObjectiveContext) -> None:
        super().__init__(network, config, context)
        self.freeze_readout()
        self.visible = self.model.patches - config.num_masked(self.model)
        self.decoder = Decoder(self.model, config.decoder(self.model))
        initialise(self.decoder)

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Pixels as bytes [B, 3, H, W], indices of the visible patches [B, N - M] and of the hidden ones [B, M], the
        index of each patch in the two concatenated [B, N], and which images count [B]."""
        return batch.pixels, *self.draw(seed=seed, step=step, epoch=batch.epoch, sample=batch.sample), batch.valid

    def draw(self, *, seed: int, step: int, epoch: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draws which patches of the samples [B] are visible and which are hidden, and the inverse order."""
        bits = ops.draw_bits("mae", self.model.patches, seed=seed, step=step, epoch=epoch, sample=sample)
        order = ops.draw_permutations(bits)
        return order[:, : self.visible], order[:, self.visible :], order.argsort(1)

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, visible, masked, restore, valid = inputs
        images = self.normalise(pixels)
        predicted = self.decoder(self.encode(images, visible), masked, restore).float()
        truth = ops.gather_tokens(ops.cut_patches(images, self.model.patch), masked)
        mean, std = self.patch_moments(truth)
        losses = (predicted - (truth - mean) / std).square().mean((1, 2))
        # Places that do not count may hold anything, NaN included, so they are replaced rather than multiplied by 0.
        return ObjectiveOutput(torch.where(valid, losses, 0.0).sum(), valid.float().sum(), {})

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """Class token, registers and visible patches after the encoder's last norm: [B, T - M, D]."""
        z = self.network.embed(self.cast(images), keep=visible)
        return self.network.norm(self.network.forward_blocks(z, keep=visible))

    def patch_moments(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and deviation [B, M, 1] that normalise each patch [B, M, P·P·3]. As in the published code: over all
        channels together, with the unbiased variance, of pixels normalised as for the encoder."""
        if not self.config.normalise:
            return patches.new_zeros(1), patches.new_ones(1)
        return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + EPS).sqrt()

    @torch.no_grad()
    def pictures(self, pixels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures for reports, uint8 [B, 3, H, W] each: the images, what the encoder sees of them (hidden patches
        grey), and the images with the decoder's predictions in the hidden places, denormalised with each patch's own
        mean and deviation."""
        sample = torch.arange(len(pixels), device=pixels.device)
        visible, masked, restore = self.draw(seed=seed, step=0, epoch=torch.zeros_like(sample), sample=sample)
        images = self.normalise(pixels)
        with eval_mode(self):
            predicted = self.decoder(self.encode(images, visible), masked, restore).float()
        patch, grid = self.model.patch, self.model.grid
        mean, std = self.patch_moments(ops.gather_tokens(ops.cut_patches(images, patch), masked))
        drawn = predicted * std + mean  # [B, M, P·P·3], normalised as the images are
        drawn = drawn.unflatten(2, (-1, 3)) * self.std.view(3) + self.mean.view(3)
        known, predicted_bytes = ops.cut_patches(pixels, patch), ops.to_bytes(drawn.flatten(2))
        fills = (torch.full_like(predicted_bytes, ops.GREY), predicted_bytes)
        seen, whole = (ops.join_patches(ops.scatter_patches(known, masked, fill), patch, grid) for fill in fills)
        return pixels, seen, whole
