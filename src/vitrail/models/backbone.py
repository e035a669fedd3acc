"""The interface of networks of any family: images in; logits, features or maps out.

`Taps` collect intermediates of a forward pass; a pass without taps pays nothing. A fused kernel never stores the
attention weights. On request they are computed in addition; `explicit` computes the output from them instead, so that
gradients reach them. The caller bounds the memory: `ViT.forward_blocks` runs any range of layers, so it suffices to
hold the weights [B, k, T, T] of one layer at a time.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, format_size
from vitrail.models.family import ModelConfig
from vitrail.models.resampling.patch_kernels import adapt_channels
from vitrail.models.vit_config import Numerics

Layers: TypeAlias = int | list[int] | tuple[int, ...] | None  # number of last layers, or a list of layers; None for all


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTap:
    """The intermediates of one attention: q, k, v [S, k, t, D_h] and the weights [S, k, t, t] of S sequences whose
    tokens attend to each other. The sequences are the images, or each of their rows, columns (D.6) or windows."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerTap:
    """The intermediates of one layer. `before` is the input of its first norm, positions included; `after` is its
    output. An axial block counts as two layers."""

    layer: int
    before: Tensor  # [B, T, D]
    after: Tensor  # [B, T, D]
    inside: AttentionTap | None
    spread: Callable[[Tensor], Tensor]  # weights over sequences to weights over all tokens of an image

    @property
    def attention(self) -> Tensor:
        """A of all heads over all tokens (Eq. 6), zero between tokens that do not attend to each other:
        [B, k, T, T]."""
        return self.spread(self.weights)

    @property
    def mean_attention(self) -> Tensor:
        """The mean of all heads: [B, T, T]."""
        return self.spread(self.weights.mean(dim=1, keepdim=True))[:, 0]

    @property
    def weights(self) -> Tensor:
        """A as it was computed, with its gradient: [S, k, t, t]."""
        if self.inside is None:
            raise ValueError("attention was not requested for this pass")
        return self.inside.weights


@dataclass(slots=True, eq=False)
class Taps:
    """Options of what to collect in a forward pass, and the result: a LayerTap for each layer that ran, in order."""

    attention: bool = False
    explicit: bool = False  # the output is computed from the weights, not by the fused kernel
    first: int = 0  # the number of the first layer that runs
    layers: list[LayerTap] = field(default_factory=list)  # torch.compile cannot trace list[LayerTap]
    inside: AttentionTap | None = None  # of the layer that is running

    def take_layer(self, before: Tensor, after: Tensor, spread: Callable[[Tensor], Tensor]) -> None:
        self.layers.append(LayerTap(self.first + len(self.layers), before, after, self.inside, spread))
        self.inside = None


@dataclass(frozen=True, slots=True, eq=False)
class Intermediates:
    """The result of `forward_intermediates` after each of the requested layers, in the order of the request."""

    layers: tuple[int, ...]
    tokens: tuple[Tensor, ...]  # [B, T, D]; without the prefix tokens [B, N, D]
    maps: tuple[Tensor, ...]  # the patch tokens on their grid, [B, D, rows, columns]
    attention: tuple[Tensor, ...] = ()  # [B, k, T, T], if requested
    qkv: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()  # [B, k, T, D_h] each, if requested


def resolve_layers(layers: Layers, depth: int) -> tuple[int, ...]:
    """Resolves layers to indices from 0: None means all, a number the last ones, and negative numbers in a list count
    from the end."""
    if layers is None:
        return tuple(range(depth))
    if isinstance(layers, int):
        wanted = range(depth - layers, depth)
    else:
        wanted = [layer + depth if layer < 0 else layer for layer in layers]
    if layers == 0 or not all(0 <= layer < depth for layer in wanted):
        raise ConfigError(f"layers={layers!r}: this network has {depth}, counted from 0")
    return tuple(wanted)


