"""What a report shows of a segmentation: the IoU of each class, and the images it does worst on."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.core.errors import VitrailError
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_indices
from vitrail.data.geometry import Geometry
from vitrail.data.targets import IGNORED
from vitrail.report.axis import share
from vitrail.report.page import Section, Table
from vitrail.report.sections import Pane, Strip, Strips, pane
from vitrail.tasks.segmentation.images import list_colours, colour_mask, blend_mask
from vitrail.tasks.segmentation.metric import SegmentationScore, SegmentedImage


def build_sections(score: SegmentationScore, source: ImageDataset | None, names: Sequence[str], title: str) -> list[Section]:
    """A table of classes; images next to their own masks and the predicted ones."""
    found: list[Section] = [build_class_table(score, names, title)]
    if source is not None and score.worst:
        sides = ("image", "mask", "predicted")
        strips = [
            Strip(panes=build_panes(one, source, sides), caption=f"IoU {share(one.iou)}", note=source.name(one.sample))
            for one in score.worst
        ]
        found.append(Strips(title=f"Lowest IoU{on(title)}", sides=sides, strips=strips))
    return found


def build_class_table(score: SegmentationScore, names: Sequence[str], title: str) -> Table:
    truth, said = score.confusion.sum(1), score.confusion.sum(0)
    total = max(int(truth.sum()), 1)
    rows = [
        (name, "–" if math.isnan(iou) else share(iou), share(truth[at] / total), share(said[at] / total))
        for at, (name, iou) in enumerate(zip(names, score.ious.tolist(), strict=True))
    ]
    columns = ("class", "IoU", "pixels", "predicted")
    return Table(title=f"Classes{on(title)}", columns=columns, rows=rows, colours=list_colours(len(names)))


def on(title: str) -> str:
    return f" on {title}" if title else ""


def build_panes(one: SegmentedImage, source: ImageDataset, names: Sequence[str]) -> list[Pane]:
    """The image, and over it its own mask and the predicted one; nothing where it cannot be read any more. Where the
    network saw a part of it, the masks of that part stand by themselves."""
    try:
        image = source.open_image(one.sample).rgb()
        truth = read_indices(source.mask(one.sample))
    except (OSError, VitrailError):
        return [pane(None, name) for name in names]
    if np.array_equal(stretch_mask(truth, one.truth.shape), one.truth):
        shown = (image, blend_mask(truth, image), blend_mask(stretch_mask(one.mask, truth.shape), image))
    else:
        shown = (image, colour_mask(one.truth), colour_mask(one.mask))
    return [pane(picture, name) for picture, name in zip(shown, names, strict=True)]


def stretch_mask(mask: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """A whole mask at another size, as `Masks` are resized."""
    whole, inner = (mask.shape[0], mask.shape[1]), (size[0], size[1])
    return Geometry(whole=whole, box=(0, 0, *whole), inner=inner).mask(torch.from_numpy(mask), IGNORED).numpy()
