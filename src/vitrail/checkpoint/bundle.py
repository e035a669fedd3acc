"""A network as data, on its way in or out: config and tensors, and the card that travels with them."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from vitrail.checkpoint.formats.table import Tensors
from vitrail.core.errors import ConfigError
from vitrail.core.shapes import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.training_record import abridge
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig, from_dict, to_dict

CLASSIFICATION: Final = "classification"  # the task of a network that says nothing else


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a network cannot say itself: how pictures are prepared, what classes are called, where it is from."""

    preprocessing: Preprocessing
    labels: tuple[str, ...] | None = None
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])
    multi_label: bool = False  # whether each class is a question of its own, answered by a sigmoid
    task: str = CLASSIFICATION  # what its outputs mean; a name that is not known here is kept as it is

    def without_labels(self, *, keep_task: bool = False) -> "Card":
        """The card of a network whose head was replaced; the task stays where the new head is of the same kind."""
        return replace(self, labels=None, multi_label=False, task=self.task if keep_task else CLASSIFICATION)

    def abridged(self) -> "Card":
        """For files that no command here scores: without the hashes of the images that were trained on."""
        return replace(self, provenance=abridge(self.provenance))

    def resized(self, image: Pair) -> "Card":
        """The card for another image size; a shorter side before the crop grows in proportion."""
        old = self.preprocessing
        resize = None if old.resize is None else max(round(old.resize * min(image) / min(old.image)), min(image))
        return replace(self, preprocessing=replace(old, image=image, resize=resize))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Config, tensors by our own names in the type they were stored in, and the card."""

    config: ModelConfig
    tensors: Tensors
    card: Card

    def __post_init__(self) -> None:
        self.card.preprocessing.check_fit(self.config.image)


def card_of(network: Backbone) -> Card:
    """What travels with a network; one that was built by itself gets the card of a network for pixels in [-1, 1]."""
    card = network.card
    return card if isinstance(card, Card) else Card(preprocessing=Preprocessing(image=network.config.image))


def describe(config: ModelConfig, card: Card) -> dict[str, Any]:
    """Config and card as plain data: the header of our own files, and the sidecar of others'."""
    return {
        "config": to_dict(config),
        "preprocessing": card.preprocessing.to_dict(),
        "labels": None if card.labels is None else list(card.labels),
        "provenance": card.provenance,
        **({"multi_label": True} if card.multi_label else {}),  # as older versions wrote it where it is not
        **({"task": card.task} if card.task != CLASSIFICATION else {}),
    }


def described(data: dict[str, Any]) -> tuple[ModelConfig, Card]:
    """What `describe` wrote, checked."""
    try:
        config, labels, provenance = from_dict(data["config"]), data["labels"], data["provenance"]
        card = Card(
            preprocessing=Preprocessing.from_dict(data["preprocessing"]),
            labels=None if labels is None else tuple(str(label) for label in labels),
            provenance=dict(provenance),
            multi_label=flag(data.get("multi_label", False)),
            task=task_name(data.get("task", CLASSIFICATION)),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("incomplete description: config, preprocessing, labels and provenance are needed") from None
    if card.labels is not None and len(card.labels) != config.classes:
        raise ConfigError(f"{len(card.labels)} labels for {config.classes} classes")
    return config, card


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"multi_label is {value!r}, not true or false")
    return value


def task_name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"task is {value!r}, not a name")
    return value
