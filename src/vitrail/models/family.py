"""A family of networks as the rest of the package sees it: one config class that answers every question. No torch.

A config builds a `Backbone` (backbone.py), and build.py knows which. All other code asks the two and never checks their
types; CONTRIBUTING.md shows a family in one file. Also here: the rules that configs of several families share, and the
closed-form cost of a network as a list of steps, each with the shape, parameters and multiply-accumulates of one layer.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast, get_args

from vitrail.core.config_overrides import Choice
from vitrail.core.errors import ConfigError, ImageSizeError, unknown_name
from vitrail.core.text import LARGEST_SIDE, Pair, format_size, pair


@dataclass(frozen=True, slots=True)
class CostStep:
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
        """A description for a network without a name in the paper."""

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
    def walk(self) -> Iterator[CostStep]:
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


def multiples_of_patch(config: ModelConfig) -> ImageSizes:
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
        raise unknown_name("model family", family, FAMILIES)
    kind = FAMILIES[family]
    known = {field.name: field for field in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in rest.items():
        if name not in known:
            raise unknown_name("config field", name, known)
        values[name] = _check_type(name, known[name].type, value)
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"incomplete model config: {', '.join(missing)} missing")
    return kind(**values)


def _check_type(name: str, kind: Any, value: Any) -> Any:
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


Gelu: TypeAlias = Literal["tanh", "erf"]
Position: TypeAlias = Literal["none", "learned", "learned2d", "learned2d-sum", "relative", "sincos2d"]
Placement: TypeAlias = Literal["stem", "every", "shared"]
Pool: TypeAlias = Literal["token", "mean"]
Head: TypeAlias = Literal["none", "linear", "tanh", "patches"]
Attention: TypeAlias = Literal["full", "axial"]
Unit: TypeAlias = Literal["preactivation", "postactivation"]
Root: TypeAlias = Literal["7x7", "3x3"]
Standardisation: TypeAlias = Literal["std+eps", "sqrt(var+eps)"]
Padding: TypeAlias = Literal["same", "symmetric"]
PoolPadding: TypeAlias = Literal["zero", "infinity"]
Mixing: TypeAlias = Literal["convolution", "axial"]

# Beyond these no machine computes, and merely naming all the tensors would take minutes.
MOST: Final = {
    "depth": 1024,
    "width": 1 << 16,
    "mlp_width": 1 << 18,
    "heads": 1 << 12,
    "channels": 1 << 12,
    "classes": 1 << 24,
    "registers": 1 << 12,
    "groups": 1 << 16,
    "axial_heads": 1 << 12,
}
MOST_BLOCKS: Final = 1024  # of one stage of a ResNet
MOST_PATCHES: Final = 1 << 18


CHOICES: dict[str, tuple[str | None, ...]] = {
    "gelu": get_args(Gelu),
    "position": get_args(Position),
    "placement": (None, *get_args(Placement)),
    "pool": get_args(Pool),
    "head": get_args(Head),
    "attention": get_args(Attention),
    "unit": get_args(Unit),
    "root": get_args(Root),
    "standardisation": get_args(Standardisation),
    "padding": get_args(Padding),
    "pool_padding": get_args(PoolPadding),
    "mixing": get_args(Mixing),
}


def check_types(config: ModelConfig) -> None:
    """Numbers are numbers and switches are switches; a file, a shell or a slip may say otherwise."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in (int, bool) and type(value) is not field.type:
            raise ConfigError(f"{field.name}={value!r} must be of type {getattr(field.type, '__name__', field.type)}")
        if field.type is float and (type(value) not in (int, float) or not -math.inf < value < math.inf):
            raise ConfigError(f"{field.name}={value!r} must be a finite number")


def check_choices(config: ModelConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in CHOICES and value not in CHOICES[field.name]:
            raise unknown_name(field.name, str(value), [str(choice) for choice in CHOICES[field.name]])


def check_positive(config: ModelConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}={value} must be above 0")


def check_most(config: ModelConfig) -> None:
    """Sizes that no machine could compute."""
    for field in fields(config):
        if field.name in MOST and getattr(config, field.name) > MOST[field.name]:
            raise ConfigError(f"{field.name}={getattr(config, field.name)} is more than {MOST[field.name]:,}")
    if max(config.image) > LARGEST_SIDE:
        raise ImageSizeError(f"image={format_size(config.image)} is larger than {LARGEST_SIDE} pixels a side")


def check_positive_pairs(config: ModelConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (len(value) == 2 and min(value) >= 1):
            raise ConfigError(f"{name}={value} must be (height, width), both at least 1")


def list_steps(config: ModelConfig) -> list[CostStep]:
    """The steps of one image through the network, from pixels to logits."""
    return list(config.walk())


def sum_steps(steps: Iterable[CostStep]) -> CostStep:
    """All steps as one line; the shape is the last one's."""
    rows = list(steps)
    return CostStep("total", rows[-1].shape, sum(s.params for s in rows), sum(s.macs for s in rows))
