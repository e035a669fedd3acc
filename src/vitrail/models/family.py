"""A family of networks as the rest of the package sees it: one config class that answers every question. No torch.

What is built from a config is a `Backbone` (backbone.py), and build.py knows which. All other code asks the two and
never checks their types; CONTRIBUTING.md shows a family that is one file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, cast

from vitrail.core.errors import ConfigError, unknown
from vitrail.core.shapes import Pair, pair
from vitrail.core.values import Choice


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a tensor's walk through a network: what happened, the shape that came out, what it cost."""

    name: str
    shape: tuple[int, ...]
    params: int = 0
    macs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSizes:
    """Image sizes that one graph takes: multiples of `step`, or `any` at all; without a step the network's own alone,
    and `why` it is so."""

    step: Pair | None
    any: bool = False
    why: str = ""


class ModelConfig(Choice, ABC):
    """What a network is, as frozen data, and what can be said of it before it is built."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every family is a frozen dataclass

    family: ClassVar[str]  # its name in weight files
    head_layer: ClassVar[str]  # the last layer's name among the tensors
    image: Pair
    channels: int
    classes: int

    @classmethod
    def registered(cls) -> tuple[type[Any], ...]:
        return tuple(sorted(FAMILIES.values(), key=lambda config: config.family != "vit"))  # the one most people mean

    # Its shape.

    @property
    @abstractmethod
    def grid(self) -> Pair:
        """Rows and columns of its patches, or of its last map."""

    @property
    @abstractmethod
    def features(self) -> int:
        """D: how many numbers the last layer reads."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """What layers are counted by, for freezing and decay of the rate: blocks, or stages."""

    @property
    @abstractmethod
    def units(self) -> int:
        """Blocks, all in all."""

    @property
    def tokens(self) -> int | None:
        """T: how many tokens attention sees; none where there is no attention between tokens."""
        return None

    @property
    @abstractmethod
    def patch_pixels(self) -> Pair:
        """Pixels of the image from one patch, or place of the map, to the next."""

    @property
    def size_step(self) -> Pair:
        """What the sides of an image must be multiples of."""
        return (1, 1)

    @property
    def tied_to_size(self) -> str:
        """Why its weights cannot be brought to another image size; empty where they can."""
        return ""

    @property
    @abstractmethod
    def open_sizes(self) -> ImageSizes:
        """The image sizes that one built network can read, without a change of its weights."""

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return 0

    @property
    def has_patch_head(self) -> bool:
        """Whether its head reads every patch and gives logits per pixel, [B, K, H, W]."""
        return False

    @property
    def has_convolutions(self) -> bool:
        """Whether there are convolutions of more than a patch."""
        return False

    @property
    @abstractmethod
    def title(self) -> str:
        """The network in words, for one without a name of the paper's."""

    @property
    @abstractmethod
    def shape(self) -> tuple[object, ...]:
        """What tells the named networks apart."""

    @property
    def table(self) -> list[tuple[str, str]]:
        """More about it for a model card: names and values."""
        return []

    # What is made of it.

    @abstractmethod
    def walk(self) -> Iterator[Step]:
        """The steps of one image from pixels to logits."""

    @property
    def parameters(self) -> int:
        """How many numbers the network learns, its head included."""
        return sum(step.params for step in self.walk())

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image; a FLOP count is twice this. Matrix products and convolutions count, padded
        taps included (the paper's exaFLOPs leave those out: `padding_macs`); normalisation, softmax and GELU do not."""
        return sum(step.macs for step in self.walk())

    @abstractmethod
    def activation_bytes(self, width: int, *, recompute: bool) -> int:
        """What the backward pass of one image reads again, in values of `width` bytes; with `recompute` blocks keep
        their inputs alone."""

    @property
    def can_recompute(self) -> bool:
        """Whether blocks can be computed again in the backward pass."""
        return False

    @property
    def padding_macs(self) -> int:
        """Multiply-accumulates of one image that only multiply padding, which the paper's counts leave out."""
        return 0

    # How it is changed.

    def configured_like(self, old: "ModelConfig") -> "ModelConfig":
        """This network as a run had another: of the same image size and classes."""
        changes: dict[str, Any] = {"classes": old.classes, "image": old.image}
        self.settle(changes)
        return replace(self, **changes)

    def settle(self, changes: dict[str, Any]) -> None:
        """Completes changes of fields, so that rules that hang together move together."""
        del changes

    def linear_head(self, classes: int) -> dict[str, Any]:
        """The changes that give it one linear layer as head, or none at all (3.2)."""
        return {"classes": classes}

    def patch_head(self, classes: int) -> dict[str, Any]:
        """The changes that give it one linear layer on every patch token as head, or none at all."""
        raise ConfigError(
            f"{self.title} has no patch tokens for a head with {classes} classes per pixel; take a ViT or a hybrid"
        )

    def new_last_layer(self, classes: int) -> dict[str, Any]:
        """The changes that replace the last layer alone."""
        return {"classes": classes}

    def without_head(self) -> dict[str, Any]:
        """The changes that leave the encoder."""
        return {"classes": 0}

    @property
    def fixed_bytes(self) -> int:
        """Memory of tables that no tensor of a file vouches for."""
        return 0


FAMILIES: dict[str, type[ModelConfig]] = {}
C = TypeVar("C", bound=type[ModelConfig])


def register_config(config: C) -> C:
    """Makes a family's config known by its name, to files and to --set. Its network is registered in build.py."""
    known = FAMILIES.get(config.family)
    if known is not None and known.__qualname__ != config.__qualname__:
        raise ConfigError(f"model family {config.family!r} is {known.__name__} already; choose another name")
    FAMILIES[config.family] = config
    return config


def multiples(config: ModelConfig) -> ImageSizes:
    """Multiples of the patch, or of a backbone's stride."""
    step = config.patch_pixels
    if config.image[0] % step[0] or config.image[1] % step[1]:
        return ImageSizes(
            step=None, why="SAME padding at a size that leaves pixels over is laid on for that size alone"
        )
    return ImageSizes(step=step)


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Plain data for a file header; `from_dict` reads it back."""
    return {"family": config.family, **asdict(config)}


def from_dict(data: dict[str, Any]) -> ModelConfig:
    """The config that `to_dict` wrote; unknown or ill-typed fields are refused by name."""
    rest = dict(data)
    family = str(rest.pop("family", None))
    if family not in FAMILIES:
        raise unknown("model family", family, FAMILIES)
    kind = FAMILIES[family]
    known = {field.name: field for field in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in rest.items():
        if name not in known:
            raise unknown("config field", name, known)
        values[name] = _typed(name, known[name].type, value)
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"incomplete model config: {', '.join(missing)} missing")
    return kind(**values)


def _typed(name: str, kind: Any, value: Any) -> Any:
    """JSON knows no tuples and blurs 1 and 1.0; everything else must already be right."""
    if name == "backbone":
        if value is None:
            return None
        if not isinstance(value, dict) or cast(dict[str, Any], value).get("family", "resnet") != "resnet":
            raise ConfigError(f"backbone={value!r} must be the config of a ResNet")
        try:
            return from_dict({"family": "resnet", **cast(dict[str, Any], value)})
        except ConfigError as error:
            raise ConfigError(f"backbone: {error}") from None
    if name in ("image", "patch", "blocks"):
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise ConfigError(f"{name}={value!r} must be a list of whole numbers")
        return pair(list(value)) if name != "blocks" and len(value) == 2 else tuple(value)
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if not isinstance(value, kind if kind in (int, float, bool) else (str, type(None))) or (
        type(value) is bool and kind is not bool
    ):
        raise ConfigError(f"{name}={value!r} must be of type {getattr(kind, '__name__', 'text')}")
    return value
