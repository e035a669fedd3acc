"""What a grid will cost, from its runs alone: no data is opened that is not there, and nothing is trained.

ExaFLOPs are those that the ledger of a run will count: 6 FLOPs a multiply-accumulate and image. Hours are
estimates: a large network reaches some 40 % of a device's peak; of a small one every step takes a few milliseconds
whatever its size, and every cell some seconds before its first step.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vitrail.core.errors import VitrailError
from vitrail.core.paper_tables import JFT_CLASSES, JFT_IMAGES
from vitrail.data.collection import open_collection
from vitrail.data.datasets.catalogue import SETS
from vitrail.evaluation.speed import training_flops
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config, network_name
from vitrail.train.config import Data
from vitrail.train.data import find_split
from vitrail.train.grid.plan import Cell
from vitrail.train.metrics import PEAKS, measure_flops, peak_flops

USED: Final = 0.4  # of a device's peak, by a large network
OTHERWISE: Final = "H200"  # whose hours are told where the grid is for a GPU and there is none
JFT: Final = "jft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How quick a device is, roughly: FLOP/s, what a step takes at least, and what comes before the first step."""

    device: str
    peak: float
    step_s: float
    start_s: float

    def hours(self, flops: float, steps: int) -> float:
        return (flops / (USED * self.peak) + steps * self.step_s + self.start_s) / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a cell will cost; what cannot be known without its data is none."""

    network: str
    pictures: int | None  # in an epoch
    steps: int | None
    exaflops: float | None
    hours: float | None


def pace_of(name: str, *, for_card: bool) -> Pace:
    """Of the device at hand; where that is a CPU and the grid is for a GPU, of one H200."""
    device = torch.device(name)
    if device.type == "cuda":
        return Pace(device=torch.cuda.get_device_name(device), peak=peak_flops(device), step_s=4e-3, start_s=30.0)
    if for_card:
        return Pace(device=f"one {OTHERWISE}", peak=PEAKS[OTHERWISE], step_s=4e-3, start_s=30.0)
    threads = torch.get_num_threads()
    told = f"this CPU ({threads} thread{'s' * (threads > 1)})"
    return Pace(device=told, peak=measure_flops(device), step_s=5e-3, start_s=0.5)


def prices(cells: Sequence[Cell], pace: Pace) -> dict[str, Price]:
    """Of every cell, by its name."""
    by_name, sizes = {cell.name: cell for cell in cells}, dict[str, tuple[int, int] | None]()
    return {cell.name: price(cell, by_name, sizes, pace) for cell in cells}


def price(cell: Cell, cells: Mapping[str, Cell], sizes: dict[str, tuple[int, int] | None], pace: Pace) -> Price:
    run = cell.run
    key = f"{run.data.source} {run.data.train}"
    if key not in sizes:
        sizes[key] = size_of(run.data)
    size, model = sizes[key], model_of(cell, cells)
    pictures = None if size is None else max(round(size[0] * run.data.part * (1 - run.data.dev)), 1)
    steps = run.steps or (None if pictures is None else max(round(run.epochs * pictures / run.batch), 1))
    if model is not None and size is not None and run.objective.labelled and size[1]:
        model = adapt_config(model, classes=size[1])
    flops = (
        None
        if model is None or steps is None
        else training_flops(run.objective.macs_per_image(model), steps * run.batch)
    )
    return Price(
        network="?" if model is None else network_name(model),
        pictures=pictures,
        steps=steps,
        exaflops=None if flops is None else flops / 1e18,
        hours=None if flops is None or steps is None else pace.hours(flops, steps),
    )


def model_of(cell: Cell, cells: Mapping[str, Cell]) -> ModelConfig | None:
    """The cell's network; where it comes from another cell's weights, that one's at this cell's size (3.2)."""
    if cell.run.model is not None or cell.after not in cells:
        return cell.run.model
    before = model_of(cells[cell.after], cells)
    return None if before is None else adapt_config(before, image_size=cell.run.augmentation.size)


def size_of(data: Data) -> tuple[int, int] | None:
    """Training images and classes: of a named set as published, without its files; none where nobody can know. What
    names no source is the paper's JFT-300M, which nobody can get."""
    name = re.split("[:@]", data.source)[0]
    if name in (JFT, ""):
        return JFT_IMAGES, JFT_CLASSES
    if name in SETS:
        part = data.source.rpartition("@")[2] if "@" in data.source else data.train
        count = SETS[name].splits.get(part)
        return None if count is None else (count, SETS[name].classes)
    return opened_size(data)


def opened_size(data: Data) -> tuple[int, int] | None:
    try:
        collection = open_collection(data.source)
        return len(find_split(collection, data.train)), len(collection.classes)
    except VitrailError:  # a list is not a place to complain of what is not there; the cell will
        return None
