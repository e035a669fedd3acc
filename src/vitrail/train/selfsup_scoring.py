"""Scores a run without labels during training: by its frozen features, and by its own loss.

    {"split": "dev", "measure": "k-NN", "accuracy": 0.83, "count": 360, "rank": 21.4, "width": 64, ..., "loss": 0.2}

The features are what the last layer reads, without augmentation, for the split and for a sample of the training images.
The accuracy is that of a nearest-neighbour vote, and is absent without labels. The loss is the objective's own, on
training views that are drawn the same way every time: if it rises while the training loss falls, the run overfits.
Every process reads a part of the images, and all get the same row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import DataError
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import CLASS_LABELS
from vitrail.data.transforms.augmentation import TrainViews
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen import knn
from vitrail.evaluation.frozen.closed_form_classifier import sample_stratified
from vitrail.evaluation.frozen.features import FrozenFeatures, compute_features, inference_context, iterate_features
from vitrail.tasks.registry import targets_of
from vitrail.train.assemble import Parts
from vitrail.train.data import EvalBatches
from vitrail.train.observer import Advance, count_batches, ignore_advance

MOST: Final = 5_000  # training images among which neighbours are searched; images whose loss is computed
BATCH: Final = 256  # of all processes together, so that their number does not affect random draws
SEED: Final = 0
REBUILT, QUERIES = 12, 8  # images in the report: reconstructions, and those whose neighbours are shown


@runtime_checkable
class Rebuilds(Protocol):
    """An objective that can reconstruct images [B, 3, H, W], as bytes: the image, what the network saw, its output."""

    def pictures(self, pixels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReportSamples:
    """Samples of a split for the report: reconstructions (the image, what the network saw, its output; uint8 [H, W, 3]
    each), and images of `source` with their nearest neighbours among `references`."""

    rebuilt: tuple[tuple[NDArray[np.uint8], ...], ...]
    neighbours: tuple[knn.SampleNeighbours, ...]
    source: ImageDataset
    references: ImageDataset


@dataclass
class FeatureScorer:
    """Scores the features of a run with its current weights."""

    parts: Parts
    advance: Advance = ignore_advance
    batches: dict[str, EvalBatches] = field(default_factory=dict[str, EvalBatches])

    @cached_property
    def references(self) -> ImageDataset:
        """The training images among which neighbours are searched, chosen on first use."""
        return sample_stratified(self.parts.splits.train, MOST)

    def score_features(self, split: str, source: ImageDataset) -> tuple[dict[str, Any], ReportSamples]:
        """The columns of a row of metrics, and samples for the report."""
        references, mine = self.extract("references", self.references), self.extract(split, source)
        num_classes = len(self.parts.splits.class_names)
        vote = knn.score_vote(references, mine, num_classes, device=self.parts.world.device)
        row: dict[str, Any] = {"split": split, "measure": "k-NN"}
        row |= {} if vote is None else {"accuracy": vote[0] / vote[1]}
        row |= {"count": len(mine.samples) if vote is None else vote[1], **self.measure(mine)}
        row["loss"] = self.compute_loss(split, source)
        return row, self.pick(source, mine, references)

    def score_training_features(self) -> tuple[dict[str, Any], ReportSamples]:
        """The same for training images, if no split is watched: without accuracy, and the loss is known already."""
        references = self.extract("references", self.references)
        row = {"split": self.parts.run.data.train, "count": len(references.samples), **self.measure(references)}
        return row, self.pick(self.references, references, references)

    def measure(self, found: FrozenFeatures) -> dict[str, Any]:
        some = found.features[:: -(-len(found.features) // MOST)]
        collapse = knn.measure_collapse(some, device=self.parts.world.device)
        return {name: getattr(collapse, name) for name in ("rank", "width", "similarity", "spread")}

    def pick(self, source: ImageDataset, mine: FrozenFeatures, references: FrozenFeatures) -> ReportSamples:
        samples = knn.pick_samples(source.labels, REBUILT)
        at = [row for sample in samples[:QUERIES] for row in (mine.samples == int(sample)).nonzero()[:, 0].tolist()]
        queries = mine.select(torch.tensor(at, dtype=torch.int64))
        near = knn.find_similar_samples(queries, references, itself=source is self.references) if at else ()
        return ReportSamples(self.rebuild(SubsetDataset(source, samples)), near, source, self.references)

    def extract(self, name: str, source: ImageDataset) -> FrozenFeatures:
        """The features of a dataset, in every process: each writes its part into a table that is then summed."""
        parts, prepared = self.parts, self.parts.run.preprocessing
        images = self.iterate(f"features, {name}, plain", source, prepared, self.share(BATCH, source))
        read = lambda _, images: self.read(images)  # noqa: E731
        how: dict[str, Any] = {"precision": parts.evaluation_precision, "read": read}
        found = iterate_features(parts.objective, images, prepared, parts.world.device, **how)
        batches = [(features, batch.sample, batch.valid) for features, batch in found]
        features, sample, valid = (torch.cat(columns) for columns in zip(*batches, strict=True))
        table = features.new_zeros(len(source), features.shape[1] + 1)
        table[sample[valid]] = torch.cat([features[valid], features.new_ones(int(valid.sum()), 1)], 1)
        table = parts.world.sum_(table).cpu()
        samples = table[:, -1].nonzero()[:, 0]
        if len(samples) < 2:
            raise DataError(f"features need two readable images; {len(samples)} of {len(source)} are readable")
        labels = torch.from_numpy(source.labels.rows(samples.numpy()))
        return FrozenFeatures(features=table[samples, :-1], samples=samples, labels=labels)

    def read(self, images: Tensor) -> Tensor:
        """What the last layer reads; processes that share the weights compute it together."""
        if self.parts.is_sharded:
            return self.parts.parallel.evaluate_with(compute_features, images)
        return compute_features(self.parts.objective.eval_network, images)

    def compute_loss(self, split: str, source: ImageDataset) -> float:
        """The objective's own loss on at most 5,000 images, in the precision of training."""
        run, objective, world = self.parts.run, self.parts.objective, self.parts.world
        views = TrainViews(objective.views(run.augmentation))
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        some = sample_stratified(source, MOST)
        size = self.share(run.batch if objective.config.needs_whole_batch else BATCH, some)
        with inference_context(objective, world.device, "float32"):
            for batch in self.iterate(f"features, {split}, views", some, views, size):
                # The last step: the draws are the same in every scoring, and whatever warms up has done so.
                inputs = objective.inputs(batch, seed=SEED, step=run.steps - 1)
                # The inputs are bound here, not passed: floats among them would be rounded, and targets must not be.
                output = self.parts.parallel.evaluate_with(lambda _, inputs=inputs: objective.forward(*inputs))
                sums += torch.stack([output.total, output.count]).double()
        total, count = world.sum_(sums).tolist()
        return total / count if count else float("nan")

    def rebuild(self, source: ImageDataset) -> tuple[tuple[NDArray[np.uint8], ...], ...]:
        objective, device = self.parts.objective, self.parts.world.device
        if not isinstance(objective, Rebuilds):
            return ()
        batches = eval_batches(source, self.parts.run.preprocessing, batch=len(source), ledger=self.parts.ledger)
        batch = next(batches).to(device)
        pixels = batch.pixels[batch.valid]
        if not len(pixels):
            return ()
        with inference_context(objective, device, "float32"):
            images = self.parts.parallel.evaluate_with(lambda _: objective.pictures(pixels, SEED))
        arrays = [image.permute(0, 2, 3, 1).cpu().numpy() for image in images]
        return tuple(zip(*arrays, strict=True))

    def share(self, batch: int, source: ImageDataset) -> int:
        """A process's images of a batch of all processes."""
        return -(-min(batch, len(source)) // self.parts.world.size)

    def iterate(
        self, what: str, source: ImageDataset, views: Preprocessing | TrainViews, batch: int, *, alone: bool = False
    ) -> Iterator[Batch]:
        """The batches of a dataset, `batch` images for each process, set up once. With `alone` every process reads all
        of it, with class labels."""
        run, ledger = self.parts.run, self.parts.ledger
        world = World(device=self.parts.world.device) if alone else self.parts.world
        if what not in self.batches:
            targets = CLASS_LABELS if alone else targets_of(run.objective)
            self.batches[what] = EvalBatches(run.data, source, views, batch, world, ledger=ledger, targets=targets)
        return count_batches(self.batches[what], what, len(source), self.advance, processes=world.size)
