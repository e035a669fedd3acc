"""An instant classifier: frozen features, least squares in closed form (4.1), and a network that answers at once.

    fitted = vitrail.fit("deit.safetensors", "photos/")
    vitrail.save(fitted.model, "photos.safetensors")

Nothing is trained. What comes out is an ordinary network with another last layer, the names of the new classes and a
word on how it was made.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle, Card, get_card
from vitrail.checkpoint.weights import build_network as built
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.collection import Collection, open_collection, unify_classes
from vitrail.data.dataset import ImageDataset, Labels, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.splits import split_stratified
from vitrail.data.training_record import KEY, find_exposure, record_training
from vitrail.evaluation.frozen.features import Kept, hash_network, list_missing, load_or_extract
from vitrail.evaluation.frozen.ridge_head import SHARE, RidgeHead, fit_head, fit_multi_label_head
from vitrail.evaluation.intervals import calibration_error
from vitrail.evaluation.metrics import has_label, is_right, keep_single_labels, label_rows, score_predictions
from vitrail.evaluation.multi_label import THRESHOLD, MultiLabelScore
from vitrail.evaluation.result import Measure, measure_share
from vitrail.models.build import Model
from vitrail.models.zoo import adapt_config

BATCH: Final = 64
UNEVEN: Final = 20  # times as many images as the smallest class has, from which a word is said
NAMED: Final = 3

Batches = Callable[[ImageDataset], Iterable[Batch]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """How the network did on images that it was not made from; `error` is the expected calibration error."""

    split: str
    top1: Measure
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelMeasures:
    """How a multi-label classifier did, in mAP and F1: on the images held out while it was made, and on a split that it
    was not made from, where there is one."""

    held: tuple[Measure, ...]
    scored: tuple[Measure, ...]
    split: str  # that was scored, "" for none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedClassifier:
    """A network in evaluation mode with its card, ready to be saved; it shares all but its head with the one it came
    from. `found` and `kept` are of the features: there from before, there for later."""

    model: Model
    head: RidgeHead
    split: str
    pictures: int  # that it was made from
    scored: HeldOutScore | None
    found: bool
    kept: bool
    notes: tuple[str, ...]
    unreadable: tuple[str, ...]
    several: MultiLabelMeasures | None = None  # of multi-label data


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
    """The classifier of `data`'s train split (or of its only one), scored on its test or val, or on that of `test`.

    `held_out` of every class chooses the penalty, unless one is given, and the scale of the logits; then all images
    count, or at most `shots` of each class. `name` is what the weights are called in the card. `batches` gives the
    images of a source, each once, prepared as the network's card says; with a `folder` features are kept there."""
    collection = data if isinstance(data, Collection) else open_collection(data)
    split, source = to_learn_from(collection)
    if shots is not None:
        source = SubsetDataset(source, at_most(source.labels, len(collection.classes), shots))
    where = to_score(collection, split, source, test)
    prepared = get_card(network).preprocessing
    pictures = batches or (lambda bare: eval_batches(bare, prepared, batch=min(BATCH, max(len(bare), 1))))
    parts = [
        (one, part, load_or_extract(network, part, prepared, device, batches=pictures, folder=folder))
        for one, part in [(split, source), *([] if where is None else [where])]
    ]
    notes = [note for part in parts for note in notes_of(*part)]
    learnt = parts[0][2]
    if source.labels.multi_label:
        return fit_labels(network, collection, parts, notes, penalty=penalty, share=held_out, name=name)
    labels = keep_single_labels(learnt.labels)
    usable = labels >= 0
    if not usable.any():
        raise BadLabels(f"{collection.name}: no image of {split} has one label and can be read")
    if not usable.all():
        notes.append(f"{int((~usable).sum()):,} of {split} have no label or several, and are not learnt from")
    features, labels = learnt.features[usable], labels[usable]
    notes += balance(labels, collection.classes)
    head = fit_head(features, labels, len(collection.classes), penalty=penalty, share=held_out)
    if head.held is None:
        notes.append("nothing was held out: l2 and sureness are the usual ones, not chosen; two images a class would")
    records = record_fit(network, name, collection, split, source, learnt.samples[usable])
    unseen = [leave_seen(*part, records, notes) for part in parts[1:]]
    scored = next((score(parts[1][0], head, took) for took in unseen if took is not None), None)
    provenance = {**told(head, collection, split, source, scored), **records}
    return FittedClassifier(
        model=with_head(network, head, collection.classes, provenance),
        head=head,
        split=split,
        pictures=len(labels),
        scored=scored,
        found=all(took.found for _, _, took in parts),
        kept=all(took.kept for _, _, took in parts),
        notes=tuple(dict.fromkeys(notes)),
        unreadable=tuple(
            f"{one}: {part.name(at)}" for one, part, took in parts for at in list_missing(part, took.samples)
        ),
    )


