"""All foreign formats in one list, and which one a set of tensor names belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vitrail.checkpoint.formats import google, google_bit, huggingface, timm, torchvision
from vitrail.checkpoint.formats.table import Entry, Shapes, Tensors
from vitrail.core.errors import unknown
from vitrail.core.shapes import Pair
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.config import ModelConfig, ResNetConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How one format names its tensors, what a file of it says of the network, and how its pictures are prepared."""

    name: str
    recognises: Callable[[set[str]], bool]
    table: Callable[[ModelConfig], list[Entry]]
    infer: Callable[[Shapes], ModelConfig]
    modern: Callable[[Tensors], Tensors] = dict
    refuse_unreadable: Callable[[ModelConfig], None] = lambda config: None  # by the format's own code, at export
    describe_inferred: Callable[[ModelConfig], str | None] = lambda config: None
    half: bool = True  # pixels to [-1, 1]; else ImageNet's mean and deviation

    def preprocessing(self, image: Pair) -> Preprocessing:
        """What the format's own weights expect, unless a card says otherwise."""
        if self.half:
            return Preprocessing(image=image, mean=HALF, std=HALF)
        resize = round(min(image) * 256 / 224)
        return Preprocessing(image=image, resize=resize, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _google(layout: google.Layout) -> Format:
    return Format(
        name=layout.name,
        recognises=lambda names: google.recognises(names) and google.layout_of(names) is layout,
        table=partial(google.table, layout=layout),
        infer=google.infer,
        modern=google.modern,
        refuse_unreadable=partial(google.refuse_unreadable, layout=layout),
        describe_inferred=google.describe_inferred,
    )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name=timm.NAME,
            recognises=timm.recognises,
            table=timm.table,
            infer=timm.infer,
            half=False,
        ),
        Format(
            name=huggingface.NAME,
            recognises=huggingface.recognises,
            table=huggingface.table,
            infer=huggingface.infer,
            modern=huggingface.modern,
        ),
        Format(
            name=torchvision.NAME,
            recognises=torchvision.recognises,
            table=torchvision.table,
            infer=torchvision.infer,
            modern=torchvision.modern,
            half=False,
        ),
        *(_google(layout) for layout in google.LAYOUTS),
        Format(
            name=google_bit.NAME,
            recognises=google_bit.recognises,
            table=google_bit.table,
            infer=google_bit.infer,
            modern=google_bit.modern,
        ),
    )
}
SHORT = {"hf": "huggingface", "google": "npz", "bit": "npz-bit"}


def find_format(name: str, config: ModelConfig | None = None) -> Format:
    """A format by name; plain `npz` means BiT's own layout for a BiT ResNet."""
    name = SHORT.get(name, name)
    if name == "npz" and isinstance(config, ResNetConfig):
        name = "npz-bit"
    if name not in FORMATS:
        raise unknown("weight format", name, ["vitrail", *FORMATS, *SHORT])
    return FORMATS[name]


def recognise(tensors: Tensors) -> tuple[Format, Tensors] | None:
    """The format whose names these are, and the tensors under that format's modern names."""
    for known in FORMATS.values():
        modern = known.modern(tensors)
        if known.recognises(set(modern)):
            return known, modern
    return None
