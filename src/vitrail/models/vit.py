"""The Vision Transformer (Section 3.1, Eqs. 1-4), whole.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                        (2)
    z_l  = MLP(LN(z'_l)) + z'_l                              (3)
    y    = LN(z_L^0)                                         (4)

A hybrid differs in `embedding` alone (hybrid.py), an Axial-ViT in `blocks` (D.6).
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ImageSizeError
from vitrail.core.shapes import Pair, times
from vitrail.models import attention
from vitrail.models.attention import Attention
from vitrail.models.card import Card
from vitrail.models.config import ViTConfig
from vitrail.models.fused import gelu_linear, suits
from vitrail.models.heads import ClassificationHead, pool_named, pooled
from vitrail.models.initialise import lecun_normal_
from vitrail.models.position import Positions
from vitrail.models.stochastic_depth import StochasticDepth


class PatchEmbedding(nn.Module):
    """x_p E: the image cut into patches in raster order, each projected to width D. [B, C, H, W] -> [B, N, D]."""

    def __init__(self, channels: int, width: int, patch: Pair):
        super().__init__()
        self.projection = nn.Conv2d(channels, width, patch, stride=patch)

    def initialise(self) -> None:
        lecun_normal_(self.projection.weight)
        nn.init.constant_(cast(Tensor, self.projection.bias), 0)

    def forward(self, images: Tensor) -> Tensor:
        """As one matrix product on flattened patches: the same as the convolution, and quicker on accelerators."""
        rows, columns = self.projection.stride
        cut = images.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))  # [B, C, H/P, P, W/P, P]
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, N, C·P·P]
        return F.linear(patches, self.projection.weight.flatten(1), self.projection.bias)


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
        hidden = gelu_linear(z, self.expand, self.tanh) if suits(z, self.expand) else self.gelu(self.expand(z))
        return self.dropout(self.contract(self.dropout(hidden)))


class Block(nn.Module):
    """One encoder layer, pre-norm (Eqs. 2 and 3): [B, T, D] -> [B, T, D].

    With `queries` only the first so many tokens come out, [B, queries, D]. They see all others, so they are what they
    would be in the whole, but nothing is computed that only the others need.
    """

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(
            config.width, config.heads, qkv_bias=config.qkv_bias, dropout=config.attention_dropout
        )
        self.norm_mlp = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.skip = StochasticDepth(config.stochastic_depth * layer / max(config.depth - 1, 1))

    def forward(self, z: Tensor, offsets: Tensor | None = None, queries: int | None = None) -> Tensor:
        z = z[:, :queries] + self.skip(self.dropout(self.mix(self.norm_attention(z), offsets, queries)))  # Eq. 2
        return z + self.skip(self.mlp(self.norm_mlp(z)))  # Eq. 3

    def mix(self, z: Tensor, offsets: Tensor | None, queries: int | None) -> Tensor:
        return self.attention(z, offsets, queries)


class RowBlock(Block):
    """A layer whose tokens see their own row of the grid alone (D.6)."""

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__(config, layer)
        self.grid = config.grid

    def mix(self, z: Tensor, offsets: Tensor | None, queries: int | None) -> Tensor:
        return attention.from_rows(self.attention(attention.rows(z, self.grid), offsets), self.grid)[:, :queries]


class ColumnBlock(RowBlock):
    """A layer whose tokens see their own column of the grid alone (D.6)."""

    def mix(self, z: Tensor, offsets: Tensor | None, queries: int | None) -> Tensor:
        mixed = self.attention(attention.columns(z, self.grid), offsets)
        return attention.from_columns(mixed, self.grid)[:, :queries]


class AxialBlock(nn.Module):
    """Row attention and MLP, then column attention and MLP: two layers, each blind to the other axis (D.6)."""

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        self.row = RowBlock(config, layer)
        self.column = ColumnBlock(config, layer)

    def forward(self, z: Tensor, offsets: Tensor | None = None, queries: int | None = None) -> Tensor:
        return self.column(self.row(z, offsets), offsets, queries)


class ViT(nn.Module):
    """Images to logits: [B, C, H, W] -> [B, K], or to the representation y [B, D] where there is no head."""

    card: Card | None = None  # what travels with the weights; the checkpoint layer puts it here and reads it
    # Whether the last layer, in training mode, computes the class token alone where the head reads no other. At depth
    # 12 that saves 7 % of the work, and a hook on the last layer sees one token. vitrail's own training asks for it.
    class_token_only: bool = False

    def __init__(self, config: ViTConfig, embedding: nn.Module):
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.class_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.position = Positions(config)
        self.dropout = nn.Dropout(config.dropout)
        block = Block if config.attention == "full" else AxialBlock
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = ClassificationHead(config)

    def initialise(self) -> None:
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02)

    def tokens(self, images: Tensor) -> Tensor:
        """[x_class; registers; x_p E]: the tokens before positions, [B, T, D]."""
        if tuple(images.shape[1:]) != (self.config.channels, *self.config.image):
            raise ImageSizeError(
                f"images of {tuple(images.shape)} do not fit a network for [B, {self.config.channels}, "
                f"{times(self.config.image).replace('x', ', ')}]; load it with image_size=... to resize its positions"
            )
        patches = self.embedding(images)
        prefix = [
            token.expand(patches.shape[0], -1, -1) for token in (self.class_token, self.registers) if token is not None
        ]
        return torch.cat([*prefix, patches], dim=1) if prefix else patches

    def encode(self, images: Tensor) -> Tensor:
        """z_L, before the last norm: [B, C, H, W] -> [B, T, D]."""
        return self._encode(images, None)

    def _encode(self, images: Tensor, queries: int | None) -> Tensor:
        """z_L of the first tokens: [B, C, H, W] -> [B, queries, D]; of all where `queries` is none."""
        return self.layers(self.dropout(self.position(self.tokens(images), 0)), queries)  # Eq. 1

    def layers(self, z: Tensor, queries: int | None = None) -> Tensor:
        """z_0, positions included, through all layers to z_L: [B, T, D] -> [B, T, D], or the first `queries` tokens of
        it. Where positions enter at the stem alone, T may be any number: a part of the tokens will do."""
        last = self.config.depth - 1
        for layer, block in enumerate(self.blocks):
            if layer:
                z = self.position(z, layer)
            z = block(z, self.position.offsets(layer), queries if layer == last else None)  # Eqs. 2, 3
        return z

    @property
    def queries(self) -> int | None:
        """How many tokens the last layer has to compute; none for all of them. Eq. 4 reads the class token alone."""
        return 1 if self.class_token_only and self.training and self.config.pool == "token" else None

    def represent(self, images: Tensor) -> Tensor:
        """y, the image's representation (Eq. 4): [B, C, H, W] -> [B, D]."""
        z = self._encode(images, self.queries)
        if self.config.pool == "mean" and not self.config.norm_after_pool:
            return pooled(self.norm(z), self.config)
        return self.norm(pooled(z, self.config))  # Eq. 4: LN works on each token by itself, so the others can stay out

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.represent(images))

    # What people have in their fingers from timm.

    @property
    def num_features(self) -> int:
        return self.config.width

    @property
    def num_classes(self) -> int:
        return self.config.classes

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits; an identity where there is none."""
        return nn.Identity() if self.head.classifier is None else self.head.classifier

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens behind the last norm: [B, C, H, W] -> [B, T, D]."""
        z = self.encode(images)
        return z if self.config.norm_after_pool else self.norm(z)

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of `forward_features` to logits, or to what the last layer reads."""
        y = pooled(tokens, self.config)
        if self.config.norm_after_pool:
            y = self.norm(y)
        return self.head.features(y) if pre_logits else self.head(y)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new zero-initialised linear head in place of the whole old one (3.2); 0 leaves none. `global_pool` is what
        it reads, in timm's words ("token", "avg"); as before where it is not given."""
        pool = self.config.pool if global_pool is None else pool_named(global_pool)
        self.config = replace(
            self.config,
            classes=num_classes,
            head="linear" if num_classes else "none",
            pool=pool,
            norm_after_pool=self.config.norm_after_pool and pool == "mean",  # of one token the order is the same
        )
        like = self.norm.weight
        self.head = ClassificationHead(self.config).to(like.device, like.dtype)
        self.head.initialise()
        self.card = None if self.card is None else self.card.without_labels()
