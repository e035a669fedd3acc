"""The exportable form of a network: the same weights and arithmetic as in models/, in operations that export correctly.

Three things differ. Convolution kernels are standardised once, not at every call. The zero border of a max-pool is
added by concatenation: a runtime that fuses zero padding into the pool that follows, as ONNX Runtime does, would turn
the zeros into minus infinity. And if the image size is left open, positions are resampled in the graph (3.2).

Also loads the bundle to export, and builds the reference networks that an export is compared with.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import build_network, replace_head_and_resize, to_bundle
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.export.verify import Forward
from vitrail.models.build import Model, build_from
from vitrail.models.family import ImageSizes
from vitrail.models.layers import RootPool, StandardisedConv, pad_same
from vitrail.models.query_output import Output, output_tensors
from vitrail.models.resnet_config import same_widths


def to_exportable(model: Model, *, dynamic: bool = False, preprocessing: Preprocessing | None = None) -> nn.Module:
    """A module [B, C, H, W] -> [B, K], [B, K, H, W] or a pair of classes and masks, in evaluation mode, on the CPU, in
    float32. With `dynamic` it also takes other image sizes. With `preprocessing` it takes bytes and normalises them."""
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    copy = build_from(model.config, tensors).eval()  # shares the tensors; its modules are changed below
    replace_parts(copy, dynamic)
    copy.class_token_only = False  # it slices weights, and only whole constants can be quantised
    copy.open_size = dynamic
    form = PlainNetwork(copy) if copy.config.has_queries else copy
    return (form if preprocessing is None else NormalisingNetwork(form, preprocessing)).eval().requires_grad_(False)


def replace_parts(module: nn.Module, dynamic: bool) -> None:
    """Replaces modules that do not export correctly (`REPLACED`), in place, and computes patches by convolution."""
    for name, child in module.named_children():
        make = REPLACED.get(type(child))
        if make is not None:
            setattr(module, name, make(child, dynamic))
            continue
        if hasattr(child, "as_convolution"):
            setattr(child, "as_convolution", True)  # noqa: B010 (torch types attributes as tensors)
        replace_parts(child, dynamic)


class PlainNetwork(nn.Module):
    """A network with queries that returns a plain tuple, since graphs are loaded where this package's types are
    unknown."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return output_tensors(self.network(image))


class NormalisingNetwork(nn.Module):
    """Normalises bytes, then runs the network."""

    def __init__(self, network: nn.Module, preprocessing: Preprocessing):
        super().__init__()
        self.network, self.preprocessing = network, preprocessing

    def forward(self, image: Tensor) -> Output | tuple[Tensor, ...]:
        return self.network(self.preprocessing.normalise(image))


class FixedConv(nn.Module):
    """A weight-standardised convolution whose kernel is standardised in advance."""

    def __init__(self, conv: StandardisedConv, dynamic: bool):
        super().__init__()
        self.weight = nn.Parameter(conv.standardise_kernel().detach(), requires_grad=False)
        self.stride, self.padding, self.same, self.dynamic = conv.stride, conv.padding, conv.same, dynamic

    def forward(self, x: Tensor) -> Tensor:
        if self.same:
            x = pad_same(x, self.weight.shape[2], self.stride[0], open_size=self.dynamic)
        return F.conv2d(x, self.weight, None, self.stride, self.padding)


class BorderedPool(nn.Module):
    """A max-pool with a zero border that is added by concatenation, so that no optimiser fuses it into the pool."""

    def __init__(self, pool: RootPool, dynamic: bool):
        super().__init__()
        self.config, self.dynamic = pool.config, dynamic

    def forward(self, x: Tensor) -> Tensor:
        if self.config.root == "3x3":
            return x
        same = self.config.padding == "same"
        if self.config.pool_padding == "infinity":
            x = pad_same(x, 3, 2, float("-inf"), open_size=self.dynamic) if same else x
            return F.max_pool2d(x, 3, stride=2, padding=0 if same else 1)
        for axis in (3, 2):
            zeros = torch.zeros_like(x.narrow(axis, 0, 1))
            before, behind = same_widths(2 if self.dynamic else x.shape[axis], 3, 2) if same else (1, 1)
            x = torch.cat([*[zeros] * before, x, *[zeros] * behind], dim=axis)
        return F.max_pool2d(x, 3, stride=2)


REPLACED: dict[type[nn.Module], Any] = {StandardisedConv: FixedConv, RootPool: BorderedPool}
Weights: TypeAlias = str | Path | Model | Bundle
FURTHER: Final = (2, 1)  # steps by which a second checked size is larger: not square, so that swapped axes show


def load_bundle(weights: Weights, image_size: int | Pair | None = None, *, exact: bool = False) -> Bundle:
    """Loads weights in any form as a bundle, with positions resized to `image_size` if given. With `exact` it is in
    float32, since half precision would round resampled positions."""
    if isinstance(weights, str | Path):
        weights = find_weights(weights)
    bundle = weights if isinstance(weights, Bundle) else to_bundle(weights)
    kind = torch.float32 if exact else None
    bundle = replace(bundle, tensors={name: tensor.to("cpu", kind) for name, tensor in bundle.tensors.items()})
    return bundle if image_size is None else replace_head_and_resize(bundle, image_size=image_size)


def source_path(weights: Weights) -> Path | None:
    """The file or folder that weights are read from, which an export must not overwrite; None for other weights."""
    return Path(weights) if isinstance(weights, str | Path) and Path(weights).exists() else None


def make_references(bundle: Bundle, open_sizes: ImageSizes, *, pixels: bool = False) -> dict[Pair, Forward]:
    """The reference networks by image size: the bundle's own size and, if sizes are open, a larger non-square one."""
    own = bundle.config.image
    wanted = [own]
    if open_sizes.step is not None:
        wanted.append((own[0] + FURTHER[0] * open_sizes.step[0], own[1] + FURTHER[1] * open_sizes.step[1]))
    if open_sizes.any:
        wanted.append((own[0] + 1, own[1] + 3))  # an odd size
    return {image: make_reference(bundle, image, pixels=pixels) for image in wanted}


def make_reference(bundle: Bundle, image: Pair, *, pixels: bool = False) -> Forward:
    """The original network at one image size, in float32 on the CPU. With `pixels` it takes bytes."""
    model = build_network(replace_head_and_resize(bundle, image_size=image)).requires_grad_(False)
    preprocessing = bundle.card.preprocessing

    @torch.inference_mode()
    def forward(images: Tensor) -> Output:
        return model(preprocessing.normalise(images) if pixels else images)

    return forward
