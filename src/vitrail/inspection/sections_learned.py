"""What a network has learned of pixels and places (Figure 7, left and centre), and what it makes of patches.

The attention explorer of some images.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.inspection import figures
from vitrail.inspection.context import DOWN, InspectionContext, Pixels, choose_layers, name_prefix_tokens, to_numpy
from vitrail.inspection.layer_taps import has_token_readout, iterate_layers
from vitrail.inspection.measures import layer_cka
from vitrail.inspection.page import (
    ExploredImage,
    ExplorerSection,
    InspectionSection,
    SectionFigure,
    make_thumbnail,
    pack_attention,
    plan_explorer,
)
from vitrail.inspection.weights_and_features import (
    distance_correlation,
    feature_colours,
    filter_components,
    patch_features,
    patch_similarity,
    position_similarity,
    row_column_score,
    token_norms,
)
from vitrail.report.figure_style import coloured

MARK: Final = (255, 176, 32)


def make_filters(given: InspectionContext) -> InspectionSection:
    tiles = to_numpy(filter_components(given.model))
    what = "patch embedding" if given.transformer else "root convolution"
    if given.transformer and type(getattr(given.model, "embedding", None)).__name__ == "HybridEmbedding":
        what = "root convolution of the backbone"
    return InspectionSection(
        kind="filters", title="Filters of the first layer",
        reading=f"The {len(tiles)} leading principal components of the {what} (Figure 7, left), largest first, each "
        "stretched to the full range of colours. A trained network shows smooth waves of all directions and some plain "
        "colours, a basis for the inside of a patch; noise means that it has not learned much yet. Signs "
        "are arbitrary.",
        drawings=[
            SectionFigure(
                name="filters", text="principal components of the filters", draw=partial(figures.draw_filters, tiles),
                narrow=True,
            )
        ],
    )  # fmt: skip


def make_positions(given: InspectionContext) -> InspectionSection:
    similarity = position_similarity(given.model)
    lines, near = row_column_score(similarity), distance_correlation(similarity)
    values = to_numpy(similarity)
    return InspectionSection(
        kind="positions", title="Position embeddings",
        reading="Cosine similarity of each patch's position embedding to all others (Figure 7, centre): one tile for "
        "each place, and in the tile one cell for each other place. A bright spot where the tile itself lies means "
        "that near patches are alike; a bright cross means that the network knows rows and columns, which nobody "
        "told it.",
        drawings=[
            SectionFigure(
                name="positions", text="similarity of position embeddings", narrow=True,
                draw=partial(figures.draw_positions, values),
                note=f"Rows and columns: places of one row or column are {abs(lines):.3f} "
                f"{'more' if lines >= 0 else 'less'} alike than others as far apart. Rank correlation of likeness "
                f"with distance: {near:.3f} (-1: the nearer, the more alike).",
            )
        ],
        numbers={"row-column score": lines, "similarity against distance": near},
    )  # fmt: skip


def make_norms(given: InspectionContext) -> InspectionSection:
    values = to_numpy(token_norms(given.model, given.images))
    tokens, prefix = given.tokens, name_prefix_tokens(given)
    maps = values[:, :, tokens.prefix :].reshape(*values.shape[:2], *tokens.grid)
    chosen = [layer + 1 for layer in choose_layers(given, len(values) - 1, 6)]
    top = [float(maps[layer].max()) for layer in chosen]
    tiles = [
        [pixels, *(coloured(maps[layer, at], 0, high) for layer, high in zip(chosen, top, strict=True))]
        for at, pixels in enumerate(given.pixels[:DOWN])
    ]
    columns = ["picture", *(f"behind layer {layer}" for layer in chosen)]
    ratio = float((maps[-1].max((1, 2)) / np.median(maps[-1], (1, 2))).max())
    return InspectionSection(
        kind="norms", title="Token norms",
        reading="How long the tokens are behind each layer. In many networks a few patches of the background grow much "
        "longer than the rest: artefacts, in which the network keeps something about the whole image. They show as a "
        "red line that leaves the band, and as bright dots in the tiles. Here the longest patch behind the last layer "
        f"is {ratio:.1f} times the median of its image.",
        drawings=[
            SectionFigure(
                name="norms", text="length of tokens behind each layer", lines=True,
                draw=lambda theme: figures.draw_norms(values, prefix, theme),
            ),
            SectionFigure(
                name="norm-maps", text="length of the patches on their images",
                draw=lambda theme: figures.draw_sheet(tiles, theme, columns=columns),
                note="Each column goes from black, length nought, to its longest patch.",
            ),
        ],
        numbers={"longest patch over median": ratio}, count=len(given.images),
    )  # fmt: skip


def make_features(given: InspectionContext) -> InspectionSection:
    chosen = choose_layers(given, given.depth, 5)
    shades = [to_numpy(feature_colours(patch_features(given.model, given.images[:DOWN], layer))) for layer in chosen]
    tiles = [
        [pixels, *(np.rint(255 * shade[at]).astype(np.uint8) for shade in shades)]
        for at, pixels in enumerate(given.pixels[:DOWN])
    ]
    columns = ["picture", *(f"layer {layer + 1}" for layer in chosen)]
    return InspectionSection(
        kind="features", title="Patch features as colours",
        reading="The first three principal components of the patches behind a layer, as red, green and blue, taken "
        "over all images together: patches that the network takes for alike have like colours, within an image and "
        "across them. Early colours follow position and texture; later ones part things from what is around them.",
        drawings=[
            SectionFigure(
                name="features", text="principal components of patch features as colours",
                draw=lambda theme: figures.draw_sheet(tiles, theme, columns=columns),
            )
        ],
    )  # fmt: skip


def make_similarity(given: InspectionContext) -> InspectionSection:
    features, maps = patch_features(given.model, given.images[:DOWN]), to_numpy(given.rollout)
    tiles = list[list[Pixels]]()
    for at, pixels in enumerate(given.pixels[:DOWN]):
        places = [given.patch] if given.patch else find_extremes(maps[at])
        row = list[Pixels]()
        for down, across in places:
            alike = to_numpy(patch_similarity(features[at : at + 1], down, across))[0]
            row += [mark_patch(pixels, given.tokens.grid, (down, across)), coloured(alike, 0.0, 1.0, "viridis")]
        tiles.append(row)
    which = (
        f"the patch in row {given.patch[0] + 1}, column {given.patch[1] + 1}" if given.patch
        else "the patch that rollout marks most (left) and the one that it marks least (right)"
    )  # fmt: skip
    return InspectionSection(
        kind="similarity", title="Which patches are alike",
        reading=f"Cosine similarity, behind the last layer, of one patch to all others: {which}. A network that has "
        "parted a thing from its surroundings shows its outline here.",
        drawings=[
            SectionFigure(
                name="similarity", text="similarity of a chosen patch to all others",
                draw=lambda theme: figures.draw_sheet(
                    tiles, theme, bar=(0.0, 1.0, "cosine similarity to the marked patch"), colours="viridis"
                ),
            )
        ],
    )  # fmt: skip


def make_cka(given: InspectionContext) -> InspectionSection:
    values = to_numpy(layer_cka(given.model, given.crowd()))
    return InspectionSection(
        kind="cka", title="What changes at each layer",
        reading=f"Centred kernel alignment between every two layers, over {given.over}: 1 where two layers tell "
        "images apart in the same way, whatever the turn of their axes. Bright blocks are stretches of layers that "
        "change little; a dark border between them is where the network does something new.",
        drawings=[SectionFigure(name="cka", text="CKA between layers", narrow=True, lines=True,
                          draw=partial(figures.draw_matrix, values))],
        numbers={"CKA of first and last": float(values[0, -1])}, count=given.count,
    )  # fmt: skip


def find_extremes(map: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Where a map is largest and where it is least, by the mean of a patch and its neighbours: not at an edge."""
    wide = np.pad(map, 1, mode="edge")
    rows, columns = map.shape
    mean = sum(wide[down : down + rows, across : across + columns] for down in range(3) for across in range(3)) / 9
    return [divmod(int(index), columns) for index in (np.argmax(mean), np.argmin(mean))]


