"""Which samples are for what: dev splits, nested subsets, few-shot draws. Each is a pure function of labels and a seed.

The paper searches its learning rates on a part of the training set (Section 4.1): 10 % of Pets and Flowers, 2 % of
CIFAR, 1 % of ImageNet. Section 4.3 trains on random subsets of which each holds the smaller ones. Few-shot draws (4.1)
are the reference's: a numpy generator a seed, classes in order.

Which samples of a source take part: a small file with a rule, the source's fingerprint and a hash of its own.

Dev splits, k-shot draws, VTAB-1k and the outcome of de-duplication are all kept this way, so that a result can say
exactly which images it saw.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, read_text, replace_on_success
from vitrail.core.errors import BadLabels, ConfigError, DataError, describe_error
from vitrail.data.dataset import NONE, ImageDataset, Labels, SubsetDataset
from vitrail.data.randomness import EpochOrder, hash_keys, hash_word

KIND = "vitrail selection 1"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """The samples of `source` (a fingerprint) that `rule` chose, in order; or, with `drop`, those it leaves out."""

    source: str
    rule: dict[str, Any]  # what chose them: a name, a seed, sizes, thresholds
    indices: NDArray[np.int64]
    drop: bool = False

    @property
    def hash(self) -> str:
        """Of everything that matters: two equal hashes mean the same images in the same order."""
        head = json.dumps([KIND, self.source, self.rule, self.drop], sort_keys=True)
        return sha256(head.encode() + np.ascontiguousarray(self.indices, "<i8").tobytes()).hexdigest()

    def apply(self, source: ImageDataset) -> SubsetDataset:
        """The chosen samples. A source that has changed since is refused."""
        if source.fingerprint != self.source:
            raise DataError(
                f"the selection {self.rule.get('name', '')!r} is of a source with fingerprint {self.source[:12]}, but "
                f"this one has {source.fingerprint[:12]}: the data have changed since; make the selection again"
            )
        kept = np.setdiff1d(np.arange(len(source)), self.indices) if self.drop else self.indices
        return SubsetDataset(source, kept)

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        body = {
            "kind": KIND,
            "hash": self.hash,
            "source": self.source,
            "rule": self.rule,
            "drop": self.drop,
            "indices": self.indices.tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(path) as file:
            file.write(json.dumps(body).encode())

    @classmethod
    def load(cls, path: Path) -> "Selection":
        """Reads a file that `save` wrote, and checks its hash."""
        try:
            body = json.loads(read_text(path))
            made = cls(
                source=body["source"],
                rule=body["rule"],
                indices=np.asarray(body["indices"], np.int64),
                drop=body["drop"],
            )
            if body["kind"] != KIND or body["hash"] != made.hash:
                raise ValueError("its hash does not fit")
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not a selection, or was edited: {describe_error(error)}; write it again with what made it, "
                "as `vitrail data dedup` does"
            ) from None
        return made


DEV: Final = {"pets": 0.10, "flowers102": 0.10, "cifar10": 0.02, "cifar100": 0.02, "imagenet": 0.01}


def split_stratified(labels: Labels, fraction: float, *, seed: int = 0) -> NDArray[np.int64]:
    """A fraction of the samples, the same one of every class as nearly as whole samples allow, in ascending order.

    The whole comes to round(fraction * N); what rounding leaves over goes to the classes that lost most by it. A class
    is never taken whole. Samples with several labels, or none, are drawn without regard to class."""
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction={fraction} must lie between 0 and 1")
    count = len(labels)
    lot = hash_keys(hash_word("stratified"), seed, np.arange(count))
    group = np.zeros(count, np.int64) if labels.multiple else labels.values.astype(np.int64)
    order = np.lexsort((lot, group))  # by class, and by lot inside a class
    present, first, sizes = np.unique(group[order], return_index=True, return_counts=True)
    ideal = sizes * fraction
    taken = np.minimum(np.floor(ideal).astype(np.int64), np.maximum(sizes - 1, 0))
    room = sizes - 1 - taken
    left = round(count * fraction) - int(taken.sum())
    # The largest remainders first; among equal ones the lot of their first sample decides, not the class's number.
    for at in np.lexsort((lot[order[first]], -(ideal - taken)))[: max(left, 0)]:
        taken[at] += min(1, int(room[at]))
    chosen = [order[first[at] : first[at] + taken[at]] for at in range(len(present))]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)


def split_share(labels: Labels, fraction: float, *, seed: int = 0) -> NDArray[np.int64]:
    """That share of every class, rounded class by class, in ascending order; for one seed a larger share holds every
    smaller one. Samples with several labels, or none, are drawn without regard to class.

    Unlike `stratified`, whose remainders go to other classes from one fraction to the next, nothing ever leaves."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction} must be above 0 and at most 1")
    lot = hash_keys(hash_word("share"), seed, np.arange(len(labels)))
    group = np.zeros(len(labels), np.int64) if labels.multiple else labels.values.astype(np.int64)
    order = np.lexsort((lot, group))  # by class, and by lot inside a class
    present, first, sizes = np.unique(group[order], return_index=True, return_counts=True)
    taken = np.floor(sizes * fraction + 0.5).astype(np.int64)
    lost = (taken == 0) & ((present != NONE) | (len(present) == 1))  # those without a label are no class
    if lost.any():
        least = int(sizes[lost].min())
        what = "class" if len(present) > 1 else "set"
        raise BadLabels(
            f"a share of {fraction} leaves nothing of a {what} of {least} samples; use {0.5 / least:.2g} or more"
        )
    chosen = [order[start : start + count] for start, count in zip(first, taken, strict=True)]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)