def fit_labels(
    network: Model,
    collection: Collection,
    parts: Sequence[tuple[str, ImageDataset, Kept]],
    notes: list[str],
    *,
    penalty: float | None,
    share: float,
    name: str,
) -> FittedClassifier:
    """The classifier of images that may have several labels, from the features of the split to learn from and, behind
    it, of the one to score."""
    classes, (split, source, learnt) = collection.classes, parts[0]
    truth = truth_of(learnt.labels, len(classes))
    made = fit_multi_label_head(learnt.features, truth, penalty=penalty, share=share)
    held = scored = ()
    if made.truth.any():
        held = measures_of(made.scores, made.truth, classes)
    records = record_fit(network, name, collection, split, source, learnt.samples)
    for took in filter(None, [leave_seen(*part, records, notes) for part in parts[1:]]):
        held_back = truth_of(took.labels, len(classes)).numpy()
        scored = measures_of(made.head.logits(took.features).sigmoid().numpy(), held_back, classes)
    several = MultiLabelMeasures(held=held, scored=scored, split=parts[1][0] if len(parts) > 1 else "")
    told = {
        "made_by": "vitrail fit",
        "how": "closed-form least squares on frozen features (4.1) for each label, folded into the last layer",
        "data": collection.name,
        "split": split,
        "pictures": len(source),
        "fingerprint": source.fingerprint,
        "l2": made.head.penalty,
        "logit_scale": made.head.scale,
        "held_out": {measure.name: measure.value for measure in held},
        **({"score": {measure.name: measure.value for measure in scored}} if scored else {}),
    }
    empty = [classes[at] for at in (~truth.any(0)).nonzero()[:, 0].tolist()]
    never = f"{len(empty)} of {len(classes)} classes are true of no image to learn from: {', '.join(empty[:NAMED])}"
    return FittedClassifier(
        model=with_head(network, made.head, classes, {**told, **records}, multi_label=True),
        head=made.head,
        split=split,
        pictures=len(truth),
        scored=None,
        found=all(took.found for _, _, took in parts),
        kept=all(took.kept for _, _, took in parts),
        notes=tuple(dict.fromkeys([*notes, *([never] if empty else [])])),
        unreadable=tuple(
            f"{one}: {part.name(at)}" for one, part, took in parts for at in list_missing(part, took.samples)
        ),
        several=several,
    )


def truth_of(labels: Tensor, classes: int) -> Tensor:
    """[N, K] as booleans, from labels [N] or [N, M] filled up with -1."""
    rows = label_rows(labels)
    found = torch.zeros(len(rows), classes + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(rows >= 0, rows, classes), True)
    return found[:, :-1]


def measures_of(scores: NDArray[np.float32], truth: NDArray[np.bool_], names: tuple[str, ...]) -> tuple[Measure, ...]:
    """mAP, F1 and exact match; none where nothing is true."""
    if not truth.any():
        return ()
    places = np.arange(len(truth))
    return MultiLabelScore(scores=scores, truth=truth, sample=places, names=names, threshold=THRESHOLD).measures


def to_learn_from(collection: Collection) -> tuple[str, ImageDataset]:
    """The train split, or the only one, with two classes at least."""
    collection.need_labels()
    if len(collection.classes) < 2:
        raise BadLabels(
            f"{collection.name} has one class, {', '.join(collection.classes)}: there must be two at least to tell "
            "apart; put the images of each into a folder of its own"
        )
    if len(collection.splits) == 1:
        return next(iter(collection.splits.items()))
    return "train", collection.split("train")


def to_score(
    collection: Collection, split: str, source: ImageDataset, test: Collection | str | Path | None
) -> tuple[str, ImageDataset] | None:
    """The images to score, with the class numbers of those to learn from; none where none have labels."""
    if test is None:
        found = next((name for name in ("test", "val") if name in collection.splits and name != split), None)
        if found is None or not collection.splits[found].classes:
            return None
        return found, collection.splits[found]
    other = test if isinstance(test, Collection) else open_collection(test)
    other.need_labels()
    name = next((one for one in ("test", "val") if one in other.splits), next(iter(other.splits)))
    if len(other.splits) > 1 and name not in ("test", "val"):
        raise DataError(f"{other.name} has the splits {', '.join(other.splits)}; say which one: {other.name}@{name}")
    called = f"{other.title}@{name}"
    both, _ = unify_classes(collection.name, {split: source, called: other.splits[name]})
    return called, both[called]


