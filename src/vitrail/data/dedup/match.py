"""One block of TRAIN against one block of another set, or of its own.

Images that a network finds alike: cosines of embeddings, block by block. Which network is the caller's affair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup.align_pair import distances
from vitrail.data.dedup.block_files import (
    EMBEDDING,
    EXACT,
    FLIPPED,
    NEAR,
    Blocks,
    Pairs,
    joined,
    pairs,
    read_arrays,
    write_arrays,
)
from vitrail.data.dedup.fingerprints import UNREADABLE, Prints, decoded
from vitrail.data.dedup.perceptual_hash import VIEWS, WINDOWS, closest, equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What counts as the same image. The defaults miss few copies and, on photographs, accuse no strangers."""

    exact: bool = True  # the same decoded pixels
    near: bool = True  # by perceptual hash: re-encoded, resized, mirrored, with up to a tenth of a side cut away
    bits: int = 13  # of 63: how far hashes may differ for two images to be looked at
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
    """Hashes propose, thumbnails decide. Of images with the same pixels one speaks for all."""
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
    """The comparable images, without those whose pixels have been there before in the block."""
    comparable = prints.comparable
    _, first = np.unique(prints.digests[comparable], return_index=True)
    return comparable[np.sort(first)]


def spread(found: Pairs, side: str, prints: Prints, spoke: NDArray[np.int64]) -> Pairs:
    """The same pairs for the other images with the same pixels as the one that spoke for them."""
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
        for ours in (True, False):  # the window is in the train image, or in the test image
            at = np.flatnonzero((mirrored == flip) & ((view == 0) | ((view < VIEWS) == ours)))
            mine, theirs = train.small[i[at]], test.small[j[at]]
            theirs = theirs.mirrored if flip else theirs
            whole, part = (mine, theirs) if ours else (theirs, mine)
            out[at] = np.minimum(out[at], distances(whole, part, windows[view[at] % VIEWS]))
    return out


Embed: TypeAlias = Callable[[list[Image]], NDArray[np.float32]]  # B images to [B, D]

AT_ONCE: Final = 64  # images a call
SLACK: Final = 1e-4  # a matrix product rounds differently in another block; what is near the border is computed again
CROWD: Final = 1_000_000


def embeddings_of(prints: Blocks, folder: Path, name: str) -> Blocks:
    """Where the embeddings belong of the source that has these prints."""
    made = sha256(name.encode()).hexdigest()[:12]
    return Blocks(folder=folder / f"{prints.folder.name}-{made}", length=prints.length, size=prints.size)


def write_embeddings(source: ImageDataset, embed: Embed, blocks: Blocks, block: int) -> None:
    """Embeds a block: unit vectors [N, D]; a row of zeros, which is near nothing, where an image cannot be read."""
    start, stop = blocks.span(block)
    rows: list[NDArray[np.float32]] = []
    for low in range(start, stop, AT_ONCE):
        readable: dict[int, Image] = {}
        high = min(stop, low + AT_ONCE)
        for index in range(low, high):
            try:
                readable[index - low] = decoded(source, index)
            except BadImage:  # named and counted with the prints
                continue
        rows.append(unit(embed, readable, high - low))
    width = max(row.shape[1] for row in rows)
    whole = np.concatenate([row if row.shape[1] else np.zeros((len(row), width), np.float32) for row in rows])
    write_arrays(blocks.path(block), {"vectors": whole})


def unit(embed: Embed, pictures: dict[int, Image], count: int) -> NDArray[np.float32]:
    """[count, D] with the embedding of each image in its row, at length 1."""
    if not pictures:
        return np.zeros((count, 0), np.float32)
    made = np.asarray(embed(list(pictures.values())), np.float32)
    if made.ndim != 2 or len(made) != len(pictures) or not np.isfinite(made).all():
        raise DataError(
            f"embed returned {made.shape} for {len(pictures)} images; it should return finite numbers "
            f"[{len(pictures)}, D]"
        )
    out = np.zeros((count, made.shape[1]), np.float32)
    length = np.sqrt((made.astype(np.float64) ** 2).sum(1, keepdims=True))
    out[list(pictures)] = made / np.maximum(length, 1e-12)
    return out


def load_vectors(blocks: Blocks, block: int) -> NDArray[np.float32]:
    return read_arrays(blocks.path(block))["vectors"]


def alike(
    train: NDArray[np.float32], test: NDArray[np.float32], cosine: float, where: int, *, step: int = 2048
) -> Pairs:
    """The pairs of two blocks whose cosine is at least `cosine`; the distance is 1 - cosine."""
    found: list[Pairs] = []
    if not (train.shape[1] and test.shape[1]):  # no image of the block could be read
        return joined(found)
    for a in range(0, len(train), step):
        for b in range(0, len(test), step):
            i, j = np.nonzero(train[a : a + step] @ test[b : b + step].T >= cosine - SLACK)
            if len(i) > CROWD:
                raise DataError(
                    f"{len(i):,} pairs of images have a cosine of at least {cosine}: the embedding does not tell "
                    "them apart; raise the threshold"
                )
            product = train[a + i].astype(np.float64) * test[b + j].astype(np.float64)
            near = product.sum(1)
            same = near >= cosine
            distance = np.maximum(0.0, 1 - near[same])
            found.append(pairs(where, a + i[same], b + j[same], EMBEDDING, distance))
    return joined(found)
