"""Segments over images: which pixels change, where the colours lie, and what is written."""

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import ConfigError
from vitrail.report.segment_drawing import (
    TINT,
    choose_colours_alike,
    choose_segment_colours,
    draw_segments,
    pick_class_colour,
)

GREY = Image.new("RGB", (120, 80), (100, 100, 100))


def square(top: int, left: int, side: int, size: tuple[int, int] = (80, 120)) -> np.ndarray:
    mask = np.zeros(size, np.bool_)
    mask[top : top + side, left : left + side] = True
    return mask


def test_a_segment_is_tinted_inside_and_solid_on_its_edge() -> None:
    mask, colour = square(10, 20, 30), (200, 40, 0)
    drawn = np.asarray(draw_segments(GREY, [mask], [colour]))
    assert (drawn[~mask] == 100).all()
    assert drawn[10, 25].tolist() == drawn[39, 49].tolist() == list(colour)
    assert drawn[25, 35].tolist() == [round(100 + TINT * (part - 100)) for part in colour]
    edge = (drawn == colour).all(-1)
    assert edge.sum() == 4 * 29  # one pixel wide
    assert np.asarray(GREY).max() == 100  # the image itself is as it was


def test_small_segments_lie_above_large_ones_whatever_their_order() -> None:
    large, small = square(0, 0, 60), square(20, 20, 10)
    one = draw_segments(GREY, [large, small], [(255, 0, 0), (0, 0, 255)])
    other = draw_segments(GREY, iter([small, large]), [(0, 0, 255), (255, 0, 0)])
    assert np.array_equal(np.asarray(one), np.asarray(other))
    assert np.asarray(one)[20, 20].tolist() == [0, 0, 255]


def test_masks_of_another_size_cover_the_same_part() -> None:
    small = draw_segments(GREY, [square(10, 20, 20, (40, 60))], [(255, 0, 0)])
    changed = (np.asarray(small) != 100).any(-1)
    assert np.array_equal(changed, square(20, 40, 40))


def test_boxes_alone_and_empty_masks() -> None:
    drawn = np.asarray(draw_segments(GREY, None, [(255, 0, 0)], boxes=[(10, 20, 40, 60)]))
    changed = (drawn != 100).any(-1)
    assert np.array_equal(np.flatnonzero(changed.any(0)), np.arange(10, 40))
    assert np.array_equal(np.flatnonzero(changed.any(1)), np.arange(20, 60))
    assert drawn[20, 10].tolist() == [255, 0, 0]
    empty = np.zeros((80, 120), np.bool_)
    assert np.array_equal(np.asarray(draw_segments(GREY, [empty], [(1, 2, 3)], ["none"])), np.asarray(GREY))


def test_names_lie_on_plates_in_the_image_and_apart() -> None:
    image = Image.new("RGB", (400, 300))
    masks = [square(at, 40, 60, (300, 400)) for at in (0, 80, 160)]
    colours = choose_segment_colours([0, 1, 1])
    plain, named = (np.asarray(draw_segments(image, masks, colours, names)) for names in ([], ["cat", "dog", "dog"]))
    for mask in masks:  # each has a plate inside
        assert (plain != named).any(-1)[mask].sum() > 100
    scored = np.asarray(draw_segments(image, masks, colours, ["cat", "dog", "dog"], [0.5, 0.25, 1.0]))
    assert (scored != named).any()
    with pytest.raises(ConfigError):
        draw_segments(image, masks, colours, ["cat"])


def test_colours_differ_between_classes_and_between_segments_of_one() -> None:
    colours = choose_segment_colours([3, 3, 5, 3])
    assert colours[0] == pick_class_colour(3)
    assert colours[2] == pick_class_colour(5)
    assert len(set(colours)) == 4
    neighbours = np.array([pick_class_colour(k) for k in range(40)], int)
    assert np.abs(np.diff(neighbours, axis=0)).sum(1).min() > 100


def test_a_segment_that_is_found_has_the_colour_of_the_true_one() -> None:
    masks = [square(0, 0, 20), square(0, 40, 20), square(40, 0, 20)]
    theirs = choose_segment_colours([3, 3, 5])
    found = [square(40, 2, 20), square(0, 42, 20), square(50, 90, 20), square(0, 0, 20)]
    colours = choose_colours_alike([5, 3, 3, 7], found, [3, 3, 5], masks)
    assert colours[:2] == [theirs[2], theirs[1]]
    assert colours[2:] == [theirs[0], pick_class_colour(7)]  # one more of its class, and a wrong class
    assert choose_colours_alike([], [], [3], masks[:1]) == []
