"""The sections that an inspection can show: where a network looks, how far and how widely, how faithful its maps are
(Figures 6 and 7 right, D.7, D.8), and what it has learned about pixels, places and patches (Figure 7, left and centre).

given = InspectionContext(model=model, images=images, pixels=pixels, names=names, crowd=batches, count=len(images))
sections = [kind.make(given) for kind in KINDS.values() if kind.obstacle(given) is None]
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.core.text import Pair
from vitrail.inspection import context, figures, measures, page
from vitrail.inspection import weights_and_features as learned
from vitrail.inspection.context import DOWN, InspectionContext, Pixels, choose_layers, name_prefix_tokens, to_numpy
from vitrail.inspection.layer_taps import has_token_readout, iterate_layers, mean_logits
from vitrail.inspection.page import InspectionSection
from vitrail.inspection.query_masks import has_queries, make_queries
from vitrail.inspection.rollout import class_attention, grad_cam, gradient_rollout, overlay, rollout, rollout_by_layer
from vitrail.models.backbone import eval_mode
from vitrail.report.figure_style import map_colours

Tile: TypeAlias = Callable[[Pixels, int, int], Pixels]
NO_TOKENS: Final = "a ResNet has no tokens and no attention between them"
COMPARED: Final = 16  # images below which CKA is noise
SCORED: Final = 32  # images that the faithfulness of maps is measured on
MARK: Final = (255, 176, 32)
EXPLORED: Final = 4_500_000  # bytes of attention in a page, unless a single image needs more


def make_rollout(given: InspectionContext) -> InspectionSection:
    looks = overlay_images(given, given.rollout)
    captions = [f"{look.said[0][0]}, {100 * look.said[0][1]:.0f} %" if look.said else look.name for look in looks]
    more = " Below each image are its likeliest classes." if given.probabilities.shape[1] else ""
    if has_queries(given.model):
        more = " The attention is that of the encoder by itself, without the queries that the network answers from."
    return pair_section("rollout", looks, captions, more=more)


def make_gradcam(given: InspectionContext) -> InspectionSection:
    classes = given.target_classes()
    looks = overlay_images(given, grad_cam(given.model, given.images, classes.to(given.images.device)))
    return pair_section("gradcam", looks, [given.output_name(int(number)) for number in classes])


def overlay_images(given: InspectionContext, maps: Tensor) -> list[page.ImageOverlay]:
    triples = zip(given.names, given.pixels, to_numpy(maps), strict=True)
    return [
        page.ImageOverlay(name=name, picture=pixels, overlay=overlay(pixels, map), said=given.top_classes(at))
        for at, (name, pixels, map) in enumerate(triples)
    ]


def pair_section(kind: str, looks: list[page.ImageOverlay], captions: list[str], **facts: str) -> InspectionSection:
    """Makes a section with images next to their overlays."""
    draw = partial(figures.draw_pairs, [look.picture for look in looks], [look.overlay for look in looks], captions)
    return page.make_section(kind, draw, facts, looks=looks)


def tile_section(given: InspectionContext, kind: str, layers: Sequence[int], tile: Tile) -> InspectionSection:
    """Makes a section with a few images, each followed by one tile per layer. `tile` gets the pixels and the indices
    of image and layer."""
    places, pixels = range(len(layers)), given.pixels[:DOWN]
    tiles = [[shown, *(tile(shown, at, place) for place in places)] for at, shown in enumerate(pixels)]
    columns = ["image", *(f"layer {layer + 1}" for layer in layers)]
    return page.make_section(kind, partial(figures.draw_sheet, tiles, columns=columns), {})


def make_layers(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(rollout_by_layer(given.model, given.images[:DOWN]))
    layers = choose_layers(given, maps.shape[1])
    return tile_section(given, "layers", layers, lambda pixels, at, place: overlay(pixels, maps[at, layers[place]]))


def make_heads(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(class_attention(given.model, given.images[:1]))[0]  # [L, k, rows, columns]
    count = maps.shape[1]
    layers, heads = choose_layers(given, len(maps)), context.space_evenly(0, count - 1, 16)
    tiles = [[map_colours(maps[layer, head], 0, float(maps[layer, head].max())) for layer in layers] for head in heads]
    columns, rows = [f"layer {at + 1}" for at in layers], [f"head {at + 1}" for at in heads]
    whose = "patches look, on average,"
    if has_token_readout(given.model):
        whose = "class token looks" if has_queries(given.model) else "output's token looks"
    subset = "" if len(heads) == count else f" {len(heads)} of {count} heads are shown."
    draw = partial(figures.draw_sheet, tiles, columns=columns, rows=rows)
    return page.make_section("heads", draw, {"whose": whose, "name": given.names[0], "subset": subset})


def make_gradient(given: InspectionContext) -> InspectionSection:
    images, plain = given.images[:DOWN], to_numpy(given.rollout[:DOWN])
    places = [0, 1] if given.asked is None and given.classes > 1 else [0]
    targets = [given.target_classes(place)[:DOWN] for place in places]
    maps = [to_numpy(gradient_rollout(given.model, images, classes.to(images.device))) for classes in targets]
    tiles, captions = list[list[Pixels]](), list[list[str]]()
    for at, pixels in enumerate(given.pixels[:DOWN]):
        tiles.append([pixels, overlay(pixels, plain[at]), *(overlay(pixels, map[at]) for map in maps)])
        names = [given.output_name(int(classes[at])) for classes in targets]
        captions.append(["image", f"any {given.output}", *names])
    if not given.has_classes:
        few = "one output" if len(places) == 1 else "the first two"
        which = f"an output. The map is for {few}, next to plain rollout, which depends on no output."
    else:
        few = "map is for the requested class" if given.asked is not None else "maps are for the two likeliest classes"
        which = f"the logit of a class. The {few}, next to plain rollout, which depends on no class. "
        which += "If an image shows two things, each class should light up its own."
    draw = partial(figures.draw_sheet, tiles, captions=captions)
    return page.make_section("gradient", draw, {"output": given.output, "which": which})


def make_distance(given: InspectionContext) -> InspectionSection:
    even = float(measures.distance_matrix(given.tokens.grid, given.tokens.patch).mean())
    return head_section(given, "distance", measures.attention_distance, "pixels", even, f"even: {even:.1f} px")


def make_entropy(given: InspectionContext) -> InspectionSection:
    most = math.log2(given.tokens.prefix + given.tokens.patches)
    return head_section(given, "entropy", measures.attention_entropy, "bits", most, f"even: {most:.2f} bits")


def head_section(
    given: InspectionContext, kind: str, measure: Callable[..., Tensor], unit: str, even: float, label: str
) -> InspectionSection:
    """Makes a section with a chart of one number per head [L, k]."""
    values = to_numpy(measure(given.model, given.crowd()))
    what = f"{'mean ' if kind == 'distance' else ''}attention {kind}"
    draw = partial(figures.draw_heads, values, f"{what} [{unit}]", reference=even, label=label)
    numbers = {f"{what}, {name} layer": float(values[at].mean()) for name, at in (("first", 0), ("last", -1))}
    return page.make_section(kind, draw, {}, numbers=numbers, count=given.count)


def make_faithfulness(given: InspectionContext) -> InspectionSection:
    model, images = given.model, given.images
    if given.count > len(images):  # the first of the data set, which is larger than what is shown
        collected = list[Tensor]()
        for batch in given.crowd():
            collected.append(batch)
            if sum(map(len, collected)) >= SCORED:
                break
        images = torch.cat(collected)[:SCORED]
    with eval_mode(model), torch.no_grad():
        classes = mean_logits(model(images)).argmax(-1)
    if given.asked is not None:
        classes = torch.full_like(classes, given.asked)
    if given.transformer:
        portions = zip(*(both.split(context.choose_portion(model)) for both in (images, classes)), strict=True)
        run = partial(context.run_in_portions, model, images)
        maps = {"rollout": run(partial(rollout, model))}
        maps["gradient rollout"] = torch.cat([gradient_rollout(model, *portion) for portion in portions])
        maps["last layer"] = run(lambda some: class_attention(model, some)[:, -1].mean(1))
    else:
        maps = {"Grad-CAM": grad_cam(model, images, classes)}
    maps["random"] = measures.random_maps(next(iter(maps.values())))
    steps = min(14, maps["random"][0].numel())
    measure = partial(measures.faithfulness_curves, model, images, classes=classes, steps=steps)
    curves = {name: measure(map) for name, map in maps.items()}
    values = {name: (to_numpy(curve.deletion), to_numpy(curve.insertion)) for name, curve in curves.items()}
    numbers = {f"deletion, {name}": float(curve.deletion_area.mean()) for name, curve in curves.items()}
    numbers |= {f"insertion, {name}": float(curve.insertion_area.mean()) for name, curve in curves.items()}
    draw = partial(figures.draw_faithfulness, values)
    return page.make_section("faithfulness", draw, {}, numbers=numbers, count=len(images))


def make_filters(given: InspectionContext) -> InspectionSection:
    tiles = to_numpy(learned.filter_components(given.model))
    layer = "patch embedding" if given.transformer else "root convolution"
    if given.transformer and type(getattr(given.model, "embedding", None)).__name__ == "HybridEmbedding":
        layer = "root convolution of the backbone"
    return page.make_section("filters", partial(figures.draw_filters, tiles), {"count": len(tiles), "layer": layer})


def make_positions(given: InspectionContext) -> InspectionSection:
    similarity = learned.position_similarity(given.model)
    score, near = learned.row_column_score(similarity), learned.distance_correlation(similarity)
    facts = {"score": abs(score), "comparison": "more" if score >= 0 else "less", "near": near}
    numbers = {"row-column score": score, "similarity against distance": near}
    return page.make_section("positions", partial(figures.draw_positions, to_numpy(similarity)), facts, numbers=numbers)


def make_norms(given: InspectionContext) -> InspectionSection:
    values, tokens = to_numpy(learned.token_norms(given.model, given.images)), given.tokens
    maps = values[:, :, tokens.prefix :].reshape(*values.shape[:2], *tokens.grid)
    layers = [layer + 1 for layer in choose_layers(given, len(values) - 1, 6)]
    rows = [[map_colours(row, 0, float(maps[at].max())) for row in maps[at, :DOWN]] for at in layers]
    tiles = [list(tiles) for tiles in zip(given.pixels[:DOWN], *rows, strict=True)]
    columns = ["image", *(f"after layer {layer}" for layer in layers)]
    ratio = float((maps[-1].max((1, 2)) / np.median(maps[-1], (1, 2))).max())
    on_images = page.SectionFigure(
        name="norm-maps",
        text="norms of the patches on their images",
        draw=partial(figures.draw_sheet, tiles, columns=columns),
        note="Each column ranges from black, norm zero, to its longest patch.",
    )
    draw, numbers = partial(figures.draw_norms, values, name_prefix_tokens(given)), {"longest patch over median": ratio}
    facts, count = {"ratio": ratio}, len(given.images)
    return page.make_section("norms", draw, facts, more=[on_images], numbers=numbers, count=count)


def make_features(given: InspectionContext) -> InspectionSection:
    layers, images = choose_layers(given, given.depth, 5), given.images[:DOWN]
    shades = [to_numpy(learned.feature_colours(learned.patch_features(given.model, images, layer))) for layer in layers]
    colours = [np.rint(255 * shade).astype(np.uint8) for shade in shades]
    return tile_section(given, "features", layers, lambda _, at, place: colours[place][at])


def make_similarity(given: InspectionContext) -> InspectionSection:
    features, maps = learned.patch_features(given.model, given.images[:DOWN]), to_numpy(given.rollout)
    tiles = list[list[Pixels]]()
    for at, pixels in enumerate(given.pixels[:DOWN]):
        row = list[Pixels]()
        for place in [given.patch] if given.patch else find_extremes(maps[at]):
            similarity = to_numpy(learned.patch_similarity(features[at : at + 1], *place))[0]
            row += [mark_patch(pixels, given.tokens.grid, place), map_colours(similarity, 0.0, 1.0, "viridis")]
        tiles.append(row)
    which = "the patch with the highest rollout (left) and the one with the lowest (right)"
    if given.patch:
        which = f"the patch in row {given.patch[0] + 1}, column {given.patch[1] + 1}"
    bar = (0.0, 1.0, "cosine similarity to the marked patch")
    draw = partial(figures.draw_sheet, tiles, bar=bar, colours="viridis")
    return page.make_section("similarity", draw, {"which": which})


def make_cka(given: InspectionContext) -> InspectionSection:
    values = to_numpy(measures.layer_cka(given.model, given.crowd()))
    draw, numbers = partial(figures.draw_matrix, values), {"CKA of first and last": float(values[0, -1])}
    return page.make_section("cka", draw, {}, numbers=numbers, count=given.count)


def find_extremes(map: NDArray[np.float32]) -> list[Pair]:
    """Where a map is highest and lowest, by the mean of a patch and its neighbours."""
    wide = np.pad(map, 1, mode="edge")
    rows, columns = map.shape
    mean = sum(wide[down : down + rows, across : across + columns] for down in range(3) for across in range(3)) / 9
    return [divmod(int(index), columns) for index in (np.argmax(mean), np.argmin(mean))]


def mark_patch(pixels: Pixels, grid: Pair, place: Pair) -> Pixels:
    """The image with a frame around one patch."""
    high, wide = pixels.shape[0] / grid[0], pixels.shape[1] / grid[1]
    top, left = round(place[0] * high), round(place[1] * wide)
    bottom, right = round((place[0] + 1) * high), round((place[1] + 1) * wide)
    thick = max(1, round(min(pixels.shape[:2]) / 90))
    out = pixels.copy()
    out[max(top - thick, 0) : bottom + thick, max(left - thick, 0) : right + thick] = 0
    out[top:bottom, left:right] = MARK
    inner = slice(top + thick, bottom - thick), slice(left + thick, right - thick)
    out[inner] = pixels[inner]
    return out


def build_explorer(given: InspectionContext) -> page.ExplorerSection:
    """The explorer for the first images, as many as keep the page small."""
    config: Any = given.model.config
    plan = page.plan_explorer(given.depth, config.heads, given.tokens.grid, given.tokens.prefix)
    pictures = [
        page.ExploredImage(
            name=given.names[at], picture=page.make_thumbnail(given.pixels[at]),
            weights=page.pack_attention(plan, iterate_attention(given.model, given.images[at : at + 1])),
        )
        for at in range(min(len(given.names), max(EXPLORED // plan.size, 1), DOWN))
    ]  # fmt: skip
    rows, columns = plan.page_grid
    start, source = given.tokens.prefix + rows // 2 * columns + columns // 2, "the mean of all patches"
    if has_token_readout(given.model):
        start, source = 0, "the class token" if given.tokens.class_tokens == 1 else "the mean of the class tokens"
        source += " and the distillation token" if given.tokens.distilled else ""
        source += ", next to the mean of all patches" if config.pool == "token+mean" else ""
    elif config.pool == "map" and not config.has_patch_head:
        source = f"all {'tokens' if config.map_prefix else 'patches'} by attention pooling"
    if has_queries(given.model):
        source = "its queries, which have no part here: the attention is that of the encoder by itself"
    lead = page.READINGS["explorer"]["reading"].format(source=source)
    return page.ExplorerSection(plan=plan, pictures=pictures, prefix=name_prefix_tokens(given), start=start, lead=lead)


def iterate_attention(model: nn.Module, image: Tensor) -> Iterator[NDArray[np.float32]]:
    """[k, T, T] of each layer."""
    for layer in iterate_layers(model, image):
        yield to_numpy(layer.attention[0])
        del layer


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionKind:
    """A kind of section: how to make it, and what it needs."""

    make: Callable[[InspectionContext], InspectionSection]
    tokens: bool = True  # needs a transformer
    classes: bool = False  # needs a head
    pictures: bool = True  # needs images
    resnet: bool = False  # is for ResNets only
    queries: bool = False  # is for networks with queries only
    check: Callable[[InspectionContext], str | None] | None = None

    @property
    def is_common(self) -> bool:
        """Whether the page says that it is missing if it cannot be made and was not requested by name."""
        return not (self.resnet or self.queries)

    def obstacle(self, given: InspectionContext) -> str | None:
        """Why it cannot be made for this network; None if it can."""
        if self.tokens and not given.transformer:
            return NO_TOKENS
        if self.resnet and given.transformer:
            return "it is for ResNets; a transformer has rollout and gradient-weighted rollout"
        if self.queries and not has_queries(given.model):
            return "this network has no queries"
        if self.classes and not given.classes:
            return "this network has no head, so no classes"
        return None if self.check is None else self.check(given)


def check_single_answer(given: InspectionContext) -> str | None:
    several = "it explains one answer per image, but this network has one per query"
    return several if has_queries(given.model) else None


def check_probabilities(given: InspectionContext) -> str | None:
    if several := check_single_answer(given):
        return several
    if given.has_classes and given.classes > 1:
        return None
    return "it follows the probability of one class among several, but this network has no classes to choose from"


def check_positions(given: InspectionContext) -> str | None:
    config: Any = given.model.config
    if config.position not in ("none", "relative"):
        return None
    kinds = {"rotary positions have": config.rotary is not None, "position biases have": config.position_bias != "none"}
    what = next((kind for kind, found in kinds.items() if found), f"position={config.position!r} has")
    return f"{what} no embedding per place"


def check_count(given: InspectionContext) -> str | None:
    too_few = f"it compares images with each other and needs at least {COMPARED}; add a data set"
    return too_few if given.count < COMPARED else None


def check_channels(given: InspectionContext) -> str | None:
    config: Any = given.model.config
    return None if config.channels in (1, 3) else f"filters over {config.channels} channels have no colours"


KINDS: Final[dict[str, SectionKind]] = {
    "rollout": SectionKind(make=make_rollout),
    "gradcam": SectionKind(make=make_gradcam, tokens=False, classes=True, resnet=True),
    "layers": SectionKind(make=make_layers),
    "heads": SectionKind(make=make_heads),
    "queries": SectionKind(make=make_queries, queries=True),
    "gradient": SectionKind(make=make_gradient, classes=True, check=check_single_answer),
    "faithfulness": SectionKind(make=make_faithfulness, tokens=False, classes=True, check=check_probabilities),
    "filters": SectionKind(make=make_filters, tokens=False, pictures=False, check=check_channels),
    "positions": SectionKind(make=make_positions, pictures=False, check=check_positions),
    "distance": SectionKind(make=make_distance),
    "entropy": SectionKind(make=make_entropy),
    "norms": SectionKind(make=make_norms),
    "features": SectionKind(make=make_features),
    "similarity": SectionKind(make=make_similarity),
    "cka": SectionKind(make=make_cka, check=check_count),
}
