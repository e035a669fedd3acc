"""Finds pairs of equal images, block by block: the training set against another set or itself, by pixels, by perceptual
hash and thumbnail, or by embeddings."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup import fingerprints as fp
from vitrail.data.dedup.align_pair import measure_distances
from vitrail.data.dedup.fingerprints import UNREADABLE, VIEWS, WINDOWS, BlockFiles, Fingerprints

KINDS: Final = ("exact", "near", "flipped", "embedding")  # the most certain first
EXACT, NEAR, FLIPPED, EMBEDDING = range(4)
WITHIN: Final = -1  # number of the set if both images are from the training set
PAIR: Final = np.dtype([("set", "<i4"), ("train", "<i8"), ("test", "<i8"), ("kind", "u1"), ("distance", "<f4")])
EMBED_BATCH: Final = 64  # images per call
SLACK: Final = 1e-4  # matrix products round differently per block, so borderline cosines are recomputed

PairArray: TypeAlias = NDArray[np.void]  # [M] of PAIR; `set` counts the test sets
Embed: TypeAlias = Callable[[list[Image]], NDArray[np.float32]]  # B images to [B, D]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchRule:
    """What counts as the same image. The defaults miss few copies and, on photographs, have no false positives."""

    exact: bool = True  # the same decoded pixels
    near: bool = True  # by perceptual hash: re-encoded, resized, mirrored, or with up to a tenth of a side cropped
    bits: int = 13  # of 63: by how many the hashes of two images may differ for them to be compared
    distance: float = 0.04  # 1 - correlation of the thumbnails: the most that counts as the same image
    cosine: float = 0.95  # of embeddings: the least that counts as the same image
    embedding: str = ""  # what computed the embeddings, if any

    def __post_init__(self) -> None:
        if not (0 <= self.bits < 32 and 0 < self.distance < 1 and 0 < self.cosine <= 1):
            limits = "bits must be between 0 and 31, distance between 0 and 1, cosine above 0 and at most 1"
            raise ConfigError(f"bits={self.bits}, distance={self.distance}, cosine={self.cosine}: {limits}")
        if not (self.exact or self.near or self.embedding):
            raise ConfigError("nothing to compare by; choose exact, near or an embedding")


def make_pairs(
    where: int, train: NDArray[np.int64], test: NDArray[np.int64], kind: "int | NDArray[np.int64]", distance: object
) -> PairArray:
    """Builds an array of pairs from its columns."""
    pairs = np.zeros(len(train), PAIR)
    pairs["set"], pairs["train"], pairs["test"], pairs["kind"], pairs["distance"] = where, train, test, kind, distance
    return pairs


def merge_pairs(parts: Sequence[PairArray]) -> PairArray:
    """Sorts all pairs and keeps each once, with its most certain kind, then its smallest distance."""
    pairs = np.concatenate([np.zeros(0, PAIR), *parts])
    order = ("distance", "kind", "test", "train", "set")  # the last key is the primary one
    pairs = pairs[np.lexsort([pairs[name] for name in order])]
    return pairs[fp.is_first(np.stack([pairs[name].astype(np.int64) for name in ("set", "train", "test")]))]


def find_groups(length: int, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Finds the lowest number in the group of each of `length` items [N]. Each (one, other) is in one group."""
    root = np.arange(length)
    while True:
        low, new = np.minimum(root[one], root[other]), root.copy()
        np.minimum.at(new, np.concatenate([one, other]), np.concatenate([low, low]))
        new = new[new]
        if np.array_equal(new, root):
            return root
        root = new


def match_all(
    block: int, blocks: Sequence[BlockFiles], within: bool, match: Callable[[int, int, int], PairArray]
) -> PairArray:
    """Matches one block of the training set, source 0, against all blocks of the other sources and, with `within`,
    against its earlier blocks and itself. `match` takes the source, the block and the number of the set."""
    others = [(s, b, s - 1) for s in range(1, len(blocks)) for b in range(len(blocks[s]))]
    others += [(0, b, WITHIN) for b in range(block + 1)] if within else []
    return merge_pairs([shift_pairs(match(s, b, where), block, b, blocks[0].size) for s, b, where in others])


def shift_pairs(pairs: PairArray, train: int, test: int, size: int) -> PairArray:
    """Changes indices within blocks to indices within sets, in place. Within one set the later image is train."""
    pairs["train"] += train * size
    pairs["test"] += test * size
    inner = pairs["set"] == WITHIN
    later, earlier = np.maximum(pairs["train"], pairs["test"]), np.minimum(pairs["train"], pairs["test"])
    pairs["train"], pairs["test"] = np.where(inner, later, pairs["train"]), np.where(inner, earlier, pairs["test"])
    return pairs[~inner | (pairs["train"] != pairs["test"])]


def match_blocks(train: Fingerprints, test: Fingerprints, rule: MatchRule, where: int) -> PairArray:
    """Finds the pairs of two blocks, as indices within the blocks."""
    found: list[PairArray] = []
    if rule.exact:
        mine, theirs = (np.flatnonzero(prints.state != UNREADABLE) for prints in (train, test))
        i, j = fp.find_equal(train.digests[mine], test.digests[theirs])
        found.append(make_pairs(where, mine[i], theirs[j], EXACT, 0.0))
        j, i = fp.find_equal(test.digests[theirs], train.digests[mine])
        found.append(make_pairs(where, mine[i], theirs[j], EXACT, 0.0))
    if rule.near:
        found.append(match_near(train, test, rule, where))
    return merge_pairs(found)


