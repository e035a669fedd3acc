"""The network as it is shipped: the same weights and arithmetic as models/, in operations that leave PyTorch unharmed.

Three things differ. Kernels are standardised once, not at every call. Zeros around a max-pool are laid on by
concatenation: a runtime that merges a zero pad into the pool behind it, as ONNX Runtime does, turns them into minus
infinity. And where the image size is left open, positions are resampled in the graph (3.2).

What is exported: a bundle, the image sizes that one file of it can take, and the networks to hold it against.
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
    float32. With `dynamic` it takes other image sizes, too; with `preprocessing` bytes, which it normalises itself."""
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    copy = build_from(model.config, tensors).eval()  # other modules around the same tensors: these get changed
    replace_parts(copy, dynamic)
    copy.class_token_only = False  # half a weight is a slice, and no constant that can be quantised
    copy.open_size = dynamic
    form = PlainNetwork(copy) if copy.config.has_queries else copy
    return (form if preprocessing is None else NormalisingNetwork(form, preprocessing)).eval().requires_grad_(False)


def replace_parts(module: nn.Module, dynamic: bool) -> None:
    """Puts what leaves PyTorch unharmed in the place of what does not."""
    for name, child in module.named_children():
        make = REPLACED.get(type(child))
        if make is not None:
            setattr(module, name, make(child, dynamic))
            continue
        if hasattr(child, "as_convolution"):
            setattr(child, "as_convolution", True)  # noqa: B010 (torch types attributes as tensors)
        replace_parts(child, dynamic)


class PlainNetwork(nn.Module):
    """A network with queries that gives a plain tuple: graphs are read where this package's types are not known."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return output_tensors(self.network(image))


class NormalisingNetwork(nn.Module):
    """Bytes to what the network takes, then the network."""

    def __init__(self, network: nn.Module, preprocessing: Preprocessing):
        super().__init__()
        self.network, self.preprocessing = network, preprocessing

    def forward(self, image: Tensor) -> Output | tuple[Tensor, ...]:
        return self.network(self.preprocessing.normalise(image))


class FixedConv(nn.Module):
    """A weight-standardised convolution with its kernel as it comes out."""

    def __init__(self, conv: StandardisedConv, dynamic: bool):
        super().__init__()
        self.weight = nn.Parameter(conv.standardise_kernel().detach(), requires_grad=False)
        self.stride, self.padding, self.same, self.dynamic = conv.stride, conv.padding, conv.same, dynamic

    def forward(self, x: Tensor) -> Tensor:
        if self.same:
            x = pad_same(x, self.weight.shape[2], self.stride[0], open_size=self.dynamic)
        return F.conv2d(x, self.weight, None, self.stride, self.padding)


class BorderedPool(nn.Module):
    """A max-pool whose border of zeros no optimiser takes for padding: it is laid on by concatenation."""

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
FURTHER: Final = (2, 1)  # steps that the second size of a check is larger by: not square, so that a swapped axis shows


def load_bundle(weights: Weights, image_size: int | Pair | None = None, *, exact: bool = False) -> Bundle:
    """The bundle of weights however they are given, with positions resized where that is asked for; in float32 where it
    is to be exact, for half precision would round resampled positions."""
    if isinstance(weights, str | Path):
        weights = find_weights(weights)
    bundle = weights if isinstance(weights, Bundle) else to_bundle(weights)
    kind = torch.float32 if exact else None
    bundle = replace(bundle, tensors={name: tensor.to("cpu", kind) for name, tensor in bundle.tensors.items()})
    return bundle if image_size is None else replace_head_and_resize(bundle, image_size=image_size)


def source_path(weights: Weights) -> Path | None:
    """Where they are read from, if from a file or folder: no export may go there."""
    return Path(weights) if isinstance(weights, str | Path) and Path(weights).exists() else None


def make_references(bundle: Bundle, open_sizes: ImageSizes, *, pixels: bool = False) -> dict[Pair, Forward]:
    """The networks that a file is held against: at its own size, and where sizes are open at a larger, oblong one."""
    own = bundle.config.image
    wanted = [own]
    if open_sizes.step is not None:
        wanted.append((own[0] + FURTHER[0] * open_sizes.step[0], own[1] + FURTHER[1] * open_sizes.step[1]))
    if open_sizes.any:
        wanted.append((own[0] + 1, own[1] + 3))  # an odd one, too
    return {image: make_reference(bundle, image, pixels=pixels) for image in wanted}


def make_reference(bundle: Bundle, image: Pair, *, pixels: bool = False) -> Forward:
    """The network itself at one size, in float32 on the CPU; with `pixels` it takes bytes."""
    model = build_network(replace_head_and_resize(bundle, image_size=image)).requires_grad_(False)
    preprocessing = bundle.card.preprocessing

    @torch.inference_mode()
    def forward(images: Tensor) -> Output:
        return model(preprocessing.normalise(images) if pixels else images)

    return forward
