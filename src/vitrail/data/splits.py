"""Dev splits, nested shares and few-shot draws, each a pure function of labels and a seed; and selections on disk.

The paper tunes its learning rates on a part of the training set (Section 4.1): 10 % of Pets and Flowers, 2 % of
CIFAR, 1 % of ImageNet. Section 4.3 trains on random subsets, each of which contains the smaller ones. Few-shot draws
(4.1) follow the reference: one numpy generator per seed, classes in order.

A `Selection` records which samples of a dataset take part: a rule, the dataset's fingerprint and its own hash. Dev
splits, few-shot draws, VTAB-1k and de-duplication all use it, so that a result can say exactly which images it used.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import read_text, replace_on_success
from vitrail.core.errors import BadLabels, ConfigError, DataError, describe_error
from vitrail.core.text import pluralise
from vitrail.data.dataset import NONE, ImageDataset, Labels, SubsetDataset
from vitrail.data.randomness import hash_keys, hash_word

KIND = "vitrail selection 1"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """The samples of `source` (a fingerprint) that `rule` chose, in order; with `drop`, the samples to exclude."""

    source: str
    rule: dict[str, Any]  # what chose them: a name, a seed, sizes, thresholds
    indices: NDArray[np.int64]
    drop: bool = False

    @property
    def hash(self) -> str:
        """Equal hashes mean the same images in the same order."""
        head = json.dumps([KIND, self.source, self.rule, self.drop], sort_keys=True)
        return sha256(head.encode() + np.ascontiguousarray(self.indices, "<i8").tobytes()).hexdigest()

    def apply(self, source: ImageDataset) -> SubsetDataset:
        """Returns the chosen samples of the dataset. Raises DataError if it has changed since."""
        if source.fingerprint != self.source:
            changed = f"{self.source[:12]} became {source.fingerprint[:12]}"
            fact = f"the data of the selection {self.rule.get('name', '')!r} have changed since ({changed})"
            raise DataError(f"{fact}; make the selection again")
        kept = np.setdiff1d(np.arange(len(source)), self.indices) if self.drop else self.indices
        return SubsetDataset(source, kept)

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        body = {"kind": KIND, "hash": self.hash, "source": self.source, "rule": self.rule, "drop": self.drop}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(path) as file:
            file.write(json.dumps({**body, "indices": self.indices.tolist()}).encode())

    @classmethod
    def load(cls, path: Path) -> "Selection":
        """Reads a file that `save` wrote, and checks its hash."""
        try:
            body = json.loads(read_text(path))
            indices = np.asarray(body["indices"], np.int64)
            made = cls(source=body["source"], rule=body["rule"], indices=indices, drop=body["drop"])
            if body["kind"] != KIND or body["hash"] != made.hash:
                raise ValueError("its hash does not fit")
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            fact = f"{path} is not a selection, or was edited: {describe_error(error)}"
            raise DataError(f"{fact}; write it again with what made it, as `vitrail data dedup` does") from None
        return made


def drop_listed(source: ImageDataset, path: Path, *, option: str) -> tuple[ImageDataset, Selection]:
    """Applies the drop.json at `path`. Returns the remaining images and the selection that it drops. Errors start with
    `option`, which is "--without " or "data.without="."""
    try:
        selection = Selection.load(path)
    except DataError as error:  # it names the file
        raise DataError(f"{option}{error}") from None
    if not selection.drop:
        raise DataError(f"{option}{path} lists images to keep; give a drop.json of `vitrail data dedup`")
    try:
        left = selection.apply(source)
    except DataError as error:
        raise DataError(f"{option}{path}: {error}") from None
    if not len(left):
        raise DataError(f"{option}{path} leaves none of {pluralise(len(source), 'image')}; check it against the data")
    return left, selection


DEV: Final = {"pets": 0.10, "flowers102": 0.10, "cifar10": 0.02, "cifar100": 0.02, "imagenet": 0.01}


def split_stratified(labels: Labels, fraction: float, *, seed: int = 0) -> NDArray[np.int64]:
    """Draws a fraction of the samples, from every class as evenly as whole samples allow. Indices are ascending.

    The total is round(fraction * N), and classes with the largest remainders are rounded up. A class is never taken
    completely. Samples with several labels, or none, are drawn regardless of class."""
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction={fraction} must lie between 0 and 1")
    order, lot, _, first, sizes = order_by_class(labels, "stratified", seed)
    ideal = sizes * fraction
    taken = np.minimum(np.floor(ideal).astype(np.int64), np.maximum(sizes - 1, 0))
    left = round(len(labels) * fraction) - int(taken.sum())
    # The largest remainders first; ties are broken by the random key of the first sample, not by class number.
    for at in np.lexsort((lot[order[first]], -(ideal - taken)))[: max(left, 0)]:
        taken[at] += min(1, int(sizes[at] - 1 - taken[at]))
    return take_first(order, first, taken)


def order_by_class(labels: Labels, purpose: str, seed: int) -> tuple[NDArray[Any], ...]:
    """Returns all samples sorted by class and in random order within a class, their random keys, and for each class its
    number, its first position in the order and its size."""
    lot = hash_keys(hash_word(purpose), seed, np.arange(len(labels)))
    group = np.zeros(len(labels), np.int64) if labels.multiple else labels.values.astype(np.int64)
    order = np.lexsort((lot, group))
    return order, lot, *np.unique(group[order], return_index=True, return_counts=True)


def take_first(order: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Takes the first `counts` samples of every class. Indices are ascending."""
    parts = [order[start : start + count] for start, count in zip(first, counts, strict=True)]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))


