"""Sections on what a network has learned about pixels and places (Figure 7, left and centre) and on its patch features,
and the attention explorer."""

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
from vitrail.report.figure_style import map_colours

MARK: Final = (255, 176, 32)
EXPLORED: Final = 4_500_000  # bytes of attention in a page, unless a single image needs more


def make_filters(given: InspectionContext) -> InspectionSection:
    tiles = to_numpy(filter_components(given.model))
    layer = "patch embedding" if given.transformer else "root convolution"
    if given.transformer and type(getattr(given.model, "embedding", None)).__name__ == "HybridEmbedding":
        layer = "root convolution of the backbone"
    draw = partial(figures.draw_filters, tiles)
    return InspectionSection(
        kind="filters", title="Filters of the first layer",
        reading=f"The {len(tiles)} leading principal components of the {layer} (Figure 7, left), largest first, each "
        "stretched to the full range of colours. A trained network shows smooth waves of all directions and some plain "
        "colours, a basis for the inside of a patch; noise means that it has not learned much yet. Signs "
        "are arbitrary.",
        drawings=[SectionFigure(name="filters", text="principal components of the filters", draw=draw, narrow=True)],
    )  # fmt: skip


def make_positions(given: InspectionContext) -> InspectionSection:
    similarity = position_similarity(given.model)
    lines, near = row_column_score(similarity), distance_correlation(similarity)
    return InspectionSection(
        kind="positions", title="Position embeddings",
        reading="Cosine similarity of each patch's position embedding with all others (Figure 7, centre): one tile per "
        "place, and in the tile one cell per other place. A bright spot at the tile's own place means that near "
        "patches are similar; a bright cross means that the network has learned rows and columns by itself.",
        drawings=[
            SectionFigure(
                name="positions", text="similarity of position embeddings", narrow=True,
                draw=partial(figures.draw_positions, to_numpy(similarity)),
                note=f"Rows and columns: places in one row or column are {abs(lines):.3f} "
                f"{'more' if lines >= 0 else 'less'} similar than others at the same distance. Rank correlation of "
                f"similarity with distance: {near:.3f} (-1: the nearer, the more similar).",
            )
        ],
        numbers={"row-column score": lines, "similarity against distance": near},
    )  # fmt: skip


def make_norms(given: InspectionContext) -> InspectionSection:
    values, tokens = to_numpy(token_norms(given.model, given.images)), given.tokens
    maps = values[:, :, tokens.prefix :].reshape(*values.shape[:2], *tokens.grid)
    layers = [layer + 1 for layer in choose_layers(given, len(values) - 1, 6)]
    tiles = [
        [pixels, *(map_colours(maps[layer, at], 0, float(maps[layer].max())) for layer in layers)]
        for at, pixels in enumerate(given.pixels[:DOWN])
    ]
    columns = ["image", *(f"after layer {layer}" for layer in layers)]
    ratio = float((maps[-1].max((1, 2)) / np.median(maps[-1], (1, 2))).max())
    return InspectionSection(
        kind="norms", title="Token norms",
        reading="The norms of the tokens after each layer. In many networks a few patches of the background grow much "
        "longer than the rest: artefacts in which the network stores something about the whole image. They show as a "
        "red line that leaves the band, and as bright dots in the tiles. Here the longest patch after the last layer "
        f"is {ratio:.1f} times the median of its image.",
        drawings=[
            SectionFigure(
                name="norms", text="norms of the tokens after each layer", lines=True,
                draw=partial(figures.draw_norms, values, name_prefix_tokens(given)),
            ),
            SectionFigure(
                name="norm-maps", text="norms of the patches on their images",
                draw=partial(figures.draw_sheet, tiles, columns=columns),
                note="Each column ranges from black, norm zero, to its longest patch.",
            ),
        ],
        numbers={"longest patch over median": ratio}, count=len(given.images),
    )  # fmt: skip


