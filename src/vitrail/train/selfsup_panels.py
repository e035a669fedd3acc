"""What the report of a run without labels shows of its pictures: what they are rebuilt to, and which of them are near
each other to the network."""

from collections.abc import Sequence
from typing import Final

from vitrail.core.errors import VitrailError
from vitrail.data.source import Source
from vitrail.report.page import Section
from vitrail.report.panels import Mood, Picture
from vitrail.report.strips import Strip, Strips, pane
from vitrail.train.unlabelled import Seen

CLOSE: Final = 0.995  # from here on three digits would all be the same


def panels(seen: Seen, split: str, classes: Sequence[str]) -> list[Section]:
    """Reconstructions, where there are some, and neighbours."""
    found: list[Section] = []
    if seen.rebuilt:
        found.append(reconstructions(seen, split))
    if seen.company:
        found.append(neighbours(seen, split, classes))
    return found


def reconstructions(seen: Seen, split: str) -> Strips:
    names = ("picture", "as seen", "rebuilt")
    return Strips(
        title=f"Reconstructions on {split}",
        lead="Each picture, what the network saw of it, and what it made of that; what it saw is left as it is.",
        strips=[
            Strip(panes=[pane(picture, name) for picture, name in zip(three, names, strict=True)])
            for three in seen.rebuilt
        ],
        sides=names,
    )


def neighbours(seen: Seen, split: str, classes: Sequence[str]) -> Strips:
    """Each picture beside the training pictures that are nearest to it, framed by whether the label is the same."""
    strips: list[Strip] = []
    framed = False
    for query in seen.company:
        name = label(seen.source, query.sample, classes)
        panes = [pane(picture(seen.source, query.sample), name or "a picture")]
        right = [one.same for one in query.neighbours if one.same is not None]
        for one in query.neighbours:
            mood: Mood = "" if one.same is None else "right" if one.same else "wrong"
            called = label(seen.beside, one.sample, classes)
            caption = f"{one.similarity:.3f}" if one.similarity < CLOSE else f"{one.similarity:.5f}"
            panes.append(pane(picture(seen.beside, one.sample), called or "a neighbour", caption=caption, mood=mood))
        framed = framed or bool(right)
        strips.append(Strip(panes=panes, caption=name, note=f"{sum(right)} of {len(right)} the same" if right else ""))
    frames = " A green frame is the same label, a red one another." if framed else ""
    return Strips(
        title=f"Nearest neighbours of {split}",
        lead=f"Pictures beside the training pictures whose features are nearest, with their cosine.{frames}",
        strips=strips,
        apart=True,
    )


def label(source: Source, sample: int, classes: Sequence[str]) -> str:
    return ", ".join(classes[at] for at in source.labels[sample] if at < len(classes))


def picture(source: Source, sample: int) -> Picture | None:
    """None where it cannot be read any more."""
    try:
        return source.picture(sample).rgb()
    except VitrailError:
        return None