def split_share(labels: Labels, fraction: float, *, seed: int = 0) -> NDArray[np.int64]:
    """Draws a share of every class, rounded per class. Indices are ascending. With the same seed, a larger share
    contains every smaller one, which `split_stratified` does not guarantee. Samples with several labels, or none, are
    drawn regardless of class."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction} must be above 0 and at most 1")
    order, _, present, first, sizes = order_by_class(labels, "share", seed)
    taken = np.floor(sizes * fraction + 0.5).astype(np.int64)
    lost = (taken == 0) & ((present != NONE) | (len(present) == 1))  # unlabelled samples are not a class
    if lost.any():
        least, what = int(sizes[lost].min()), "class" if len(present) > 1 else "set"
        fact = f"a share of {fraction} leaves nothing of a {what} of {least} samples"
        raise BadLabels(f"{fact}; use {0.5 / least:.2g} or more")
    return take_first(order, first, taken)


def select_few_shot(labels: Labels, classes: int, shots: int, *, seed: int | None = 0) -> NDArray[np.int64]:
    """Draws `shots` samples per class as the reference does: one generator per seed, permuting class after class. With
    seed None it takes the first samples in the order of the source, or fewer if a class has no more: the sweep
    variant."""
    if labels.multiple:
        raise BadLabels("a few-shot draw needs exactly one label per sample")
    drawn = [np.flatnonzero(labels.values == number) for number in range(classes)]
    if seed is not None:
        drawn = list(map(np.random.default_rng(seed).permutation, drawn))
    short = [number for number, found in enumerate(drawn) if len(found) < shots]
    if short and seed is not None:
        few = f"({len(short)} of {classes} classes have too few)"
        raise BadLabels(f"class {short[0]} has {len(drawn[short[0]])} samples, {shots} shots were asked for {few}")
    return np.concatenate([found[:shots] for found in drawn])


def dev_split(source: ImageDataset, fraction: float, *, seed: int = 0) -> tuple[Selection, Selection]:
    """Splits a dataset into a training part and a dev part, as selections."""
    held = split_stratified(source.labels, fraction, seed=seed)
    rule = {"name": "dev", "fraction": fraction, "seed": seed}
    rest = np.setdiff1d(np.arange(len(source)), held)
    train = Selection(source=source.fingerprint, rule={**rule, "part": "train"}, indices=rest)
    return train, Selection(source=source.fingerprint, rule={**rule, "part": "dev"}, indices=held)


def share_split(source: ImageDataset, fraction: float, *, seed: int = 0) -> Selection:
    """Selects a share of every class."""
    rule = {"name": "share", "fraction": fraction, "seed": seed}
    return Selection(source=source.fingerprint, rule=rule, indices=split_share(source.labels, fraction, seed=seed))
