"""From tokens to logits (Eq. 4, D.3): pool, then no head, a linear layer, or a hidden tanh layer for pre-training."""

from torch import Tensor, nn

from vitrail.core.errors import unknown
from vitrail.models.config_checks import Pool
from vitrail.models.initialise import lecun_normal_
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