def make_features(given: InspectionContext) -> InspectionSection:
    layers = choose_layers(given, given.depth, 5)
    shades = [to_numpy(feature_colours(patch_features(given.model, given.images[:DOWN], layer))) for layer in layers]
    tiles = [
        [pixels, *(np.rint(255 * shade[at]).astype(np.uint8) for shade in shades)]
        for at, pixels in enumerate(given.pixels[:DOWN])
    ]
    columns = ["image", *(f"layer {layer + 1}" for layer in layers)]
    return InspectionSection(
        kind="features", title="Patch features as colours",
        reading="The first three principal components of the patches after a layer, as red, green and blue, computed "
        "over all images together: patches with similar features have similar colours, within an image and across "
        "images. Early colours follow position and texture; later ones separate objects from their surroundings.",
        drawings=[
            SectionFigure(
                name="features", text="principal components of patch features as colours",
                draw=partial(figures.draw_sheet, tiles, columns=columns),
            )
        ],
    )  # fmt: skip


def make_similarity(given: InspectionContext) -> InspectionSection:
    features, maps = patch_features(given.model, given.images[:DOWN]), to_numpy(given.rollout)
    tiles = list[list[Pixels]]()
    for at, pixels in enumerate(given.pixels[:DOWN]):
        row = list[Pixels]()
        for place in [given.patch] if given.patch else find_extremes(maps[at]):
            similarity = to_numpy(patch_similarity(features[at : at + 1], *place))[0]
            row += [mark_patch(pixels, given.tokens.grid, place), map_colours(similarity, 0.0, 1.0, "viridis")]
        tiles.append(row)
    which = (
        f"the patch in row {given.patch[0] + 1}, column {given.patch[1] + 1}" if given.patch
        else "the patch with the highest rollout (left) and the one with the lowest (right)"
    )  # fmt: skip
    bar = (0.0, 1.0, "cosine similarity to the marked patch")
    return InspectionSection(
        kind="similarity", title="Which patches are alike",
        reading=f"Cosine similarity, after the last layer, of one patch with all others: {which}. A network that "
        "separates an object from its surroundings shows its outline here.",
        drawings=[
            SectionFigure(
                name="similarity", text="similarity of one patch to all others",
                draw=partial(figures.draw_sheet, tiles, bar=bar, colours="viridis"),
            )
        ],
    )  # fmt: skip


def make_cka(given: InspectionContext) -> InspectionSection:
    values = to_numpy(layer_cka(given.model, given.crowd()))
    draw = partial(figures.draw_matrix, values)
    return InspectionSection(
        kind="cka", title="What changes at each layer",
        reading=f"Centred kernel alignment between every two layers, over {given.sample_count}: 1 if two layers "
        "distinguish images in the same way, up to a rotation of their axes. Bright blocks are groups of layers that "
        "change little; a dark border between them is where the network does something new.",
        drawings=[SectionFigure(name="cka", text="CKA between layers", narrow=True, lines=True, draw=draw)],
        numbers={"CKA of first and last": float(values[0, -1])}, count=given.count,
    )  # fmt: skip


def find_extremes(map: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Where a map is highest and lowest, by the mean of a patch and its neighbours."""
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


def build_explorer(given: InspectionContext) -> ExplorerSection:
    """The explorer for the first images, as many as keep the page small."""
    config: Any = given.model.config
    plan = plan_explorer(given.depth, config.heads, given.tokens.grid, given.tokens.prefix)
    pictures = [
        ExploredImage(
            name=given.names[at], picture=make_thumbnail(given.pixels[at]),
            weights=pack_attention(plan, iterate_attention(given.model, given.images[at : at + 1])),
        )
        for at in range(min(len(given.names), max(EXPLORED // plan.size, 1), DOWN))
    ]  # fmt: skip
    rows, columns = plan.shown
    reads_token = has_token_readout(given.model)
    middle = given.tokens.prefix + rows // 2 * columns + columns // 2
    return ExplorerSection(
        plan=plan, pictures=pictures, prefix=name_prefix_tokens(given), start=0 if reads_token else middle,
        lead="Pick a patch and see where it looks: its row of the attention matrix, for one head, the mean of all "
        "heads, or rolled out through the layers below. The network's output is read from "
        f"{'the class token' if reads_token else 'the mean of all patches'}. Colours range from dark, the patch with "
        "the least weight, to bright, the one with the most, apart from the selected patch itself.",
    )  # fmt: skip


def iterate_attention(model: nn.Module, image: Tensor) -> Iterator[NDArray[np.float32]]:
    """[k, T, T] of each layer."""
    for layer in iterate_layers(model, image):
        yield to_numpy(layer.attention[0])
        del layer
