"""A segmenter in seconds: frozen patch tokens, least squares in closed form (ridge_patches.py), and a linear head.

    fitted = fit_segmenter(network, "photos/")
    vitrail.save(fitted.model, "photos.safetensors")

The result is an ordinary segmentation network. One pass over the training images accumulates the sums that least
squares needs. A held-out tenth of the images selects the penalty, the class offsets and the scale of the logits.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import Bundle, Card, get_card
from vitrail.checkpoint.weights import build_network, replace_head_and_resize, to_bundle
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.text import join_words, pluralise
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import IGNORED, MaskTargets
from vitrail.data.training_record import KEY, find_exposure, record_training
from vitrail.distributed.process_group import synchronise
from vitrail.evaluation import SHARE
from vitrail.evaluation.frozen.features import hash_network, iterate_features
from vitrail.evaluation.frozen.ridge_patches import (
    HeldOutPixels,
    PatchHead,
    PatchSums,
    count_shares,
    draw_pixels,
    fit_patch_head,
)
from vitrail.evaluation.intervals import Interval
from vitrail.evaluation.metrics import score_batches
from vitrail.evaluation.scoring import choose_split
from vitrail.models.backbone import unwrap_backbone
from vitrail.models.build import Model
from vitrail.tasks.segmentation.metric import SegmentationMetric, SegmentationScore

BATCH: Final = 32
PIXELS: Final = 1 << 17  # drawn from all held-out images together
LEAST, MOST = 16, 4096  # pixels drawn from one held-out image
NAMED: Final = 3  # examples in a note
HOW: Final = "closed-form least squares on frozen patch tokens, folded into a linear head"

MaskBatches = Callable[[ImageDataset, Preprocessing], Iterable[Batch]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSegmentation:
    """The score on images that the segmenter was not fitted on."""

    split: str
    score: SegmentationScore
    intervals: Mapping[str, Interval | None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PatchFit:
    """A fitted head, the samples it was fitted on, the unreadable ones, and the seconds spent on the sums and the
    solution, without those of the network."""

    head: PatchHead
    samples: tuple[int, ...]
    unreadable: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedSegmenter:
    """A network in evaluation mode with its card, ready to be saved; it shares all but its head with the original."""

    model: Model
    head: PatchHead
    split: str
    pictures: int  # number of images it was fitted on
    patches: int  # per image
    scored: HeldOutSegmentation | None
    seconds: float  # for the sums and the solution
    notes: tuple[str, ...]
    unreadable: tuple[str, ...]


def fit_segmenter(
    network: Model,
    data: Collection | str | Path,
    *,
    test: Collection | str | Path | None = None,
    penalty: float | None = None,
    held_out: float = SHARE,
    name: str = "",
    device: torch.device | str = "cpu",
    batches: MaskBatches | None = None,
) -> FittedSegmenter:
    """Fits a segmenter on the train split of `data` (or its only split), and scores it on the test or val split of
    `data`, or of `test`.

    `held_out` is the share of the images that selects the offsets, the scale and, unless one is given, the penalty.
    `name` is what the card calls the original weights. `batches` yields every image of a source once, with its mask,
    preprocessed as given. BadLabels for data without masks, ConfigError for networks without patch tokens."""
    collection = data if isinstance(data, Collection) else open_collection(data)
    collection.need_masks()
    names = collection.pixel_classes
    if len(names) < 2:
        raise BadLabels(
            f"{collection.name} has one class of pixels, {join_words(names)!r}, and at least two are needed"
        )
    split, source = choose_split(collection, "train")
    scored = choose_scored_masks(collection, split, test)
    model, device = make_patch_network(to_bundle(network), names).to(device), torch.device(device)
    prepared = get_card(model).preprocessing
    batches = batches or load_masks
    made = fit_patches(model, source, batches(source, prepared), device, penalty=penalty, held_out=held_out)
    head, used = made.head, SubsetDataset(source, np.array(made.samples, np.int64))
    selection, others = {"source": collection.name, "split": split}, dict(collection.splits)
    del others[split]
    records: dict[str, Any] = {KEY: [record_training(used, out_of=len(source), selection=selection, others=others)]}
    records["from"] = {"weights": name, "hash": hash_network(network), **get_card(network).provenance}
    facts: dict[str, Any] = {"how": HOW, "made_by": "vitrail fit", "data": collection.name, "split": split}
    facts |= {"pictures": len(source), "fingerprint": source.fingerprint, "l2": head.penalty}
    facts |= {"logit_scale": head.scale, "offsets": head.offsets.tolist()}
    facts |= {} if head.held is None else {"held_out": {"miou": head.held.miou, "count": head.held.images}}
    set_patch_head(model, head)
    notes = list(describe_segmenter(made, collection, split))
    found = None if scored is None else score_segmenter(model, *scored, records, batches, device, notes)
    if found is not None:
        facts["score"] = {"split": found.split, "miou": found.score.miou, "count": found.score.count}
    model.card = replace(get_card(model), provenance=facts | records)
    rows, columns = model.config.grid
    return FittedSegmenter(
        model=model,
        head=head,
        split=split,
        pictures=len(made.samples),
        patches=rows * columns,
        scored=found,
        seconds=made.seconds,
        notes=tuple(dict.fromkeys(notes)),
        unreadable=tuple(f"{split}: {one}" for one in made.unreadable),
    )


def choose_scored_masks(
    collection: Collection, split: str, test: Collection | str | Path | None
) -> tuple[str, ImageDataset] | None:
    """Chooses the images to score; None if there are no other images with masks. DataError if `test` has other
    classes."""
    if test is None:
        names = [name for name in ("test", "val") if name in collection.splits and name != split]
        found = ((name, collection.splits[name]) for name in names[:1])
        return next(((name, one) for name, one in found if one.pixel_classes), None)
    other = test if isinstance(test, Collection) else open_collection(test)
    other.need_masks()
    if other.pixel_classes != collection.pixel_classes:
        theirs, ours = (join_words(one.pixel_classes, limit=NAMED) for one in (other, collection))
        both = f"{other.name} has the pixel classes {theirs}, but {collection.name} has {ours}"
        raise DataError(f"{both}; give images with the same classes in the same order")
    name, images = choose_split(other, "test", "val")
    return f"{other.title}@{name}", images


def make_patch_network(bundle: Bundle, names: Sequence[str]) -> Model:
    """Builds the network of a bundle with a zero linear head on its patches, and preprocessing that keeps images
    whole."""
    fresh = replace_head_and_resize(bundle, len(names), kind="patches")
    prepared = replace(fresh.card.preprocessing, resize=None)
    card = Card(preprocessing=prepared, labels=tuple(names), task="segmentation", provenance=fresh.card.provenance)
    return build_network(replace(fresh, card=card), next(iter(fresh.tensors.values())).dtype)


def set_patch_head(network: nn.Module, head: PatchHead) -> None:
    """Copies a fitted head into the linear patch head of a network."""
    last: Any = unwrap_backbone(network).get_classifier()
    with torch.no_grad():
        last.weight.copy_(head.weight)
        last.bias.copy_(head.bias)


def load_masks(source: ImageDataset, preprocessing: Preprocessing) -> Iterator[Batch]:
    """Loads every image of a source once, with its mask."""
    return eval_batches(source, preprocessing, batch=min(BATCH, max(len(source), 1)), targets=MaskTargets())


def read_patch_map(network: nn.Module, images: Tensor) -> Tensor:
    """The input of a linear patch head: [B, C, H, W] -> [B, D, rows, columns]."""
    return unwrap_backbone(network).patch_map(images)


def fit_patches(
    network: nn.Module,
    source: ImageDataset,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    penalty: float | None = None,
    held_out: float = SHARE,
) -> PatchFit:
    """Fits a head on a source with masks, whose images `batches` yields once each. Leaves torch's random generators
    untouched."""
    if not 0 <= held_out < 1:
        raise ConfigError(f"held-out share {held_out} must be at least 0 and below 1")
    patches = TrainingPatches(len(source.pixel_classes), draw_held_out(len(source), held_out))
    preprocessing, seconds = get_card(unwrap_backbone(network)).preprocessing, 0.0
    for maps, batch in iterate_features(network, batches, preprocessing, device, read=read_patch_map):
        synchronise(device)
        begun = time.perf_counter()
        patches.add(maps, batch)
        synchronise(device)
        seconds += time.perf_counter() - begun
    begun = time.perf_counter()
    head = patches.solve(penalty)
    seconds += time.perf_counter() - begun
    samples, unreadable = tuple(sorted(patches.samples)), tuple(patches.unreadable)
    return PatchFit(head=head, samples=samples, unreadable=unreadable, seconds=seconds)


class TrainingPatches:
    """Sums over the patches of the training images, separately for the held-out ones (`apart`), and pixels drawn from
    the held-out images."""

    def __init__(self, classes: int, apart: Set[int]) -> None:
        self.classes, self.apart = classes, apart
        self.count = min(max(PIXELS // max(len(apart), 1), LEAST), MOST)  # pixels drawn from a held-out image
        self.sums: tuple[PatchSums, PatchSums] | None = None  # of the images fitted on, and of the held-out ones
        self.drawn, self.samples, self.unreadable = list[tuple[Tensor, Tensor]](), list[int](), list[str]()

    def add(self, maps: Tensor, batch: Batch) -> None:
        """Adds the token maps [B, D, rows, columns] of a batch with masks."""
        masks = batch.target.masked_fill(~batch.valid[:, None, None], IGNORED)
        tokens = maps.flatten(2).transpose(1, 2)  # [B, N, D]
        found = count_shares(masks, (maps.shape[2], maps.shape[3]), self.classes)
        shares, weights = (part.unflatten(0, tokens.shape[:2]) for part in found)
        if self.sums is None:
            origin = tokens.mean((0, 1))
            self.sums = PatchSums(origin, self.classes), PatchSums(origin, self.classes)
        samples = batch.sample.tolist()
        is_apart = torch.tensor([sample in self.apart for sample in samples], device=maps.device)
        for sums, mine in zip(self.sums, (~is_apart, is_apart), strict=True):
            if mine.any():
                sums.add(*(part[mine].flatten(0, 1) for part in (tokens, shares, weights)))
        for at in (is_apart & batch.valid).nonzero()[:, 0].tolist():
            pixels, truth = draw_pixels(maps[at], masks[at], self.count, samples[at])
            self.drawn.append((pixels.cpu(), truth.cpu()))
        self.samples += batch.sample[batch.valid].tolist()
        self.unreadable += [f"{one.name} ({one.reason})" for one in batch.unreadable]

    def solve(self, penalty: float | None) -> PatchHead:
        if self.sums is None or not self.samples:
            raise DataError("no readable images with masks; there is nothing to learn from")
        pixels: HeldOutPixels | None = None
        if self.drawn:
            tokens, truth = (torch.cat(column) for column in zip(*self.drawn, strict=True))
            pixels = HeldOutPixels(tokens=tokens, truth=truth, images=len(self.drawn))
        return fit_patch_head(*self.sums, pixels, penalty=penalty)


def draw_held_out(count: int, share: float) -> set[int]:
    """Draws the held-out samples with a fixed seed; none from a single image."""
    held = min(max(round(count * share), 1), count - 1) if share else 0
    return set(np.random.default_rng(0).permutation(count)[:held].tolist())


def describe_segmenter(made: PatchFit, collection: Collection, split: str) -> Iterator[str]:
    """Notes on what was learned and which images were skipped."""
    if collection.segment_classes:
        yield "only the classes of pixels are learned, not the single objects"
    if made.head.held is None:
        yield "nothing was held out: l2, the class offsets and the confidence are defaults"
    if made.unreadable:
        named = join_words(made.unreadable, limit=NAMED)
        yield f"skipped {pluralise(len(made.unreadable), 'unreadable image')} of {split}: {named}"


def score_segmenter(
    model: Model,
    split: str,
    source: ImageDataset,
    records: Mapping[str, Any],
    batches: MaskBatches,
    device: torch.device,
    notes: list[str],
) -> HeldOutSegmentation | None:
    """Scores the network as saved, on the images that neither this fit nor earlier training has used; None if there are
    none."""
    exposure = find_exposure(records, source)
    if exposure.count:
        used = f"{exposure.count:,} of the {len(source):,} images of {split} were used in training"
        if exposure.count == len(source):
            notes.append(f"{used}: they are not scored; give other images with --test SOURCE")
            return None
        notes.append(f"{used} and are not scored")
        source = SubsetDataset(source, np.flatnonzero(~exposure.seen))
    score = score_patches(model, batches(source, get_card(model).preprocessing), device)
    if score.unreadable:
        notes.append(f"skipped {pluralise(score.unreadable, 'unreadable image')} of {split}")
    intervals = {} if score.images is None else score.images.intervals(0)
    return HeldOutSegmentation(split=split, score=score, intervals=intervals)


def score_patches(network: Model, batches: Iterable[Batch], device: torch.device) -> SegmentationScore:
    """Scores a segmentation network on the images of the batches, with counts for each image."""
    metric = SegmentationMetric(network.config.classes, device, extremes=1)
    return score_batches(network, batches, get_card(network).preprocessing, metric, device=device)
