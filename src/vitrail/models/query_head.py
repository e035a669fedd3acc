"""Predicts the classes and masks of queries from tokens, as in EoMT."""

from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.blocks import Block
from vitrail.models.kernels.fused_ops import can_fuse_gelu, fused_upscale
from vitrail.models.layers import ChannelNorm, make_norm
from vitrail.models.positions.rotary import RotaryPositions
from vitrail.models.query_configs import PMTConfig, QueryConfig
from vitrail.models.query_output import QueryOutput

DRAWN: Final = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


class Upscale(nn.Module):
    """Doubles the resolution of a map: a transposed convolution, GELU, a depthwise 3x3 convolution, and LN over the
    channels. [B, D, H, W] -> [B, D, 2H, 2W]."""

    def __init__(self, width: int):
        super().__init__()
        self.expand = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.smooth = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = ChannelNorm(width, eps=1e-6)

    def forward(self, patches: Tensor) -> Tensor:
        expand, kernel = self.expand, self.smooth.weight
        if can_fuse_gelu(patches) and expand.weight.dtype == patches.dtype:
            finer = fused_upscale(patches.movedim(1, -1), expand.weight, cast(Tensor, expand.bias)).movedim(-1, 1)
        else:
            finer = F.gelu(expand(patches))
        # Through a view of the kernel its gradient has the strides of the weight, so DDP does not warn.
        kernel = kernel.flatten(1).view(kernel.shape)
        return self.norm(F.conv2d(finer, kernel, padding=1, groups=len(kernel)))


class MaskMLP(nn.Module):
    """Maps queries to mask embeddings: three linear layers with GELU in between. [B, Q, D] -> [B, Q, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, z: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(F.gelu(second(F.gelu(first(z)))))


class QueryHead(nn.Module):
    """The queries, and the layers that predict a class and a mask for each. The classifier has K + 1 outputs; the last
    one is "no object". Mask logits are the dot products of a query's mask embedding with the upscaled patches."""

    def __init__(self, config: QueryConfig):
        super().__init__()
        self.prefix = config.queries + config.prefix  # tokens in front of the patches
        self.queries = nn.Parameter(torch.empty(config.queries, config.width))
        self.classifier = nn.Linear(config.width, config.classes + 1)
        self.mask = MaskMLP(config.width)
        self.upscale = nn.ModuleList(Upscale(config.width) for _ in range(config.upscale))

    def initialise(self) -> None:
        """Initialises as EoMT does: queries with standard deviation 1, the rest with torch's defaults."""
        nn.init.normal_(self.queries)
        for part in (self.classifier, *self.mask.modules(), *self.upscale.modules()):
            if isinstance(part, DRAWN):
                part.reset_parameters()

    def add_queries(self, z: Tensor) -> Tensor:
        """Prepends the queries: [B, T, D] -> [B, Q + T, D]."""
        return torch.cat([self.queries.to(z.dtype).expand(z.shape[0], -1, -1), z], dim=1)

    def forward(self, z: Tensor, grid: Pair) -> QueryOutput:
        """Normalised queries, prefix and patches [B, Q + T, D] -> classes [B, Q, K + 1] and masks [B, Q, h, w]."""
        queries = z[:, : self.queries.shape[0]]
        patches = z[:, self.prefix :].transpose(1, 2).unflatten(2, grid)
        for finer in self.upscale:
            patches = finer(patches)
        masks = (self.mask(queries) @ patches.flatten(2)).unflatten(2, patches.shape[2:])
        return QueryOutput(self.classifier(queries), masks)


class Lateral(nn.Module):
    """Transforms one level of the encoder before the levels are summed: a norm, then an MLP with a residual. The norm
    is LN over the channels of each token. With batch norm, which the authors use, the result for an image would depend
    on the rest of its batch, and statistics would differ between processes."""

    def __init__(self, config: QueryConfig):
        super().__init__()
        self.norm = make_norm(config, config.width)
        self.expand = nn.Linear(config.width, config.width)
        self.contract = nn.Linear(config.width, config.width)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        return z + self.contract(F.gelu(self.expand(z)))


class DecoderHead(QueryHead):
    """PMT's head: laterals, blocks with the queries in front, and a final norm."""

    def __init__(self, config: PMTConfig):
        super().__init__(config)
        blocks = config.head_blocks
        assert blocks.rotary is not None
        self.laterals = nn.ModuleList(Lateral(config) for _ in config.tapped)
        self.rotary = RotaryPositions(blocks, blocks.rotary)
        self.blocks = nn.ModuleList(Block(blocks, layer) for layer in range(blocks.depth))
        self.norm = make_norm(config, config.width)

    def initialise(self) -> None:
        super().initialise()
        for part in self.laterals.modules():
            if isinstance(part, DRAWN):
                part.reset_parameters()

    def join(self, levels: Sequence[Tensor]) -> Tensor:
        """Sums all levels, [B, T, D] each, after their laterals."""
        joined = [lateral(z) for lateral, z in zip(self.laterals, levels, strict=True)]
        return torch.stack(joined).sum(dim=0)
