"""Pictures that a network finds alike: cosines of embeddings, block by block. Which network is the caller's affair."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from vitrail.core.errors import BadPicture, DataError
from vitrail.data.dedup.blocks import Blocks, read_arrays, write_arrays
from vitrail.data.dedup.pairs import EMBEDDING, Pairs, joined, pairs
from vitrail.data.dedup.prints import decoded
from vitrail.data.source import Source

Embed: TypeAlias = Callable[[list[Image]], NDArray[np.float32]]  # B pictures to [B, D]

AT_ONCE: Final = 64  # pictures a call
SLACK: Final = 1e-4  # a matrix product rounds differently in another block; what is near the border is computed again
CROWD: Final = 1_000_000


def embeddings_of(prints: Blocks, folder: Path, name: str) -> Blocks:
    """Where the embeddings belong of the source that has these prints."""
    made = sha256(name.encode()).hexdigest()[:12]
    return Blocks(folder=folder / f"{prints.folder.name}-{made}", length=prints.length, size=prints.size)


def write_embeddings(source: Source, embed: Embed, blocks: Blocks, block: int) -> None:
    """Embeds a block: unit vectors [N, D]; a row of zeros, which is near nothing, where a picture cannot be read."""
    start, stop = blocks.span(block)
    rows: list[NDArray[np.float32]] = []
    for low in range(start, stop, AT_ONCE):
        readable: dict[int, Image] = {}
        high = min(stop, low + AT_ONCE)
        for index in range(low, high):
            try:
                readable[index - low] = decoded(source, index)
            except BadPicture:  # named and counted with the prints
                continue
        rows.append(unit(embed, readable, high - low))
    width = max(row.shape[1] for row in rows)
    whole = np.concatenate([row if row.shape[1] else np.zeros((len(row), width), np.float32) for row in rows])
    write_arrays(blocks.path(block), {"vectors": whole})


def unit(embed: Embed, pictures: dict[int, Image], count: int) -> NDArray[np.float32]:
    """[count, D] with the embedding of each picture in its row, at length 1."""
    if not pictures:
        return np.zeros((count, 0), np.float32)
    made = np.asarray(embed(list(pictures.values())), np.float32)
    if made.ndim != 2 or len(made) != len(pictures) or not np.isfinite(made).all():
        raise DataError(
            f"embed returned {made.shape} for {len(pictures)} pictures; it should return finite numbers "
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
    if not (train.shape[1] and test.shape[1]):  # no picture of the block could be read
        return joined(found)
    for a in range(0, len(train), step):
        for b in range(0, len(test), step):
            i, j = np.nonzero(train[a : a + step] @ test[b : b + step].T >= cosine - SLACK)
            if len(i) > CROWD:
                raise DataError(
                    f"{len(i):,} pairs of pictures have a cosine of at least {cosine}: the embedding does not tell "
                    "them apart; raise the threshold"
                )
            product = train[a + i].astype(np.float64) * test[b + j].astype(np.float64)
            near = product.sum(1)
            same = near >= cosine
            distance = np.maximum(0.0, 1 - near[same])
            found.append(pairs(where, a + i[same], b + j[same], EMBEDDING, distance))
    return joined(found)
