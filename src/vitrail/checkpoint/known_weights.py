"""Weights by name: those bundled with the package, and public weights of every family on the Hugging Face hub.

`vitrail-cifar10` is a bundled small ViT for CIFAR-10's ten classes. Its name works wherever weights are given; a file
or folder of your own with that name is ./vitrail-cifar10.

    find_public_weights("vit_b_16", "augreg_in21k_ft_in1k_384").repo
    -> "timm/vit_base_patch16_384.augreg_in21k_ft_in1k"

Public weights are data: models/families.toml. A tag is timm's own. timm puts the image size of a Transformer into the
network's name and vitrail does not, so weights for another size than the network's own have it at the end of the tag.
"""

import difflib
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from vitrail.core.errors import ConfigError, UnknownName, WeightsNotFound, unknown_name
from vitrail.models.families import WEIGHT_FAMILIES, Access
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import ZOO, adapt_config, slug

DEFAULT_WEIGHTS: Final = "vitrail-cifar10"
BUNDLED: Final = {DEFAULT_WEIGHTS: "vitrail-cifar10.safetensors"}


def is_bundled(name: str | Path) -> bool:
    return str(name) in BUNDLED


def bundled_file(name: str) -> Path:
    """The path of bundled weights in this installation."""
    path = Path(str(resources.files("vitrail"))) / "assets" / BUNDLED[name]
    if not path.is_file():
        fault = f"{name}: {path} is missing, so this copy of vitrail is incomplete"
        raise WeightsNotFound(f"{fault}; install it again, or name weights of your own")
    return path


Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Triple: TypeAlias = tuple[float, float, float]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicWeights:
    """One weight file on the hub.

    `classes=0` is a network without a head; `parameters` are the published network's. `numerics` are fields of the
    network that its tensors do not show. `mean`, `std`, `interpolation` and `crop` describe its evaluation; `crop` is
    the share of the resized image that is kept, None if the image is squashed to its size. `terms` restrict the use of
    weights that are not open; `also` is another repository with the same values; `unsure` says which of these facts are
    uncertain. With `sha256=None`, the hub names the checksum.
    """

    family: str
    network: str
    tag: str
    repo: str
    image: int
    parameters: int
    mean: Triple
    std: Triple
    classes: int = 0
    interpolation: Interpolation = "bicubic"
    crop: float | None = 1.0
    numerics: dict[str, Any] = field(hash=False)
    file: str = "model.safetensors"
    licence: str
    access: Access = "open"
    terms: str = ""
    timm: str = ""
    also: str = ""
    unsure: str = ""
    sha256: str | None = None

    def __post_init__(self) -> None:
        # Repository and file become part of a path in the cache, and must not lead out of it.
        if not re.fullmatch(f"{_NAME}/{_NAME}", self.repo):
            raise ConfigError(f"repo={self.repo!r} must be 'owner/name' of letters, digits, '.', '_' and '-'")
        if not re.fullmatch(_NAME, self.file):
            raise ConfigError(f"file={self.file!r} must be a plain file name of letters, digits, '.', '_' and '-'")
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"sha256={self.sha256!r} must be 64 lower-case hexadecimal digits")
        for name, choices in (("access", get_args(Access)), ("interpolation", get_args(Interpolation))):
            if getattr(self, name) not in choices:
                raise unknown_name(name, str(getattr(self, name)), choices)

    @property
    def model(self) -> str:
        """The network's slug."""
        return slug(self.network)

    @property
    def name(self) -> str:
        """The name by which it is requested: NAME:TAG."""
        return f"{self.model}:{self.tag}"

    @property
    def config(self) -> ModelConfig:
        """The published network."""
        return adapt_config(ZOO[self.network], classes=self.classes, image_size=self.image, **self.numerics)


def _public(row: dict[str, Any]) -> PublicWeights:
    """An entry from a row of a family."""
    changes: dict[str, Any] = {name: tuple(row[name]) for name in ("mean", "std")}
    changes |= {"crop": None} if row.get("crop") == "squash" else {}
    return PublicWeights(**{**row, **changes})


PUBLIC: tuple[PublicWeights, ...] = tuple(_public(row) for one in WEIGHT_FAMILIES.values() for row in one.weights)


def find_repository(repo: str) -> PublicWeights | None:
    """The public weights that a repository of the hub holds, as its own or as the same values in another format."""
    return next((entry for entry in PUBLIC if repo in (entry.repo, entry.also)), None)


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
    raise UnknownName(f"there are no public weights of {model!r}; train it, or use one of {', '.join(near)}")
