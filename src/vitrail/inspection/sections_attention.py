"""Where a network looks, how far and how widely: Figures 6 and 7 (right), D.7 and D.8.

Whether maps can be believed: deletion and insertion; and the map of a ResNet, Grad-CAM.
"""

import math
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

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
from vitrail.models.backbone import resting
from vitrail.report.figure_style import coloured


def make_rollout(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(given.rollout)
    looks = [
        ImageOverlay(name=name, picture=pixels, overlay=overlay(pixels, map), said=given.said(at))
        for at, (name, pixels, map) in enumerate(zip(given.names, given.pixels, maps, strict=True))
    ]
    captions = [f"{one.said[0][0]}, {100 * one.said[0][1]:.0f} %" if one.said else one.name for one in looks]
    draw = partial(figures.draw_pairs, [one.picture for one in looks], [one.overlay for one in looks], captions)
    reading = (
        "Attention rollout (Figure 6): how much of each patch reaches the output through all layers. Weights are "
        "averaged over the heads, mixed with the identity for the residual connection and multiplied layer by layer. "
        "The image stays bright where the network looks and goes dark elsewhere."
    )
    if given.classes and given.has_classes:
        reading += " Below each are the classes that the network finds likeliest."
    return InspectionSection(
        kind="rollout", title="Where it looks", reading=reading, looks=looks,
        drawings=[SectionFigure(name="rollout", text="images next to their attention rollout", draw=draw)],
    )  # fmt: skip


def make_layers(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(rollout_by_layer(given.model, given.images[:DOWN]))
    chosen = choose_layers(given, maps.shape[1])
    tiles = [
        [pixels, *(overlay(pixels, maps[at, layer]) for layer in chosen)]
        for at, pixels in enumerate(given.pixels[:DOWN])
    ]
    columns = ["picture", *(f"layer {layer + 1}" for layer in chosen)]
    return InspectionSection(
        kind="layers", title="Layer by layer",
        reading="Rollout up to each layer (D.8). Brightness is relative to each tile. Where neighbouring columns are "
        "alike, the layers between them add little to where the output comes from.",
        drawings=[
            SectionFigure(
                name="layers", text="attention rollout up to each layer",
                draw=lambda theme: figures.draw_sheet(tiles, theme, columns=columns),
            )
        ],
    )  # fmt: skip


def make_heads(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(class_attention(given.model, given.images[:1]))[0]  # [L, k, rows, columns]
    chosen, heads = (
        choose_layers(given, len(maps)),
        sorted({round(at) for at in np.linspace(0, maps.shape[1] - 1, 16).tolist()}),
    )
    tiles = [[coloured(maps[layer, head], 0, float(maps[layer, head].max())) for layer in chosen] for head in heads]
    whose, look = ("output's token", "looks") if has_token_readout(given.model) else ("patches, on average,", "look")
    left = "" if len(heads) == maps.shape[1] else f" {len(heads)} of {maps.shape[1]} heads are shown."
    return InspectionSection(
        kind="heads", title="Single heads",
        reading=f"Where the {whose} {look} in {given.names[0]}, for each layer "
        "(columns) and head (rows). Each tile goes from black, nothing, to its own brightest patch. Heads of one layer "
        f"look at different things; scattered bright dots are single patches that a head gathers its weight on.{left}",
        drawings=[
            SectionFigure(
                name="heads", text="attention of every head in every layer",
                draw=lambda theme: figures.draw_sheet(
                    tiles, theme, columns=[f"layer {at + 1}" for at in chosen], rows=[f"head {at + 1}" for at in heads]
                ),
            )
        ],
    )  # fmt: skip


def make_gradient(given: InspectionContext) -> InspectionSection:
    images, plain = given.images[:DOWN], to_numpy(given.rollout[:DOWN])
    places = [0, 1] if given.asked is None and given.classes > 1 else [0]
    wanted = [given.explained(place)[:DOWN] for place in places]
    maps = [to_numpy(gradient_rollout(given.model, images, classes.to(images.device))) for classes in wanted]
    tiles, captions = list[list[Pixels]](), list[list[str]]()
    for at, pixels in enumerate(given.pixels[:DOWN]):
        tiles.append([pixels, overlay(pixels, plain[at]), *(overlay(pixels, map[at]) for map in maps)])
        captions.append(["picture", f"any {given.output}", *(given.named(int(classes[at])) for classes in wanted)])
    return InspectionSection(
        kind="gradient", title=f"For one {given.output}", reading=describe_gradient(given, len(places)),
        drawings=[
            SectionFigure(
                name="gradient", text=f"gradient-weighted rollout for one {given.output} at a time",
                draw=lambda theme: figures.draw_sheet(tiles, theme, captions=captions),
            )
        ],
    )  # fmt: skip


def describe_gradient(given: InspectionContext, maps: int) -> str:
    first = "Gradient-weighted rollout: attention counts only where more of it would raise "
    if not given.has_classes:
        which = "an output. The map is for one output" if maps == 1 else "an output. The maps are for the first two"
        return f"{first}{which}, next to plain rollout, which knows of none."
    which = (
        "The map is for the class that was asked for"
        if given.asked is not None
        else ("The maps are for the two likeliest classes")
    )
    return (
        f"{first}the logit of a class. {which}, next to plain rollout, which knows of no class. Where an image holds "
        "two things, each class should light its own."
    )


def make_distance(given: InspectionContext) -> InspectionSection:
    values = to_numpy(attention_distance(given.model, given.crowd()))
    even = float(distance_matrix(given.tokens.grid, given.tokens.patch).mean())
    return InspectionSection(
        kind="distance", title="Attention distance",
        reading=f"How far each head looks on average, in pixels, over {given.over} (Figure 7, right; the paper takes "
        "128). A low dot is a head that stays near, as a convolution does; a high one takes in the whole image, "
        "already in the first layers. The dashed line is even attention to all patches. What goes to the class token "
        "counts as no way at all.",
        drawings=[
            SectionFigure(
                name="distance", text="mean attention distance by head and layer", lines=True,
                draw=lambda theme: figures.draw_heads(
                    values, "mean attention distance [pixels]", theme, reference=even, called=f"even: {even:.1f} px"
                ),
            )
        ],
        numbers={"mean attention distance, first layer": float(values[0].mean()),
                 "mean attention distance, last layer": float(values[-1].mean())},
        count=given.count,
    )  # fmt: skip


def make_entropy(given: InspectionContext) -> InspectionSection:
    values = to_numpy(attention_entropy(given.model, given.crowd()))
    most = math.log2(given.tokens.prefix + given.tokens.patches)
    return InspectionSection(
        kind="entropy", title="Attention entropy",
        reading=f"How widely each head looks, in bits, over {given.over}: a head of b bits spreads its weight as if "
        "over 2^b tokens alike. Near the dashed line it takes the mean of everything; near zero it picks single "
        "tokens. Distance says how far a head looks, entropy how many it looks at.",
        drawings=[
            SectionFigure(
                name="entropy", text="attention entropy by head and layer", lines=True,
                draw=lambda theme: figures.draw_heads(
                    values, "attention entropy [bits]", theme, reference=most, called=f"all alike: {most:.2f} bits"
                ),
            )
        ],
        numbers={"attention entropy, first layer": float(values[0].mean()),
                 "attention entropy, last layer": float(values[-1].mean())},
        count=given.count,
    )  # fmt: skip


SCORED: Final = 32  # images that the faithfulness of maps is measured on


def make_gradcam(given: InspectionContext) -> InspectionSection:
    maps = to_numpy(grad_cam(given.model, given.images, given.explained().to(given.images.device)))
    looks = [
        ImageOverlay(name=name, picture=pixels, overlay=overlay(pixels, map), said=given.said(at))
        for at, (name, pixels, map) in enumerate(zip(given.names, given.pixels, maps, strict=True))
    ]
    captions = [given.named(int(number)) for number in given.explained()]
    draw = partial(figures.draw_pairs, [one.picture for one in looks], [one.overlay for one in looks], captions)
    return InspectionSection(
        kind="gradcam", title="Grad-CAM",
        reading="Which places of the last feature map speak for the class: its channels, weighted by the class's mean "
        "gradient, without what is negative. The map is as coarse as the last stage, so its edges say little.",
        looks=looks, drawings=[SectionFigure(name="gradcam", text="images next to Grad-CAM", draw=draw)],
    )  # fmt: skip


def collect_images(given: InspectionContext) -> Tensor:
    """Images to score maps on: the crowd's first ones where it is larger than what is shown."""
    if given.count <= len(given.images):
        return given.images
    found, held = 0, list[Tensor]()
    for batch in given.crowd():
        held.append(batch)
        found += len(batch)
        if found >= SCORED:
            break
    return torch.cat(held)[:SCORED]


def make_faithfulness(given: InspectionContext) -> InspectionSection:
    images = collect_images(given)
    with resting(given.model), torch.no_grad():
        classes = mean_logits(given.model(images)).argmax(-1)
    if given.asked is not None:
        classes = torch.full_like(classes, given.asked)
    if given.transformer:
        maps = {
            "rollout": run_in_portions(given.model, images, partial(rollout, given.model)),
            "gradient rollout": torch.cat(
                [
                    gradient_rollout(given.model, some, asked)
                    for some, asked in zip(
                        *(both.split(choose_portion(given.model)) for both in (images, classes)), strict=True
                    )
                ]
            ),
            "last layer": run_in_portions(
                given.model, images, lambda some: class_attention(given.model, some)[:, -1].mean(1)
            ),
        }
    else:
        maps = {"Grad-CAM": grad_cam(given.model, images, classes)}
    maps["random"] = random_maps(next(iter(maps.values())))
    steps = min(14, maps["random"][0].numel())
    found = {name: faithfulness_curves(given.model, images, map, classes, steps=steps) for name, map in maps.items()}
    scores = {name: (to_numpy(one.deletion), to_numpy(one.insertion)) for name, one in found.items()}
    return InspectionSection(
        kind="faithfulness", title="Which map to believe",
        reading=f"Deletion and insertion over {len(images)} image{'s' if len(images) != 1 else ''}: patches are "
        "covered with the image's mean colour, or uncovered, beginning with those that a map marks most, and the "
        "network is asked for the class each time. A faithful map makes the probability fall early (left) and rise "
        "early (right). In brackets: the area under the curve. A map that does no better "
        "than the random one explains nothing.",
        drawings=[SectionFigure(name="faithfulness", text="deletion and insertion curves", lines=True,
                          draw=partial(figures.draw_faithfulness, scores))],
        numbers={
            **{f"deletion, {name}": float(one.deletion_area.mean()) for name, one in found.items()},
            **{f"insertion, {name}": float(one.insertion_area.mean()) for name, one in found.items()},
        },
        count=len(images),
    )  # fmt: skip
