"""Draws segments over an image from arrays: tinted, outlined, boxed and named.

    drawn = draw_segments(image, masks, choose_segment_colours(classes), names, scores)

Small segments are drawn over large ones. A name is placed inside its segment or at the corner of its box, wherever it
covers no other name; a name without a free place is left out.
"""

import colorsys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitrail.core.errors import ConfigError
from vitrail.report.contact_sheet import Bytes, fit_text, load_font, reads_white

Mask: TypeAlias = NDArray[np.bool_]  # [H, W]
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom in pixels

GOLDEN: Final = (5**0.5 - 1) / 2
KINDS: Final = ((0.74, 0.92), (0.85, 0.74))  # saturation and value; classes alternate between them
TINT: Final = 0.42  # opacity of a segment's colour
SHADES: Final = (0.0, 0.14, -0.14, 0.24, -0.22)  # of successive segments of a class, towards white or black
OUTLINE: Final = 1 / 280  # width, relative to the longer side
LETTERS: Final = (10, 26)  # least and greatest height of letters in pixels
PLACES: Final = 4096  # pixels of a segment to consider for placing its name


def pick_class_colour(index: int) -> Bytes:
    """The colour of a class by its index. Neighbouring indices have clearly different colours."""
    parts = colorsys.hsv_to_rgb((0.02 + (index + 1) * GOLDEN) % 1, *KINDS[index % 2])
    return tuple(round(255 * part) for part in parts)  # type: ignore[return-value]


def choose_segment_colours(classes: Iterable[int]) -> list[Bytes]:
    """Chooses a colour for each segment: that of its class, in a different shade for further segments of a class."""
    seen, out = Counter[int](), list[Bytes]()
    for index in classes:
        out.append(shade(pick_class_colour(index), SHADES[seen[index] % len(SHADES)]))
        seen[index] += 1
    return out


def choose_colours_alike(
    classes: Sequence[int], masks: Sequence[Mask], other_classes: Sequence[int], other_masks: Sequence[Mask]
) -> list[Bytes]:
    """Chooses colours for segments to match those that `choose_segment_colours` gives to other segments of the same
    image: a segment with an IoU above 0.5 with one of its class gets that one's colour."""
    theirs: list[Bytes] = choose_segment_colours(other_classes)
    out: list[Bytes | None] = [None] * len(classes)
    for at, (kind, mask) in enumerate(zip(classes, masks, strict=True)):
        for other_kind, other, colour in zip(other_classes, other_masks, theirs, strict=True):
            if kind == other_kind and 2 * (mask & other).sum() > (mask | other).sum():
                out[at] = colour
    for at, kind in enumerate(classes):
        shades = [shade(pick_class_colour(kind), amount) for amount in SHADES]
        out[at] = out[at] or next((colour for colour in shades if colour not in out), shades[0])
    return [colour for colour in out if colour is not None]


def shade(colour: Bytes, amount: float) -> Bytes:
    """Shifts a colour towards white, or towards black if the amount is negative."""
    red, green, blue = (round(one + (255 * (amount > 0) - one) * abs(amount)) for one in colour)
    return red, green, blue


class DrawnSegment(NamedTuple):
    """The bounding rectangle of a segment, and which of its pixels are inside the segment and on its edge."""

    part: tuple[slice, slice]
    inside: Mask
    edge: Mask
    area: int


