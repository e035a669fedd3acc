"""The worst images of a report: segments lie where they are, over what the network saw of the image."""

import numpy as np
import pytest
from PIL import Image

from vitrail.data.preprocessing import Preprocessing
from vitrail.tasks.mask_queries.report import draw_scene, find_inner
from vitrail.tasks.mask_queries.scene import SceneSegments

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("whole", [(60, 90), (90, 60), (64, 64), (1, 300), (97, 31)], ids=str)
def test_borders_of_a_fitted_image_are_left_out(whole: tuple[int, int]) -> None:
    """Where the preprocessing says that the image is."""
    image = RNG.integers(0, 256, (*whole, 3), dtype=np.uint8)
    preprocessing = Preprocessing(image=(32, 32), resize=None, fit="pad")
    seen = preprocessing.pixels(Image.fromarray(image)).permute(1, 2, 0).numpy()
    rows, columns = find_inner(seen, (whole[1], whole[0]))
    tall, wide = preprocessing.geometry(whole).inner
    assert abs(rows.stop - tall) <= 1
    assert abs(columns.stop - wide) <= 1


def test_of_a_part_or_a_squashed_image_all_is_shown() -> None:
    seen = RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert find_inner(seen, (90, 60)) == (slice(0, 32), slice(0, 32))


def test_without_segments_it_is_the_image() -> None:
    pixels = RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)
    none = SceneSegments(masks=(), classes=np.zeros(0, np.int64))
    drawn = draw_scene(Image.fromarray(pixels), none, (slice(0, 8), slice(0, 12)))
    assert np.array_equal(np.asarray(drawn), pixels)
