"""How a run without labels is scored along the way: by what its frozen features are worth, and by its own loss.

    {"split": "dev", "measure": "k-NN", "accuracy": 0.83, "count": 360, "rank": 21.4, "width": 64, ..., "loss": 0.2}

Features are those of the last read layer, without augmentation, of the split and of some training images next to. The
accuracy is that of a vote of neighbours, and is absent where there are no labels. The loss is the objective's own with
the views of training, drawn alike in every scoring: where it rises while that of training falls, the run overfits.
Every process reads a part of the images, and all have the same row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import DataError
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch, TrainViews, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.closed_form_classifier import sample_stratified
from vitrail.evaluation.frozen.features import FrozenFeatures, compute_features, inference_context, iterate_features
from vitrail.evaluation.frozen.knn import (
    SampleNeighbours,
    find_similar_samples,
    measure_collapse,
    pick_samples,
    score_vote,
)
from vitrail.objectives.objective import Objective, ObjectiveOutput
from vitrail.train.assemble import Parts
from vitrail.train.config import ResolvedRun
from vitrail.train.data import DataSplits, EvalBatches
from vitrail.train.observer import Advance, count_batches, ignore_advance

MOST: Final = 5_000  # training images that are neighbours; images of a split whose loss is taken
BATCH: Final = 256  # of all processes together, so that their number changes no draw
SEED: Final = 0
REBUILT, ASKED = 12, 8  # images in the report: reconstructions, and those whose neighbours are shown


@runtime_checkable
class Rebuilds(Protocol):
    """An objective that can show what it makes of an image: [B, 3, H, W] as bytes, as it is, as seen, as rebuilt."""

    def pictures(self, pixels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReportSamples:
    """What a report shows of a split: images as they are, as the network saw them and as it rebuilt them, uint8
    [H, W, 3] each; and images of `source` with their neighbours in `next to`."""

    rebuilt: tuple[tuple[NDArray[np.uint8], ...], ...]
    company: tuple[SampleNeighbours, ...]
    source: ImageDataset
    beside: ImageDataset


@dataclass(kw_only=True, slots=True)
class FeatureScorer:
    """Looks at what a run has learnt, with the weights that are in place."""

    run: ResolvedRun
    parts: Parts
    splits: DataSplits
    world: World
    ledger: UnreadableLog
    advance: Advance = ignore_advance
    sweeps: dict[str, EvalBatches] = field(default_factory=dict[str, EvalBatches])
    some: ImageDataset | None = None

    @property
    def beside(self) -> ImageDataset:
        """The training images that are neighbours, chosen when they are first asked for."""
        if self.some is None:
            self.some = sample_stratified(self.splits.train, MOST)
        return self.some

    def score(self, split: str, source: ImageDataset) -> tuple[dict[str, Any], ReportSamples]:
        """The columns of a row of metrics, and what there is to see."""
        beside, mine = self.frozen("beside", self.beside), self.frozen(split, source)
        row: dict[str, Any] = {"split": split, "measure": "k-NN"}
        voted = score_vote(beside, mine, len(self.splits.class_names), device=self.world.device)
        if voted is not None:
            row["accuracy"] = voted[0] / voted[1]
        row["count"] = len(mine.samples) if voted is None else voted[1]
        row |= {**self.collapse(mine), "loss": self.loss(split, source)}
        return row, self.seen(source, mine, beside)

    def train(self) -> tuple[dict[str, Any], ReportSamples]:
        """The same of training images, where no split is watched: no accuracy, and the loss is known already."""
        beside = self.frozen("beside", self.beside)
        row = {"split": self.run.data.train, "count": len(beside.samples), **self.collapse(beside)}
        return row, self.seen(self.beside, beside, beside)

    def collapse(self, of: FrozenFeatures) -> dict[str, Any]:
        some = of.features[:: -(-len(of.features) // MOST)]
        found = measure_collapse(some, device=self.world.device)
        return {"rank": found.rank, "width": found.width, "similarity": found.similarity, "spread": found.spread}

    def seen(self, source: ImageDataset, mine: FrozenFeatures, beside: FrozenFeatures) -> ReportSamples:
        shown = pick_samples(source.labels, REBUILT)
        there = [at for sample in shown[:ASKED] for at in (mine.samples == int(sample)).nonzero()[:, 0].tolist()]
        queries = mine.select(torch.tensor(there, dtype=torch.int64))
        return ReportSamples(
            rebuilt=self.rebuilt(SubsetDataset(source, shown)),
            company=find_similar_samples(queries, beside, itself=source is self.beside) if there else (),
            source=source,
            beside=self.beside,
        )

    def frozen(self, name: str, source: ImageDataset) -> FrozenFeatures:
        """Features of a source, in every process: each lays its part into a table that is then summed."""
        batches = self.sweep(f"{name}, plain", source, self.preprocessing)
        found = iterate_features(
            self.objective,
            batches,
            self.preprocessing,
            self.world.device,
            precision=self.precision,
            read=lambda _, images: self.read(images),
        )
        parts = [(read, batch.sample, batch.valid) for read, batch in found]
        read, sample, valid = (torch.cat(several) for several in zip(*parts, strict=True))
        table = read.new_zeros(len(source), read.shape[1] + 1)
        table[sample[valid]] = torch.cat([read[valid], read.new_ones(int(valid.sum()), 1)], 1)
        table = self.world.sum_(table).cpu()
        samples = table[:, -1].nonzero()[:, 0]
        if len(samples) < 2:
            raise DataError(f"features need two images that can be read; {len(samples)} of {len(source)} can")
        labels = torch.from_numpy(source.labels.rows(samples.numpy()))
        return FrozenFeatures(features=table[samples, :-1], samples=samples, labels=labels)

    def read(self, images: Tensor) -> Tensor:
        """What the last layer reads; of weights that lie in several processes, these read together."""
        if self.run.sharding in ("fsdp", "hsdp"):
            return self.parts.parallel.evaluate_with(compute_features, images)
        return compute_features(self.objective.eval_network, images)

    def loss(self, split: str, source: ImageDataset) -> float:
        """The objective's own, of at most 5,000 images, in the precision of training."""
        views = TrainViews(self.objective.views(self.run.augmentation))
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        whole = self.run.batch if self.objective.config.needs_whole_batch else BATCH
        step = self.run.steps - 1  # a fixed one for what is drawn, at which what warms up is warm
        with inference_context(self.objective, self.world.device, "float32"):
            for batch in self.sweep(f"{split}, views", sample_stratified(source, MOST), views, batch=whole):
                inputs = self.objective.inputs(batch, seed=SEED, step=step)
                found = self.asked(partial(self.objective.forward, *inputs))
                sums += torch.stack([found.total, found.count]).double()
        total, count = self.world.sum_(sums).tolist()
        return total / count if count else float("nan")

    def asked(self, question: Callable[[], ObjectiveOutput]) -> ObjectiveOutput:
        # Without inputs, for floats among those would be rounded; targets are to stay as they are.
        return self.parts.parallel.evaluate_with(lambda _: question())

    def rebuilt(self, source: ImageDataset) -> tuple[tuple[NDArray[np.uint8], ...], ...]:
        objective = self.objective
        if not isinstance(objective, Rebuilds):
            return ()
        batch = next(eval_batches(source, self.preprocessing, batch=len(source), ledger=self.ledger)).to(
            self.world.device
        )
        pixels = batch.pixels[batch.valid]
        if not len(pixels):
            return ()
        with inference_context(objective, self.world.device, "float32"):
            shown = self.parts.parallel.evaluate_with(lambda _: objective.pictures(pixels, SEED))
        arrays = [one.permute(0, 2, 3, 1).cpu().numpy() for one in shown]
        return tuple(zip(*arrays, strict=True))

    def sweep(
        self, name: str, source: ImageDataset, views: Preprocessing | TrainViews, *, batch: int = BATCH
    ) -> Iterator[Batch]:
        """The batches of a source, made once."""
        if name not in self.sweeps:
            each = -(-min(batch, len(source)) // self.world.size)
            self.sweeps[name] = EvalBatches(
                source, views, self.run.data, batch=each, world=self.world, ledger=self.ledger
            )
        return count_batches(
            self.sweeps[name], f"features, {name}", len(source), self.advance, processes=self.world.size
        )

    @property
    def objective(self) -> Objective:
        return self.parts.objective

    @property
    def precision(self) -> Any:
        return "autocast" if self.world.device.type == "cuda" else "float32"

    @property
    def preprocessing(self) -> Preprocessing:
        return self.run.preprocessing
