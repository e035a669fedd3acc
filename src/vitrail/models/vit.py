"""The Vision Transformer (Section 3.1, Eqs. 1-4): class token, positions, encoder, representation.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                        (2)
    z_l  = MLP(LN(z'_l)) + z'_l                              (3)
    y    = LN(z_L^0)                                         (4)

A hybrid differs in `embedding` alone (patch_embedding.py), an Axial-ViT in `blocks` (D.6).

There is one forward pass, `encode`: `embed`, with options for a subset of the tokens (`keep`) and masked tokens, then
`forward_blocks`, with options for the first tokens of the last layer only (`queries`) and intermediates (`taps`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.core.errors import ImageSizeError, unknown_name
from vitrail.core.text import Pair, format_size
from vitrail.models.attention import Attention, expand_line_weights, merge_lines, split_lines
from vitrail.models.backbone import Backbone, Intermediates, Layers, Taps, resolve_layers
from vitrail.models.family import ModelConfig, Pool
from vitrail.models.kernels.fused_ops import can_fuse_linear, fused_gelu_linear
from vitrail.models.layers import LinearPatchHead, StochasticDepth, build_head, pool
from vitrail.models.patch_embedding import HybridEmbedding, PatchEmbedding
from vitrail.models.positions import Numerics, PositionEmbeddings, redraw_positions, resize_positions
from vitrail.models.vit_config import ViTConfig, vit_config


class MLP(nn.Module):
    """Dense, GELU, Dense, with dropout behind each."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.expand = nn.Linear(config.width, config.mlp_width)
        self.tanh = config.gelu == "tanh"
        self.gelu = nn.GELU(approximate="tanh" if self.tanh else "none")
        self.contract = nn.Linear(config.mlp_width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def initialise(self) -> None:
        for layer in (self.expand, self.contract):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, z: Tensor) -> Tensor:
        fused = can_fuse_linear(z, self.expand)
        hidden = fused_gelu_linear(z, self.expand, self.tanh) if fused else self.gelu(self.expand(z))
        return self.dropout(self.contract(self.dropout(hidden)))


