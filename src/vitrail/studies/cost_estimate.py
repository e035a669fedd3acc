"""What a grid will cost, from its runs alone: nothing is downloaded and nothing is trained.

ExaFLOPs are counted as in a run: 6 FLOPs per multiply-accumulate and image. Hours are estimates: a large network
reaches about 40 % of a device's peak; for a small one, every step takes at least a few milliseconds, and every cell
some seconds before its first step.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch

from vitrail.core.errors import VitrailError
from vitrail.core.paper_tables import JFT_CLASSES, JFT_IMAGES
from vitrail.core.text import pluralise
from vitrail.data.collection import open_collection
from vitrail.data.datasets.catalogue import SETS
from vitrail.evaluation.speed import training_flops
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config, network_name
from vitrail.train.data import find_split
from vitrail.train.grid.plan import Cell
from vitrail.train.metrics import PEAKS, measure_flops, peak_flops

UTILISATION: Final = 0.4  # of a device's peak, by a large network
DEFAULT_GPU: Final = "H200"  # for a grid that is meant for a GPU, if there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """How fast a device is, roughly: FLOP/s, the least time of a step, and the time before the first step."""

    device: str
    peak: float
    step_s: float
    start_s: float

    def hours(self, flops: float, steps: int) -> float:
        return (flops / (UTILISATION * self.peak) + steps * self.step_s + self.start_s) / 3600


@dataclass(frozen=True, slots=True)
class CellCost:
    """The cost of a cell; None where it depends on data that is not available."""

    network: str
    images: int | None  # per epoch
    steps: int | None
    exaflops: float | None = None
    hours: float | None = None


def estimate_speed(name: str, *, for_gpu: bool) -> DeviceSpeed:
    """The speed of the local device, or of one H200 if that is a CPU and the grid is meant for a GPU."""
    device = torch.device(name)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return DeviceSpeed(device=name, peak=peak_flops(device), step_s=4e-3, start_s=30.0)
    if for_gpu:
        return DeviceSpeed(device=f"one {DEFAULT_GPU}", peak=PEAKS[DEFAULT_GPU], step_s=4e-3, start_s=30.0)
    text = f"this CPU ({pluralise(torch.get_num_threads(), 'thread')})"
    return DeviceSpeed(device=text, peak=measure_flops(device), step_s=5e-3, start_s=0.5)


def estimate_costs(cells: Sequence[Cell], speed: DeviceSpeed) -> dict[str, CellCost]:
    """The cost of every cell, by its name."""
    by_name, costs = {cell.name: cell for cell in cells}, dict[str, CellCost]()
    find_size.cache_clear()  # a folder may have grown since
    for name, cell in by_name.items():
        run = cell.run
        size, model = find_size(run.data.source, run.data.train), find_model(cell, by_name)
        images = None if size is None else max(round(size[0] * run.data.part * (1 - run.data.dev)), 1)
        steps = run.steps or (None if images is None else max(round(run.epochs * images / run.batch), 1))
        if model is not None and size is not None and run.objective.labelled and size[1]:
            model = adapt_config(model, classes=size[1])
        costs[name] = CellCost("?" if model is None else network_name(model), images, steps)
        if model is not None and steps is not None:
            flops = training_flops(run.objective.macs_per_image(model), steps * run.batch)
            costs[name] = replace(costs[name], exaflops=flops / 1e18, hours=speed.hours(flops, steps))
    return costs


def find_model(cell: Cell, cells: Mapping[str, Cell]) -> ModelConfig | None:
    """The cell's network; if it starts from another cell's weights, that one's network at this cell's size (3.2)."""
    if cell.run.model is not None or cell.after not in cells:
        return cell.run.model
    before = find_model(cells[cell.after], cells)
    return None if before is None else adapt_config(before, image_size=cell.run.augmentation.size)


@lru_cache
def find_size(source: str, split: str) -> tuple[int, int] | None:
    """Training images and classes: of a named data set as published, without its files; None if unknown. An empty
    source is the paper's JFT-300M, which is not public."""
    name, _, part = source.partition("@")
    name = re.split("[:@]", name)[0]
    if name in ("jft", ""):
        return JFT_IMAGES, JFT_CLASSES
    if name in SETS:
        count = SETS[name].splits.get(part or split)
        return None if count is None else (count, SETS[name].classes)
    try:
        collection = open_collection(source)
        return len(find_split(collection, split)), len(collection.classes)
    except VitrailError:  # the cell itself will report it
        return None
