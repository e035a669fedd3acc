"""A classifier in seconds: frozen features, least squares in closed form (4.1), and a network with a new last layer.

    fitted = vitrail.fit("deit.safetensors", "photos/")
    vitrail.save(fitted.model, "photos.safetensors")

No gradient descent is involved. The result is an ordinary network with a new last layer, the names of the new classes
and a record of how it was made.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle, Card, get_card
from vitrail.checkpoint.weights import build_network as built
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import BadLabels, ConfigError
from vitrail.core.text import join_words, pluralise
from vitrail.data.collection import Collection, open_collection, unify_classes
from vitrail.data.dataset import ImageDataset, Labels, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.splits import split_stratified
from vitrail.data.training_record import KEY, find_exposure, record_training
from vitrail.evaluation.frozen.features import FrozenFeatures, hash_network, list_missing, load_or_extract
from vitrail.evaluation.frozen.ridge_head import SHARE, RidgeHead, fit_head, fit_multi_label_head
from vitrail.evaluation.intervals import calibration_error
from vitrail.evaluation.metrics import has_label, is_right, keep_single_labels, score_predictions
from vitrail.evaluation.multi_label import THRESHOLD, MultiLabelScore, encode_labels
from vitrail.evaluation.result import Measure, measure_share
from vitrail.evaluation.scoring import choose_split
from vitrail.models.build import Model
from vitrail.models.zoo import adapt_config

BATCH: Final = 64
UNEVEN: Final = 20  # ratio of the largest class to the smallest above which a note is added
NAMED: Final = 3  # examples in a note

Batches = Callable[[ImageDataset], Iterable[Batch]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """The score on images that the classifier was not fitted on; `error` is the expected calibration error."""

    split: str
    top1: Measure
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelMeasures:
    """mAP and F1 of a multi-label classifier: on the images held out while it was fitted, and on a split that it was
    not fitted on, if there is one."""

    held: tuple[Measure, ...]
    scored: tuple[Measure, ...]
    split: str  # the split that was scored; "" for none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedClassifier:
    """A fitted network in evaluation mode, with its card, ready to be saved; it shares all but its head with the
    original. `found` says whether its features came from the cache, `kept` whether they are in it now."""

    model: Model
    head: RidgeHead
    split: str
    pictures: int  # the number of images that it was fitted on
    scored: HeldOutScore | None
    found: bool
    kept: bool
    notes: tuple[str, ...]
    unreadable: tuple[str, ...]
    several: MultiLabelMeasures | None = None  # for multi-label data


class SplitFeatures(NamedTuple):
    """A split with its features."""

    split: str
    source: ImageDataset
    features: FrozenFeatures

    @property
    def unreadable(self) -> list[str]:
        return [self.source.name(at) for at in list_missing(self.source, self.features.samples)]


def fit(
    network: Model,
    data: Collection | str | Path,
    *,
    test: Collection | str | Path | None = None,
    penalty: float | None = None,
    held_out: float = SHARE,
    shots: int | None = None,
    name: str = "",
    device: torch.device | str = "cpu",
    batches: Batches | None = None,
    folder: Path | None = None,
) -> FittedClassifier:
    """Fits a classifier on `data`'s train split (or its only one), and scores it on its test or val split, or on that
    of `test`.

    The share `held_out` of every class chooses the penalty, unless one is given, and the scale of the logits; then the
    classifier is fitted on all images, or on at most `shots` per class. `name` is the name of the original weights in
    the card. `batches` yields the images of a source, each once, prepared as the network's card says; with a `folder`
    features are cached there."""
    collection = data if isinstance(data, Collection) else open_collection(data)
    collection.need_labels()
    classes = collection.classes
    if len(classes) < 2:
        known = f"{collection.name} has one class, {', '.join(classes)!r}, and at least two are needed"
        raise BadLabels(f"{known}; put the images of each class into a folder of its own")
    network.config.linear_head(len(classes))  # networks with queries refuse it, before features are extracted
    split, source = choose_split(collection, "train")
    if shots is not None:
        source = SubsetDataset(source, draw_shots(source.labels, len(classes), shots))
    scored = choose_scored_split(collection, split, source, test)
    preprocessing = get_card(network).preprocessing
    batches = batches or (lambda bare: eval_batches(bare, preprocessing, batch=min(BATCH, max(len(bare), 1))))
    parts = [
        SplitFeatures(*part, load_or_extract(network, part[1], preprocessing, device, batches=batches, folder=folder))
        for part in filter(None, [(split, source), scored])
    ]
    notes = [note for part in parts for note in describe_problems(part)]
    multi_label = source.labels.multi_label
    train = parts[0].features if multi_label else select_single_labels(parts[0], collection.name, notes)
    records = record_fit(network, name, collection, split, source, train.samples)
    unseen = [(part.split, rest) for part in parts[1:] if (rest := skip_seen(part, records, notes)) is not None]
    fit_split = fit_multi_label if multi_label else fit_single_label
    head, facts, score, several = fit_split(train, unseen, classes, notes, penalty, held_out)
    images = {"data": collection.name, "split": split, "pictures": len(source), "fingerprint": source.fingerprint}
    facts |= {"made_by": "vitrail fit", **images, "l2": head.penalty, "logit_scale": head.scale}
    return FittedClassifier(
        model=replace_head(network, head, classes, facts | records, multi_label=multi_label),
        head=head,
        split=split,
        pictures=len(train.samples),
        scored=score,
        several=several,
        found=all(part.features.reused for part in parts),
        kept=all(part.features.cached for part in parts),
        notes=tuple(dict.fromkeys(notes)),
        unreadable=tuple(f"{part.split}: {name}" for part in parts for name in part.unreadable),
    )


def select_single_labels(part: SplitFeatures, where: str, notes: list[str]) -> FrozenFeatures:
    """The samples with exactly one label."""
    labels = keep_single_labels(part.features.labels)
    usable = labels >= 0
    if not usable.any():
        raise BadLabels(f"{where}: no image of {part.split} is readable and has exactly one label")
    if not usable.all():
        notes.append(f"{int((~usable).sum()):,} of {part.split} have no label or several, and are not used")
    return replace(part.features, labels=labels).select(usable)


Fitted = tuple[RidgeHead, dict[str, Any], HeldOutScore | None, MultiLabelMeasures | None]
Unseen = list[tuple[str, FrozenFeatures]]  # the scored split, or nothing


def fit_single_label(
    train: FrozenFeatures, unseen: Unseen, classes: Sequence[str], notes: list[str], penalty: float | None, share: float
) -> Fitted:
    """The head for images with one label each, facts on it, and its score."""
    notes += describe_balance(torch.bincount(train.labels, minlength=len(classes)), classes)
    head = fit_head(train.features, train.labels, len(classes), penalty=penalty, share=share)
    held, score = head.held, None
    if held is None:
        notes.append("nothing was held out: l2 and the confidence are defaults; two images per class would choose them")
    how = "closed-form least squares on frozen features (4.1), folded into the last layer"
    counts = None if held is None else {"accuracy": held.accuracy, "count": held.count, "draws": held.draws}
    facts: dict[str, Any] = {"how": how, "held_out": counts}
    for split, features in unseen:
        score = score_head(split, head, features)
        facts["score"] = {"split": split, "accuracy": score.top1.value, "count": score.top1.count}
    return head, facts, score, None


def fit_multi_label(
    train: FrozenFeatures, unseen: Unseen, classes: Sequence[str], notes: list[str], penalty: float | None, share: float
) -> Fitted:
    """The head for images that may have several labels, facts on it, and its measures."""
    truth = encode_labels(train.labels, len(classes))
    notes += describe_balance(truth.sum(0), classes, several=True)
    head, scores, known = fit_multi_label_head(train.features, truth, penalty=penalty, share=share)
    held, scored = measure_labels(scores, known, classes), ()
    for _, features in unseen:
        scores = head.logits(features.features).sigmoid().numpy()
        scored = measure_labels(scores, encode_labels(features.labels, len(classes)).numpy(), classes)
    how = "closed-form least squares on frozen features (4.1) for each label, folded into the last layer"
    facts: dict[str, Any] = {"how": how, "held_out": {measure.name: measure.value for measure in held}}
    if scored:
        facts["score"] = {measure.name: measure.value for measure in scored}
    return head, facts, None, MultiLabelMeasures(held=held, scored=scored, split=unseen[0][0] if unseen else "")


def measure_labels(scores: NDArray[np.float32], truth: NDArray[np.bool_], names: Sequence[str]) -> tuple[Measure, ...]:
    """mAP, F1 and exact match; empty if no sample has a label."""
    if not truth.any():
        return ()
    places = np.arange(len(truth))
    return MultiLabelScore(scores=scores, truth=truth, sample=places, names=names, threshold=THRESHOLD).measures


def choose_scored_split(
    collection: Collection, split: str, source: ImageDataset, test: Collection | str | Path | None
) -> tuple[str, ImageDataset] | None:
    """The images to score, with the class numbers of the training images; None if no others have labels."""
    if test is None:
        names = [name for name in ("test", "val") if name in collection.splits and name != split]
        return next(((name, collection.splits[name]) for name in names[:1] if collection.splits[name].classes), None)
    other = test if isinstance(test, Collection) else open_collection(test)
    other.need_labels()
    name, images = choose_split(other, "test", "val")
    title = f"{other.title}@{name}"
    both, _ = unify_classes(collection.name, {split: source, title: images})
    return title, both[title]


def draw_shots(labels: Labels, num_classes: int, shots: int) -> NDArray[np.int64]:
    """`shots` samples of each class, always the same ones, or as many as it has."""
    if shots < 1:
        raise ConfigError(f"shots={shots} must be at least 1")
    if labels.multiple:
        raise BadLabels("shots per class can only be drawn if every sample has one label, not several")
    generator = np.random.default_rng(0)
    drawn = [generator.permutation(np.flatnonzero(labels.values == one))[:shots] for one in range(num_classes)]
    return np.sort(np.concatenate(drawn))


def sample_stratified(source: ImageDataset, most: int) -> ImageDataset:
    """All of a source, or at most `most` samples with the same share of every class."""
    return source if len(source) <= most else SubsetDataset(source, split_stratified(source.labels, most / len(source)))


def describe_problems(part: SplitFeatures) -> list[str]:
    """Notes on unreadable images and on the cache."""
    count, names = pluralise(len(part.unreadable), "unreadable image"), join_words(part.unreadable, limit=NAMED)
    skipped = f"skipped {count} of {part.split}: {names}" if part.unreadable else ""
    return list(filter(None, [skipped, part.features.warning]))


def describe_balance(counts: Tensor, classes: Sequence[str], *, several: bool = False) -> list[str]:
    """A note on classes without images, or with far fewer than others, given the images of each."""
    empty = [classes[at] for at in (counts == 0).nonzero()[:, 0].tolist()]
    if empty:
        names, never = join_words(empty, limit=NAMED), "" if several else " and are never predicted"
        return [f"{len(empty)} of {len(classes)} classes have no training image{never}: {names}"]
    least, most = int(counts.min()), int(counts.max())
    if several or most <= UNEVEN * least:
        return []
    small, large = classes[int(counts.argmin())], classes[int(counts.argmax())]
    uneven = f"{large!r} has {most:,} images and {small!r} {least:,}: rare classes will be under-predicted"
    return [f"{uneven}; --shots {max(least, 5)} limits the images per class"]


def record_fit(
    network: Model, name: str, collection: Collection, split: str, source: ImageDataset, samples: Tensor
) -> dict[str, Any]:
    """Which images the classifier was fitted on, and the provenance of the weights it started from."""
    used, selection = SubsetDataset(source, samples.numpy()), {"source": collection.name, "split": split}
    others = {one: part for one, part in collection.splits.items() if one != split}
    record = record_training(used, out_of=len(collection.splits[split]), selection=selection, others=others)
    return {KEY: [record], "from": {"weights": name, "hash": hash_network(network), **get_card(network).provenance}}


def skip_seen(part: SplitFeatures, records: dict[str, Any], notes: list[str]) -> FrozenFeatures | None:
    """The features of images that were not trained on, here or before; None if there are none. Adds a note on skipped
    images."""
    split, source, features = part
    exposure = find_exposure(records, source)
    if not exposure.count:
        return features
    used = f"{exposure.count:,} of the {len(source):,} images of {split} were used in training"
    if exposure.count == len(source):
        notes.append(f"{used}: they are not scored; name others with --test SOURCE")
        return None
    notes.append(f"{used} and are not scored")
    return features.select(~torch.from_numpy(exposure.seen)[features.samples])


def score_head(split: str, head: RidgeHead, features: FrozenFeatures) -> HeldOutScore:
    """The score of the layer as it is in the file. Samples without a label do not count."""
    predicted, confidence = head.predict(features.features)
    right, count = score_predictions(predicted, features.labels)
    labelled = has_label(features.labels)
    correct = is_right(predicted, features.labels)[labelled]
    error = calibration_error(confidence[labelled].numpy(), correct.numpy())
    return HeldOutScore(split=split, top1=measure_share("top-1", right, count), error=error)


def replace_head(
    network: Model, head: RidgeHead, classes: tuple[str, ...], provenance: dict[str, Any], *, multi_label: bool = False
) -> Model:
    """The network with another last layer; a hidden layer before it (the paper's pre-logits) stays."""
    bundle = to_bundle(network)
    config = adapt_config(bundle.config, **bundle.config.new_last_layer(len(classes)))
    like = next(iter(bundle.tensors.values()))
    parts = {"weight": head.weight.to(like), "bias": head.bias.to(like)}
    layer = {f"{place}.{name}": part.clone() for place in config.last_layers for name, part in parts.items()}
    card = Card(preprocessing=bundle.card.preprocessing, labels=classes, provenance=provenance, multi_label=multi_label)
    return built(Bundle(config=config, tensors={**bundle.tensors, **layer}, card=card), like.dtype)