def draw_segments(
    image: Image.Image,
    masks: Iterable[Mask] | None,
    colours: Sequence[Bytes],
    names: Sequence[str] = (),
    scores: Sequence[float] | None = None,
    boxes: Sequence[Box] | NDArray[np.floating[Any]] | None = None,
    letters: int = 0,
) -> Image.Image:
    """Draws N segments over a copy of an image, each in its colour.

    `masks` are N masks [H, W], of the image's size or of any other size, to which they are then resized; they are
    consumed one by one, so a generator may decode them. `boxes` are in pixels of the image; a box without a mask is
    tinted a little. Without `names` no text is drawn; `scores` are added to the names. `letters` is the height of the
    text in pixels; 0 chooses it by the size of the image.
    """
    if names and len(names) != len(colours):
        raise ConfigError(f"{len(names)} names for {len(colours)} segments; give one for each")
    side = max(image.size)
    stroke, letters = max(1, round(side * OUTLINE)), letters or int(np.clip(side // 38, *LETTERS))
    pixels = np.array(image.convert("RGB"), np.float32)
    segments = [None] * len(colours) if masks is None else [trace_mask(mask, image.size, stroke) for mask in masks]
    corners = [None] * len(colours) if boxes is None else [read_box(box) for box in boxes]
    areas = [segment.area if segment else measure_box(box) for segment, box in zip(segments, corners, strict=True)]
    order = sorted(range(len(colours)), key=lambda at: -areas[at])
    for at in order:
        paint_segment(pixels, segments[at], colours[at])
    done, taken = Image.fromarray(pixels.round().astype(np.uint8)), list[Box]()
    for at in order:
        if (box := corners[at]) is not None:
            done = draw_box(done, box, colours[at], stroke, tint=masks is None)
    for at in order if names else ():
        text = names[at] if scores is None else f"{names[at]} {scores[at]:.2f}"
        write_name(done, text, colours[at], list_places(segments[at], corners[at], letters), letters, taken)
    return done


def read_box(box: Box | NDArray[np.floating[Any]]) -> Box:
    left, top, right, bottom = map(float, box)
    return left, top, right, bottom


def measure_box(box: Box | None) -> float:
    """The area of a box in pixels."""
    return 0.0 if box is None else (box[2] - box[0]) * (box[3] - box[1])


def trace_mask(mask: Mask, size: tuple[int, int], stroke: int) -> DrawnSegment | None:
    """Fits a mask to an image of `size` (width, height), with an edge `stroke` pixels wide; None if it is empty."""
    if (mask.shape[1], mask.shape[0]) != size:  # thresholded at one half, so that an enlarged edge is smooth
        grey = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
        mask = np.asarray(grey) > 127
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not rows.size:
        return None
    part = slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)
    inside, core = mask[part], np.pad(mask[part], stroke)
    for _ in range(stroke):  # erosion: pixels whose four neighbours are inside, too
        core[1:-1, 1:-1] &= core[:-2, 1:-1] & core[2:, 1:-1] & core[1:-1, :-2] & core[1:-1, 2:]
    return DrawnSegment(part, inside, inside & ~core[stroke:-stroke, stroke:-stroke], int(inside.sum()))


def paint_segment(pixels: NDArray[np.float32], segment: DrawnSegment | None, colour: Bytes) -> None:
    """Tints a segment and draws its edge, in place."""
    if segment is None:
        return
    there, ink = pixels[segment.part], np.array(colour, np.float32)
    cover = np.where(segment.edge, np.float32(1), np.float32(TINT) * segment.inside)[..., None]
    there += cover * (ink - there)  # on all pixels: selecting those inside takes ten times as long


def draw_box(image: Image.Image, box: Box, colour: Bytes, stroke: int, *, tint: bool) -> Image.Image:
    """Draws the edge of a box, on its inner side; with `tint` also a light fill."""
    left, top, right, bottom = (round(corner) for corner in box)
    right, bottom = max(right - 1, left), max(bottom - 1, top)
    if tint:
        over = image.copy()
        ImageDraw.Draw(over).rectangle((left, top, right, bottom), colour)
        image = Image.blend(image, over, TINT / 3)
    ImageDraw.Draw(image).rectangle((left, top, right, bottom), outline=colour, width=stroke)
    return image


def list_places(segment: DrawnSegment | None, box: Box | None, letters: int) -> list[tuple[float, float, str]]:
    """Lists places for a name as x, y and Pillow's anchor, best first: at the upper corner of its box, above or inside;
    above a segment that is not much taller than the text; or on the pixels of the segment nearest to its middle, and
    to the middles of its upper and lower halves."""
    if box is not None:
        left, top, _, bottom = box
        return [(left, top, "lb"), (left, top, "lt"), (left, bottom, "lb"), (left, bottom, "lt")]
    if segment is None:
        return []
    rows, columns = (found[:: len(found) // PLACES + 1] for found in np.nonzero(segment.inside))
    upper, places = (segment.part[0].start, segment.part[1].start), list[tuple[float, float, str]]()
    if segment.inside.shape[0] < 3 * letters:
        places.append((upper[1] + segment.inside.shape[1] / 2, upper[0] - 1, "mb"))
    for share in (0.5, 0.25, 0.75):
        row, column = np.quantile(rows, share), columns.mean()
        at = int(((rows - row) ** 2 + (columns - column) ** 2).argmin())
        places.append((upper[1] + int(columns[at]), upper[0] + int(rows[at]), "mm"))
    return places


def write_name(
    image: Image.Image,
    text: str,
    colour: Bytes,
    places: Sequence[tuple[float, float, str]],
    letters: int,
    taken: list[Box],
) -> None:
    """Draws a name on a plate in its colour, at the first place that is inside the image and covers no other name."""
    width, height = image.size
    line = fit_text(text, letters, 0.6 * width)
    font, edge = load_font(letters, line), max(2, letters // 4)
    wide, tall = font.getlength(line) + 2 * edge, letters + 2 * edge - 1
    for x, y, anchor in places:
        left = min(max(x - (wide / 2 if anchor[0] == "m" else 0), 0), max(width - wide, 0))
        top = y - {"b": tall, "t": 0, "m": tall / 2}[anchor[1]]
        top = min(max(top, 0), max(height - tall, 0)) if anchor[1] == "m" else top
        plate = (left, top, left + wide, top + tall)
        if top >= 0 and plate[3] <= height and not any(boxes_meet(plate, other) for other in taken):
            draw, ground = ImageDraw.Draw(image), tuple(part / 255 for part in colour)
            draw.rounded_rectangle((left, top, plate[2] - 1, plate[3] - 1), edge, colour)
            ink = (255, 255, 255) if reads_white((ground[0], ground[1], ground[2])) else (16, 16, 20)
            draw.text((left + edge, top + tall / 2), line, ink, font, anchor="lm")
            taken.append(plate)
            return


def boxes_meet(one: Box, other: Box) -> bool:
    """Whether two boxes share more than an edge."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