def match_near(train: Fingerprints, test: Fingerprints, rule: MatchRule, where: int) -> PairArray:
    """Finds near pairs: hashes propose, thumbnails decide. One image represents all with the same pixels."""
    mine, theirs = find_representatives(train), find_representatives(test)
    i, j, *views = fp.find_similar(train.hashes[mine], test.hashes[theirs], rule.bits)
    found = np.stack([mine[i], theirs[j], *views])
    if rule.exact:
        found = found[:, train.digests[found[0]] != test.digests[found[1]]]
    i, j, _, mirrored, _ = found
    distance = measure_candidates(train, test, found)
    same = distance <= rule.distance
    kind = np.where(mirrored == 1, FLIPPED, NEAR)
    pairs = merge_pairs([make_pairs(where, i[same], j[same], kind[same], distance[same])])
    copies = [copy_to_equals(pairs, "train", train, mine), copy_to_equals(pairs, "test", test, theirs)]
    return merge_pairs([pairs, *copies])


def find_representatives(prints: Fingerprints) -> NDArray[np.int64]:
    """Returns the comparable images, without those whose pixels occur earlier in the block."""
    comparable = prints.comparable
    _, first = np.unique(prints.digests[comparable], return_index=True)
    return comparable[np.sort(first)]


def copy_to_equals(found: PairArray, side: str, prints: Fingerprints, chosen: NDArray[np.int64]) -> PairArray:
    """Repeats the pairs of each representative for the images with the same pixels."""
    others = np.setdiff1d(prints.comparable, chosen)
    if not (len(others) and len(found)):
        return found[:0]
    i, first = fp.find_equal(prints.digests[others], prints.digests[chosen])
    parts = [found[:0]]
    for one, representative in zip(others[i], chosen[first], strict=True):
        parts.append(found[found[side] == representative])
        parts[-1][side] = one
    return np.concatenate(parts)


def measure_candidates(train: Fingerprints, test: Fingerprints, found: NDArray[np.int64]) -> NDArray[np.float64]:
    """Measures the distance of each candidate after aligning one image with the window of the other that the hash
    found. If the whole images matched, both directions are tried, because either may be a part of the other."""
    i, j, view, mirrored, _ = found
    out, windows = np.full(len(i), np.inf), np.array(WINDOWS)
    for flip in (0, 1):
        for ours in (True, False):  # the window is in the train image, or in the test image
            at = np.flatnonzero((mirrored == flip) & ((view == 0) | ((view < VIEWS) == ours)))
            mine, theirs = train.small[i[at]], test.small[j[at]]
            theirs = theirs.mirrored if flip else theirs
            whole, part = (mine, theirs) if ours else (theirs, mine)
            out[at] = np.minimum(out[at], measure_distances(whole, part, windows[view[at] % VIEWS]))
    return out


def write_embeddings(source: ImageDataset, embed: Embed, blocks: BlockFiles, block: int) -> None:
    """Writes the embeddings of a block as unit vectors [N, D]. An unreadable image gets zeros, which match nothing."""
    start, stop = blocks.span(block)
    vectors = np.zeros((stop - start, 0), np.float32)
    for low in range(start, stop, EMBED_BATCH):
        readable: dict[int, Image] = {}
        for index in range(low, min(stop, low + EMBED_BATCH)):
            with contextlib.suppress(BadImage):  # reported and counted with the fingerprints
                readable[index - start] = fp.decode(source, index)
        if not readable:
            continue
        found = np.asarray(embed(list(readable.values())), np.float32)
        if found.ndim != 2 or len(found) != len(readable) or not np.isfinite(found).all():
            wanted = f"it must return finite numbers [{len(readable)}, D]"
            raise DataError(f"embed returned {found.shape} for {len(readable)} images; {wanted}")
        if not vectors.shape[1]:
            vectors = np.zeros((stop - start, found.shape[1]), np.float32)
        length = np.sqrt((found.astype(np.float64) ** 2).sum(1, keepdims=True))
        vectors[list(readable)] = found / np.maximum(length, 1e-12)
    fp.write_arrays(blocks.path(block), {"vectors": vectors})


def load_vectors(blocks: BlockFiles, block: int) -> NDArray[np.float32]:
    return fp.read_arrays(blocks.path(block))["vectors"]


def match_embeddings(
    train: NDArray[np.float32], test: NDArray[np.float32], cosine: float, where: int, *, step: int = 2048
) -> PairArray:
    """Finds the pairs of two blocks whose cosine is at least `cosine`. Their distance is 1 - cosine."""
    found: list[PairArray] = []
    if not (train.shape[1] and test.shape[1]):  # no image of the block is readable
        return merge_pairs(found)
    for a in range(0, len(train), step):
        for b in range(0, len(test), step):
            i, j = np.nonzero(train[a : a + step] @ test[b : b + step].T >= cosine - SLACK)
            if len(i) > fp.CROWD:
                fault = f"{len(i):,} pairs of images have a cosine of at least {cosine}"
                raise DataError(f"{fault}, so the embedding does not distinguish them; raise the threshold")
            near = (train[a + i].astype(np.float64) * test[b + j].astype(np.float64)).sum(1)
            same = near >= cosine
            found.append(make_pairs(where, a + i[same], b + j[same], EMBEDDING, np.maximum(0.0, 1 - near[same])))
    return merge_pairs(found)
