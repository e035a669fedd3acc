"""Weights that come inside the package, by name: no network, no training.

`vitrail-cifar10` is a small ViT that knows CIFAR-10's ten classes. The name stands for it wherever one is; a file or
folder of one's own that is called so is ./vitrail-cifar10.

Public weights of the paper's networks, by name: which file on the Hugging Face hub, and what it expects of an image.

    find("vit_b_16", "augreg_in21k_ft_in1k_384").repo  ->  "timm/vit_base_patch16_384.augreg_in21k_ft_in1k"

A tag is timm's own. timm writes the image size of a Transformer into the network's name and vitrail does not, so
weights made for another size than 224 carry it at the end of the tag. Left out are networks that are not the zoo's:
layer scale, query-key norms, norms before the first block, attention pooling, distillation tokens, R+Ti/16, R26+S/32,
R50x3 and R101x3.
"""

import difflib
import re
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
        raise WeightsNotFound(
            f"{name}: {path} is not there, so this copy of vitrail is not whole; install it again, or name weights of "
            "your own"
        )
    return path


Origin: TypeAlias = Literal["google-vit", "google-bit", "meta", "timm"]
Normalisation: TypeAlias = Literal["half", "imagenet"]
Interpolation: TypeAlias = Literal["bilinear", "bicubic"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True, kw_only=True, slots=True)
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


def _vit(
    model: str,
    arch: str,
    image: int,
    tag: str,
    classes: int,
    origin: Origin = "google-vit",
    licence: str = "apache-2.0",
) -> PublicWeights:
    return PublicWeights(
        model=model,
        tag=tag if image == 224 else f"{tag}_{image}",
        repo=f"timm/{arch}_{image}.{tag}",
        image=image,
        classes=classes,
        origin=origin,
        normalisation="imagenet" if origin == "meta" else "half",
        interpolation="bicubic",
        crop=0.9 if image == 224 else 1.0,
        licence=licence,
    )


def _bit(
    model: str, arch: str, image: int, tag: str, classes: int, interpolation: Interpolation = "bilinear"
) -> PublicWeights:
    return PublicWeights(
        model=model,
        tag=tag,
        repo=f"timm/{arch}.{tag}",
        image=image,
        classes=classes,
        origin="google-bit",
        normalisation="half",
        interpolation=interpolation,
        crop=0.875 if image == 224 else 1.0,
    )


