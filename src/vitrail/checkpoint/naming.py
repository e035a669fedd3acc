"""What the classes of a network are called: its own names, ImageNet's where weights have none, or new ones.

Weights of other libraries with 1,000 classes and no names are taken for ImageNet-1k's; a file, a folder or a sidecar
that has names keeps them. A card remembers the names from before a renaming, so that data whose folders still have the
old names can be scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.core.errors import ConfigError
from vitrail.data.class_names import bundled_names, imagenet_ids

RENAMED: Final = "renamed"  # in a card's provenance: {new name: old name}


def name_imagenet(card: Card, num_classes: int) -> Card:
    """The card of another library's weights with ImageNet's names, where they have 1,000 classes and no names."""
    names = bundled_names("imagenet")
    return replace(card, labels=names) if card.labels is None and num_classes == len(names) else card


def has_imagenet_names(card: Card) -> bool:
    """Whether the class names are the bundled ones of ImageNet."""
    return card.labels == bundled_names("imagenet")


def with_names(bundle: Bundle, names: Sequence[str]) -> Bundle:
    """The same network under new class names."""
    card, count = bundle.card, bundle.config.classes
    if len(names) != count:
        raise ConfigError(f"{len(names):,} names for {count:,} classes; give one for each")
    told = {**card.provenance, **renaming(card.labels, names)}
    return replace(bundle, card=replace(card, labels=tuple(names), provenance=told))


def renaming(old: Sequence[str] | None, new: Sequence[str]) -> dict[str, Any]:
    """What a card's provenance says of new names; nothing where none changed."""
    changed = {one: other for one, other in zip(new, old or new, strict=True) if one != other}
    return {RENAMED: changed} if changed else {}


def other_names(card: Card) -> list[tuple[str, ...]]:
    """What data sets may call the classes beside the card's own names: WordNet ids, or the names before a renaming."""
    if card.labels is None:
        return []
    found = [imagenet_ids()] if has_imagenet_names(card) else []
    before: Any = card.provenance.get(RENAMED)
    if isinstance(before, Mapping) and any(name in before for name in card.labels):
        found.append(tuple(str(before.get(name, name)) for name in card.labels))
    return found
