"""From tokens to logits (Eq. 4, D.3): pool, then no head, a linear layer, or a hidden tanh layer for pre-training; or a
linear layer on each patch token, for logits per pixel."""

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import unknown
from vitrail.core.text import Pair
from vitrail.models.family import Pool
from vitrail.models.layers import lecun_normal_
from vitrail.models.vit_config import ViTConfig


def pooled(z: Tensor, config: ViTConfig) -> Tensor:
    """The class token's row, or the mean over the patches: [B, T, D] -> [B, D]."""
    return z[:, 0] if config.pool == "token" else z[:, config.prefix :].mean(dim=1)


def pool_named(name: str) -> Pool:
    """Ours of timm's words for what a head reads."""
    known: dict[str, Pool] = {"token": "token", "avg": "mean", "mean": "mean"}
    if name not in known:
        raise unknown("global_pool", name, known)
    return known[name]


class ClassificationHead(nn.Module):
    """Representation to logits. The last layer starts at zero (3.2), so that a fresh head says nothing."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.hidden = nn.Linear(config.width, config.width) if config.head == "tanh" else None
        self.classifier = nn.Linear(config.width, config.classes) if config.classes else None

    def initialise(self) -> None:
        if self.hidden is not None:
            lecun_normal_(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)
        if self.classifier is not None:
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)

    def features(self, y: Tensor) -> Tensor:
        """What the last layer reads: y itself, or y through the hidden tanh layer (the paper's pre-logits)."""
        return y if self.hidden is None else self.hidden(y).tanh()

    def forward(self, y: Tensor) -> Tensor:
        y = self.features(y)
        return y if self.classifier is None else self.classifier(y)


class LinearPatchHead(nn.Module):
    """Patch tokens to logits per pixel: one linear layer, which starts at zero, on each of them."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.classifier = nn.Linear(config.width, config.classes)

    def initialise(self) -> None:
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def features(self, y: Tensor) -> Tensor:
        """The image's representation as it is: what such a head reads is `patch_map`."""
        return y

    def forward(self, patches: Tensor, grid: Pair, size: Pair) -> Tensor:
        """[B, N, D] on a grid -> [B, K, height, width], resized bilinearly between the centres of the patches."""
        logits = self.classifier(patches).transpose(1, 2).unflatten(2, grid)  # [B, K, rows, columns]
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)


def make_head(config: ViTConfig) -> ClassificationHead | LinearPatchHead:
    return LinearPatchHead(config) if config.has_patch_head else ClassificationHead(config)
