"""Frozen features: what the last layer of a network reads, for every image of a split.

A network at rest: evaluation mode, no gradients, images normalised on the device in the type it computes in.

What a network is, as a hash: of its config and its numbers, whatever file and format they came from.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoint.weights import bundle_of
from vitrail.core.errors import DataError, unknown
from vitrail.core.text import Pair
from vitrail.data import preprocessing as tensorflow
from vitrail.data.decode.image import EncodedImage
from vitrail.data.geometry import Geometry
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import CounterRng
from vitrail.evaluation.defaults import Precision
from vitrail.models.backbone import backbone, resting
from vitrail.models.family import to_dict


@contextlib.contextmanager
def inference_context(network: object, device: torch.device, precision: Precision) -> Generator[None]:
    """Puts a module into evaluation mode and every part of it back as it was. A plain callable is taken as it is."""
    if precision not in get_args(Precision):
        raise unknown("precision", str(precision), get_args(Precision))
    mode = resting(network) if isinstance(network, nn.Module) else contextlib.nullcontext()
    # Not inference_mode: a sharded network gathers weights here that training goes on with.
    with mode, torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        yield


def make_normaliser(preprocessing: Preprocessing, device: torch.device, precision: Precision) -> Callable[[Tensor], Tensor]:
    """`preprocessing.normalise` for bytes on the device [B, 3, H, W], with its constants sent there once."""
    mean = torch.tensor(preprocessing.mean, device=device).view(3, 1, 1)
    std = torch.tensor(preprocessing.std, device=device).view(3, 1, 1)
    kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return lambda pixels: ((pixels.float() / 255 - mean) / std).to(kind)


HELD: Final = 64  # batches whose features wait on the device before they are fetched, so that few fetches make it wait


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """Of the N images that could be read, in the order of the source, on the CPU."""

    features: Tensor  # float32 [N, D]
    labels: Tensor  # int64 [N]; or [N, M], filled up with -1, where samples have several
    samples: Tensor  # int64 [N], their places in the source


@dataclass(frozen=True, slots=True)
class SquareView:
    """The view of the reference's few-shot evaluator: to a square of 8/7 the size whatever the aspect, as TensorFlow
    resizes and cuts levels off to bytes, and out of it the centre; for 224 pixels that is 256. Normalised as the
    weights want it."""

    image: Pair

    @property
    def sizes(self) -> tuple[Pair, ...]:
        return (self.image,)

    def __call__(self, picture: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        height, width = self.image
        larger = (round(height * 8 / 7), round(width * 8 / 7))
        rgb = torch.from_numpy(np.array(picture.rgb())).permute(2, 0, 1)
        whole = tensorflow.truncated(tensorflow.bilinear(rgb, larger))
        top, left = (larger[0] - height) // 2, (larger[1] - width) // 2
        return (whole[:, top : top + height, left : left + width],)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        height, width = self.image
        tall, wide = round(height * 8 / 7), round(width * 8 / 7)
        top, left = (tall - height) // 2, (wide - width) // 2
        down, across = whole[0] / tall, whole[1] / wide
        return (
            Geometry(whole=whole, box=(top * down, left * across, height * down, width * across), inner=self.image),
        )


def features(
    network: nn.Module,
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    device: torch.device | str,
    *,
    precision: Precision = "float32",
    read: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Features [N, D], float32, and labels [N] (or [N, M], filled up with -1) of all images that could be read, in
    their order, on the CPU. `read` is how a network is asked for them, where `last_read` will not do."""
    found = extract_features(network, batches, preprocessing, device, precision=precision, read=read)
    return found.features, found.labels


def extract_features(
    network: nn.Module,
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    device: torch.device | str,
    *,
    precision: Precision = "float32",
    read: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Features:
    """As `features`, with the places of the images in their source."""
    device, read = torch.device(device), read or compute_features
    prepare = make_normaliser(preprocessing, device, precision)
    held, fetched = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
    with inference_context(network, device, precision):
        for batch in batches:
            moved = batch.to(device)
            held.append((read(network, prepare(moved.pixels)).float(), moved.target, moved.sample, moved.valid))
            if len(held) == HELD:
                fetched, held = [*fetched, *move_to_host(held)], []
    fetched += move_to_host(held)
    if not sum(len(samples) for _, _, samples in fetched):
        raise DataError("there are no images to take features of, or none that can be read")
    widest = max(label.shape[-1] for _, label, _ in fetched) if fetched[0][1].ndim == 2 else 0
    return Features(
        features=torch.cat([y for y, _, _ in fetched]),
        labels=torch.cat([pad_labels(label, widest) for _, label, _ in fetched]),
        samples=torch.cat([samples for _, _, samples in fetched]),
    )


def compute_features(network: nn.Module, images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, D]: of a ViT the representation y, through the hidden layer where there is one (the paper's
    pre-logits); of a ResNet the pooled map."""
    return backbone(network).features(images)


def move_to_host(held: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """To the host, without the places that hold no image."""
    on_host = [tuple(tensor.cpu() for tensor in row) for row in held]
    return [tuple(tensor[valid] for tensor in row) for *row, valid in on_host]


def pad_labels(label: Tensor, widest: int) -> Tensor:
    """Rows of several labels, all as wide as the widest batch's."""
    return torch.nn.functional.pad(label, (0, widest - label.shape[1]), value=-1) if widest else label


def hash_network(network: torch.nn.Module) -> str:
    """Equal for equal networks: a file converted there and back, on whatever device, has the same."""
    bundle = bundle_of(network)
    found = sha256(json.dumps(to_dict(bundle.config), sort_keys=True).encode())
    for name, tensor in sorted(bundle.tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
