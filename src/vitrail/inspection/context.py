"""The input of an inspection: a network, images, and their names."""

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
from vitrail.models.backbone import eval_mode

Pixels = NDArray[np.uint8]

ACROSS: Final = 12  # layers or heads side by side
DOWN: Final = 4  # images below each other
WEIGHTS: Final = 1 << 27  # attention weights held at once, 4 bytes each


@dataclass(frozen=True, kw_only=True, eq=False)
class InspectionContext:
    """A network and the images to inspect it on. `images` [B, C, H, W] are prepared, on the model's device; `pixels`
    show the same images, perhaps larger; `crowd` yields batches of prepared images, `count` in total, for statistics
    over many. Outputs that are not classes have no probabilities."""

    model: nn.Module
    images: Tensor
    pixels: Sequence[Pixels]  # [H, W, 3] each
    names: Sequence[str]
    crowd: Callable[[], Iterator[Tensor]]
    count: int
    labels: Sequence[str] | None = None  # class names
    asked: int | None = None  # the class to explain
    layers: Sequence[int] = ()  # to show, from 0; empty for as many as there is room for
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
        """The number of layers; an axial block has two."""
        return require_transformer(self.model).depth

    @property
    def classes(self) -> int:
        config: Any = self.model.config
        return config.classes

    @cached_property
    def probabilities(self) -> Tensor:
        """Probabilities [B, K] on the host; [B, 0] without a head, or for a head without classes or with queries."""
        config: Any = self.model.config
        if not self.classes or config.has_queries or not self.has_classes or not len(self.images):
            return torch.zeros(len(self.images), 0)
        with eval_mode(self.model), torch.no_grad():
            return mean_logits(self.model(self.images)).float().softmax(-1).cpu()

    @cached_property
    def rollout(self) -> Tensor:
        return run_in_portions(self.model, self.images, lambda images: rollout(self.model, images))

    @property
    def output(self) -> str:
        """The word for an output."""
        return "class" if self.has_classes else "output"

    def output_name(self, number: int) -> str:
        return self.labels[number] if self.labels else f"{self.output} {number}"

    def top_classes(self, at: int, most: int = 3) -> list[tuple[str, float]]:
        """The likeliest classes of an image with their probabilities."""
        top = self.probabilities[at].topk(min(most, self.probabilities.shape[1]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [(self.output_name(number), share) for number, share in pairs]

    def target_classes(self, place: int = 0) -> Tensor:
        """The class to explain for each image [B]: the requested one, or the likeliest at `place` 0, the second at 1,
        and so on; without classes, the output of that number."""
        if self.asked is not None and place == 0:
            return torch.full((len(self.images),), self.asked)
        if not self.has_classes:
            return torch.full((len(self.images),), place)
        return self.probabilities.argsort(dim=1, descending=True)[:, place]


def to_numpy(values: Tensor) -> NDArray[np.float32]:
    return values.detach().float().cpu().numpy()


def choose_layers(given: InspectionContext, count: int, most: int = ACROSS) -> list[int]:
    """The layers to show: the requested ones, else all, else evenly spaced ones with the first and the last."""
    wrong = [layer for layer in given.layers if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"--layers {wrong[0] + 1} is out of range; this network has layers 1 to {count}")
    return list(given.layers) or space_evenly(0, count - 1, min(count, most))


def space_evenly(first: int, last: int, count: int) -> list[int]:
    """At most so many integers from the first to the last, both included."""
    return sorted({round(at) for at in np.linspace(first, last, count).tolist()})


def name_prefix_tokens(given: InspectionContext) -> list[str]:
    classes, distilled = given.tokens.class_tokens, given.tokens.distilled
    others = [(classes, "class token"), (int(distilled), "distillation token")]
    others.append((given.tokens.prefix - classes - distilled, "register"))
    return [f"{name} {at + 1}" if count > 1 else name for count, name in others for at in range(count)]


def choose_portion(model: nn.Module) -> int:
    """How many images to process at once, so that one layer's attention takes at most half a gigabyte."""
    config: Any = model.config
    tokens = get_token_layout(model)
    return max(WEIGHTS // (config.heads * (tokens.prefix + tokens.patches) ** 2), 1)


def run_in_portions(model: nn.Module, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies a function to images [B, C, H, W], a few of them at a time."""
    return torch.cat([function(portion) for portion in images.split(choose_portion(model))])
