"""Strips of pictures: a picture beside others that belong to it, as panes in one lead.

Strips(title="Reconstructions", sides=("as it is", "as seen", "rebuilt"), strips=[strip([one, seen, rebuilt])])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from vitrail.report.page import data_uri
from vitrail.report.panels import Mood, Picture

SIDE = 96  # pixels of a pane


@dataclass(frozen=True, kw_only=True, slots=True)
class Pane:
    """A picture as a data URI, or empty where there is none to show, with a word below it where it has one."""

    picture: str
    name: str  # for those who do not see it
    caption: str = ""
    mood: Mood = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Panes that belong together, left to right; `note` is set quietly beside the caption."""

    panes: Sequence[Pane]
    caption: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strips:
    """Strips side by side where there is room. `sides` names the panes of every strip; with `apart` the first one
    stands by itself, what the others are beside."""

    title: str
    strips: Sequence[Strip]
    lead: str = ""
    sides: Sequence[str] = ()
    apart: bool = False
    template: str = field(default="strips.html", init=False)


def pane(picture: Picture | None, name: str, *, caption: str = "", mood: Mood = "") -> Pane:
    """A picture made small."""
    if isinstance(picture, np.ndarray):
        picture = Image.fromarray(np.ascontiguousarray(picture))
    return Pane(picture="" if picture is None else data_uri(picture, SIDE), name=name, caption=caption, mood=mood)
