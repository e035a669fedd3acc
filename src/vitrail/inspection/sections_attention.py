"""Sections on where a network looks, how far and how widely (Figures 6 and 7 right, D.7, D.8), and on how faithful
its maps are."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitrail.core.text import pluralise
from vitrail.inspection import figures
from vitrail.inspection.context import (
    DOWN,
    InspectionContext,
    Pixels,
    choose_layers,
    choose_portion,
    run_in_portions,
    to_numpy,
)
from vitrail.inspection.layer_taps import has_token_readout, mean_logits
from vitrail.inspection.measures import (
    attention_distance,
    attention_entropy,
    distance_matrix,
    faithfulness_curves,
    random_maps,
)
from vitrail.inspection.page import ImageOverlay, InspectionSection, SectionFigure
from vitrail.inspection.rollout import class_attention, grad_cam, gradient_rollout, overlay, rollout, rollout_by_layer
from vitrail.models.backbone import eval_mode
from vitrail.report.figure_style import map_colours

SCORED: Final = 32  # images that the faithfulness of maps is measured on


def make_rollout(given: InspectionContext) -> InspectionSection:
    reading = (
        "Attention rollout (Figure 6): how much of each patch reaches the output through all layers. Weights are "
        "averaged over the heads, mixed with the identity for the residual connection and multiplied layer by layer. "
        "The image stays bright where the network looks and turns dark elsewhere."
    )
    if given.classes and given.has_classes:
        reading += " Below each image are its likeliest classes."
    looks = overlay_images(given, given.rollout)
    captions = [f"{look.said[0][0]}, {100 * look.said[0][1]:.0f} %" if look.said else look.name for look in looks]
    return pair_section("rollout", "Where it looks", reading, "images next to their attention rollout", looks, captions)


def make_gradcam(given: InspectionContext) -> InspectionSection:
    classes = given.target_classes()
    looks = overlay_images(given, grad_cam(given.model, given.images, classes.to(given.images.device)))
    reading = (
        "Which places of the last feature map raise the class's logit: its channels, weighted by the class's mean "
        "gradient, without negative values. The map is as coarse as the last stage, so its edges mean little."
    )
    captions = [given.output_name(int(number)) for number in classes]
    return pair_section("gradcam", "Grad-CAM", reading, "images next to Grad-CAM", looks, captions)


def overlay_images(given: InspectionContext, maps: Tensor) -> list[ImageOverlay]:
    triples = zip(given.names, given.pixels, to_numpy(maps), strict=True)
    return [
        ImageOverlay(name=name, picture=pixels, overlay=overlay(pixels, map), said=given.top_classes(at))
        for at, (name, pixels, map) in enumerate(triples)
    ]


def pair_section(
    kind: str, title: str, reading: str, text: str, looks: Sequence[ImageOverlay], captions: Sequence[str]
) -> InspectionSection:
    """Images next to their overlays."""
    draw = partial(figures.draw_pairs, [look.picture for look in looks], [look.overlay for look in looks], captions)
    drawings = [SectionFigure(name=kind, text=text, draw=draw)]
    return InspectionSection(kind=kind, title=title, reading=reading, looks=looks, drawings=drawings)


def make_layers(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(rollout_by_layer(given.model, given.images[:DOWN]))
    layers = choose_layers(given, maps.shape[1])
    tiles = [
        [pixels, *(overlay(pixels, maps[at, layer]) for layer in layers)]
        for at, pixels in enumerate(given.pixels[:DOWN])
    ]
    columns = ["image", *(f"layer {layer + 1}" for layer in layers)]
    draw = partial(figures.draw_sheet, tiles, columns=columns)
    return InspectionSection(
        kind="layers", title="Layer by layer",
        reading="Rollout up to each layer (D.8). Brightness is relative to each tile. If neighbouring columns are "
        "alike, the layers between them change little about where the output comes from.",
        drawings=[SectionFigure(name="layers", text="attention rollout up to each layer", draw=draw)],
    )  # fmt: skip


def make_heads(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(class_attention(given.model, given.images[:1]))[0]  # [L, k, rows, columns]
    count = maps.shape[1]
    layers, heads = (
        choose_layers(given, len(maps)),
        sorted({round(at) for at in np.linspace(0, count - 1, 16).tolist()}),
    )
    tiles = [[map_colours(maps[layer, head], 0, float(maps[layer, head].max())) for layer in layers] for head in heads]
    columns, rows = [f"layer {at + 1}" for at in layers], [f"head {at + 1}" for at in heads]
    whose = "output's token looks" if has_token_readout(given.model) else "patches look, on average,"
    subset = "" if len(heads) == count else f" {len(heads)} of {count} heads are shown."
    return InspectionSection(
        kind="heads", title="Single heads",
        reading=f"Where the {whose} in {given.names[0]}, for each layer (columns) and head (rows). Each tile ranges "
        "from black, nothing, to its own brightest patch. Heads of one layer look at different things; scattered "
        f"bright dots are single patches on which a head concentrates its weight.{subset}",
        drawings=[
            SectionFigure(
                name="heads", text="attention of every head in every layer",
                draw=partial(figures.draw_sheet, tiles, columns=columns, rows=rows),
            )
        ],
    )  # fmt: skip


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
    return InspectionSection(
        kind="gradient", title=f"For one {given.output}", reading=describe_gradient(given, len(places)),
        drawings=[
            SectionFigure(
                name="gradient", text=f"gradient-weighted rollout for one {given.output} at a time",
                draw=partial(figures.draw_sheet, tiles, captions=captions),
            )
        ],
    )  # fmt: skip


def describe_gradient(given: InspectionContext, maps: int) -> str:
    first = "Gradient-weighted rollout: attention counts only where more of it would raise "
    if not given.has_classes:
        which = "one output" if maps == 1 else "the first two"
        return f"{first}an output. The map is for {which}, next to plain rollout, which depends on no output."
    which = "map is for the requested class" if given.asked is not None else "maps are for the two likeliest classes"
    return (
        f"{first}the logit of a class. The {which}, next to plain rollout, which depends on no class. If an image "
        "shows two things, each class should light up its own."
    )


def make_distance(given: InspectionContext) -> InspectionSection:
    even = float(distance_matrix(given.tokens.grid, given.tokens.patch).mean())
    return head_section(
        given, "distance", to_numpy(attention_distance(given.model, given.crowd())), "pixels", even,
        f"even: {even:.1f} px",
        f"How far each head looks on average, in pixels, over {given.sample_count} (Figure 7, right; the paper uses "
        "128). A low dot is a head that looks nearby, like a convolution; a high one takes in the whole image, already "
        "in the first layers. The dashed line is even attention to all patches. Weight on the class token counts as "
        "zero distance.",
    )  # fmt: skip


def make_entropy(given: InspectionContext) -> InspectionSection:
    most = math.log2(given.tokens.prefix + given.tokens.patches)
    return head_section(
        given, "entropy", to_numpy(attention_entropy(given.model, given.crowd())), "bits", most,
        f"even: {most:.2f} bits",
        f"How widely each head looks, in bits, over {given.sample_count}: a head of b bits spreads its weight as if "
        "evenly over 2^b tokens. Near the dashed line it averages everything; near zero it picks single tokens. "
        "Distance is how far a head looks, entropy is at how many tokens.",
    )  # fmt: skip


def head_section(
    given: InspectionContext, kind: str, values: figures.Floats, unit: str, even: float, label: str, reading: str
) -> InspectionSection:
    """One number per head [L, k] as a chart."""
    measure = f"{'mean ' if kind == 'distance' else ''}attention {kind}"
    draw = partial(figures.draw_heads, values, f"{measure} [{unit}]", reference=even, label=label)
    return InspectionSection(
        kind=kind, title=f"Attention {kind}", reading=reading,
        drawings=[SectionFigure(name=kind, text=f"{measure} by head and layer", lines=True, draw=draw)],
        numbers={f"{measure}, {name} layer": float(values[at].mean()) for name, at in (("first", 0), ("last", -1))},
        count=given.count,
    )  # fmt: skip


def collect_images(given: InspectionContext) -> Tensor:
    """Images to score maps on: the first of the data set if it is larger than what is shown."""
    if given.count <= len(given.images):
        return given.images
    collected = list[Tensor]()
    for batch in given.crowd():
        collected.append(batch)
        if sum(map(len, collected)) >= SCORED:
            break
    return torch.cat(collected)[:SCORED]


def make_faithfulness(given: InspectionContext) -> InspectionSection:
    model, images = given.model, collect_images(given)
    with eval_mode(model), torch.no_grad():
        classes = mean_logits(model(images)).argmax(-1)
    if given.asked is not None:
        classes = torch.full_like(classes, given.asked)
    if given.transformer:
        portions = zip(*(both.split(choose_portion(model)) for both in (images, classes)), strict=True)
        maps = {
            "rollout": run_in_portions(model, images, partial(rollout, model)),
            "gradient rollout": torch.cat([gradient_rollout(model, *portion) for portion in portions]),
            "last layer": run_in_portions(model, images, lambda some: class_attention(model, some)[:, -1].mean(1)),
        }
    else:
        maps = {"Grad-CAM": grad_cam(model, images, classes)}
    maps["random"] = random_maps(next(iter(maps.values())))
    steps = min(14, maps["random"][0].numel())
    curves = {name: faithfulness_curves(model, images, map, classes, steps=steps) for name, map in maps.items()}
    values = {name: (to_numpy(curve.deletion), to_numpy(curve.insertion)) for name, curve in curves.items()}
    draw = partial(figures.draw_faithfulness, values)
    return InspectionSection(
        kind="faithfulness", title="Which map to believe",
        reading=f"Deletion and insertion over {pluralise(len(images), 'image')}: patches are covered with the image's "
        "mean colour, or uncovered, in the order of a map, and the network predicts the class each time. A faithful "
        "map makes the probability fall early (left) and rise early (right). In brackets: the area under the curve. "
        "A map that does no better than the random one explains nothing.",
        drawings=[SectionFigure(name="faithfulness", text="deletion and insertion curves", lines=True, draw=draw)],
        numbers={
            **{f"deletion, {name}": float(curve.deletion_area.mean()) for name, curve in curves.items()},
            **{f"insertion, {name}": float(curve.insertion_area.mean()) for name, curve in curves.items()},
        },
        count=len(images),
    )  # fmt: skip