def mark_patch(pixels: Pixels, grid: tuple[int, int], place: tuple[int, int]) -> Pixels:
    """The image with a frame around one patch."""
    high, wide = pixels.shape[0] / grid[0], pixels.shape[1] / grid[1]
    top, left = round(place[0] * high), round(place[1] * wide)
    bottom, right = round((place[0] + 1) * high), round((place[1] + 1) * wide)
    thick = max(1, round(min(pixels.shape[:2]) / 90))
    out = pixels.copy()
    inner = out[top + thick : bottom - thick, left + thick : right - thick].copy()
    out[max(top - thick, 0) : bottom + thick, max(left - thick, 0) : right + thick] = 0
    out[top:bottom, left:right] = MARK
    out[top + thick : bottom - thick, left + thick : right - thick] = inner
    return out


EXPLORED: Final = 4_500_000  # bytes of attention in a page, where one image does not take more by itself


def build_explorer(given: InspectionContext) -> ExplorerSection:
    """The explorer for the first images, as many as keep the page small."""
    config: Any = given.model.config
    asked = plan_explorer(given.depth, config.heads, given.tokens.grid, given.tokens.prefix)
    pictures = [
        ExploredImage(
            name=given.names[at], picture=make_thumbnail(given.pixels[at]),
            weights=pack_attention(asked, iterate_attention(given.model, given.images[at : at + 1])),
        )
        for at in range(min(len(given.names), max(EXPLORED // asked.size, 1), DOWN))
    ]  # fmt: skip
    rows, columns = asked.shown
    middle = given.tokens.prefix + rows // 2 * columns + columns // 2
    whose = "the class token" if has_token_readout(given.model) else "the mean of all patches"
    return ExplorerSection(
        plan=asked, pictures=pictures, prefix=name_prefix_tokens(given),
        start=0 if has_token_readout(given.model) else middle,
        lead="Pick a patch and see where it looks: its row of the attention matrix, for one head, the mean of all "
        f"heads, or rolled out through the layers below. The network's answer is read from {whose}. From dark, the "
        "patch with the least weight, to bright, the one with the most, the asking patch itself aside.",
    )  # fmt: skip


def iterate_attention(model: nn.Module, image: Tensor) -> Iterator[NDArray[np.float32]]:
    """Layer by layer [k, T, T]."""
    for view in iterate_layers(model, image):
        yield to_numpy(view.attention[0])
        del view
