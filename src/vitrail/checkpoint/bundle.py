"""A network as data: its config, its tensors, and the card with everything the network itself does not know.

The card holds preprocessing, class names and provenance. In a foreign format that cannot store it, it goes into a
sidecar: a JSON file next to the weights, tied to them by checksum.

Class names are the network's own, ImageNet's for weights of other libraries with 1,000 classes and no names, or new
ones from a renaming. The card remembers the old names, so that data whose folders still use them can be scored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from vitrail.checkpoint.download_weights import compute_sha256
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.core.errors import ConfigError, CorruptWeights, WeightsError, describe_error
from vitrail.core.text import Pair
from vitrail.data.class_names import read_class_names, read_imagenet_ids
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.training_record import shorten_provenance
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig, from_dict, to_dict

CLASSIFICATION: Final = "classification"  # the default task of a network
PANOPTIC: Final = "panoptic"  # the task of a network with queries


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What the network itself does not contain: preprocessing, class names, provenance."""

    preprocessing: Preprocessing
    labels: tuple[str, ...] | None = None
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])
    multi_label: bool = False  # whether classes are independent, each with a sigmoid
    task: str = CLASSIFICATION  # what its outputs mean; unknown names are kept
    things: tuple[bool, ...] | None = None  # for classes of segments: which have countable instances; None: all

    def without_labels(self, *, keep_task: bool = False) -> "Card":
        """The card of a network whose head was replaced. The task is kept if the new head is of the same kind."""
        task = self.task if keep_task else CLASSIFICATION
        return replace(self, labels=None, multi_label=False, task=task, things=None)

    def abridge(self) -> "Card":
        """The card without the hashes of the training images, for files that no command here scores."""
        return replace(self, provenance=shorten_provenance(self.provenance))

    def resize(self, image: Pair) -> "Card":
        """The card for another image size; a shorter side before the crop grows in proportion."""
        old = self.preprocessing
        resize = None if old.resize is None else max(round(old.resize * min(image) / min(old.image)), min(image))
        return replace(self, preprocessing=replace(old, image=image, resize=resize))

    def adapt_channels(self, channels: int) -> "Card":
        """The card for another number of channels."""
        return replace(self, preprocessing=self.preprocessing.adapt_channels(channels))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Config, tensors by our own names in the type they were stored in, and the card."""

    config: ModelConfig
    tensors: Tensors
    card: Card

    def __post_init__(self) -> None:
        self.card.preprocessing.check_fit(self.config.image, self.config.channels)


def get_card(network: Backbone) -> Card:
    """The card of a network; one that was built without a card gets that of a network for pixels in [-1, 1]."""
    card = network.card
    known = card if isinstance(card, Card) else Card(preprocessing=Preprocessing(image=network.config.image))
    return known.adapt_channels(network.config.channels)


def describe(config: ModelConfig, card: Card) -> dict[str, Any]:
    """Config and card as plain data: the header of our own files, and the sidecar of others'."""
    return {
        "config": to_dict(config),
        "preprocessing": card.preprocessing.to_dict(),
        "labels": None if card.labels is None else list(card.labels),
        "provenance": card.provenance,
        **({"multi_label": True} if card.multi_label else {}),  # omitted if false, as in older versions
        **({"task": card.task} if card.task != CLASSIFICATION else {}),
        **({"things": list(card.things)} if card.things is not None else {}),
    }


def parse_description(data: dict[str, Any]) -> tuple[ModelConfig, Card]:
    """Parses and validates what `describe` wrote."""
    try:
        config, labels, provenance = from_dict(data["config"]), data["labels"], data["provenance"]
        multi_label, task = data.get("multi_label", False), data.get("task", CLASSIFICATION)
        if not isinstance(multi_label, bool) or not isinstance(task, str) or not task:
            raise ConfigError(f"multi_label={multi_label!r} must be true or false, and task={task!r} a name")
        preprocessing = Preprocessing.from_dict(data["preprocessing"])
        names = None if labels is None else tuple(map(str, labels))
        kind: Any = {
            "multi_label": multi_label,
            "task": task,
            "things": parse_things(data.get("things"), config.classes),
        }
        card = Card(preprocessing=preprocessing, labels=names, provenance=dict(provenance), **kind)
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError("incomplete description: config, preprocessing, labels and provenance are needed") from None
    if card.labels is not None and len(card.labels) != config.classes:
        raise ConfigError(f"{len(card.labels)} labels for {config.classes} classes")
    return config, card


