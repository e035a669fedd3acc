"""Shows what the queries of a network see: the mask of each query before every query block, and its final mask."""

from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.core.text import pluralise
from vitrail.inspection import figures, page
from vitrail.inspection.context import ACROSS, InspectionContext, Pixels, to_numpy
from vitrail.inspection.page import InspectionSection
from vitrail.inspection.rollout import brighten
from vitrail.models.backbone import eval_mode
from vitrail.report.figure_style import Floats, make_legible

IMAGES: Final = 2  # images whose queries are shown
QUERIES: Final = 4  # queries per image
BESIDE: Final = 8  # most tiles of a row with both images side by side
LONGEST: Final = 14  # characters of a class name
SHADE: Final = 0.2  # brightness outside a mask


def has_queries(model: nn.Module) -> bool:
    """Whether a network predicts classes and masks by queries."""
    config: Any = model.config
    return config.has_queries


@torch.no_grad()
def query_masks(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """For images [B, C, H, W], the class probabilities [B, Q, K] of queries, and the pixel probabilities of their masks
    [B, L + 1, Q, h, w], before each query block and at the end. ConfigError for a network without queries."""
    if not has_queries(model):
        raise ConfigError(f"a {type(model).__name__} has no queries; EoMT and PMT have")
    network: Any = model
    config = network.config
    masked = torch.zeros(len(images), config.query_blocks, config.queries, dtype=torch.bool, device=images.device)
    masked[:, config.query_blocks - config.masked_blocks :] = True  # as `forward` does
    with eval_mode(model):
        layers = network.forward_layers(images, masked)
    masks = torch.stack([layer.masks.float().sigmoid() for layer in layers], 1)
    return layers[-1].classes.float().softmax(-1)[..., :-1], masks


def make_queries(given: InspectionContext) -> InspectionSection:
    """Makes the section with the likeliest queries of a few images, one per row: its mask from block to block."""
    config: Any = given.model.config
    blocks: int = config.query_blocks
    first = given.depth - blocks if config.family == "eomt" else 0  # the encoder's last blocks, or the head's own
    shown = figures.space_ticks(blocks, ACROSS // 2)
    across = len(shown) + 1
    beside = 2 * across <= BESIDE and len(given.pixels) > 1
    rows, captions = list[list[Pixels]](), list[list[str]]()
    for at, pixels in enumerate(given.pixels[:IMAGES]):
        classes, masks = query_masks(given.model, given.images[at : at + 1])
        scores, labels = classes[0].max(-1)
        best = scores.topk(min(QUERIES, len(scores)))
        maps = to_numpy(masks[0, :, best.indices])
        names = [given.output_name(int(label)) for label in labels[best.indices]]
        for row, (name, score) in enumerate(zip(names, best.values.tolist(), strict=True)):
            tiles = [light_mask(pixels, maps[block, row]) for block in [*(block - 1 for block in shown), blocks]]
            above = ["" if row else f"before block {first + block}" for block in shown]
            above.append(f"{make_legible(name, LONGEST)}, {100 * score:.0f} %")
            if beside and at:
                rows[row] += tiles
                captions[row] += above
            else:
                rows.append(tiles)
                captions.append(above)
    draw = partial(figures.draw_sheet, rows, captions=captions, gaps=across if beside else 0)
    facts = {"images": pluralise(len(given.pixels[:IMAGES]), "image"), "blocks": pluralise(blocks, "query block")}
    return page.make_section("queries", draw, facts)


def light_mask(pixels: Pixels, mask: Floats) -> Pixels:
    """Darkens an image [H, W, 3] outside a mask, by the mask's probabilities [h, w]."""
    large = F.interpolate(torch.from_numpy(mask)[None, None], pixels.shape[:2], mode="bilinear", align_corners=False)
    light = SHADE + (1 - SHADE) * large[0, 0].numpy()
    return np.rint(brighten(pixels) * light[..., None]).astype(np.uint8)
