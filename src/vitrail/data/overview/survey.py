"""Looks at many samples, by header or by decoding them whole, here or in several processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

import numpy as np

from vitrail.core.errors import BadPicture, WorkerDied
from vitrail.data.decode.picture import Picture
from vitrail.data.source import Source
from vitrail.data.targets import Masks

CHUNK: Final = 32
HERE: Final = 256  # so few samples are not worth starting processes for


@dataclass(frozen=True, slots=True)
class Seen:
    """What one sample turned out to be; `reason` says why it is no picture."""

    index: int
    height: int = 0
    width: int = 0
    format: str = ""  # JPEG RGB, PNG P, pixels L
    bytes: int = 0
    reason: str = ""


def see(source: Source, index: int, *, decode: bool) -> Seen:
    """One sample by its header and, with `decode`, all of its pixels and its mask."""
    try:
        data = source.read(index)
        picture = Picture(data)
        kind = f"{picture.image.format or 'pixels'} {picture.image.mode}"
        if decode:
            picture.rgb()
            if source.pixel_classes:
                Masks().read(source, index, picture.size)
    except BadPicture as error:
        return Seen(index, reason=str(error))
    except OSError as error:
        return Seen(index, reason=error.strerror or str(error))
    height, width = picture.size
    return Seen(index, height, width, kind, data.nbytes if isinstance(data, np.ndarray) else len(data))


def survey(
    source: Source,
    indices: Sequence[int],
    *,
    decode: bool = False,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Seen]:
    """Looks at the samples in order. `workers` is the number of processes to decode with, by default one a core;
    `progress` hears how many more are done."""
    workers = cores() if workers is None else workers
    if not decode or workers < 2 or len(indices) <= HERE:
        for index in indices:
            yield see(source, index, decode=decode)
            if progress is not None:
                progress(1)
        return
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    done = 0
    # Processes are spawned: a fork beside threads may hang.
    with ProcessPoolExecutor(workers, get_context("spawn"), start, (source, decode)) as pool:
        try:
            for found in pool.map(see_all, chunks):
                yield from found
                done += len(found)
                if progress is not None:
                    progress(len(found))
        except BrokenProcessPool:
            near = ", ".join(source.name(index) for index in indices[done : done + 3])
            raise WorkerDied(
                f"a process that decodes pictures was killed, by lack of memory perhaps, soon after {near}; "
                f"try --workers 1"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Here:
    """The source of a process in the pool."""

    source: Source
    decode: bool


def start(source: Source, decode: bool) -> None:
    Here.source, Here.decode = source, decode


def see_all(indices: Sequence[int]) -> list[Seen]:
    return [see(Here.source, index, decode=Here.decode) for index in indices]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
