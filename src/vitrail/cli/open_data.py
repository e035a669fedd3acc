"""DATA, as the commands read it. Without torch, which takes long to load."""

from pathlib import Path

from vitrail.cli.progress import bars
from vitrail.data.collection import Collection, open_collection


def open_data(text: str, *, download: bool = False) -> Collection:
    """A collection by path or name; what is missing of a named one is fetched where that was asked for."""
    with bars(bytes_=True) as progress:
        progress(f"reading {Path(text).name or text}", 0, None)
        return open_collection(text, download=download, progress=progress)
