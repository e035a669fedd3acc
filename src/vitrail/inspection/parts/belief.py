"""Whether maps can be believed: deletion and insertion; and the map of a ResNet, Grad-CAM."""

from functools import partial
from typing import Final

import torch
from torch import Tensor

from vitrail.inspection import figures
from vitrail.inspection.faithfulness import curves, random_maps
from vitrail.inspection.gradcam import grad_cam
from vitrail.inspection.overlay import overlay
from vitrail.inspection.page import Drawing, Look, Part
from vitrail.inspection.parts.given import Given, in_portions, numpy, portion
from vitrail.inspection.rollout import class_attention, gradient_rollout, rollout
from vitrail.inspection.tokens import class_logits
from vitrail.models.resting import resting

SCORED: Final = 32  # pictures that the faithfulness of maps is measured on


def gradcam_part(given: Given) -> Part:
    maps = numpy(grad_cam(given.model, given.images, given.explained().to(given.images.device)))
    looks = [
        Look(name=name, picture=pixels, overlay=overlay(pixels, map), said=given.said(at))
        for at, (name, pixels, map) in enumerate(zip(given.names, given.pixels, maps, strict=True))
    ]
    captions = [given.named(int(number)) for number in given.explained()]
    draw = partial(figures.pairs, [one.picture for one in looks], [one.overlay for one in looks], captions)
    return Part(
        kind="gradcam", title="Grad-CAM",
        reading="Which places of the last feature map speak for the class: its channels, weighted by the class's mean "
        "gradient, without what is negative. The map is as coarse as the last stage, so its edges say little.",
        looks=looks, drawings=[Drawing(name="gradcam", text="pictures beside Grad-CAM", draw=draw)],
    )  # fmt: skip


def scored(given: Given) -> Tensor:
    """Pictures to score maps on: the crowd's first ones where it is larger than what is shown."""
    if given.count <= len(given.images):
        return given.images
    found, held = 0, list[Tensor]()
    for batch in given.crowd():
        held.append(batch)
        found += len(batch)
        if found >= SCORED:
            break
    return torch.cat(held)[:SCORED]


def faithfulness_part(given: Given) -> Part:
    images = scored(given)
    with resting(given.model), torch.no_grad():
        classes = class_logits(given.model(images)).argmax(-1)
    if given.asked is not None:
        classes = torch.full_like(classes, given.asked)
    if given.transformer:
        maps = {
            "rollout": in_portions(given.model, images, partial(rollout, given.model)),
            "gradient rollout": torch.cat(
                [
                    gradient_rollout(given.model, some, asked)
                    for some, asked in zip(
                        *(both.split(portion(given.model)) for both in (images, classes)), strict=True
                    )
                ]
            ),
            "last layer": in_portions(
                given.model, images, lambda some: class_attention(given.model, some)[:, -1].mean(1)
            ),
        }
    else:
        maps = {"Grad-CAM": grad_cam(given.model, images, classes)}
    maps["random"] = random_maps(next(iter(maps.values())))
    steps = min(14, maps["random"][0].numel())
    found = {name: curves(given.model, images, map, classes, steps=steps) for name, map in maps.items()}
    scores = {name: (numpy(one.deletion), numpy(one.insertion)) for name, one in found.items()}
    return Part(
        kind="faithfulness", title="Which map to believe",
        reading=f"Deletion and insertion over {len(images)} picture{'s' if len(images) != 1 else ''}: patches are "
        "covered with the picture's mean colour, or uncovered, beginning with those that a map marks most, and the "
        "network is asked for the class each time. A faithful map makes the probability fall early (left) and rise "
        "early (right). In brackets: the area under the curve. A map that does no better "
        "than the random one explains nothing.",
        drawings=[Drawing(name="faithfulness", text="deletion and insertion curves", lines=True,
                          draw=partial(figures.faithfulness, scores))],
        numbers={
            **{f"deletion, {name}": float(one.deletion_area.mean()) for name, one in found.items()},
            **{f"insertion, {name}": float(one.insertion_area.mean()) for name, one in found.items()},
        },
        count=len(images),
    )  # fmt: skip
