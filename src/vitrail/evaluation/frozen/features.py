"""Frozen features: what the last layer of a network reads, for every image of a split.

A network at rest: evaluation mode, no gradients, images normalised on the device in the type it computes in.

What a network is, as a hash: of its config and its numbers, whatever file and format they came from.

Features that were extracted once are kept: under a hash of all that they depend on.

    kept = cached_features(network, source, preprocessing, "cpu", batches=..., folder=cache_folder("features"))
    kept.features, kept.labels, kept.samples

The key holds the network's config and numbers, the images (their fingerprint, and the bytes of some of them), how
they are prepared, the precision, the kind of device, and the versions; not the labels, so that two sets of labels on
the same images share one file. A file is a sealed one: written whole or not at all, with a checksum of every tensor,
so that a damaged one is noticed and made again. The least recently used goes when all of them together exceed `LIMIT`.
"""

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import BadImage, DataError, WeightsError, WeightsNotFound, unknown_name
from vitrail.core.text import Pair
from vitrail.data import preprocessing as tensorflow
from vitrail.data.dataset import ImageDataset, RelabelledDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import CounterRng
from vitrail.data.targets import Geometry
from vitrail.evaluation.defaults import Precision
from vitrail.models.backbone import eval_mode, unwrap_backbone
from vitrail.models.family import to_dict


@contextlib.contextmanager
def inference_context(network: object, device: torch.device, precision: Precision) -> Generator[None]:
    """Puts a module into evaluation mode and every part of it back as it was. A plain callable is taken as it is."""
    if precision not in get_args(Precision):
        raise unknown_name("precision", str(precision), get_args(Precision))
    mode = eval_mode(network) if isinstance(network, nn.Module) else contextlib.nullcontext()
    # Not inference_mode: a sharded network gathers weights here that training goes on with.
    with mode, torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        yield


def make_normaliser(
    preprocessing: Preprocessing, device: torch.device, precision: Precision
) -> Callable[[Tensor], Tensor]:
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
        whole = tensorflow.truncate_levels(tensorflow.resize_bilinear(rgb, larger))
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
    return unwrap_backbone(network).features(images)


