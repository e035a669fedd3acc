"""A classifier in seconds: frozen features, least squares in closed form (4.1), and a network with a new last layer.

    fitted = vitrail.fit("deit.safetensors", "photos/")
    vitrail.save(fitted.model, "photos.safetensors")

Nothing is trained. The result is an ordinary network with another last layer, the names of the new classes and a record
of how it was made.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle, Card, get_card
from vitrail.checkpoint.weights import build_network as built
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import BadLabels, ConfigError, DataError
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
    split: str  # that was scored; "" for none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedClassifier:
    """A network in evaluation mode with its card, ready to be saved; it shares all but its head with the original.
    `found` is whether its features came from the cache, `kept` whether they are in it now."""

    model: Model
    head: RidgeHead
    split: str
    pictures: int  # that it was fitted on
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
    """The classifier of `data`'s train split (or its only one), scored on its test or val split, or on that of `test`.

    The share `held_out` of every class chooses the penalty, unless one is given, and the scale of the logits; then the
    classifier is fitted on all images, or on at most `shots` per class. `name` is what the card calls the original
    weights. `batches` yields the images of a source, each once, prepared as the network's card says; with a `folder`
    features are cached there."""
    collection = data if isinstance(data, Collection) else open_collection(data)
    split, source = choose_training_split(collection)
    if shots is not None:
        source = SubsetDataset(source, draw_shots(source.labels, len(collection.classes), shots))
    scored = choose_scored_split(collection, split, source, test)
    preprocessing = get_card(network).preprocessing
    batches = batches or (lambda bare: eval_batches(bare, preprocessing, batch=min(BATCH, max(len(bare), 1))))
    parts = [
        SplitFeatures(*part, load_or_extract(network, part[1], preprocessing, device, batches=batches, folder=folder))
        for part in [(split, source), *([] if scored is None else [scored])]
    ]
    notes = [note for part in parts for note in describe_problems(part)]
    fit_split = fit_multi_label if source.labels.multi_label else fit_single_label
    return fit_split(network, collection, parts, notes, penalty=penalty, share=held_out, name=name)


def fit_single_label(
    network: Model,
    collection: Collection,
    parts: Sequence[SplitFeatures],
    notes: list[str],
    *,
    penalty: float | None,
    share: float,
    name: str,
) -> FittedClassifier:
    """Fits images with one label each, from the features of the training split and, after it, of the scored one."""
    split, source, train = parts[0]
    labels = keep_single_labels(train.labels)
    usable = labels >= 0
    if not usable.any():
        raise BadLabels(f"{collection.name}: no image of {split} is readable and has exactly one label")
    if not usable.all():
        notes.append(f"{int((~usable).sum()):,} of {split} have no label or several, and are not used")
    labels = labels[usable]
    notes += describe_balance(labels, collection.classes)
    head = fit_head(train.features[usable], labels, len(collection.classes), penalty=penalty, share=share)
    if head.held is None:
        notes.append("nothing was held out: l2 and the confidence are defaults; two images per class would choose them")
    records = record_fit(network, name, collection, split, source, train.samples[usable])
    score = None
    for unseen in filter(None, [skip_seen(part, records, notes) for part in parts[1:]]):
        score = score_head(parts[1].split, head, unseen)
    held = head.held
    facts: dict[str, Any] = {
        "held_out": None if held is None else {"accuracy": held.accuracy, "count": held.count, "draws": held.draws}
    }
    if score is not None:
        facts["score"] = {"split": score.split, "accuracy": score.top1.value, "count": score.top1.count}
    how = "closed-form least squares on frozen features (4.1), folded into the last layer"
    provenance = describe_fit(how, collection, split, source, head) | facts | records
    model = replace_head(network, head, collection.classes, provenance)
    return build_fit(model, head, parts, len(labels), notes, scored=score)


def fit_multi_label(
    network: Model,
    collection: Collection,
    parts: Sequence[SplitFeatures],
    notes: list[str],
    *,
    penalty: float | None,
    share: float,
    name: str,
) -> FittedClassifier:
    """Fits images that may have several labels."""
    classes, (split, source, train) = collection.classes, parts[0]
    truth = encode_labels(train.labels, len(classes))
    fitted = fit_multi_label_head(train.features, truth, penalty=penalty, share=share)
    held, scored = measure_labels(fitted.scores, fitted.truth, classes), ()
    records = record_fit(network, name, collection, split, source, train.samples)
    for unseen in filter(None, [skip_seen(part, records, notes) for part in parts[1:]]):
        scores = fitted.head.logits(unseen.features).sigmoid().numpy()
        scored = measure_labels(scores, encode_labels(unseen.labels, len(classes)).numpy(), classes)
    facts: dict[str, Any] = {"held_out": {measure.name: measure.value for measure in held}}
    if scored:
        facts["score"] = {measure.name: measure.value for measure in scored}
    how = "closed-form least squares on frozen features (4.1) for each label, folded into the last layer"
    provenance = describe_fit(how, collection, split, source, fitted.head) | facts | records
    empty = [classes[at] for at in (~truth.any(0)).nonzero()[:, 0].tolist()]
    if empty:
        notes.append(f"{len(empty)} of {len(classes)} classes have no training image: {join_words(empty, limit=NAMED)}")
    model = replace_head(network, fitted.head, classes, provenance, multi_label=True)
    several = MultiLabelMeasures(held=held, scored=scored, split=parts[1].split if len(parts) > 1 else "")
    return build_fit(model, fitted.head, parts, len(truth), notes, several=several)


def build_fit(
    model: Model,
    head: RidgeHead,
    parts: Sequence[SplitFeatures],
    images: int,
    notes: Sequence[str],
    *,
    scored: HeldOutScore | None = None,
    several: MultiLabelMeasures | None = None,
) -> FittedClassifier:
    return FittedClassifier(
        model=model,
        head=head,
        split=parts[0].split,
        pictures=images,
        scored=scored,
        found=all(part.features.reused for part in parts),
        kept=all(part.features.cached for part in parts),
        notes=tuple(dict.fromkeys(notes)),
        unreadable=tuple(f"{part.split}: {name}" for part in parts for name in part.unreadable),
        several=several,
    )


def measure_labels(scores: NDArray[np.float32], truth: NDArray[np.bool_], names: Sequence[str]) -> tuple[Measure, ...]:
    """mAP, F1 and exact match; empty if no sample has a label."""
    if not truth.any():
        return ()
    places = np.arange(len(truth))
    return MultiLabelScore(scores=scores, truth=truth, sample=places, names=names, threshold=THRESHOLD).measures


def choose_training_split(collection: Collection) -> tuple[str, ImageDataset]:
    """The train split, or the only one, with at least two classes."""
    collection.need_labels()
    if len(collection.classes) < 2:
        raise BadLabels(
            f"{collection.name} has one class, {', '.join(collection.classes)!r}, and at least two are needed; put the "
            "images of each class into a folder of its own"
        )
    if len(collection.splits) == 1:
        return next(iter(collection.splits.items()))
    return "train", collection.split("train")


def choose_scored_split(
    collection: Collection, split: str, source: ImageDataset, test: Collection | str | Path | None
) -> tuple[str, ImageDataset] | None:
    """The images to score, with the class numbers of the training images; None if no others have labels."""
    if test is None:
        scored = next((name for name in ("test", "val") if name in collection.splits and name != split), None)
        if scored is None or not collection.splits[scored].classes:
            return None
        return scored, collection.splits[scored]
    other = test if isinstance(test, Collection) else open_collection(test)
    other.need_labels()
    name = next((one for one in ("test", "val") if one in other.splits), next(iter(other.splits)))
    if len(other.splits) > 1 and name not in ("test", "val"):
        raise DataError(f"{other.name} has the splits {', '.join(other.splits)}; choose one: {other.name}@{name}")
    title = f"{other.title}@{name}"
    both, _ = unify_classes(collection.name, {split: source, title: other.splits[name]})
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
    gone, notes = part.unreadable, [part.features.warning]
    if gone:
        names = join_words(gone, limit=NAMED)
        notes.insert(0, f"skipped {pluralise(len(gone), 'unreadable image')} of {part.split}: {names}")
    return list(filter(None, notes))


def describe_balance(labels: Tensor, classes: tuple[str, ...]) -> list[str]:
    """A note on classes without images, or with far fewer than others."""
    counts = torch.bincount(labels, minlength=len(classes))
    empty = [classes[at] for at in (counts == 0).nonzero()[:, 0].tolist()]
    if empty:
        names = join_words(empty, limit=NAMED)
        return [f"{len(empty)} of {len(classes)} classes have no training image and are never predicted: {names}"]
    least, most = int(counts.min()), int(counts.max())
    if most > UNEVEN * least:
        small, large = classes[int(counts.argmin())], classes[int(counts.argmax())]
        return [
            f"{large!r} has {most:,} images and {small!r} {least:,}: rare classes will be under-predicted; --shots "
            f"{max(least, 5)} limits the images per class"
        ]
    return []


def record_fit(
    network: Model, name: str, collection: Collection, split: str, source: ImageDataset, samples: Tensor
) -> dict[str, Any]:
    """Which images the classifier was fitted on, and the provenance of the weights it started from."""
    record = record_training(
        SubsetDataset(source, samples.numpy()),
        out_of=len(collection.splits[split]),
        selection={"source": collection.name, "split": split},
        others={one: part for one, part in collection.splits.items() if one != split},
    )
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
    place = config.head_layer
    like = next(iter(bundle.tensors.values()))
    layer = {f"{place}.weight": head.weight.to(like), f"{place}.bias": head.bias.to(like)}
    card = Card(preprocessing=bundle.card.preprocessing, labels=classes, provenance=provenance, multi_label=multi_label)
    return built(Bundle(config=config, tensors={**bundle.tensors, **layer}, card=card), like.dtype)


def describe_fit(how: str, collection: Collection, split: str, source: ImageDataset, head: RidgeHead) -> dict[str, Any]:
    """How the network was made, for its card."""
    return {
        "made_by": "vitrail fit",
        "how": how,
        "data": collection.name,
        "split": split,
        "pictures": len(source),
        "fingerprint": source.fingerprint,
        "l2": head.penalty,
        "logit_scale": head.scale,
    }
