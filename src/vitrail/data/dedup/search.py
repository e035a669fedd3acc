"""One block of TRAIN against one block of another set, or of its own."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError
from vitrail.data.dedup.exact import equal
from vitrail.data.dedup.pairs import EXACT, FLIPPED, NEAR, Pairs, joined, pairs
from vitrail.data.dedup.perceptual import VIEWS, WINDOWS, closest
from vitrail.data.dedup.prints import UNREADABLE, Prints
from vitrail.data.dedup.registration import distances


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What counts as the same picture. The defaults miss few copies and, on photographs, accuse no strangers."""

    exact: bool = True  # the same decoded pixels
    near: bool = True  # by perceptual hash: re-encoded, resized, mirrored, with up to a tenth of a side cut away
    bits: int = 13  # of 63: how far hashes may differ for two pictures to be looked at
    distance: float = 0.04  # 1 - correlation of the thumbnails, up to which they are the same
    cosine: float = 0.95  # of embeddings, from which on they are the same
    embedding: str = ""  # what made the embeddings, where some were given

    def __post_init__(self) -> None:
        if not 0 <= self.bits < 32:
            raise ConfigError(f"bits={self.bits}: of 63, so 0 to 31")
        if not 0 < self.distance < 1:
            raise ConfigError(f"distance={self.distance}: between 0 and 1")
        if not 0 < self.cosine <= 1:
            raise ConfigError(f"cosine={self.cosine}: above 0 and at most 1")
        if not (self.exact or self.near or self.embedding):
            raise ConfigError("nothing to compare by: exact, near or an embedding")


def compare(train: Prints, test: Prints, method: Method, where: int) -> Pairs:
    """The pairs of two blocks, with numbers that count from the beginning of the blocks."""
    found: list[Pairs] = []
    if method.exact:
        mine, theirs = (np.flatnonzero(prints.state != UNREADABLE) for prints in (train, test))
        i, j = equal(train.digests[mine], test.digests[theirs])
        found.append(pairs(where, mine[i], theirs[j], EXACT, 0.0))
        j, i = equal(test.digests[theirs], train.digests[mine])
        found.append(pairs(where, mine[i], theirs[j], EXACT, 0.0))
    if method.near:
        found.append(near(train, test, method, where))
    return joined(found)


def near(train: Prints, test: Prints, method: Method, where: int) -> Pairs:
    """Hashes propose, thumbnails decide. Of pictures with the same pixels one speaks for all."""
    mine, theirs = firsts(train), firsts(test)
    i, j, view, mirrored, _ = closest(train.hashes[mine], test.hashes[theirs], method.bits)
    i, j = mine[i], theirs[j]
    differ = train.digests[i] != test.digests[j] if method.exact else np.ones(len(i), bool)
    i, j, view, mirrored = i[differ], j[differ], view[differ], mirrored[differ]
    distance = checked(train, test, i, j, view, mirrored)
    same = distance <= method.distance
    kind = np.where(mirrored == 1, FLIPPED, NEAR)
    found = joined([pairs(where, i[same], j[same], kind[same], distance[same])])
    return joined([found, spread(found, "train", train, mine), spread(found, "test", test, theirs)])


def firsts(prints: Prints) -> NDArray[np.int64]:
    """The comparable pictures, without those whose pixels have been there before in the block."""
    comparable = prints.comparable
    _, first = np.unique(prints.digests[comparable], return_index=True)
    return comparable[np.sort(first)]


def spread(found: Pairs, side: str, prints: Prints, spoke: NDArray[np.int64]) -> Pairs:
    """The same pairs for the other pictures with the same pixels as the one that spoke for them."""
    silent = np.setdiff1d(prints.comparable, spoke)
    if not (len(silent) and len(found)):
        return found[:0]
    i, first = equal(prints.digests[silent], prints.digests[spoke])
    parts = [found[:0]]
    for one, spokesman in zip(silent[i], spoke[first], strict=True):
        made = found[found[side] == spokesman]
        made[side] = one
        parts.append(made)
    return np.concatenate(parts)


def checked(
    train: Prints,
    test: Prints,
    i: NDArray[np.int64],
    j: NDArray[np.int64],
    view: NDArray[np.int64],
    mirrored: NDArray[np.int64],
) -> NDArray[np.float64]:
    """How far the candidates are apart once the one is laid on the window of the other that the hash found. Where the
    hash saw no window, either may turn out to be a part of the other."""
    out = np.full(len(i), np.inf)
    windows = np.array(WINDOWS)
    for flip in (0, 1):
        for ours in (True, False):  # the window is in the train picture, or in the test picture
            at = np.flatnonzero((mirrored == flip) & ((view == 0) | ((view < VIEWS) == ours)))
            mine, theirs = train.small[i[at]], test.small[j[at]]
            theirs = theirs.mirrored if flip else theirs
            whole, part = (mine, theirs) if ours else (theirs, mine)
            out[at] = np.minimum(out[at], distances(whole, part, windows[view[at] % VIEWS]))
    return out