def move_to_host(held: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """To the host, without the places that hold no image."""
    on_host = [tuple(tensor.cpu() for tensor in row) for row in held]
    return [tuple(tensor[valid] for tensor in row) for *row, valid in on_host]


def pad_labels(label: Tensor, widest: int) -> Tensor:
    """Rows of several labels, all as wide as the widest batch's."""
    return torch.nn.functional.pad(label, (0, widest - label.shape[1]), value=-1) if widest else label


def hash_network(network: torch.nn.Module) -> str:
    """Equal for equal networks: a file converted there and back, on whatever device, has the same."""
    bundle = to_bundle(network)
    found = sha256(json.dumps(to_dict(bundle.config), sort_keys=True).encode())
    for name, tensor in sorted(bundle.tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


KIND: Final = "vitrail features 1"
LIMIT: Final = 20 << 30  # bytes of features that are kept; those of ImageNet's training set at width 768 are 3.9 GB
LOOKED_AT: Final = 256  # images of a source whose bytes go into the key


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept(Features):
    """`found` is whether they were there already, `kept` whether they are there now; `trouble` is what is to be told
    of the file, where anything is."""

    found: bool = False
    kept: bool = False
    trouble: str = ""


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
) -> Kept:
    """What the last layer reads for every image of a source, from `folder` or from the network. `batches` gives the
    images of a source, each once; `view` names the way it cuts them, where that is not the preprocessing's. Without
    a folder nothing is kept."""
    bare = source
    while isinstance(bare, RelabelledDataset):
        bare = bare.source
    if folder is None:
        features, samples = extract_finite(network, bare, preprocessing, device, batches(bare), precision)
        return labelled(source, features, samples)
    facts = describe_extraction(network, bare, preprocessing, torch.device(device), precision, view)
    path = folder / f"{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.safetensors"
    trouble = ""
    try:
        features, samples = read_cache_file(path, facts)
        if not any(is_readable(bare, sample) for sample in list_missing(bare, samples)):
            os.utime(path)  # used now
            return labelled(source, features, samples, found=True, kept=True)
    except WeightsNotFound:
        pass
    except (WeightsError, OSError) as error:
        trouble = f"kept features were damaged and are made again ({' '.join(str(error).split())})"
    features, samples = extract_finite(network, bare, preprocessing, device, batches(bare), precision)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(path, {"features": features, "samples": samples}, {"kind": KIND, "facts": facts})
        remove_oldest(folder, limit, path)
    except (WeightsError, OSError) as error:
        trouble = f"the features could not be kept ({' '.join(str(error).split())})"
        return labelled(source, features, samples, trouble=trouble)
    return labelled(source, features, samples, kept=True, trouble=trouble)


def labelled(
    source: ImageDataset,
    features: Tensor,
    samples: Tensor,
    *,
    found: bool = False,
    kept: bool = False,
    trouble: str = "",
) -> Kept:
    labels = torch.from_numpy(source.labels.rows(samples.numpy()))
    return Kept(features=features, labels=labels, samples=samples, found=found, kept=kept, trouble=trouble)


def extract_finite(
    network: nn.Module,
    source: ImageDataset,
    preprocessing: Preprocessing,
    device: torch.device | str,
    batches: Iterable[Batch],
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """Features and samples from the network itself; a network that overflows is refused, with the first image."""
    made = extract_features(network, batches, preprocessing, device, precision=precision)
    wrong = (~made.features.isfinite()).any(1).nonzero()
    if len(wrong):
        name = source.name(int(made.samples[wrong[0, 0]]))
        raise DataError(f"the network gives no finite features for {len(wrong):,} images, first of them {name}")
    return made.features, made.samples


def read_cache_file(path: Path, facts: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Features and samples out of a file; any damage is one of the weights errors."""
    found = read_weights(path)
    if found.description != {"kind": KIND, "facts": facts} or set(found.tensors) != {"features", "samples"}:
        raise WeightsError(f"{path} holds something else than its name says")
    return found.tensors["features"], found.tensors["samples"]


def describe_extraction(
    network: nn.Module,
    source: ImageDataset,
    preprocessing: Preprocessing,
    device: torch.device,
    precision: Precision,
    view: str,
) -> dict[str, Any]:
    """All that features depend on, as plain data."""
    facts = {
        "network": hash_network(network),
        "pictures": hash_images(source),
        "preprocessing": preprocessing.to_dict(),
        "view": view,
        "read": "last layer",
        "precision": precision,
        "device": device.type,
        "versions": [__version__, torch.__version__],
    }
    return json.loads(json.dumps(facts))  # lists for tuples, as they come back


def hash_images(source: ImageDataset) -> str:
    """The source's fingerprint together with the bytes of images at even distances: where names and sizes are those
    of another set, as with raw images of one size, these are not."""
    digest = sha256(source.fingerprint.encode())
    some = np.linspace(0, len(source) - 1, min(len(source), LOOKED_AT)).astype(np.int64)
    for at in some.tolist():
        try:
            content = source.read(at)
        except (BadImage, OSError):
            content = b"unreadable"
        digest.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).data)
    return digest.hexdigest()


def list_missing(source: ImageDataset, samples: Tensor) -> list[int]:
    """The places of a source of which there are no features: their images could not be read."""
    return np.setdiff1d(np.arange(len(source)), samples.numpy()).tolist()


def is_readable(source: ImageDataset, sample: int) -> bool:
    """Whether an image can be decoded now: a store that was away for a moment must not be remembered for ever."""
    try:
        source.open_image(sample).rgb()
    except BadImage:
        return False
    return True


def remove_oldest(folder: Path, limit: int, newest: Path) -> None:
    """Takes the files away that were used longest ago, until the rest fits; the newest one stays, whatever its size."""
    files: list[tuple[Path, os.stat_result]] = []
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another process trims, too
            files += [(path, path.stat())] if path != newest else []
    total = newest.stat().st_size
    for path, status in sorted(files, key=lambda file: -file[1].st_mtime_ns):
        total += status.st_size
        if total > limit:
            path.unlink(missing_ok=True)
