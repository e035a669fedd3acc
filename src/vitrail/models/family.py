"""A family of networks as the rest of the package sees it: one config class that answers every question. No torch.

A config builds a `Backbone` (backbone.py), and build.py knows which. All other code asks the two and never checks their
types; CONTRIBUTING.md shows a family in one file. Also here: the rules that configs of several families share, and the
closed-form cost of a network as a list of steps, each with the shape, parameters and multiply-accumulates of one layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from vitrail.core.config_overrides import Choice
from vitrail.core.errors import ConfigError, ImageSizeError, unknown_name
from vitrail.core.text import LARGEST_SIDE, Pair, format_size


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
    """A network as frozen data, and everything that is known about it before it is built."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every family is a frozen dataclass

    family: ClassVar[str]  # its name in weight files
    head_layer: ClassVar[str]  # the last layer's name among the tensors
    parts: ClassVar[tuple[str, ...]] = ()  # fields that files mention only where they differ from their defaults
    image: Pair
    channels: int
    classes: int

    @classmethod
    def list_registered(cls) -> tuple[type[Any], ...]:
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
    def units(self) -> int:
        """The total number of blocks."""
        return self.layers

    @property
    def tokens(self) -> int | None:
        """T: how many tokens attention sees; none without attention between tokens."""
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
    def open_sizes(self) -> ImageSizes:
        """The image sizes that one built network can read, without a change of its weights."""
        return self.multiples_of_patch()

    def multiples_of_patch(self) -> ImageSizes:
        """Sizes in steps of the patch, or of a backbone's stride. Not a property: torch cannot compile super()'s."""
        step = self.patch_pixels
        if self.image[0] % step[0] or self.image[1] % step[1]:
            return ImageSizes(step=None, why="SAME padding that leaves pixels over is made for one size alone")
        return ImageSizes(step=step)

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return 0

    @property
    def has_patch_head(self) -> bool:
        """Whether its head reads every patch and gives logits per pixel, [B, K, H, W]."""
        return False

    @property
    def has_queries(self) -> bool:
        """Whether it answers with classes and masks of queries, a `QueryOutput`."""
        return False

    @property
    def encoder(self) -> "ModelConfig | None":
        """The encoder that its queries read, as a network without a head; None without queries."""
        return None

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
        """What distinguishes the named networks."""

    @property
    def card_rows(self) -> list[tuple[str, str]]:
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
        return bool(self.tokens)

    @property
    def padding_macs(self) -> int:
        """Multiply-accumulates of one image that only multiply padding, which the paper's counts leave out."""
        return 0

    # How it is changed.

    def configure_like(self, old: "ModelConfig") -> "ModelConfig":
        """This network as a run had another: of the same image size and classes."""
        changes: dict[str, Any] = {"classes": old.classes, "image": old.image}
        self.settle(changes)
        return replace(self, **changes)

    def settle(self, changes: dict[str, Any]) -> None:
        """Completes changes to fields, so that dependent fields change together."""
        del changes

    def linear_head(self, classes: int) -> dict[str, Any]:
        """The changes that give it one linear layer as head, or none at all (3.2)."""
        return {"classes": classes}

    def patch_head(self, classes: int) -> dict[str, Any]:
        """The changes that give it one linear layer on every patch token as head, or none at all."""
        why = f"{self.title} has no patch tokens for a head with {classes} classes per pixel"
        raise ConfigError(f"{why}; use a ViT or a hybrid")

    def new_last_layer(self, classes: int) -> dict[str, Any]:
        """The changes that replace the last layer alone."""
        return {"classes": classes}

    @property
    def last_layers(self) -> tuple[str, ...]:
        """The names, among the tensors, of the last layer, or of several that read the same and are averaged."""
        return (self.head_layer,)

    @property
    def has_plain_head(self) -> bool:
        """Whether a new linear head reads what the last layer reads now: no hidden layer or projection goes with it."""
        return True

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


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Plain data for a file header; `from_dict` reads it back."""
    plain = {name: config.__dataclass_fields__[name].default for name in config.parts}
    data = asdict(config)
    return {
        "family": config.family,
        **{name: data[name] for name in data if name not in plain or data[name] != plain[name]},
    }


def from_dict(data: dict[str, Any]) -> ModelConfig:
    """The config that `to_dict` wrote; unknown or ill-typed fields are refused by name."""
    rest = dict(data)
    family = str(rest.pop("family", None))
    if family not in FAMILIES:
        raise unknown_name("model family", family, FAMILIES)
    kind = FAMILIES[family]
    known = {field.name: field for field in fields(kind)}
    for name, value in rest.items():
        if name not in known:
            raise unknown_name("config field", name, known)
        rest[name] = _from_json(name, known[name].type, value)
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in rest]:
        raise ConfigError(f"incomplete model config: {', '.join(missing)} missing")
    return kind(**rest)


def _from_json(name: str, kind: Any, value: Any) -> Any:
    """JSON knows no tuples and blurs 1 and 1.0; `check_fields` sees to the rest."""
    if name == "backbone" and value is not None:
        if not isinstance(value, dict) or cast(dict[str, Any], value).get("family", "resnet") != "resnet":
            raise ConfigError(f"backbone={value!r} must be the config of a ResNet")
        try:
            return from_dict({"family": "resnet", **cast(dict[str, Any], value)})
        except ConfigError as error:
            raise ConfigError(f"backbone: {error}") from None
    part = next((member for member in get_args(kind) if member is not NoneType and is_dataclass(member)), None)
    if part is not None and value is not None:
        return _part_from_json(name, part, value)
    if value is not None and any(get_origin(member) is tuple for member in (kind, *get_args(kind))):
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in cast(list[Any], value)):
            raise ConfigError(f"{name}={value!r} must be a list of whole numbers")
        return tuple(cast(list[int], value))
    return float(value) if kind is float and type(value) is int and abs(value) < LARGEST_FLOAT else value


def _part_from_json(name: str, kind: Any, value: Any) -> Any:
    """A config within a config, such as rotary positions."""
    known = {field.name: field.type for field in fields(kind)}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={value!r} must be the fields of {kind.__name__}")
    given = cast(dict[str, Any], value)
    if unknown := next((key for key in given if key not in known), None):
        raise unknown_name(f"field of {name}", unknown, known)
    made = {key: _from_json(key, known[key], part) for key, part in given.items()}
    try:
        part = kind(**made)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None
    check_types(part, f"{name}.")
    return part


Pool: TypeAlias = Literal["token", "mean", "token+mean", "map"]
Position: TypeAlias = Literal["none", "learned", "learned2d", "learned2d-sum", "relative", "sincos2d"]

# Beyond these no machine computes, and merely naming all the tensors would take minutes.
MOST: Final = {
    "depth": 1024, "width": 1 << 16, "mlp_width": 1 << 18, "heads": 1 << 12, "channels": 1 << 12, "classes": 1 << 24,
    "registers": 1 << 12, "groups": 1 << 16, "axial_heads": 1 << 12, "head_width": 1 << 12, "class_tokens": 1 << 12,
    "map_heads": 1 << 12, "map_mlp_width": 1 << 18, "projection": 1 << 16, "neck": 1 << 16,
    "queries": 1 << 16, "query_blocks": 1 << 10, "masked_blocks": 1 << 10, "upscale": 8,
}  # fmt: skip
LARGEST_FLOAT: Final = 2**53  # up to here whole numbers are floats, too


def check_fields(config: ModelConfig, *positive: str) -> None:
    """Numbers are numbers and switches are switches, choices are known, sizes are possible; a file, a shell or a slip
    may say otherwise."""
    check_types(config)
    for field in fields(config):
        name, kind = field.name, field.type
        value: Any = getattr(config, name)
        if kind == Pair and not (len(value) == 2 and min(value) >= 1):
            raise ConfigError(f"{name}={value} must be (height, width), both at least 1")
        if name in positive and not value > 0:
            raise ConfigError(f"{name}={value} must be above 0")
        if name in MOST and value > MOST[name]:
            raise ConfigError(f"{name}={value} is more than {MOST[name]:,}")
    if max(config.image) > LARGEST_SIDE:
        raise ImageSizeError(f"image={format_size(config.image)} is larger than {LARGEST_SIDE} pixels a side")


def check_types(config: Any, path: str = "") -> None:
    """Numbers are numbers, switches are switches, and choices are known, by the annotations of a config."""
    for field in fields(config):
        name, kind = path + field.name, field.type
        value: Any = getattr(config, field.name)
        found = type(value)
        if kind in (int, bool) and found is not kind:
            raise ConfigError(f"{name}={value!r} must be of type {getattr(kind, '__name__', kind)}")
        if kind is float and (found not in (int, float) or not abs(value) < LARGEST_FLOAT):
            raise ConfigError(f"{name}={value!r} must be a finite number")
        literal = next((member for member in (kind, *get_args(kind)) if get_origin(member) is Literal), None)
        if literal and value not in (get_args(literal) if literal is kind else (*get_args(literal), None)):
            raise unknown_name(name, str(value), get_args(literal))


def sum_steps(steps: Iterable[CostStep]) -> CostStep:
    """All steps as one line; the shape is the last one's."""
    rows = list(steps)
    return CostStep("total", rows[-1].shape, sum(s.params for s in rows), sum(s.macs for s in rows))
