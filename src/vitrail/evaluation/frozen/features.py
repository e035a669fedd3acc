"""Frozen features: the input of a network's last layer for every image of a split, extracted once and cached.

    found = load_or_extract(network, source, preprocessing, "cpu", batches=..., folder=cache_folder("features"))
    found.features, found.labels, found.samples

The key of a cache file is a hash of everything that the features depend on: the network's config and numbers, the
images (their fingerprint, and the bytes of some of them), the preprocessing, the precision, the kind of device, and the
versions. Labels are not part of it, so two sets of labels for the same images share one file. Files are written
atomically with a checksum per tensor, so a damaged one is detected and replaced. When all files together exceed
`LIMIT`, the least recently used are deleted.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail import __version__
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.onnx_network import OnnxNetwork
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import BadImage, DataError, WeightsError, WeightsNotFound, unknown_name
from vitrail.core.precision import HALF, Precision
from vitrail.core.text import Pair
from vitrail.data import preprocessing as tensorflow
from vitrail.data.dataset import ImageDataset, RelabelledDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing, normalise_pixels
from vitrail.data.randomness import CounterRng
from vitrail.data.targets import Geometry
from vitrail.models.backbone import eval_mode, unwrap_backbone
from vitrail.models.family import to_dict

KIND: Final = "vitrail features 1"
LIMIT: Final = 20 << 30  # bytes of cached features; those of ImageNet's training set at width 768 are 3.9 GB
LOOKED_AT: Final = 256  # images of a source whose bytes go into the key
HELD: Final = 64  # batches whose features stay on the device before they are copied, so that copies seldom block it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrozenFeatures:
    """Features of the N readable images of a source, in its order, on the CPU."""

    features: Tensor  # float32 [N, D]
    labels: Tensor  # int64 [N], -1 for none; or [N, M] padded with -1 if samples have several
    samples: Tensor  # int64 [N], their indices in the source
    reused: bool = False  # read from the cache
    cached: bool = False  # in the cache now
    warning: str = ""  # about the cache file

    def select(self, rows: Tensor) -> "FrozenFeatures":
        """Some of the rows, by mask or index."""
        return replace(self, features=self.features[rows], labels=self.labels[rows], samples=self.samples[rows])


@contextlib.contextmanager
def inference_context(network: object, device: torch.device, precision: Precision) -> Generator[None]:
    """Evaluation mode (restored afterwards), no gradients, and autocast if the precision asks for it. `network` may be
    any callable."""
    if precision not in get_args(Precision):
        raise unknown_name("precision", str(precision), get_args(Precision))
    mode = eval_mode(network) if isinstance(network, nn.Module) else contextlib.nullcontext()
    # Not inference_mode: a sharded network gathers weights here that training continues to use.
    with mode, torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        yield


def make_normaliser(
    preprocessing: Preprocessing, device: torch.device, precision: Precision
) -> Callable[[Tensor], Tensor]:
    """`preprocessing.normalise` for bytes on the device [B, 3, H, W], with its constants copied there once."""
    mean, std = preprocessing.channel_tensors(device)
    dtype = torch.bfloat16 if precision in HALF else torch.float32
    return lambda pixels: normalise_pixels(pixels, mean, std).to(dtype)


def compute_features(network: nn.Module, images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, D]: the representation y of a ViT, after the hidden layer if there is one (the paper's
    pre-logits); the pooled map of a ResNet."""
    return unwrap_backbone(network).features(images)


def iterate_features(
    network: nn.Module,
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    device: torch.device,
    *,
    precision: Precision = "float32",
    read: Callable[[nn.Module, Tensor], Tensor] = compute_features,
) -> Iterator[tuple[Tensor, Batch]]:
    """Features [B, D] in float32 for each batch, both on the device. `read` computes them from normalised images."""
    normalise = make_normaliser(preprocessing, device, precision)
    for batch in batches:
        moved = batch.to(device)
        with inference_context(network, device, precision):
            features = read(network, normalise(moved.pixels)).float()
        yield features, moved


