"""The pieces by themselves: hashes, the search, registration, groups, waiting."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.dedup.planted import cropped, mirrored, scene
from vitrail.core.errors import DataError
from vitrail.data.dedup.align_pair import Thumbnails, measure_distances
from vitrail.data.dedup.fingerprints import (
    VIEWS,
    WINDOWS,
    BlockFiles,
    find_equal,
    find_similar,
    hash_pixels,
    hash_thumbnails,
    make_thumbnail,
)
from vitrail.data.dedup.match import PAIR, find_groups, make_pairs, match_embeddings, merge_pairs


def grey(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([make_thumbnail(scene(rng))[..., 0] for _ in range(count)])


def test_hashes_do_not_depend_on_the_batch() -> None:
    thumbs = grey(9)
    one_by_one = np.concatenate([hash_thumbnails(thumbs[i : i + 1]) for i in range(9)])
    assert (hash_thumbnails(thumbs) == one_by_one).all()
    assert hash_thumbnails(thumbs).shape == (9, 2 * VIEWS)


def test_the_second_half_is_of_the_mirror_image() -> None:
    thumbs = grey(5)
    forth, back = hash_thumbnails(thumbs), hash_thumbnails(np.ascontiguousarray(thumbs[:, :, ::-1]))
    assert (forth[:, VIEWS:] == back[:, :VIEWS]).all()
    assert (forth[:, :VIEWS] == back[:, VIEWS:]).all()
    assert not (forth[:, 0] == back[:, 0]).any()


def test_brightness_does_not_change_a_hash() -> None:
    thumbs = grey(5).clip(20, 220)
    assert (hash_thumbnails(thumbs) == hash_thumbnails(thumbs + np.uint8(17))).all()


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 25), st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_the_search_is_what_comparing_one_by_one_gives(n: int, m: int, most: int, step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    train = rng.integers(0, 2**63, (n, 2 * VIEWS), np.uint64)
    test = rng.integers(0, 2**63, (m, 2 * VIEWS), np.uint64)
    for _ in range(10):  # some that are near, in some view
        i, j, view = rng.integers(n), rng.integers(m), rng.integers(2 * VIEWS)
        test[j, view] = train[i, 0 if view % VIEWS else rng.integers(VIEWS)] ^ np.uint64(2 ** rng.integers(12) - 1)
    expected = {}
    for i in range(n):
        for j in range(m):
            for flip in (0, 1):
                other = test[j, flip * VIEWS : (flip + 1) * VIEWS]
                views = [(int(train[i, v] ^ other[0]).bit_count(), v) for v in range(VIEWS)]
                views += [(int(train[i, 0] ^ other[v]).bit_count(), VIEWS + v) for v in range(1, VIEWS)]
                if min(views)[0] <= most:
                    expected[i, j, flip] = min(views)
    rows = find_similar(train, test, most, step=step)
    assert {(i, j, flip): (bits, view) for i, j, view, flip, bits in rows.T.tolist()} == expected
    assert rows.shape[1] == len(expected)


def test_a_crowd_is_refused_before_it_fills_the_memory() -> None:
    same = np.zeros((100, 2 * VIEWS), np.uint64)
    with pytest.raises(DataError):
        find_similar(same, same, 3, crowd=5000)


def small(pictures: list) -> Thumbnails:
    made = np.stack([make_thumbnail(picture) for picture in pictures])
    return Thumbnails(grey=made[..., 0], chroma=made[:, ::4, ::4, 1:])


def test_registration_finds_the_window_and_tells_strangers_apart() -> None:
    rng = np.random.default_rng(0)
    whole = [scene(rng, 128) for _ in range(20)]
    parts = [cropped(picture, 0.92, rng) for picture in whole]
    middle = np.tile(np.array(WINDOWS[5]), (20, 1))
    assert measure_distances(small(whole), small(parts), middle).max() < 0.04
    assert measure_distances(small(whole), small(parts[1:] + parts[:1]), middle).min() > 0.2
    turned = small([mirrored(picture) for picture in parts])
    assert measure_distances(small(whole), turned, middle).min() > 0.2
    assert measure_distances(small(whole), turned.mirrored, middle).max() < 0.04


def test_registration_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(0)
    whole = [scene(rng, 64) for _ in range(7)]
    parts = [cropped(picture, 0.92, rng) for picture in whole[:5]] + whole[:2]
    one, other, window = small(whole), small(parts), np.tile(np.array(WINDOWS[5]), (7, 1))
    single = [float(measure_distances(one[i : i + 1], other[i : i + 1], window[i : i + 1])[0]) for i in range(7)]
    assert measure_distances(one, other, window).tolist() == single


def test_pixels_and_size_make_the_digest() -> None:
    rng = np.random.default_rng(0)
    picture = scene(rng, 32)
    assert hash_pixels(picture) == hash_pixels(picture.copy())
    assert hash_pixels(picture) != hash_pixels(picture.resize((16, 64)).resize((32, 32)))
    flat = picture.resize((8, 8))
    flat.paste((1, 2, 3), (0, 0, 8, 8))
    assert hash_pixels(flat.resize((16, 4))) != hash_pixels(flat)


def test_equal_digests_end_in_any_byte() -> None:
    rows = np.array([[0, 0], [0, 1], [1, 0], [0, 0], [2, 2]], np.uint8).view("V2")[:, 0]
    i, j = find_equal(rows, rows[[1, 0, 3, 2]])
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 1), (1, 0), (2, 3), (3, 1)]


def test_joined_keeps_the_surest_of_each_pair() -> None:
    index = np.array([4])
    parts = [
        make_pairs(0, index, index, kind, distance) for kind, distance in ((3, 0.0), (1, 0.02), (1, 0.01), (2, 0.0))
    ]
    (one,) = merge_pairs(parts).tolist()
    assert one[:4] == (0, 4, 4, 1)
    assert one[4] == pytest.approx(0.01)
    assert merge_pairs([]).dtype == PAIR


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40))
def test_groups_are_the_connected_parts(length: int, links: list[tuple[int, int]]) -> None:
    links = [(a % length, b % length) for a, b in links]
    expected = list(range(length))
    for _ in range(length):
        for a, b in links:
            expected[a] = expected[b] = min(expected[a], expected[b])
    one, other = np.array(links, np.int64).reshape(-1, 2).T
    assert find_groups(length, one, other).tolist() == expected


def test_cosines_in_blocks_are_cosines() -> None:
    rng = np.random.default_rng(0)
    train, test = (rng.normal(size=(n, 8)).astype(np.float32) for n in (50, 40))
    train, test = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test))
    test[7] = train[31]
    expected = {(int(i), int(j)) for i, j in np.argwhere(train.astype(float) @ test.T.astype(float) >= 0.7)}
    for step in (3, 7, 1000):
        found = match_embeddings(train, test, 0.7, 0, step=step)
        assert {(row[1], row[2]) for row in found.tolist()} == expected
    assert (31, 7) in expected


def test_waiting_ends_when_nothing_comes(tmp_path: Path) -> None:
    blocks, naps = BlockFiles(folder=tmp_path, length=1, size=1), []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            blocks.path(0).write_bytes(b"")

    assert blocks.wait(10, nap) == [blocks.path(0)]
    with pytest.raises(DataError):
        BlockFiles(folder=tmp_path / "never", length=1, size=1).wait(10, naps.append)
