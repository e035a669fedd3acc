"""Features that were extracted once are kept: under a hash of all that they depend on.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.sealed_file import write_sealed
from vitrail.core.errors import BadImage, DataError, WeightsError, WeightsNotFound
from vitrail.data.dataset import ImageDataset, RelabelledDataset
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.frozen.features import Features, Precision, extract_features, hash_network

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
