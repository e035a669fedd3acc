"""Sections of a page other than charts: large numbers, a run's status, images with captions, and collapsible details.

ImageRows(title="Reconstructions", sides=("as it is", "as seen", "rebuilt"), strips=[ImageRow(panes=...)])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.report.page import Mood, Shot, to_data_uri

State: TypeAlias = Literal["running", "done", "interrupted", "diverged", "failed"]
ImageLike: TypeAlias = Image.Image | NDArray[np.uint8]  # an array is [H, W, 3] or [H, W]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A large number, its name, and a short note."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Large numbers side by side."""

    tiles: Sequence[Tile]
    title: str = ""
    template: str = field(default="tiles.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A status: a word with its colour, a sentence, lines below it, a command to copy, and the progress from 0 to 1 if
    it is known."""

    state: State
    text: str = ""
    lines: Sequence[str] = ()
    asks: str = ""  # what the command is for
    command: str = ""
    progress: float | None = None
    template: str = field(default="status.html", init=False)

    @property
    def filled(self) -> float:
        """The progress in per cent."""
        return round(100 * min(max(self.progress or 0.0, 0.0), 1.0), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """Small images with captions."""

    title: str
    shots: Sequence[Shot]
    lead: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Galleries:
    """Galleries side by side."""

    galleries: Sequence[Gallery]
    template: str = field(default="galleries.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Names and values, side by side if there is space."""

    title: str
    rows: Sequence[tuple[str, str]]
    template: str = field(default="facts.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetailsSection:
    """Collapsible details that open at a click, without a script."""

    title: str
    groups: Sequence[Facts]
    hint: str = ""
    template: str = field(default="details.html", init=False)


def make_shot(image: ImageLike | None, caption: str, *, mood: Mood = "", side: int = 128) -> Shot:
    """A small version of an image. The second line of its caption is less prominent."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(np.ascontiguousarray(image))
    text, _, note = caption.partition("\n")
    return Shot(picture="" if image is None else to_data_uri(image, side), caption=text, note=note, mood=mood)


SIDE, LARGE_SIDE = 96, 224  # pixels of a pane, and of a large one


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRow:
    """Panes that belong together, left to right; `note` is a less prominent text next to the caption."""

    panes: Sequence[Shot]  # their captions are for screen readers, their notes are shown below them
    caption: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRows:
    """Rows of panes, side by side if there is space. `sides` names the panes of every row. With `apart` the first pane
    is set apart, for comparison with the others; `large` panes are about twice as wide."""

    title: str
    strips: Sequence[ImageRow]
    lead: str = ""
    sides: Sequence[str] = ()
    apart: bool = False
    large: bool = False
    template: str = field(default="image_rows.html", init=False)


def make_pane(image: ImageLike | None, name: str, *, caption: str = "", mood: Mood = "", side: int = SIDE) -> Shot:
    """A small version of an image, with an optional word below it."""
    return make_shot(image, f"{name}\n{caption}", mood=mood, side=side)
