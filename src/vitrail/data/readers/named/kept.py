"""What it takes long to find out about large files, kept in the cache until one of the files changes."""

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.core.storage import cache_folder, replacing

Tables = dict[str, NDArray[np.generic]]


def kept(kind: str, files: Sequence[Path], make: Callable[[], Tables]) -> Tables:
    """The arrays that `make` gives, from the cache where the files have the names, sizes and times that they had."""
    digest = sha256(f"{kind} 1".encode())
    for file in files:
        status = file.stat()
        digest.update(os.fsencode(file.absolute()) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    path = cache_folder("index") / f"{kind}-{digest.hexdigest()[:32]}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except Exception:  # not there, or damaged: made anew, and nothing is lost but time
        tables = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **tables)
    except OSError:
        pass  # a cache that cannot be written costs time, too
    return tables
