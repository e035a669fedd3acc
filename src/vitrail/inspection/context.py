"""What is looked at: a network, images, and how both are called."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.inspection.layer_taps import TokenLayout, get_token_layout, has_attention, mean_logits, require_transformer
from vitrail.inspection.rollout import rollout
from vitrail.models.backbone import resting

Pixels = NDArray[np.uint8]

ACROSS: Final = 12  # layers or heads side by side
WEIGHTS: Final = 1 << 27  # of attention that are held at once, 4 bytes each
DOWN: Final = 4  # images one below the other


@dataclass(frozen=True, kw_only=True, eq=False)
class InspectionContext:
    """What is looked at. `images` [B, C, H, W] are prepared, on the model's device; `pixels` show the same, perhaps
    larger; `crowd` gives batches of prepared images for what is measured over many, `count` of them. Outputs that do
    not stand for classes are numbers by themselves, without probabilities."""

    model: nn.Module
    images: Tensor
    pixels: Sequence[Pixels]  # [H, W, 3] each
    names: Sequence[str]
    crowd: Callable[[], Iterator[Tensor]]
    count: int
    labels: Sequence[str] | None = None
    asked: int | None = None  # the class to explain
    layers: Sequence[int] = ()  # to show, from 0; none for all that there is room for
    patch: tuple[int, int] | None = None  # row and column to compare with the others
    has_classes: bool = True

    @property
    def transformer(self) -> bool:
        return has_attention(self.model)

    @cached_property
    def tokens(self) -> TokenLayout:
        return get_token_layout(self.model)

    @cached_property
    def depth(self) -> int:
        """Layers, of which an axial block has two."""
        return require_transformer(self.model).depth

    @cached_property
    def classes(self) -> int:
        config: Any = self.model.config
        return config.classes

    @cached_property
    def probabilities(self) -> Tensor:
        """[B, K] on the host; [B, 0] where there is no head, or one without classes."""
        if not self.classes or not self.has_classes or not len(self.images):
            return torch.zeros(len(self.images), 0)
        with resting(self.model), torch.no_grad():
            return mean_logits(self.model(self.images)).float().softmax(-1).cpu()

    @cached_property
    def rollout(self) -> Tensor:
        return run_in_portions(self.model, self.images, lambda images: rollout(self.model, images))

    def named(self, number: int) -> str:
        return self.labels[number] if self.labels else f"{self.output} {number}"

    @property
    def output(self) -> str:
        """What an output stands for, in a word."""
        return "class" if self.has_classes else "output"

    def said(self, at: int, most: int = 3) -> list[tuple[str, float]]:
        """The likeliest classes of an image."""
        found = self.probabilities[at].topk(min(most, self.probabilities.shape[1]))
        pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [(self.named(number), share) for number, share in pairs]

    def explained(self, place: int = 0) -> Tensor:
        """The class to explain for each image [B]: the one that was asked for, or the network's first, second ...;
        without classes the output of that place."""
        if self.asked is not None and place == 0:
            return torch.full((len(self.images),), self.asked)
        if not self.has_classes:
            return torch.full((len(self.images),), place)
        return self.probabilities.argsort(dim=1, descending=True)[:, place]

    @property
    def over(self) -> str:
        return f"{self.count} image{'s' if self.count != 1 else ''}"


def to_numpy(values: Tensor) -> NDArray[np.float32]:
    return values.detach().float().cpu().numpy()


def choose_layers(given: InspectionContext, count: int, most: int = ACROSS) -> list[int]:
    """Layers to show: those that were asked for, else all, else evenly spread with the first and the last."""
    wrong = [layer for layer in given.layers if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"--layers {wrong[0] + 1}: this network has layers 1 to {count}")
    if given.layers:
        return list(given.layers)
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, most)).tolist()})


def name_prefix_tokens(given: InspectionContext) -> list[str]:
    first = ["class token"] if given.tokens.class_token else []
    registers = given.tokens.prefix - len(first)
    return first + [f"register {at + 1}" if registers > 1 else "register" for at in range(registers)]


def choose_portion(model: nn.Module) -> int:
    """Images at once, of which one layer's attention takes half a gigabyte at most."""
    config: Any = model.config
    tokens = get_token_layout(model)
    return max(WEIGHTS // (config.heads * (tokens.prefix + tokens.patches) ** 2), 1)


def run_in_portions(model: nn.Module, images: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function makes of images [B, C, H, W], a few of them at a time."""
    return torch.cat([work(some) for some in images.split(choose_portion(model))])
