"""The public functions that do what the commands do, in silence, and return what they found.

    score = vitrail.evaluate("vitrail-cifar10", "cifar10@test")
    fitted = vitrail.fit("vitrail-cifar10", "photos/")
    vitrail.save(fitted.model, "photos.safetensors")

Weights are given by any name that `vitrail.load` takes, or as a network; data by any name that
`vitrail.open_collection` takes, or as a collection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find import find_weights
from vitrail.checkpoint.weights import bundle_of
from vitrail.core.storage import cache_folder
from vitrail.data.collection import Collection, open_collection
from vitrail.distributed.device import find_device
from vitrail.distributed.world import joined
from vitrail.evaluation import instant
from vitrail.evaluation.closed_form import SHARE
from vitrail.evaluation.instant import Instant
from vitrail.evaluation.rest import Precision
from vitrail.evaluation.result import Measure, Result
from vitrail.evaluation.scoring import Scoring, score
from vitrail.evaluation.subject import chosen, make_subject, read_all
from vitrail.models.build import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The score of a network on the images of a split. Shares are between 0 and 1. `measures` has every number with its
    95% interval; `result` is what `vitrail evaluate --out` writes: `result.write(path)`."""

    split: str
    count: int  # images that were scored
    left_out: int  # images that were not, because the weights were trained on them
    measures: dict[str, Measure]
    unreadable: tuple[str, ...]
    notes: tuple[str, ...]
    result: Result

    @property
    def top1(self) -> float | None:
        """The share of right answers; none of multi-label weights."""
        return self._value("top-1")

    @property
    def top5(self) -> float | None:
        """The share of images whose class is among the five likeliest; none for five classes or fewer."""
        return self._value("top-5")

    @property
    def loss(self) -> float | None:
        return self._value("loss")

    @property
    def mean_average_precision(self) -> float | None:
        """mAP, of multi-label weights."""
        return self._value("mAP")

    def _value(self, name: str) -> float | None:
        return self.measures[name].value if name in self.measures else None


def evaluate(
    weights: str | Path | Model,
    data: str | Path | Collection,
    *,
    image_size: int | None = None,
    labels: Sequence[str] | None = None,
    by_number: bool = False,
    real: str | Path | None = None,
    threshold: float | None = None,
    precision: Precision = "float32",
    include_seen: bool = False,
    batch: int = 0,
    workers: int = 0,
    seed: int = 0,
    device: str = "auto",
) -> Evaluation:
    """Scores weights, or a network, on labelled images, as `vitrail evaluate` does.

    The test split is scored, else val, or the one that `data` names ("photos@dev"). Images that the weights were
    trained on are left out, as far as the weights record them, unless `include_seen`. `labels` name the outputs where
    the weights do not, or otherwise; `by_number` takes class 7 for output 7; `real` is a file of ReaL labels;
    `threshold` is for multi-label weights. A network that is passed is not changed. Under torchrun all processes call
    it and get the same numbers.
    """
    collection = as_collection(data)
    name, bundle = as_bundle(weights)
    split, _ = chosen(collection, "test", "val")
    how = Scoring(
        labels=None if labels is None else tuple(labels),
        by_number=by_number,
        real=None if real is None else Path(real),
        threshold=threshold,
        precision=precision,
        seed=seed,
        include_seen=include_seen,
        batch=batch,
        workers=workers,
    )
    with joined(device) as world:
        about = make_subject(name, bundle, world.device, image_size=image_size)
        found = score(about, collection, split, how, world=world, called=f"{collection.name}@{split}")
    return Evaluation(
        split=split,
        count=len(found.source),
        left_out=found.scope.given - len(found.source),
        measures={measure.name: measure for measure in found.result.measures},
        unreadable=tuple(found.result.details["unreadable"]),
        notes=found.notes,
        result=found.result,
    )


def fit(
    weights: str | Path | Model,
    data: str | Path | Collection,
    *,
    test: str | Path | Collection | None = None,
    l2: float | None = None,
    dev: float = SHARE,
    shots: int | None = None,
    image_size: int | None = None,
    batch: int = 0,
    workers: int = 0,
    cache: bool = True,
    device: str = "auto",
) -> Instant:
    """A classifier of new classes in seconds, as `vitrail fit` makes it: frozen features and least squares in closed
    form (4.1). Its `model` is a network for `vitrail.save` and `vitrail.Predictor`.

    The train split of `data`, or its only one, is learnt from; its test split, else val, or that of `test` is scored.
    `l2` is chosen on the share `dev` of every class, unless it is given; at most `shots` images of each class count.
    Features are kept in the cache for the next call, unless `cache` is False. A network that is passed is not changed.
    """
    collection, place = as_collection(data), find_device(device)
    collection.need_labels()  # before the weights are read
    name, bundle = as_bundle(weights)
    subject = make_subject(name, bundle, place, image_size=image_size)
    return instant.fit(
        subject.network,
        collection,
        test=None if test is None else as_collection(test),
        penalty=l2,
        held_out=dev,
        shots=shots,
        name=name,
        device=place,
        batches=lambda source: read_all(source, subject.preprocessing, place, batch=batch, workers=workers),
        folder=cache_folder("features") if cache else None,
    )


def as_collection(data: str | Path | Collection) -> Collection:
    return data if isinstance(data, Collection) else open_collection(data)


def as_bundle(weights: str | Path | Model) -> tuple[str, Bundle]:
    """What weights are called in results, and what they are."""
    if isinstance(weights, str | Path):
        return str(weights), find_weights(weights)
    return type(weights).__name__, bundle_of(weights)