def extract_features(
    network: nn.Module,
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    device: torch.device | str,
    *,
    precision: Precision = "float32",
    read: Callable[[nn.Module, Tensor], Tensor] = compute_features,
) -> FrozenFeatures:
    """The features of all readable images of the batches, in their order."""
    rows, device = list[tuple[Tensor, ...]](), torch.device(device)
    found = iterate_features(network, batches, preprocessing, device, precision=precision, read=read)
    while held := [(one, batch.target, batch.sample, batch.valid) for one, batch in itertools.islice(found, HELD)]:
        rows += [tuple(tensor.cpu()[valid.cpu()] for tensor in row) for *row, valid in held]
    if not sum(len(samples) for _, _, samples in rows):
        raise DataError("there are no readable images to extract features from")
    if rows[0][1].ndim == 2:  # several labels per sample: every batch is padded to the widest
        widest = max(labels.shape[1] for _, labels, _ in rows)
        pad = lambda labels: F.pad(labels, (0, widest - labels.shape[1]), value=-1)  # noqa: E731
        rows = [(features, pad(labels), samples) for features, labels, samples in rows]
    features, labels, samples = (torch.cat(column) for column in zip(*rows, strict=True))
    return FrozenFeatures(features=features, labels=labels, samples=samples)


@dataclass(frozen=True, slots=True)
class SquareView:
    """The view of the reference's few-shot evaluator: resized to a square of 8/7 the size whatever the aspect ratio, as
    TensorFlow resizes, truncated to bytes, and centre-cropped; for 224 pixels the square is 256."""

    image: Pair

    @property
    def sizes(self) -> tuple[Pair, ...]:
        return (self.image,)

    @property
    def crop(self) -> tuple[Pair, tuple[slice, slice]]:
        """The size of the square, and its middle."""
        larger = (round(self.image[0] * 8 / 7), round(self.image[1] * 8 / 7))
        starts = ((whole - side) // 2 for whole, side in zip(larger, self.image, strict=True))
        rows, columns = (slice(start, start + side) for start, side in zip(starts, self.image, strict=True))
        return larger, (rows, columns)

    def __call__(self, image: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        larger, (rows, columns) = self.crop
        rgb = torch.from_numpy(np.array(image.rgb())).permute(2, 0, 1)
        return (tensorflow.truncate_levels(tensorflow.resize_bilinear(rgb, larger))[:, rows, columns],)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        larger, (rows, columns) = self.crop
        down, across = whole[0] / larger[0], whole[1] / larger[1]
        box = (rows.start * down, columns.start * across, self.image[0] * down, self.image[1] * across)
        return (Geometry(whole=whole, box=box, inner=self.image),)


def load_or_extract(
    network: nn.Module,
    source: ImageDataset,
    preprocessing: Preprocessing,
    device: torch.device | str,
    *,
    batches: Callable[[ImageDataset], Iterable[Batch]],
    folder: Path | None,
    precision: Precision = "float32",
    view: str = "",
    limit: int = LIMIT,
) -> FrozenFeatures:
    """Features of every image of a source, from the cache in `folder` or from the network. `batches` yields the images
    of a source, each once; `view` names how it crops them, if not as the preprocessing does. Without a folder nothing
    is cached."""
    bare = source
    while isinstance(bare, RelabelledDataset):
        bare = bare.source

    def label(features: FrozenFeatures, **facts: Any) -> FrozenFeatures:
        labels = torch.from_numpy(source.labels.rows(features.samples.numpy()))
        return replace(features, labels=labels, **facts)

    def extract() -> FrozenFeatures:
        found = extract_features(network, batches(bare), preprocessing, device, precision=precision)
        wrong = (~found.features.isfinite()).any(1).nonzero()
        if len(wrong):
            first = f"the features of {len(wrong):,} images are not finite, first of"
            raise DataError(f"{first} {bare.name(int(found.samples[wrong[0, 0]]))}; the network overflows")
        return found

    if folder is None:
        return label(extract())
    key = describe_extraction(network, bare, preprocessing, torch.device(device).type, precision, view)
    path = folder / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.safetensors"
    warning = ""
    try:
        found = read_cache_file(path, key)
        if not any(is_readable(bare, sample) for sample in list_missing(bare, found.samples)):
            os.utime(path)  # used now
            return label(found, reused=True, cached=True)
    except WeightsNotFound:
        pass
    except (WeightsError, OSError) as error:
        warning = f"the cached features were damaged and are extracted again ({' '.join(str(error).split())})"
    found = extract()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(path, {"features": found.features, "samples": found.samples}, {"kind": KIND, "facts": key})
        remove_oldest(folder, limit, path)
    except (WeightsError, OSError) as error:
        return label(found, warning=f"the features could not be cached ({' '.join(str(error).split())})")
    return label(found, cached=True, warning=warning)


def describe_extraction(
    network: nn.Module, source: ImageDataset, preprocessing: Preprocessing, device: str, precision: str, view: str
) -> dict[str, Any]:
    """Everything that features depend on, as plain data."""
    inputs = {"network": hash_network(network), "pictures": hash_images(source), "view": view, "read": "last layer"}
    how = {"preprocessing": preprocessing.to_dict(), "precision": precision, "device": device}
    facts = inputs | how | {"versions": [__version__, torch.__version__]}
    return json.loads(json.dumps(facts))  # tuples become lists, as in a file


def read_cache_file(path: Path, key: dict[str, Any]) -> FrozenFeatures:
    """Features without labels from a cache file; WeightsError if it is damaged."""
    content = read_weights(path)
    if content.description != {"kind": KIND, "facts": key} or set(content.tensors) != {"features", "samples"}:
        raise WeightsError(f"{path} does not contain what its name says")
    samples = content.tensors["samples"]
    return FrozenFeatures(features=content.tensors["features"], labels=samples, samples=samples)


def hash_network(network: nn.Module) -> str:
    """A hash of the config and the numbers: equal for equal networks, whatever file, format and device they come
    from."""
    if isinstance(network, OnnxNetwork):
        return network.hash
    bundle = to_bundle(network)
    digest = sha256(json.dumps(to_dict(bundle.config), sort_keys=True).encode())
    for name, tensor in sorted(bundle.tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_images(source: ImageDataset) -> str:
    """A hash of the source's fingerprint and the bytes of evenly spaced images, which differ between sets with equal
    names and sizes (raw images of one size)."""
    digest = sha256(source.fingerprint.encode())
    for at in np.linspace(0, len(source) - 1, min(len(source), LOOKED_AT)).astype(np.int64).tolist():
        try:
            content = source.read(at)
        except (BadImage, OSError):
            content = b"unreadable"
        digest.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).data)
    return digest.hexdigest()


def list_missing(source: ImageDataset, samples: Tensor) -> list[int]:
    """The indices of a source that have no features, because their images are unreadable."""
    return np.setdiff1d(np.arange(len(source)), samples.numpy()).tolist()


def is_readable(source: ImageDataset, sample: int) -> bool:
    """Whether an image can be decoded now: a file store that was briefly unavailable must not spoil the cache."""
    try:
        source.open_image(sample).rgb()
    except BadImage:
        return False
    return True


def remove_oldest(folder: Path, limit: int, newest: Path) -> None:
    """Deletes the least recently used files until the rest fits; the newest one stays, whatever its size."""
    files: list[tuple[Path, os.stat_result]] = []
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting, too
            files += [(path, path.stat())] if path != newest else []
    total = newest.stat().st_size
    for path, status in sorted(files, key=lambda file: -file[1].st_mtime_ns):
        total += status.st_size
        if total > limit:
            path.unlink(missing_ok=True)