class Backbone(nn.Module, ABC):
    """A network of any family: [B, C, H, W] -> logits [B, K], or features [B, D] without a head; logits per
    pixel [B, K, H, W] where its config `has_patch_head`."""

    config_class: ClassVar[type[ModelConfig]]  # what describes a network of this family
    config: ModelConfig
    blocks: nn.ModuleList  # the units that freezing and layer-wise rate decay count as layers: blocks, or stages
    card: Any = None  # metadata stored with the weights, set by the checkpoint layer: a checkpoint.bundle.Card
    grad_checkpointing: bool = False  # whether blocks are recomputed in the backward pass
    float8: bool = False  # whether the products of the layers run in fp8, where the kernels support it
    # Whether the last layer computes only the class token if the head reads no other: 7 % less work at depth 12. By
    # default this is so in inference, unless that layer has a hook. vitrail's own training turns it on.
    class_token_only: bool | None = None
    open_size: bool = False  # for export: the image size stays open in the graph, so nothing may be compared with it

    @classmethod
    @abstractmethod
    def from_config(cls, config: ModelConfig) -> Self:
        """Builds the network that a config of this family describes. Its weights are those of torch's constructors."""

    @classmethod
    def resize_tensors(
        cls, tensors: dict[str, Tensor], old: ModelConfig, new: ModelConfig, numerics: Numerics | None = None
    ) -> dict[str, Tensor]:
        """Resizes tensors to another image size (3.2), patch size or number of channels
        (resampling/patch_kernels.py)."""
        if old.tied_to_size and new.image != old.image:
            raise ConfigError(f"{old.tied_to_size}; keep image_size={format_size(old.image)}")
        if old.channels == new.channels:
            return tensors
        kernel = f"{cls.first_layer(old)}.weight"
        return {**tensors, kernel: adapt_channels(tensors[kernel], new.channels)}

    @classmethod
    def first_layer(cls, config: ModelConfig) -> str:
        """The name of the layer that reads the image, as in the names of its tensors."""
        raise ConfigError(f"{config.title} takes only images of {config.channels} channels")

    @classmethod
    def redraw_positions(
        cls, tensors: dict[str, Tensor], drawn: Mapping[str, Tensor], config: ModelConfig
    ) -> dict[str, Tensor]:
        """Replaces the grid's positions in tensors by `drawn` ones, those of a fresh network of the same config."""
        del drawn, config
        return tensors

    def units(self) -> list[nn.Module]:
        """All blocks in one list, across stages."""
        return list(self.blocks)

    # Images to something.

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """Computes the input of a classifier's last layer: [B, C, H, W] -> [B, D]. For a ViT this is the representation
        y (Eq. 4), passed through the hidden layer if there is one; for a ResNet it is the mean of its map."""

    @abstractmethod
    def patch_map(self, images: Tensor) -> Tensor:
        """Computes a vector for each patch, after the last norm: [B, C, H, W] -> [B, D, rows, columns]."""

    def forward_intermediates(
        self,
        images: Tensor,
        layers: Layers = None,
        *,
        norm: bool = True,
        prefix: bool = True,
        attention: bool = False,
        qkv: bool = False,
    ) -> tuple[Tensor, Intermediates]:
        """Returns the output of `forward_features` and the outputs of some layers.

        `layers` are counted from 0, negative ones from the end; a single number means that many last layers, None means
        all. `norm` applies the network's last norm to each output, `prefix` keeps class token and registers in the
        token sequences. `attention` and `qkv` add those of each layer."""
        return self.run_layers(images, layers, norm=norm, prefix=prefix, attention=attention, qkv=qkv)

    @abstractmethod
    def run_layers(
        self, images: Tensor, layers: Layers, *, norm: bool, prefix: bool, attention: bool, qkv: bool
    ) -> tuple[Tensor, Intermediates]:
        """Implements `forward_intermediates`."""

    @abstractmethod
    def forward_features(self, images: Tensor) -> Tensor:
        """Computes the output of the encoder's last layer, after the last norm."""

    @abstractmethod
    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Turns the output of `forward_features` into logits, or into the last layer's input with `pre_logits`."""

    @property
    @abstractmethod
    def kernel(self) -> Tensor:
        """The filters that read the image: [D, C, P, P]."""

    # The head.

    @abstractmethod
    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits; an identity if there is none."""

    @abstractmethod
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the whole head by a new zero-initialised linear one (3.2); 0 leaves none."""

    def forget_labels(self, *, keep_task: bool = False) -> None:
        """Drops the class names of a replaced head, and resets the task to classification unless `keep_task`."""
        self.card = None if self.card is None else self.card.without_labels(keep_task=keep_task)

    # Names that users know from timm.

    @property
    def num_features(self) -> int:
        """D: the length of a representation."""
        return self.config.features

    @property
    def embed_dim(self) -> int:
        return self.num_features

    @property
    def num_classes(self) -> int:
        return self.config.classes

    @property
    def num_prefix_tokens(self) -> int:
        """The number of class tokens and registers."""
        return self.config.prefix

    @property
    def has_class_token(self) -> bool:
        """Whether the first token is a class token."""
        return False

    def set_patch(self, patch: int | Pair | None) -> None:
        """Runs the network at another patch size from now on, or at its own again with None. Kernel and positions are
        resized in every pass, with gradients; the stored ones are unchanged."""
        if patch is not None:
            raise ConfigError(f"patch={patch}: {self.config.title} has no patches of another size")

    def list_kernels(self, device: torch.device) -> list[str]:
        """Lists the operations of a training step in bfloat16 that run in vitrail's own kernels on a device."""
        del device
        return []

    def float8_obstacle(self) -> str:
        """Why the network cannot compute in fp8, in its current mode; empty if it can."""
        return "only plain ViTs support it"

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Sets whether training recomputes each block in the backward pass, to save memory."""
        self.grad_checkpointing = enable

    @abstractmethod
    def no_weight_decay(self) -> set[str]:
        """Names the parameters other than kernels, biases and norms that should not decay: tokens and positions."""

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        norm: bool = True,
        *,
        return_prefix_tokens: bool = False,
    ) -> tuple[Any, ...]:
        """Returns, as in DINO's code, patch tokens [B, N, D] of the last n layers, or of a list of layers; with
        `reshape` on their grid [B, D, rows, columns]. On request each comes with its class token [B, D] or, as in timm,
        with all tokens before the patches [B, prefix, D]."""
        if return_class_token and return_prefix_tokens:
            raise ConfigError("set return_class_token or timm's return_prefix_tokens, not both")
        if return_class_token and not self.has_class_token:
            raise ConfigError(f"{self.config.title} has no class token to return; set return_class_token=False")
        layers = n if isinstance(n, int) else tuple(n)
        _, found = self.forward_intermediates(x, layers, norm=norm)
        skip = self.num_prefix_tokens
        out = found.maps if reshape else tuple(z[:, skip:] for z in found.tokens)
        if not (return_class_token or return_prefix_tokens):
            return out
        prefixes = (z[:, 0] if return_class_token else z[:, :skip] for z in found.tokens)
        return tuple(zip(out, prefixes, strict=True))


def unwrap_backbone(module: nn.Module) -> Backbone:
    """Returns the network inside a module, through compiled and parallel wrappers."""
    inner = module
    while not isinstance(inner, Backbone):
        wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            raise ConfigError(f"{type(module).__name__} is not a vitrail network; use one of `vitrail models`")
        inner = wrapped
    return inner


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Puts a model in evaluation mode, and every module back into its own mode afterwards, because a run may keep
    frozen layers in evaluation mode while the rest trains."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def has_hooks(module: nn.Module) -> bool:
    """Whether a module, or a part of it, has forward hooks."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())  # pyright: ignore[reportPrivateUsage]
