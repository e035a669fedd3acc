"""The Vision Transformer (Section 3.1, Eqs. 1-4): class token, positions, encoder, representation.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                        (2)
    z_l  = MLP(LN(z'_l)) + z'_l                              (3)
    y    = LN(z_L^0)                                         (4)

A hybrid differs only in `embedding` (patch_embedding.py), an Axial-ViT only in `blocks` (D.6).

There is one forward pass, `encode`: `embed`, with options for a subset of the tokens (`keep`) and masked tokens, then
`forward_blocks`, with options for the first tokens of the last layer only (`queries`) and intermediates (`taps`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.core.errors import ConfigError, ImageSizeError, unknown_name
from vitrail.core.text import Pair, format_size, pair
from vitrail.models.attention import Places
from vitrail.models.backbone import Backbone, Intermediates, Layers, Taps, has_hooks, resolve_layers
from vitrail.models.blocks import RESIDUAL, AxialBlock, Block, PostNormBlock, WindowBlock
from vitrail.models.family import ModelConfig, Pool
from vitrail.models.kernels.fused_ops import TensorFacts
from vitrail.models.layers import (
    AttentionPool,
    ClassificationHead,
    LinearPatchHead,
    Neck,
    build_head,
    lecun_normal_,
    make_norm,
    pool,
)
from vitrail.models.patch_embedding import HybridEmbedding, PatchEmbedding
from vitrail.models.positions.bias import BiasTable
from vitrail.models.positions.embeddings import PositionEmbeddings, redraw_positions, resize_positions
from vitrail.models.positions.rotary import RotaryPositions
from vitrail.models.resampling.patch_kernels import resize_kernel
from vitrail.models.streams import AnyStream, Float8Stream, Stream, TrainedStream
from vitrail.models.vit_config import Numerics, ViTConfig, vit_config

PATCHES: Final = "embedding.projection.weight"


class ViT(Backbone):
    """Images to logits: [B, C, H, W] -> [B, K], or to the representation y [B, D] without a head; a head of
    patches gives logits per pixel, [B, K, H, W]."""

    config_class: ClassVar[type[ModelConfig]] = ViTConfig
    config: ViTConfig

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        c = vit_config(config)
        if c.backbone is None:
            return cls(c, PatchEmbedding(c.channels, c.width, c.patch, bias=c.patch_bias))
        return cls(c, HybridEmbedding(c.backbone, c.width, c.patch, bias=c.patch_bias))

    def __init__(self, config: ViTConfig, embedding: PatchEmbedding):
        super().__init__()
        self.config = config
        self.embedding = embedding
        tokens = torch.zeros(1, config.class_tokens, config.width)
        self.class_token = nn.Parameter(tokens) if config.class_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.position = PositionEmbeddings(config)
        self.rotary = None if config.rotary is None else RotaryPositions(config, config.rotary)
        self.position_bias = BiasTable(config) if config.position_bias == "shared-table" else None
        self.norm_stem = nn.Identity() if config.norm_stem == "none" else make_norm(config, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.make_block(config, layer) for layer in range(config.depth))
        self.norm = make_norm(config, config.width) if config.norm_final else nn.Identity()
        self.neck = Neck(config.width, config.neck) if config.neck else None
        self.map_pool = AttentionPool(config) if config.pool == "map" else None
        self.projection = self._build_projection(config)
        self.head = self.make_head(config)

    def make_head(self, config: ViTConfig) -> ClassificationHead | LinearPatchHead:
        """Makes the head. A family whose head differs overrides this."""
        return build_head(config)

    def _build_projection(self, config: ViTConfig) -> nn.Linear | None:
        read = replace(config, projection=0).features
        return nn.Linear(read, config.projection, bias=False) if config.projection else None

    def make_block(self, config: ViTConfig, layer: int) -> nn.Module:
        """Makes an encoder layer. A family whose blocks differ overrides this, and `ViTConfig.walk` for their cost."""
        if config.attention == "axial":
            return AxialBlock(config, layer)
        if config.window_of(layer):
            return WindowBlock(config, layer)
        return (Block if config.norm_order == "pre" else PostNormBlock)(config, layer)

    def initialise(self) -> None:
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02)
        if self.projection is not None:
            lecun_normal_(self.projection.weight)

    def tokens(self, images: Tensor) -> Tensor:
        """[x_class; registers; x_p E]: the tokens before positions, [B, T, D]."""
        self._check(images)
        patches = self.embedding(images)
        patches = self.norm_stem(patches) if self.config.norm_stem == "patches" else patches
        # The class token comes first, before registers and patches (Eq. 1).
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
        """z_0 (Eq. 1): [B, C, H, W] -> [B, T, D]. `masked` patches [B, N] are replaced by the `mask_token` [1, 1, D]
        before positions are added. Patches not in `keep` [B, M] are dropped after that, so that T is prefix + M.
        `positions` [1, T, D] are added instead of the network's own."""
        z, prefix = self.tokens(images), self.config.prefix
        if masked is not None:
            assert mask_token is not None
            hidden = F.pad(masked, (prefix, 0)) if prefix else masked
            z = torch.where(hidden[:, :, None], mask_token.to(z.dtype), z)
        z = self.position(z, 0, self._other_grid(images)) if positions is None else z + positions.to(z.dtype)
        z = self.norm_stem(z) if self.config.norm_stem == "tokens" else z
        if keep is not None:
            kept = z[:, prefix:].gather(1, keep[:, :, None].expand(-1, -1, z.shape[2]))
            z = torch.cat([z[:, :prefix], kept], dim=1)
        return self.dropout(z)

    def encode(
        self, images: Tensor, positions: Tensor | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        """z_L, before the last norm: [B, C, H, W] -> [B, T, D], or its first `queries` tokens. Images may have another
        size than the network's own; `positions` are passed to `embed`. `taps` collect the intermediates of each
        layer."""
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
        keep: Tensor | None = None,
        rotation: Tensor | None = None,
        ahead: int = 0,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Runs z_0, positions included, through all layers to z_L, or from z_first to z_last: [B, T, D] -> [B, T, D],
        or its first `queries` tokens. If positions enter only at the stem, T may be any number; rotary positions need
        to know which patches are present, the `keep` of `embed`. `grid` is that of images of another size. Calls that
        split the layers of one pass share its `rotation`. For `ahead` and `hidden`, see Places."""
        recompute = self.grad_checkpointing and self.training and torch.is_grad_enabled()
        rotation = self.compute_rotation(z, grid, keep) if rotation is None else rotation
        last = self.config.depth if last is None else last
        if taps is None and not recompute and self._fuses(z, range(first, last)):
            stream = self._make_stream(z)
            whole = last if queries is None else min(last, self.config.depth - 1)
            while first < whole:
                places = self._places(first, z, grid, rotation)._replace(ahead=ahead, hidden=hidden)
                stream = cast(AnyStream, self.blocks[first](stream, places))
                first += 1
            z = stream.take()
        for layer in range(first, last):
            z = self.position(z, layer, grid) if layer else z
            few = queries if layer == self.config.depth - 1 else None
            places = self._places(layer, z, grid, rotation)._replace(ahead=ahead, hidden=hidden)
            block, args = self.blocks[layer], (z, places, few, taps)
            z = cast(Tensor, checkpoint(block, *args, use_reentrant=False) if recompute else block(*args))  # Eqs. 2, 3
        return z

    def list_kernels(self, device: torch.device) -> list[str]:
        c, first = self.config, self.blocks[0]
        if not isinstance(first, Block):
            return []
        found = first.list_kernels(TensorFacts(device, torch.bfloat16, (1, c.tokens, c.width)))
        inside = c.rotary is not None or c.position_bias != "none" or c.position == "relative"
        others = ["attention"] * inside + [RESIDUAL] * (not self._once)
        return [name for name in found if name not in others]

    def float8_obstacle(self) -> str:
        if not self._once:
            return "its positions enter every layer"
        found = (
            block.float8_obstacle() if isinstance(block, Block) else "its layers are not plain ones over all tokens"
            for block in self.blocks
        )
        return next(filter(None, found), "")

    def _make_stream(self, z: Tensor) -> AnyStream:
        if self.float8:
            return Float8Stream(z)
        # In inference branches are added in place, so the layers get their own copy.
        return TrainedStream(z) if torch.is_grad_enabled() else Stream(z.clone())

    def _fuses(self, z: Tensor, layers: range) -> bool:
        """Whether all these layers pass on the residual as a stream."""
        blocks = [self.blocks[layer] for layer in layers]
        return self._once and all(isinstance(block, Block) and block.can_fuse(z) for block in blocks)

    @property
    def _once(self) -> bool:
        """Whether positions are added to the tokens only before the first layer."""
        return self.config.placement in (None, "stem")

    def compute_rotation(self, z: Tensor, grid: Pair | None = None, keep: Tensor | None = None) -> Tensor | None:
        """Computes the rotary positions for the layers of one pass; None if there are none."""
        return None if self.rotary is None else self.rotary(grid or self.config.grid, z, keep)

    def _places(self, layer: int, z: Tensor, grid: Pair | None, rotation: Tensor | None) -> Places:
        """Collects what a layer's attention knows about the positions of its tokens."""
        grid = grid or self.config.grid
        bias = None if self.position_bias is None else self.position_bias(z, grid)
        if rotation is not None and self.rotary is not None and self.rotary.frequencies is not None:
            rotation = rotation[layer]
        return Places(grid, self.position.offsets(layer), rotation, bias)

    def _check(self, images: Tensor) -> None:
        """Checks the channels of images and, if positions or attention are tied to it, their size."""
        config = self.config
        if self.open_size or tuple(images.shape[1:]) == (config.channels, *config.image):
            return
        step, shape = config.open_sizes.step and self.patch_pixels, tuple(images.shape)
        fits = step and len(shape) == 4 and not (shape[2] % step[0] or shape[3] % step[1]) and min(shape[2:]) > 0
        if not fits or shape[1] != config.channels:
            own = f"[B, {config.channels}, {config.image[0]}, {config.image[1]}]"
            more = f"; multiples of {format_size(step)} do, too" if step else ""
            raise ImageSizeError(f"images of {shape} do not fit a network for {own}{more}")

    def _other_grid(self, images: Tensor) -> Pair | None:
        """Returns the grid of images whose size or patches differ from the network's own, else None."""
        fixed = self.embedding.resize is None and not self.open_size
        if fixed and tuple(images.shape[2:]) == self.config.image:
            return None
        rows, columns = self.patch_pixels
        return images.shape[2] // rows, images.shape[3] // columns

    @property
    def patch_pixels(self) -> Pair:
        """Pixels of the image from one patch to the next."""
        return self.config.patch_pixels if self.embedding.resize is None else self.embedding.patch

    @property
    def queries(self) -> int | None:
        """How many tokens the last layer has to compute; None for all of them. Eq. 4 reads only the class token."""
        c, asked = self.config, self.class_token_only
        if c.pool != "token" or asked is False:
            return None
        if asked is None and (self.training or has_hooks(self.blocks[-1])):
            return None
        return c.class_tokens + (c.head == "distilled")

    def represent(self, images: Tensor, positions: Tensor | None = None) -> Tensor:
        """y, the image's representation (Eq. 4): [B, C, H, W] -> [B, D]."""
        if self.neck is not None:
            return self.project(self.patch_map(images).mean(dim=(2, 3)))
        return self.read(self.encode(images, positions=positions, queries=self.queries))

    def read(self, z: Tensor) -> Tensor:
        """What the head reads of z_L (Eq. 4): [B, T, D] -> [B, D]. LN works on each token separately, so if only one
        token is read, only that one is normalised."""
        if self.config.norm_after_pool or (self.config.pool == "token" and self.config.class_tokens == 1):
            return self.project(self.norm(pool(z, self.config)))
        return self.pool(self.norm(z))

    def pool(self, z: Tensor) -> Tensor:
        """What the head reads of tokens after the last norm: [B, T, D] -> [B, D]."""
        return self.project(pool(z, self.config) if self.map_pool is None else self.map_pool(z))

    def project(self, y: Tensor) -> Tensor:
        return y if self.projection is None else self.projection(y)

    def forward(self, images: Tensor) -> Tensor:
        if isinstance(self.head, LinearPatchHead):
            patches = self.patch_map(images).flatten(2).transpose(1, 2)
            return self.head(patches, self._grid(images), (images.shape[2], images.shape[3]))
        return self.head(self.represent(images))

    def features(self, images: Tensor) -> Tensor:
        return self.head.features(self.represent(images))

    @property
    def kernel(self) -> Tensor:
        return self.embedding.kernel

    def patch_map(self, images: Tensor) -> Tensor:
        patches = self._map(self.norm(self.encode(images)[:, self.config.prefix :]), images)
        return patches if self.neck is None else self.neck(patches)

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
        cls, tensors: dict[str, Tensor], old: ModelConfig, new: ModelConfig, numerics: Numerics | None = None
    ) -> dict[str, Tensor]:
        before, after = vit_config(old), vit_config(new)
        tensors = super().resize_tensors(tensors, old, new, numerics)
        if before.patch != after.patch:
            tensors = {**tensors, PATCHES: resize_kernel(tensors[PATCHES], after.patch)}
        return resize_positions(tensors, before, after, numerics)

    @classmethod
    def first_layer(cls, config: ModelConfig) -> str:
        return "embedding.projection" if vit_config(config).backbone is None else "embedding.backbone.root"

    def set_patch(self, patch: int | Pair | None) -> None:
        config = self.config
        wanted = config.patch if patch is None else pair(patch)
        if wanted != config.patch:
            other = replace(config, patch=wanted)  # refuses a patch that leaves pixels over
            if config.backbone is not None or other.open_sizes.step is None:
                why = other.open_sizes.why or "a hybrid's patches are those of its feature map"
                raise ConfigError(f"patch={format_size(wanted)}: {why}; keep {format_size(config.patch)}")
        self.embedding.set_patch(wanted)

    @classmethod
    def redraw_positions(
        cls, tensors: dict[str, Tensor], drawn: Mapping[str, Tensor], config: ModelConfig
    ) -> dict[str, Tensor]:
        return redraw_positions(tensors, drawn, vit_config(config))

    @property
    def embed_dim(self) -> int:
        return self.config.width

    @property
    def has_class_token(self) -> bool:
        return self.config.class_token

    def no_weight_decay(self) -> set[str]:
        names = {name for name, _ in self.named_parameters()}
        tokens = ("class_token", "registers", "position.", "rotary.", "map_pool.query")
        return {name for name in names if name.startswith(tokens) or "position_bias." in name}

    @property
    def depth(self) -> int:
        """Layers with attention; an axial block has two."""
        return self.config.depth * (2 if self.config.attention == "axial" else 1)

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits; an identity if there is none."""
        return nn.Identity() if self.head.classifier is None else self.head.classifier

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm: [B, C, H, W] -> [B, T, D]."""
        z = self.encode(images)
        return z if self.config.norm_after_pool else self.norm(z)

    def forward_head(self, features: Tensor, pre_logits: bool = False, image_size: Pair | None = None) -> Tensor:
        """Tokens of `forward_features` to logits, or to the image's features. A neck and a patch head need the size of
        the images, which tokens do not contain: `image_size`, by default the network's own."""
        c = self.config
        if self.neck is not None or (isinstance(self.head, LinearPatchHead) and not pre_logits):
            size, patches = image_size or c.image, features[:, c.prefix :]
            rows, columns = self.patch_pixels
            own = self.embedding.resize is None and size == c.image
            grid = c.grid if own else (size[0] // rows, size[1] // columns)
            if patches.shape[1] != grid[0] * grid[1]:
                why = f"images of {format_size(size)} have {format_size(grid)} patches, not {patches.shape[1]}"
                raise ImageSizeError(f"{why}; give forward_head the image_size, or call the network itself")
            patches = self.norm(patches) if c.norm_after_pool else patches
            if self.neck is not None:
                patches = self.neck(patches.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
            if isinstance(self.head, LinearPatchHead) and not pre_logits:
                return self.head(patches, grid, size)
            y = self.project(patches.mean(dim=1))
        else:
            y = self.project(self.norm(pool(features, c))) if c.norm_after_pool else self.pool(features)
        return self.head.features(y) if pre_logits else self.head(y)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the whole head, including a projection, by a new zero-initialised linear one (3.2); 0 leaves none.
        `global_pool` says what it reads, in timm's terms ("token", "avg", "map"). By default this stays the same, so a
        patch head remains one."""
        pools: dict[str | None, Pool] = {None: self.config.pool, "token": "token", "avg": "mean", "mean": "mean"}
        pools["token+mean"] = "token+mean"
        if self.map_pool is not None:
            pools["map"] = "map"
        if global_pool not in pools:
            raise unknown_name("global_pool", str(global_pool), [name for name in pools if name])
        pool = pools[global_pool]
        patches = self.config.has_patch_head and global_pool is None
        kind = "none" if not num_classes else "patches" if patches else "linear"
        after = self.config.norm_after_pool and pool == "mean"  # of one token the order is the same
        changes = {"classes": num_classes, "head": kind, "pool": pool, "norm_after_pool": after, "projection": 0}
        changed = replace(self.config, **changes)
        self.config = changed  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, as built
        self.projection = None
        self.map_pool = self.map_pool if pool == "map" else None
        like = self.embedding.projection.weight
        self.head = self.make_head(self.config).to(like.device, like.dtype)
        self.head.initialise()
        self.forget_labels(keep_task=self.config.has_patch_head)
