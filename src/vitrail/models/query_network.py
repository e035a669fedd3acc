"""A Vision Transformer with queries: images to a class and a mask for each query.

Every query block may use masked attention: a query then attends only to the patches inside the mask predicted for it
before the block. Training anneals this away, block by block; inference is then a plain encoder with a few more tokens.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.models.layers import pool
from vitrail.models.query_configs import QueryConfig
from vitrail.models.query_head import QueryHead
from vitrail.models.query_output import QueryOutput
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig


class QueryViT(ViT):
    """Images to classes and masks: [B, C, H, W] -> QueryOutput of [B, Q, K + 1] and [B, Q, h, w].

    `features`, `patch_map`, `forward_features` and intermediates come from the encoder without queries."""

    config: QueryConfig
    head: QueryHead

    @abstractmethod
    def make_head(self, config: ViTConfig) -> QueryHead:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Builds the queries and the layers that predict from them: everything outside the encoder."""

    @abstractmethod
    def prepare(self, images: Tensor, grid: Pair) -> tuple[Tensor, Tensor | None]:
        """The input of the first query block, [B, Q + T, D], and the rotary positions of all query blocks."""

    @abstractmethod
    def run_block(self, block: int, z: Tensor, grid: Pair, rotation: Tensor | None, hidden: Tensor | None) -> Tensor:
        """Runs a query block, counted from 0: [B, Q + T, D] -> [B, Q + T, D]. Queries do not attend to the patches that
        are `hidden` from them, [B, Q, N]."""

    @abstractmethod
    def normalise(self, z: Tensor) -> Tensor:
        """Applies the norm before a prediction."""

    def forward(self, images: Tensor) -> QueryOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Predicts classes and masks after the last block. The last `masked_blocks` query blocks use masked
        attention."""
        return self._predict_layers(images, None, every=False)[-1]

    def forward_layers(self, images: Tensor, masked: Tensor | None = None) -> list[QueryOutput]:
        """Predicts classes and masks before each query block and after the last. `masked` [B, query_blocks, Q] selects
        the queries that use masked attention in each block; without it none do."""
        return self._predict_layers(images, masked, every=True)

    def _predict_layers(self, images: Tensor, masked: Tensor | None, *, every: bool) -> list[QueryOutput]:
        images = images.to(self.kernel.dtype)
        grid, c = self._grid(images), self.config
        z, rotation = self.prepare(images, grid)
        outputs: list[QueryOutput] = []
        for block in range(c.query_blocks):
            masks_all = not every and block >= c.query_blocks - c.masked_blocks
            if every or masks_all:
                outputs.append(self.predict(z, grid))
            hidden = None
            if masks_all or masked is not None:
                hidden = find_hidden(outputs[-1].masks, grid)
                hidden = hidden if masked is None else hidden & masked[:, block, :, None]
            z = self.run_block(block, z, grid, rotation, hidden)
        return [*outputs, self.predict(z, grid)]

    def predict(self, z: Tensor, grid: Pair) -> QueryOutput:
        """[B, Q + T, D] -> classes and masks."""
        return cast(QueryOutput, self.head(self.normalise(z), grid))

    def set_masked_blocks(self, count: int) -> None:
        """Sets in how many of the last query blocks inference uses masked attention. Saved weights record it."""
        self.config = replace(self.config, masked_blocks=count)

    def features(self, images: Tensor) -> Tensor:
        """The encoder's representation of images, without queries: [B, C, H, W] -> [B, D]."""
        return self.represent(images)

    def forward_head(self, features: Tensor, pre_logits: bool = False, image_size: Pair | None = None) -> Tensor:
        if not pre_logits:
            raise ConfigError(f"{self.config.title} predicts from its query blocks; call the network itself")
        return (
            self.project(self.norm(pool(features, self.config))) if self.config.norm_after_pool else self.pool(features)
        )

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier by a zero-initialised one; queries and the mask layers stay."""
        if global_pool is not None:
            raise ConfigError(f"global_pool={global_pool!r}: {self.config.title} does not pool; leave it out")
        changed = replace(self.config, classes=num_classes)
        self.config = changed  # pyright: ignore[reportIncompatibleVariableOverride]
        like = self.head.classifier.weight
        self.head.classifier = nn.Linear(changed.width, num_classes + 1, device=like.device, dtype=like.dtype)
        for parameter in self.head.classifier.parameters():
            nn.init.zeros_(parameter)
        self.forget_labels(keep_task=True)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {"head.queries"}


def find_hidden(masks: Tensor, grid: Pair) -> Tensor:
    """Finds the patches outside each query's mask: logits [B, Q, h, w] -> bool [B, Q, N]."""
    if tuple(masks.shape[2:]) != tuple(grid):
        masks = F.interpolate(masks, grid, mode="bilinear", align_corners=False)
    return (masks.detach() <= 0).flatten(2)
