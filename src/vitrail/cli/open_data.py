"""How commands read DATA, without importing torch, which is slow to load."""

from pathlib import Path

from vitrail.cli.progress import bars
from vitrail.data.collection import Collection, open_collection


def open_data(text: str, *, download: bool = False) -> Collection:
    """Opens a collection by path or name. With `download`, missing files of a named set are fetched."""
    with bars(bytes_=True) as progress:
        progress(f"reading {Path(text).name or text}", 0, None)
        return open_collection(text, download=download, progress=progress)
