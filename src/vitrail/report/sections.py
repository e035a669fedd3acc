"""Parts of a page that are not charts: big numbers, how a run stands, images with captions, and details that open.

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
    """A number, what it is, and a little more about it."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Numbers side by side."""

    tiles: Sequence[Tile]
    title: str = ""
    template: str = field(default="tiles.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How a thing stands: a word with its colour, a sentence, lines below it, a command to copy, and how far it is from
    0 to 1 where that is known."""

    state: State
    text: str = ""
    lines: Sequence[str] = ()
    asks: str = ""  # what the command is for
    command: str = ""
    progress: float | None = None
    template: str = field(default="status.html", init=False)

    @property
    def filled(self) -> float:
        """Per cent of the bar."""
        return round(100 * min(max(self.progress or 0.0, 0.0), 1.0), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """Small images with captions."""

    title: str
    shots: Sequence[Shot]
    lead: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Galleries:
    """Some of them side by side."""

    galleries: Sequence[Gallery]
    template: str = field(default="galleries.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Names and values, side by side where there is room."""

    title: str
    rows: Sequence[tuple[str, str]]
    template: str = field(default="facts.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetailsSection:
    """What few want to see at once: opens at a click, without a script."""

    title: str
    groups: Sequence[Facts]
    hint: str = ""
    template: str = field(default="details.html", init=False)


def make_shot(image: ImageLike | None, caption: str, *, mood: Mood = "", side: int = 128) -> Shot:
    """An image made small. A second line of the caption is the quieter one."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(np.ascontiguousarray(image))
    text, _, note = caption.partition("\n")
    return Shot(picture="" if image is None else to_data_uri(image, side), caption=text, note=note, mood=mood)


SIDE, LARGE_SIDE = 96, 224  # pixels of a pane, and of a large one


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRow:
    """Panes that belong together, left to right; `note` is set quietly next to the caption."""

    panes: Sequence[Shot]  # their captions are for those who do not see them, their notes stand below them
    caption: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRows:
    """Strips side by side where there is room. `sides` names the panes of every strip; with `apart` the first one
    stands by itself, what the others are next to; `large` panes have twice the room."""

    title: str
    strips: Sequence[ImageRow]
    lead: str = ""
    sides: Sequence[str] = ()
    apart: bool = False
    large: bool = False
    template: str = field(default="image_rows.html", init=False)


def make_pane(image: ImageLike | None, name: str, *, caption: str = "", mood: Mood = "", side: int = SIDE) -> Shot:
    """An image made small, with a word below it where it has one."""
    return make_shot(image, f"{name}\n{caption}", mood=mood, side=side)