class Block(nn.Module):
    """One encoder layer, pre-norm (Eqs. 2 and 3): [B, T, D] -> [B, T, D].

    With `queries` only the first so many tokens come out, [B, queries, D]. They see all others, so they are what they
    would be in the whole, but nothing is computed that only the others need.
    """

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width, eps=config.norm_eps)
        dropout, bias = config.attention_dropout, config.qkv_bias
        self.attention = Attention(config.width, config.heads, qkv_bias=bias, dropout=dropout)
        self.norm_mlp = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.skip = StochasticDepth(config.stochastic_depth * layer / max(config.depth - 1, 1))

    def forward(
        self, z: Tensor, offsets: Tensor | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        before = z
        attended = self.attend(self.norm_attention(z), offsets, queries, taps)
        z = z[:, :queries] + self.skip(self.dropout(attended))  # Eq. 2
        z = z + self.skip(self.transform(self.norm_mlp(z)))  # Eq. 3
        if taps is not None:
            taps.take_layer(before, z, self.expand_weights)
        return z

    def attend(self, z: Tensor, offsets: Tensor | None, queries: int | None, taps: Taps | None) -> Tensor:
        return self.attention(z, offsets, queries, taps)

    def transform(self, z: Tensor) -> Tensor:
        return self.mlp(z)

    def expand_weights(self, weights: Tensor) -> Tensor:
        """Attention weights as those over all tokens of an image, which here they are."""
        return weights


class RowBlock(Block):
    """A layer whose tokens see their own row of the grid alone (D.6)."""

    columns: bool = False

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__(config, layer)
        self.grid = config.grid

    def attend(self, z: Tensor, offsets: Tensor | None, queries: int | None, taps: Taps | None) -> Tensor:
        mixed = self.attention(split_lines(z, self.grid, columns=self.columns), offsets, None, taps)
        return merge_lines(mixed, self.grid, columns=self.columns)[:, :queries]

    def expand_weights(self, weights: Tensor) -> Tensor:
        return expand_line_weights(weights, self.grid, columns=self.columns)


class ColumnBlock(RowBlock):
    """A layer whose tokens see their own column of the grid alone (D.6)."""

    columns: bool = True


class AxialBlock(nn.Module):
    """Row attention and MLP, then column attention and MLP: two layers, each blind to the other axis (D.6)."""

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        self.row = RowBlock(config, layer)
        self.column = ColumnBlock(config, layer)

    def forward(
        self, z: Tensor, offsets: Tensor | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        return self.column(self.row(z, offsets, None, taps), offsets, queries, taps)


class ViT(Backbone):
    """Images to logits: [B, C, H, W] -> [B, K], or to the representation y [B, D] where there is no head; a head of
    patches gives logits per pixel, [B, K, H, W]."""

    config_class: ClassVar[type[ModelConfig]] = ViTConfig
    config: ViTConfig

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        c = vit_config(config)
        if c.backbone is None:
            return cls(c, PatchEmbedding(c.channels, c.width, c.patch))
        return cls(c, HybridEmbedding(c.backbone, c.width, c.patch))

    def __init__(self, config: ViTConfig, embedding: PatchEmbedding):
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.class_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.position = PositionEmbeddings(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.make_block(config, layer) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = build_head(config)

    def make_block(self, config: ViTConfig, layer: int) -> nn.Module:
        """A layer of the encoder. A family whose blocks differ overrides this, and `ViTConfig.walk` for their cost."""
        return Block(config, layer) if config.attention == "full" else AxialBlock(config, layer)

    def initialise(self) -> None:
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02)

    def tokens(self, images: Tensor) -> Tensor:
        """[x_class; registers; x_p E]: the tokens before positions, [B, T, D]."""
        self._check(images)
        patches = self.embedding(images)
        # The class token is added here, in front of registers and patches (Eq. 1).
        first = [token for token in (self.class_token, self.registers) if token is not None]
        prefix = [token.expand(patches.shape[0], -1, -1) for token in first]
        return torch.cat([*prefix, patches], dim=1) if prefix else patches

    def embed(
        self,
        images: Tensor,
        *,
        keep: Tensor | None = None,
        masked: Tensor | None = None,
        mask_token: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """z_0 (Eq. 1): [B, C, H, W] -> [B, T, D]. `masked` patches [B, N] give way to the `mask_token` [1, 1, D] before
        positions are added; those not in `keep` [B, M] are dropped after that, so that T is prefix + M. `positions`
        [1, T, D] are added in place of the network's own."""
        z, prefix = self.tokens(images), self.config.prefix
        if masked is not None:
            assert mask_token is not None
            hidden = F.pad(masked, (prefix, 0)) if prefix else masked
            z = torch.where(hidden[:, :, None], mask_token.to(z.dtype), z)
        z = self.position(z, 0, self._other_grid(images)) if positions is None else z + positions.to(z.dtype)
        if keep is not None:
            kept = z[:, prefix:].gather(1, keep[:, :, None].expand(-1, -1, z.shape[2]))
            z = torch.cat([z[:, :prefix], kept], dim=1)
        return self.dropout(z)

    def encode(
        self, images: Tensor, positions: Tensor | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        """z_L, before the last norm: [B, C, H, W] -> [B, T, D], or the first `queries` tokens of it. Images may be of
        another size than the network's own; `positions` are for `embed`. `taps` collect what each layer does."""
        z = self.embed(images, positions=positions)
        return self.forward_blocks(z, self._other_grid(images), queries=queries, taps=taps)

    def forward_blocks(
        self,
        z: Tensor,
        grid: Pair | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        queries: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """z_0, positions included, through all layers to z_L, or from z_first to z_last: [B, T, D] -> [B, T, D], or the
        first `queries` tokens of it. Where positions enter at the stem alone, T may be any number. `grid` is that of
        images of another size."""
        recompute = self.grad_checkpointing and self.training and torch.is_grad_enabled()
        for layer in range(first, self.config.depth if last is None else last):
            z = self.position(z, layer, grid) if layer else z
            few = queries if layer == self.config.depth - 1 else None
            block, args = self.blocks[layer], (z, self.position.offsets(layer), few, taps)
            z = cast(Tensor, checkpoint(block, *args, use_reentrant=False) if recompute else block(*args))  # Eqs. 2, 3
        return z

    def _check(self, images: Tensor) -> None:
        """Channels must be the network's; so must the size where positions or attention are tied to it."""
        config = self.config
        if self.open_size or tuple(images.shape[1:]) == (config.channels, *config.image):
            return
        step, shape = config.open_sizes.step, tuple(images.shape)
        fits = step and len(shape) == 4 and not (shape[2] % step[0] or shape[3] % step[1]) and min(shape[2:]) > 0
        if not fits or shape[1] != config.channels:
            own = f"[B, {config.channels}, {config.image[0]}, {config.image[1]}]"
            more = f"; multiples of {format_size(step)} do, too" if step else ""
            raise ImageSizeError(f"images of {shape} do not fit a network for {own}{more}")

    def _other_grid(self, images: Tensor) -> Pair | None:
        """The grid of images of another size than the network's own."""
        if not self.open_size and tuple(images.shape[2:]) == self.config.image:
            return None
        rows, columns = self.config.patch_pixels
        return images.shape[2] // rows, images.shape[3] // columns

    @property
    def queries(self) -> int | None:
        """How many tokens the last layer has to compute; none for all of them. Eq. 4 reads the class token alone."""
        return 1 if self.class_token_only and self.training and self.config.pool == "token" else None

    def represent(self, images: Tensor, positions: Tensor | None = None) -> Tensor:
        """y, the image's representation (Eq. 4): [B, C, H, W] -> [B, D]."""
        return self.read(self.encode(images, positions=positions, queries=self.queries))

    def read(self, z: Tensor) -> Tensor:
        """What the head reads of z_L (Eq. 4): [B, T, D] -> [B, D]. LN works on each token by itself, so where one token
        is read the others can stay out."""
        if self.config.pool == "mean" and not self.config.norm_after_pool:
            return pool(self.norm(z), self.config)
        return self.norm(pool(z, self.config))

    def forward(self, images: Tensor) -> Tensor:
        if isinstance(self.head, LinearPatchHead):
            return self.head(self._patches(images), self._grid(images), (images.shape[2], images.shape[3]))
        return self.head(self.represent(images))

    def features(self, images: Tensor) -> Tensor:
        return self.head.features(self.represent(images))

    @property
    def kernel(self) -> Tensor:
        return self.embedding.kernel

    def patch_map(self, images: Tensor) -> Tensor:
        return self._map(self._patches(images), images)

    def _patches(self, images: Tensor) -> Tensor:
        """Patch tokens behind the last norm: [B, C, H, W] -> [B, N, D]."""
        return self.norm(self.encode(images)[:, self.config.prefix :])

    def _grid(self, images: Tensor) -> Pair:
        return self._other_grid(images) or self.config.grid

    def _map(self, patches: Tensor, images: Tensor) -> Tensor:
        """[B, N, D] -> [B, D, rows, columns]."""
        return patches.transpose(1, 2).unflatten(2, self._grid(images))

    def run_layers(
        self, images: Tensor, layers: Layers, *, norm: bool, prefix: bool, attention: bool, qkv: bool
    ) -> tuple[Tensor, Intermediates]:
        wanted = resolve_layers(layers, self.depth)
        taps = Taps(attention=attention or qkv)
        z = self.encode(images, taps=taps)
        found = [taps.layers[layer] for layer in wanted]
        tokens = [self.norm(tap.after) if norm else tap.after for tap in found]
        start = self.config.prefix
        return z if self.config.norm_after_pool else self.norm(z), Intermediates(
            layers=wanted,
            tokens=tuple(z if prefix else z[:, start:] for z in tokens),
            maps=tuple(self._map(z[:, start:], images) for z in tokens),
            attention=tuple(tap.attention for tap in found) if attention else (),
            qkv=tuple((i.q, i.k, i.v) for i in (tap.inside for tap in found) if i is not None) if qkv else (),
        )

    @classmethod
    def resize_tensors(
        cls, tensors: dict[str, Tensor], old: ModelConfig, new: ModelConfig, numerics: Numerics = "reference"
    ) -> dict[str, Tensor]:
        return resize_positions(tensors, vit_config(old), vit_config(new), numerics)

    @classmethod
    def redraw_positions(
        cls, tensors: dict[str, Tensor], drawn: Mapping[str, Tensor], config: ModelConfig
    ) -> dict[str, Tensor]:
        return redraw_positions(tensors, drawn, vit_config(config))

    @property
    def has_class_token(self) -> bool:
        return self.config.class_token

    def no_weight_decay(self) -> set[str]:
        names = {name for name, _ in self.named_parameters()}
        return {name for name in names if name.startswith(("class_token", "registers", "position."))}

    @property
    def depth(self) -> int:
        """Layers with attention; an axial block has two."""
        return self.config.depth * (2 if self.config.attention == "axial" else 1)

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits; an identity where there is none."""
        return nn.Identity() if self.head.classifier is None else self.head.classifier

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens behind the last norm: [B, C, H, W] -> [B, T, D]."""
        z = self.encode(images)
        return z if self.config.norm_after_pool else self.norm(z)

    def forward_head(self, features: Tensor, pre_logits: bool = False, image_size: Pair | None = None) -> Tensor:
        """Tokens of `forward_features` to logits, or to the image's features. A head of patches has to know the size of
        the images, which tokens do not tell: `image_size`, or the network's own where it is not given."""
        if isinstance(self.head, LinearPatchHead) and not pre_logits:
            size, patches = image_size or self.config.image, features[:, self.config.prefix :]
            rows, columns = self.config.patch_pixels
            grid = self.config.grid if size == self.config.image else (size[0] // rows, size[1] // columns)
            if patches.shape[1] != grid[0] * grid[1]:
                why = f"images of {format_size(size)} have {format_size(grid)} patches, not {patches.shape[1]}"
                raise ImageSizeError(f"{why}; give forward_head the image_size, or call the network itself")
            return self.head(self.norm(patches) if self.config.norm_after_pool else patches, grid, size)
        y = pool(features, self.config)
        if self.config.norm_after_pool:
            y = self.norm(y)
        return self.head.features(y) if pre_logits else self.head(y)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new zero-initialised linear head in place of the whole old one (3.2); 0 leaves none. `global_pool` is what
        it reads, in timm's words ("token", "avg"); as before where it is not given, so that a head of patches remains
        one."""
        pools: dict[str | None, Pool] = {None: self.config.pool, "token": "token", "avg": "mean", "mean": "mean"}
        if global_pool not in pools:
            raise unknown_name("global_pool", str(global_pool), ("token", "avg", "mean"))
        pool = pools[global_pool]
        patches = self.config.has_patch_head and global_pool is None
        kind = "none" if not num_classes else "patches" if patches else "linear"
        after = self.config.norm_after_pool and pool == "mean"  # of one token the order is the same
        changed = replace(self.config, classes=num_classes, head=kind, pool=pool, norm_after_pool=after)
        self.config = changed  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, as built
        like = self.norm.weight
        self.head = build_head(self.config).to(like.device, like.dtype)
        self.head.initialise()
        self.forget_labels(keep_task=self.config.has_patch_head)
