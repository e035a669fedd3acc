"""The definition of a weight format, as a row of facts and functions that its module declares, and common
preprocessing.

Every module of this folder with a tuple `FORMATS` adds its rows to the registry; they are listed nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing, Triple
from vitrail.models.family import ModelConfig

Settings: TypeAlias = dict[str, Any] | None  # the config.json next to the tensors

CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)


def half_squash(config: ModelConfig) -> Preprocessing:
    """Straight to the size, pixels to [-1, 1]: Hugging Face's ViT."""
    return Preprocessing(image=config.image, mean=HALF, std=HALF)


def google_squash(config: ModelConfig) -> Preprocessing:
    """The same as TensorFlow resizes: what vit_jax, LiT and BiT evaluate with."""
    return replace(half_squash(config), antialias=False)


def big_vision_crop(config: ModelConfig) -> Preprocessing:
    """resize_small(256)|central_crop(224) in big_vision's configs, 448 and 384 after transfer."""
    side = min(config.image)
    resize = 448 if side == 384 else round(side * 256 / 224)
    return replace(google_squash(config), resize=resize, interpolation="area")


def imagenet_crop(config: ModelConfig, share: float = 224 / 256) -> Preprocessing:
    """ImageNet's mean and deviation and a bicubic centre crop of this share: timm's and torchvision's habit."""
    resize = round(min(config.image) / share)
    said: Any = {"resize": resize, "interpolation": "bicubic", "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return Preprocessing(image=config.image, **said)


def clip_crop(config: ModelConfig) -> Preprocessing:
    """CLIP's mean and deviation; the shorter side is resized, bicubic, and the centre is cropped."""
    said: Any = {"resize": min(config.image), "interpolation": "bicubic", "mean": CLIP_MEAN, "std": CLIP_STD}
    return Preprocessing(image=config.image, **said)


def half_crop(config: ModelConfig) -> Preprocessing:
    """Pixels to [-1, 1]; the shorter side is resized, bicubic, and the centre is cropped: SigLIP in timm."""
    return replace(clip_crop(config), mean=HALF, std=HALF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a format names its tensors, what a file says about the network, and how images are preprocessed.

    Formats are tried in order until one recognises a file (by its tensor names, after `modern` has updated old names,
    and its settings), so special formats come before general ones. Several may belong to one library: a network is
    written in the first of them that `claims` it.
    """

    name: str
    library: str
    order: int = 50
    recognises: Callable[[set[str], Settings], bool]
    table: Callable[[ModelConfig], list[KeyEntry]]
    infer: Callable[[TensorShapes], ModelConfig]
    modern: Callable[[Tensors, Settings], Tensors] = lambda tensors, settings: dict(tensors)
    preprocessing: Callable[[ModelConfig], Preprocessing] = half_squash  # what its weights expect, unless a card says
    claims: Callable[[ModelConfig], bool] = lambda config: True
    settings: Callable[[ModelConfig], dict[str, Any]] | None = None  # of the network, for folders with a config.json
    finish: Callable[[Tensors, ModelConfig], Tensors] = lambda tensors, config: tensors  # undoes `modern`
    refuse_unreadable: Callable[[ModelConfig], None] = lambda config: None  # for the format's own code, at export
    describe_inferred: Callable[[ModelConfig], str | None] = lambda config: None
