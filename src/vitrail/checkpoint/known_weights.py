"""Weights by name: those bundled with the package, and public weights of the paper's networks on the Hugging Face hub.

`vitrail-cifar10` is a bundled small ViT for CIFAR-10's ten classes. Its name works wherever weights are given; a file
or folder of your own with that name is ./vitrail-cifar10.

    find_public_weights("vit_b_16", "augreg_in21k_ft_in1k_384").repo
    -> "timm/vit_base_patch16_384.augreg_in21k_ft_in1k"

A tag is timm's own. timm writes the image size of a Transformer into the network's name and vitrail does not, so
weights for another size than 224 carry it at the end of the tag. Networks outside of the zoo are not listed: layer
scale, query-key norms, norms before the first block, attention pooling, distillation tokens, R+Ti/16, R26+S/32, R50x3
and R101x3.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal, TypeAlias

from vitrail.core.errors import ConfigError, UnknownName, WeightsNotFound, unknown_name

DEFAULT_WEIGHTS: Final = "vitrail-cifar10"
BUNDLED: Final = {DEFAULT_WEIGHTS: "vitrail-cifar10.safetensors"}


def is_bundled(name: str | Path) -> bool:
    return str(name) in BUNDLED


def bundled_file(name: str) -> Path:
    """Where the weights of a name lie in this installation."""
    path = Path(str(resources.files("vitrail"))) / "assets" / BUNDLED[name]
    if not path.is_file():
        fault = f"{name}: {path} is not there, so this copy of vitrail is incomplete"
        raise WeightsNotFound(f"{fault}; install it again, or name weights of your own")
    return path


Origin: TypeAlias = Literal["google-vit", "google-bit", "meta", "timm"]
Normalisation: TypeAlias = Literal["half", "imagenet"]
Interpolation: TypeAlias = Literal["bilinear", "bicubic"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True, slots=True)
class PublicWeights:
    """One weight file on the hub.

    `origin` says whose code trained it last, and so which numerics are the true ones: "google-vit" and "google-bit" are
    the papers' JAX and TensorFlow code, "meta" is DeiT, DINO and MAE, and "timm" is Google's pre-training fine-tuned
    again in PyTorch. `classes=0` is a network without a head. `normalisation` is mean and deviation 0.5 ("half") or
    those of ImageNet; it, `interpolation` and `crop` (the share of the resized image that is kept) are how timm
    evaluates the weights. `sha256=None` leaves the checksum to the hub's word.
    """

    model: str
    tag: str
    repo: str
    image: int
    classes: int
    origin: Origin
    normalisation: Normalisation
    interpolation: Interpolation
    crop: float
    file: str = "model.safetensors"
    licence: str = "apache-2.0"
    sha256: str | None = None

    def __post_init__(self) -> None:
        # Repository and file become part of a path in the cache: nothing in them may climb out of it.
        if not re.fullmatch(f"{_NAME}/{_NAME}", self.repo):
            raise ConfigError(f"repo={self.repo!r} must be 'owner/name' of letters, digits, '.', '_' and '-'")
        if not re.fullmatch(_NAME, self.file):
            raise ConfigError(f"file={self.file!r} must be a plain file name of letters, digits, '.', '_' and '-'")
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"sha256={self.sha256!r} must be 64 lower-case hexadecimal digits")


SHAPES: Final = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}


def _vits(
    tag: str, classes: int, names: str, origin: Origin = "google-vit", licence: str = "apache-2.0"
) -> Iterator[PublicWeights]:
    """The weights of one release, by names such as "vit_b_16" or, for images of 384 pixels, "vit_b_16@384"."""
    for name in names.split():
        model, _, size = name.partition("@")
        image = int(size or 224)
        *stem, _, shape, patch = model.split("_")
        kind = "deit" if tag == "fb_in1k" else "vit"
        arch = f"{kind}_{SHAPES[shape]}_" + (f"r50_s{patch}" if stem else f"patch{patch}")
        scaling: Normalisation = "imagenet" if origin == "meta" else "half"
        full, repo = tag if image == 224 else f"{tag}_{image}", f"timm/{arch}_{image}.{tag}"
        crop = 0.9 if image == 224 else 1.0
        yield PublicWeights(model, full, repo, image, classes, origin, scaling, "bicubic", crop, licence=licence)


def _bits(tag: str, classes: int, names: str, interpolation: Interpolation = "bilinear") -> Iterator[PublicWeights]:
    """The weights of one BiT release, by names such as "50x1" or, for images of 448 pixels, "50x1@448"."""
    for name in names.split():
        size, _, side = name.partition("@")
        image, repo = int(side or 224), f"timm/resnetv2_{size}_bit.{tag}"
        crop = 0.875 if image == 224 else 1.0
        yield PublicWeights(f"bit_r{size}", tag, repo, image, classes, "google-bit", "half", interpolation, crop)


NON_COMMERCIAL: Final = "cc-by-nc-4.0"
PUBLIC: tuple[PublicWeights, ...] = (
    # Section 3.1 and Table 1, the original release: ImageNet-21k, without its head, which the authors zeroed.
    *_vits("orig_in21k", 0, "vit_b_16 vit_b_32 vit_l_16 vit_l_32 vit_h_14 r50_vit_b_16"),
    *_vits("orig_in21k_ft_in1k", 1000, "vit_b_16 vit_b_16@384 vit_l_32@384 r50_vit_b_16@384"),
    # "How to train your ViT?", the authors' later release: ImageNet-21k with its head.
    *_vits("augreg_in21k", 21843, "vit_ti_16 vit_s_16 vit_s_32 vit_b_8 vit_b_16 vit_b_32 vit_l_16 r50_vit_l_32"),
    # The same, fine-tuned on ImageNet.
    *_vits("augreg_in21k_ft_in1k", 1000, "vit_ti_16 vit_ti_16@384 vit_s_16 vit_s_16@384 vit_s_32 vit_s_32@384 vit_b_8"),
    *_vits("augreg_in21k_ft_in1k", 1000, "vit_b_16 vit_b_16@384 vit_b_32 vit_b_32@384 vit_l_16 vit_l_16@384"),
    *_vits("augreg_in21k_ft_in1k", 1000, "r50_vit_l_32 r50_vit_l_32@384"),
    *_vits("augreg2_in21k_ft_in1k", 1000, "vit_b_8 vit_b_16", "timm"),
    # ImageNet alone: the same recipe, and sharpness-aware minimisation.
    *_vits("augreg_in1k", 1000, "vit_s_16 vit_s_16@384 vit_b_16 vit_b_16@384 vit_b_32 vit_b_32@384"),
    *_vits("sam_in1k", 1000, "vit_b_16 vit_b_32"),
    # Meta's training of the same networks: DeiT, DINO, MAE (not for commercial use).
    *_vits("fb_in1k", 1000, "vit_ti_16 vit_s_16 vit_b_16 vit_b_16@384", "meta"),
    *_vits("dino", 0, "vit_s_8 vit_s_16 vit_b_8 vit_b_16", "meta"),
    *_vits("mae", 0, "vit_b_16 vit_l_16 vit_h_14", "meta", NON_COMMERCIAL),
    # BiT-M: ImageNet-21k, and fine-tuned on ImageNet at a larger size.
    *_bits("goog_in21k", 21843, "50x1 101x1 152x2 152x4"),
    *_bits("goog_in21k_ft_in1k", 1000, "50x1@448 101x1@448 152x2@448 152x4@480"),
    # "A good teacher is patient and consistent": the teacher, and its student.
    *_bits("goog_teacher_in21k_ft_in1k", 1000, "152x2", "bicubic"),
    *_bits("goog_teacher_in21k_ft_in1k_384", 1000, "152x2@384", "bicubic"),
    *_bits("goog_distilled_in1k", 1000, "50x1", "bicubic"),
)


def list_tags(model: str) -> tuple[str, ...]:
    """The tags of a model's public weights, in the order of the table; empty where there are none."""
    return tuple(entry.tag for entry in PUBLIC if entry.model == model)


def find_public_weights(model: str, tag: str) -> PublicWeights:
    """The public weights of a model by tag."""
    if found := next((entry for entry in PUBLIC if (entry.model, entry.tag) == (model, tag)), None):
        return found
    if known := list_tags(model):
        raise unknown_name(f"weights of {model}", tag, known)
    models = list(dict.fromkeys(entry.model for entry in PUBLIC))
    near = difflib.get_close_matches(model, models, n=4, cutoff=0.4) or models
    raise UnknownName(f"there are no public weights of {model!r}; train it, or take one of {', '.join(near)}")