def at_most(labels: Labels, classes: int, shots: int) -> NDArray[np.int64]:
    """`shots` samples of each class, drawn once and for all, or as many as it has."""
    if shots < 1:
        raise ConfigError(f"{shots} shots a class are nothing to learn from; give at least 1")
    if labels.multiple:
        raise BadLabels("so many shots a class can be drawn where samples have one label each, not several")
    generator = np.random.default_rng(0)
    drawn = [generator.permutation(np.flatnonzero(labels.values == one))[:shots] for one in range(classes)]
    return np.sort(np.concatenate(drawn))


def sample_stratified(source: ImageDataset, most: int) -> ImageDataset:
    """All of a source, or a sample of it with the same share of every class."""
    return source if len(source) <= most else SubsetDataset(source, split_stratified(source.labels, most / len(source)))


def notes_of(split: str, source: ImageDataset, took: Kept) -> list[str]:
    """What is to be told of a split's features."""
    gone = [source.name(sample) for sample in list_missing(source, took.samples)]
    some = ", ".join(gone[:NAMED]) + (", ..." if len(gone) > NAMED else "")
    count = f"{len(gone):,} of {split} could not be read and {'is' if len(gone) == 1 else 'are'} out: {some}"
    return [*([count] if gone else []), *([took.trouble] if took.trouble else [])]


def balance(labels: Tensor, classes: tuple[str, ...]) -> list[str]:
    """A word on classes that have no images, or far fewer than others."""
    counts = torch.bincount(labels, minlength=len(classes))
    empty = [classes[at] for at in (counts == 0).nonzero()[:, 0].tolist()]
    if empty:
        some = ", ".join(empty[:NAMED]) + (", ..." if len(empty) > NAMED else "")
        return [f"{len(empty)} of {len(classes)} classes have no image to learn from and are never said: {some}"]
    if int(counts.max()) > UNEVEN * int(counts.min()):
        least, most = classes[int(counts.argmin())], classes[int(counts.argmax())]
        return [
            f"{most!r} has {int(counts.max()):,} images and {least!r} {int(counts.min()):,}: small classes are said "
            f"too seldom; --shots {max(int(counts.min()), 5)} takes no more than so many of each"
        ]
    return []


def record_fit(
    network: Model, name: str, collection: Collection, split: str, source: ImageDataset, samples: Tensor
) -> dict[str, Any]:
    """Which images a classifier was made from, and the weights that it started from with theirs."""
    record = record_training(
        SubsetDataset(source, samples.numpy()),
        out_of=len(collection.splits[split]),
        selection={"source": collection.name, "split": split},
        others={one: part for one, part in collection.splits.items() if one != split},
    )
    return {KEY: [record], "from": {"weights": name, "hash": hash_network(network), **get_card(network).provenance}}


def leave_seen(split: str, source: ImageDataset, took: Kept, records: dict[str, Any], notes: list[str]) -> Kept | None:
    """The features of the images to score that were not learnt from, here or before; none where there are no others.
    What is left out is noted."""
    exposure = find_exposure(records, source)
    if not exposure.count:
        return took
    used = f"{exposure.count:,} of the {len(source):,} images of {split} were used in training"
    if exposure.count == len(source):
        notes.append(f"{used}: they are not scored; name others with --test SOURCE")
        return None
    notes.append(f"{used} and are not scored")
    fresh = ~torch.from_numpy(exposure.seen)[took.samples]
    return replace(took, features=took.features[fresh], labels=took.labels[fresh], samples=took.samples[fresh])


def score(split: str, head: RidgeHead, took: Kept) -> HeldOutScore:
    """With the layer as it is in the file. A sample without a label is out."""
    said, sure = head.predict(took.features)
    right, count = score_predictions(said, took.labels)
    labelled = has_label(took.labels)
    error = calibration_error(sure[labelled].numpy(), is_right(said, took.labels)[labelled].numpy())
    return HeldOutScore(split=split, top1=measure_share("top-1", right, count), error=error)


def with_head(
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


def told(
    head: RidgeHead, collection: Collection, split: str, source: ImageDataset, scored: HeldOutScore | None
) -> dict[str, Any]:
    """How the network was made, for its card."""
    held = head.held
    chosen = None if held is None else {"accuracy": held.accuracy, "count": held.count, "draws": held.draws}
    score = None
    if scored is not None:
        score = {"split": scored.split, "accuracy": scored.top1.value, "count": scored.top1.count}
    return {
        "made_by": "vitrail fit",
        "how": "closed-form least squares on frozen features (4.1), folded into the last layer",
        "data": collection.name,
        "split": split,
        "pictures": len(source),
        "fingerprint": source.fingerprint,
        "l2": head.penalty,
        "logit_scale": head.scale,
        "held_out": chosen,
        **({} if score is None else {"score": score}),
    }