def parse_things(values: Any, classes: int) -> tuple[bool, ...] | None:
    """Parses which classes are things; ConfigError unless there is a value for each class."""
    if values is None:
        return None
    things = tuple(cast("list[Any]", values)) if isinstance(values, list) else ()
    if len(things) != classes or not all(isinstance(one, bool) for one in things):
        raise ConfigError(f"things={values!r} must be true or false for each of {classes} classes")
    return things


def sidecar_path(weights: Path) -> Path:
    return weights.with_name(weights.name + ".vitrail.json")


def write_sidecar(weights: Path, config: ModelConfig, card: Card, lost_fields: list[str]) -> Path:
    """Writes config and card in full, the fields that made a sidecar necessary, and the checksum of the weight file."""
    path = sidecar_path(weights)
    data = {"format": 1, "weights": compute_sha256(weights), "unheld": lost_fields, **describe(config, card)}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return path


def read_sidecar(weights: Path) -> tuple[ModelConfig, Card] | None:
    """Config and card from a weight file's sidecar, or None without one; a sidecar of another file is refused."""
    path = sidecar_path(weights)
    if not path.is_file():
        return None
    data = read_json(path)
    if data.get("weights") != compute_sha256(weights):
        raise CorruptWeights(f"{path}: belongs to another version of {weights.name}; remove it or restore the weights")
    if data.get("format") != 1:
        raise WeightsError(f"{path}: written by a newer vitrail (format {data.get('format')!r}); upgrade vitrail")
    try:
        return parse_description(data)
    except ConfigError as error:
        raise CorruptWeights(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small text file."""
    try:
        if path.stat().st_size > 64 * 2**20:
            raise CorruptWeights(f"{path}: {path.stat().st_size} bytes are too many for a description")
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptWeights(f"{path}: cannot be read as JSON ({describe_error(error)})") from None
    if not isinstance(data, dict):
        raise CorruptWeights(f"{path}: expected a JSON object")
    return cast(dict[str, Any], data)


RENAMED: Final = "renamed"  # in a card's provenance: {new name: old name}


def name_imagenet(card: Card, num_classes: int) -> Card:
    """Adds ImageNet's names to the card of another library's weights, if they have 1,000 classes and no names."""
    names = read_class_names("imagenet")
    return replace(card, labels=names) if card.labels is None and num_classes == len(names) else card


def rename_classes(bundle: Bundle, names: Sequence[str]) -> Bundle:
    """The same network under new class names."""
    card, count = bundle.card, bundle.config.classes
    if len(names) != count:
        raise ConfigError(f"{len(names):,} names for {count:,} classes; give one for each")
    provenance = {**card.provenance, **record_renaming(card.labels, names)}
    return replace(bundle, card=replace(card, labels=tuple(names), provenance=provenance))


def record_renaming(old: Sequence[str] | None, new: Sequence[str]) -> dict[str, Any]:
    """The provenance entry for renamed classes; empty if no name changed."""
    changed = {one: other for one, other in zip(new, old or new, strict=True) if one != other}
    return {RENAMED: changed} if changed else {}


def list_other_names(card: Card) -> list[tuple[str, ...]]:
    """Other names that data sets may use for the classes: WordNet ids, or the names before a renaming."""
    if card.labels is None:
        return []
    found = [read_imagenet_ids()] if card.labels == read_class_names("imagenet") else []
    before: Any = card.provenance.get(RENAMED)
    if isinstance(before, Mapping) and any(name in before for name in card.labels):
        found.append(tuple(str(before.get(name, name)) for name in card.labels))
    return found
