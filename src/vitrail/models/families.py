"""Weight families as data: families.toml, read once. No torch.

A family is a name, a paper, terms of use, networks and public weights. A new one is described there, and its files by a
module in checkpoint/formats where their names are new; the zoo and the table of public weights follow.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, Final, Literal, TypeAlias, cast

from vitrail.core.text import pair
from vitrail.models.family import from_dict
from vitrail.models.vit_config import ViTConfig

Access: TypeAlias = Literal["open", "gated", "non-commercial"]
Row: TypeAlias = dict[str, Any]

# What a file shows by its tensors, and what is for training; all other fields of a network have to be known.
VISIBLE: Final = (
    "width", "depth", "mlp_width", "image", "patch", "channels", "classes", "head", "map_mlp_width", "neck",
    "dropout", "attention_dropout", "stochastic_depth",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedNetwork:
    """A network of a family; `slug` is empty where it follows from the name."""

    config: ViTConfig
    slug: str = ""

    @property
    def numerics(self) -> Row:
        """The fields that its tensors do not show."""
        names = (field.name for field in fields(self.config))
        return {name: getattr(self.config, name) for name in names if name not in VISIBLE}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFamily:
    """One family. `aliases` are its names for networks that are the paper's; `weights` are rows of one public file
    each, complete with what their release and the family say of all."""

    name: str
    about: str
    paper: str
    year: int
    licence: str
    access: Access = "open"
    arxiv: str = ""
    unsure: str = ""
    aliases: dict[str, str]
    networks: dict[str, NamedNetwork]
    weights: tuple[Row, ...]


def parse_families(text: str) -> dict[str, WeightFamily]:
    """The families of a file by name, in its order; a network with a field that there is not is refused."""
    data: Row = tomllib.loads(text)
    colours: Row = data["normalisation"]
    families: dict[str, WeightFamily] = {}
    for name, row in cast(dict[str, Row], data["family"]).items():
        config: Row = row.pop("config", {})
        networks = {key: _network({**config, **own}) for key, own in row.pop("networks", {}).items()}
        weights = tuple(_weights(name, row, config, networks, colours, data["terms"]))
        about: Row = {"aliases": {}, **{key: value for key, value in row.items() if key != "release"}}
        families[name] = WeightFamily(name=name, networks=networks, weights=weights, **about)
    return families


def _network(row: Row) -> NamedNetwork:
    slug = row.pop("slug", "")
    sizes = {key: pair(row[key]) for key in ("image", "patch") if key in row}
    return NamedNetwork(config=cast(ViTConfig, from_dict({"family": "vit", **row, **sizes})), slug=slug)


def _weights(
    family: str, about: Row, config: Row, networks: dict[str, NamedNetwork], colours: Row, terms: Row
) -> Iterator[Row]:
    """The rows of a family's files, which combine the entries of the family, the release and the file."""
    common = {key: about[key] for key in ("licence", "access", "unsure") if key in about}
    for release in about.get("release", ()):
        shared = common | {key: value for key, value in release.items() if key not in ("weights", "about", "config")}
        for name, own in release["weights"].items():
            network, _, tag = name.partition(":")
            row = {"normalisation": "imagenet", **shared, **own}
            known = networks.get(network)
            image = 224 if known is None else known.config.image[0]
            numerics = {**(config if known is None else known.numerics), **release.get("config", {})}
            row |= {"family": family, "network": network, "tag": tag, "image": own.get("image", image)}
            row |= colours[row.pop("normalisation")] | {"numerics": {**numerics, **own.get("config", {})}}
            row |= {"repo": own.get("repo", f"timm/{own['timm']}"), "terms": terms.get(row["licence"], "")}
            yield {key: value for key, value in row.items() if key != "config"}


WEIGHT_FAMILIES: Final = parse_families(resources.files("vitrail.models").joinpath("families.toml").read_text("utf-8"))
