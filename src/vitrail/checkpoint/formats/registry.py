"""All foreign formats in one list, and which one a set of tensor names belongs to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vitrail.checkpoint.formats import google, timm
from vitrail.checkpoint.formats import huggingface as hf
from vitrail.checkpoint.formats import torchvision as tv
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes
from vitrail.core.errors import MismatchedWeights, unknown_name
from vitrail.core.text import Pair
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.family import ModelConfig


def half_squash(image: Pair) -> Preprocessing:
    """Straight to the size, pixels to [-1, 1]: Hugging Face's ViT."""
    return Preprocessing(image=image, mean=HALF, std=HALF)


def google_squash(image: Pair) -> Preprocessing:
    """The same as TensorFlow resizes: what vit_jax, LiT and BiT evaluate with."""
    return replace(half_squash(image), antialias=False)


def big_vision_crop(image: Pair) -> Preprocessing:
    """resize_small(256)|central_crop(224) in big_vision's configs, 448 and 384 after transfer."""
    resize = 448 if min(image) == 384 else round(min(image) * 256 / 224)
    return replace(google_squash(image), resize=resize, interpolation="area")


def imagenet_crop(image: Pair) -> Preprocessing:
    """ImageNet's mean and deviation and a bicubic centre crop: timm's and torchvision's habit."""
    resize = round(min(image) * 256 / 224)
    return Preprocessing(image=image, resize=resize, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)


@dataclass(frozen=True, slots=True)
class Format:
    """How one format names its tensors, what a file of it says of the network, and how its images are prepared."""

    name: str
    recognises: Callable[[set[str]], bool]
    table: Callable[[ModelConfig], list[KeyEntry]]
    infer: Callable[[TensorShapes], ModelConfig]
    modern: Callable[[Tensors], Tensors] = dict
    preprocessing: Callable[[Pair], Preprocessing] = half_squash  # what its own weights expect, unless a card says
    refuse_unreadable: Callable[[ModelConfig], None] = lambda config: None  # by the format's own code, at export
    describe_inferred: Callable[[ModelConfig], str | None] = lambda config: None


def _google(layout: google.NpzLayout) -> Format:
    def recognises(names: set[str]) -> bool:
        return google.recognises(names) and google.find_layout(names) is layout

    table, check = partial(google.build_table, layout=layout), partial(google.refuse_unreadable, layout=layout)
    crop = big_vision_crop if layout is google.BIG_VISION else google_squash
    return Format(layout.name, recognises, table, google.infer, google.modernise, crop, check, google.describe_inferred)


# A new format is one module here and one row: name, recognises, table, infer, modern names, preprocessing.
_ROWS = (
    Format(timm.NAME, timm.recognises, timm.build_table, timm.infer, preprocessing=imagenet_crop),
    Format(hf.NAME, hf.recognises, hf.build_table, hf.infer, hf.modernise),
    Format(tv.NAME, tv.recognises, tv.build_table, tv.infer, tv.modernise, imagenet_crop),
    *(_google(layout) for layout in google.LAYOUTS),
    Format(google.BIT, google.recognises_bit, google.bit_table, google.infer_bit, google.modernise_bit, google_squash),
)
FORMATS = {row.name: row for row in _ROWS}
SHORT = {"hf": "huggingface", "google": "npz", "bit": "npz-bit"}


def find_format(name: str, config: ModelConfig | None = None) -> Format:
    """A format by name; plain `npz` means BiT's own layout for a BiT ResNet."""
    name = SHORT.get(name, name)
    if name == "npz" and config is not None and not config.tokens:
        name = "npz-bit"
    if name not in FORMATS:
        raise unknown_name("weight format", name, ["vitrail", *FORMATS, *SHORT])
    return FORMATS[name]


def recognise(path: Path, tensors: Tensors) -> tuple[Format, Tensors]:
    """The format whose names these are, and the tensors under that format's modern names."""
    for known in FORMATS.values():
        modern = known.modern(tensors)
        if known.recognises(set(modern)):
            return known, modern
    raise MismatchedWeights(f"{path}: tensors like {', '.join(list(tensors)[:3])} are of no format that vitrail knows")