def split_nested(count: int, size: int, *, seed: int = 0) -> NDArray[np.int64]:
    """A random subset of `size` among `count`, ascending; for one seed, a larger one holds every smaller one (4.3)."""
    if not 0 < size <= count:
        raise ConfigError(f"size={size}: a subset of {count} samples has between 1 and {count}")
    return np.sort(EpochOrder(count, keyed_seed("nested", seed))(0, np.arange(size, dtype=np.int64)))


def select_few_shot(labels: Labels, classes: int, shots: int, *, seed: int = 0) -> NDArray[np.int64]:
    """`shots` samples a class, as the reference draws them: one generator a seed, permuting class after class."""
    if labels.multiple:
        raise BadLabels("a few-shot draw needs one label a sample")
    generator = np.random.default_rng(seed)
    drawn = [generator.permutation(np.flatnonzero(labels.values == number)) for number in range(classes)]
    short = [number for number, found in enumerate(drawn) if len(found) < shots]
    if short:
        raise BadLabels(
            f"class {short[0]} has {len(drawn[short[0]])} samples, {shots} shots were asked for "
            f"({len(short)} of {classes} classes have too few)"
        )
    return np.concatenate([found[:shots] for found in drawn])


def select_first_shots(labels: Labels, classes: int, shots: int) -> NDArray[np.int64]:
    """The first `shots` samples of each class in the order of the source: the sweep variant, without seeds."""
    if labels.multiple:
        raise BadLabels("a few-shot draw needs one label a sample")
    return np.concatenate([np.flatnonzero(labels.values == number)[:shots] for number in range(classes)])


def dev_split(source: ImageDataset, fraction: float, *, seed: int = 0) -> tuple[Selection, Selection]:
    """The part to train on and the dev part, as selections that say what they are."""
    held = split_stratified(source.labels, fraction, seed=seed)
    rule = {"name": "dev", "fraction": fraction, "seed": seed}
    rest = np.setdiff1d(np.arange(len(source)), held)
    return (
        Selection(source=source.fingerprint, rule={**rule, "part": "train"}, indices=rest),
        Selection(source=source.fingerprint, rule={**rule, "part": "dev"}, indices=held),
    )


def share_split(source: ImageDataset, fraction: float, *, seed: int = 0) -> Selection:
    """A share of every class as a selection."""
    rule = {"name": "share", "fraction": fraction, "seed": seed}
    return Selection(source=source.fingerprint, rule=rule, indices=split_share(source.labels, fraction, seed=seed))


def few_shot_split(source: ImageDataset, shots: int, *, seed: int = 0) -> Selection:
    """A few-shot draw as a selection."""
    chosen = select_few_shot(source.labels, len(source.classes), shots, seed=seed)
    return Selection(source=source.fingerprint, rule={"name": "few-shot", "shots": shots, "seed": seed}, indices=chosen)


def nested_split(source: ImageDataset, size: int, *, seed: int = 0) -> Selection:
    """A subset of Section 4.3 as a selection."""
    rule = {"name": "nested", "size": size, "seed": seed}
    return Selection(source=source.fingerprint, rule=rule, indices=split_nested(len(source), size, seed=seed))


def find_kept(selection: Selection) -> Selection:
    """Writes a selection to the cache, under its hash, so that a result can point to it; the same one is kept once."""
    path = cache_folder("splits") / f"{selection.hash}.json"
    if not path.exists():
        selection.save(path)
    return selection


def keyed_seed(purpose: str, seed: int) -> int:
    """A seed of one purpose's own."""
    return int(hash_keys(hash_word(purpose), seed)[0])