PUBLIC: tuple[PublicWeights, ...] = (
    # Section 3.1 and Table 1, the original release: ImageNet-21k, its head zeroed by the authors and so left out.
    _vit("vit_b_16", "vit_base_patch16", 224, "orig_in21k", 0),
    _vit("vit_b_32", "vit_base_patch32", 224, "orig_in21k", 0),
    _vit("vit_l_16", "vit_large_patch16", 224, "orig_in21k", 0),
    _vit("vit_l_32", "vit_large_patch32", 224, "orig_in21k", 0),
    _vit("vit_h_14", "vit_huge_patch14", 224, "orig_in21k", 0),
    _vit("r50_vit_b_16", "vit_base_r50_s16", 224, "orig_in21k", 0),
    _vit("vit_b_16", "vit_base_patch16", 224, "orig_in21k_ft_in1k", 1000),
    _vit("vit_b_16", "vit_base_patch16", 384, "orig_in21k_ft_in1k", 1000),
    _vit("vit_l_32", "vit_large_patch32", 384, "orig_in21k_ft_in1k", 1000),
    _vit("r50_vit_b_16", "vit_base_r50_s16", 384, "orig_in21k_ft_in1k", 1000),
    # "How to train your ViT?", the authors' later release: ImageNet-21k with its head.
    _vit("vit_ti_16", "vit_tiny_patch16", 224, "augreg_in21k", 21843),
    _vit("vit_s_16", "vit_small_patch16", 224, "augreg_in21k", 21843),
    _vit("vit_s_32", "vit_small_patch32", 224, "augreg_in21k", 21843),
    _vit("vit_b_8", "vit_base_patch8", 224, "augreg_in21k", 21843),
    _vit("vit_b_16", "vit_base_patch16", 224, "augreg_in21k", 21843),
    _vit("vit_b_32", "vit_base_patch32", 224, "augreg_in21k", 21843),
    _vit("vit_l_16", "vit_large_patch16", 224, "augreg_in21k", 21843),
    _vit("r50_vit_l_32", "vit_large_r50_s32", 224, "augreg_in21k", 21843),
    # The same, fine-tuned on ImageNet.
    _vit("vit_ti_16", "vit_tiny_patch16", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_ti_16", "vit_tiny_patch16", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_s_16", "vit_small_patch16", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_s_16", "vit_small_patch16", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_s_32", "vit_small_patch32", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_s_32", "vit_small_patch32", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_b_8", "vit_base_patch8", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_b_16", "vit_base_patch16", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_b_16", "vit_base_patch16", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_b_32", "vit_base_patch32", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_b_32", "vit_base_patch32", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_l_16", "vit_large_patch16", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_l_16", "vit_large_patch16", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("r50_vit_l_32", "vit_large_r50_s32", 224, "augreg_in21k_ft_in1k", 1000),
    _vit("r50_vit_l_32", "vit_large_r50_s32", 384, "augreg_in21k_ft_in1k", 1000),
    _vit("vit_b_8", "vit_base_patch8", 224, "augreg2_in21k_ft_in1k", 1000, "timm"),
    _vit("vit_b_16", "vit_base_patch16", 224, "augreg2_in21k_ft_in1k", 1000, "timm"),
    # ImageNet alone: the same recipe, and sharpness-aware minimisation.
    _vit("vit_s_16", "vit_small_patch16", 224, "augreg_in1k", 1000),
    _vit("vit_s_16", "vit_small_patch16", 384, "augreg_in1k", 1000),
    _vit("vit_b_16", "vit_base_patch16", 224, "augreg_in1k", 1000),
    _vit("vit_b_16", "vit_base_patch16", 384, "augreg_in1k", 1000),
    _vit("vit_b_32", "vit_base_patch32", 224, "augreg_in1k", 1000),
    _vit("vit_b_32", "vit_base_patch32", 384, "augreg_in1k", 1000),
    _vit("vit_b_16", "vit_base_patch16", 224, "sam_in1k", 1000),
    _vit("vit_b_32", "vit_base_patch32", 224, "sam_in1k", 1000),
    # Meta's training of the same networks: DeiT, DINO, MAE (not for commercial use).
    _vit("vit_ti_16", "deit_tiny_patch16", 224, "fb_in1k", 1000, "meta"),
    _vit("vit_s_16", "deit_small_patch16", 224, "fb_in1k", 1000, "meta"),
    _vit("vit_b_16", "deit_base_patch16", 224, "fb_in1k", 1000, "meta"),
    _vit("vit_b_16", "deit_base_patch16", 384, "fb_in1k", 1000, "meta"),
    _vit("vit_s_8", "vit_small_patch8", 224, "dino", 0, "meta"),
    _vit("vit_s_16", "vit_small_patch16", 224, "dino", 0, "meta"),
    _vit("vit_b_8", "vit_base_patch8", 224, "dino", 0, "meta"),
    _vit("vit_b_16", "vit_base_patch16", 224, "dino", 0, "meta"),
    _vit("vit_b_16", "vit_base_patch16", 224, "mae", 0, "meta", "cc-by-nc-4.0"),
    _vit("vit_l_16", "vit_large_patch16", 224, "mae", 0, "meta", "cc-by-nc-4.0"),
    _vit("vit_h_14", "vit_huge_patch14", 224, "mae", 0, "meta", "cc-by-nc-4.0"),
    # BiT-M: ImageNet-21k, and fine-tuned on ImageNet at a larger size.
    _bit("bit_r50x1", "resnetv2_50x1_bit", 224, "goog_in21k", 21843),
    _bit("bit_r101x1", "resnetv2_101x1_bit", 224, "goog_in21k", 21843),
    _bit("bit_r152x2", "resnetv2_152x2_bit", 224, "goog_in21k", 21843),
    _bit("bit_r152x4", "resnetv2_152x4_bit", 224, "goog_in21k", 21843),
    _bit("bit_r50x1", "resnetv2_50x1_bit", 448, "goog_in21k_ft_in1k", 1000),
    _bit("bit_r101x1", "resnetv2_101x1_bit", 448, "goog_in21k_ft_in1k", 1000),
    _bit("bit_r152x2", "resnetv2_152x2_bit", 448, "goog_in21k_ft_in1k", 1000),
    _bit("bit_r152x4", "resnetv2_152x4_bit", 480, "goog_in21k_ft_in1k", 1000),
    # "A good teacher is patient and consistent": the teacher, and the student of it.
    _bit("bit_r152x2", "resnetv2_152x2_bit", 224, "goog_teacher_in21k_ft_in1k", 1000, "bicubic"),
    _bit("bit_r152x2", "resnetv2_152x2_bit", 384, "goog_teacher_in21k_ft_in1k_384", 1000, "bicubic"),
    _bit("bit_r50x1", "resnetv2_50x1_bit", 224, "goog_distilled_in1k", 1000, "bicubic"),
)


def list_tags(model: str) -> tuple[str, ...]:
    """The tags of a model's public weights, in the order of the table; empty where there are none."""
    return tuple(entry.tag for entry in PUBLIC if entry.model == model)


def find_public_weights(model: str, tag: str) -> PublicWeights:
    """The public weights of a model by tag."""
    for entry in PUBLIC:
        if (entry.model, entry.tag) == (model, tag):
            return entry
    known = list_tags(model)
    if known:
        raise unknown_name(f"weights of {model}", tag, known)
    models = list(dict.fromkeys(entry.model for entry in PUBLIC))
    near = difflib.get_close_matches(model, models, n=4, cutoff=0.4) or models
    raise UnknownName(f"there are no public weights of {model!r}; train it, or take one of {', '.join(near)}")
