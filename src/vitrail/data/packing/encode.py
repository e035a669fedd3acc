"""One sample on its way into a pack: its bytes as they are, or a smaller picture where a longest side is given."""

import io
import json
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import BadPicture
from vitrail.core.shapes import Pair
from vitrail.data.decode.picture import Picture
from vitrail.data.readers.shards.scan import MASKS
from vitrail.data.source import Source
from vitrail.data.targets import Masks

STARTS: Final = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II": "tif",
    b"MM": "tif",
    b"P": "ppm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What a sample becomes: a key and the members that go with it."""

    index: int
    key: str
    members: tuple[tuple[str, bytes], ...]  # suffix and bytes, the picture first
    reencoded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A sample that cannot be read, and why."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """Which pictures are made smaller, and how well JPEGs among them are kept. `strict` stops at one it cannot read."""

    max_side: int | None
    quality: int
    strict: bool

    def __call__(self, source: Source, index: int) -> Packed | Left:
        """Every picture is decoded, whether it changes or not: what is in a pack has been read once. So is its mask."""
        try:
            content = source.read(index)
            suffix, data, changed = self.picture(content)
            size = Picture(content).size
            masks = ((MASKS[0], self.mask(source, index, size, data)),) if source.pixel_classes else ()
        except (BadPicture, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if self.strict:
                raise BadPicture(f"{source.name(index)}: {reason}") from None
            return Left(index=index, name=source.name(index), reason=reason)
        members = ((suffix, data), *described(source, index), *masks)
        return Packed(index=index, key=key(index, source.name(index)), members=members, reencoded=changed)

    def picture(self, data: "bytes | NDArray[np.uint8]") -> tuple[str, bytes, bool]:
        """Suffix, bytes, and whether it was made smaller. Pixels become PNG."""
        picture = Picture(data)
        longest = max(picture.size)
        small = self.max_side is None or longest <= self.max_side
        if isinstance(data, np.ndarray):
            return ("png", encoded(Image.fromarray(data), "png"), False) if small else self.smaller(picture, "png")
        suffix = next((suffix for start, suffix in STARTS.items() if data.startswith(start)), None)
        if small and suffix is None:  # a format without a name here
            return "png", encoded(picture.rgb(), "png"), False
        if small and suffix:
            picture.rgb(scale=8)  # a JPEG is read to its end for a third of the time
            return suffix, data, False
        lossy = suffix == "jpg" or (suffix == "webp" and data[12:16] != b"VP8L")
        return self.smaller(picture, "jpg" if lossy else "png")

    def mask(self, source: Source, index: int, size: Pair, packed: bytes) -> bytes:
        """The mask of a sample, whose image had `size`, as PNG: as it is, or made smaller with the image."""
        indices = Masks().read(source, index, size).numpy()
        height, width = Picture(packed).size
        if indices.shape != (height, width):
            return encoded(Image.fromarray(indices).resize((width, height), Image.Resampling.NEAREST), "png")
        data = source.mask(index)
        return data if isinstance(data, bytes) else encoded(Image.fromarray(data), "png")

    def smaller(self, picture: Picture, suffix: str) -> tuple[str, bytes, bool]:
        """Upright RGB with its longer side at the limit. What was lossless stays so."""
        assert self.max_side is not None
        longest = max(picture.size)
        scale = next((scale for scale in (8, 4, 2) if longest >= 2 * scale * self.max_side), 1)
        height, width = (max(1, round(side * self.max_side / longest)) for side in picture.size)
        pixels = picture.rgb(scale).resize((width, height), Image.Resampling.LANCZOS)
        return suffix, encoded(pixels, suffix, self.quality), True


def encoded(pixels: Image.Image, suffix: str, quality: int = 0) -> bytes:
    buffer = io.BytesIO()
    if suffix == "jpg":
        pixels.save(buffer, "JPEG", quality=quality)
    else:
        pixels.save(buffer, "PNG")
    return buffer.getvalue()


def described(source: Source, index: int) -> tuple[tuple[str, bytes], ...]:
    """The labels: a number in KEY.cls, or a list in KEY.json where samples may have several."""
    labels = source.labels[index]
    if source.labels.multiple:
        return (("json", json.dumps({"labels": list(labels)}).encode()),)
    return (("cls", str(labels[0]).encode()),) if labels else ()


def key(index: int, name: str) -> str:
    """000000123-cat_12: the place in the source, and as much of its name there as a person knows it by.

    Under 100 bytes, so that it fits every kind of tar file; without dots, for those end a key.
    """
    parts = [part for part in re.split(r"[/\\]", name.rpartition(":")[2])[-2:] if part not in ("", ".", "..")]
    words = re.sub(r"\.\w{2,4}$", "", re.sub(r"^\d{9}-", "", "_".join(parts)))
    plain = "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in words).strip("_")
    short = plain.encode()[-60:].decode("utf-8", "ignore")
    return f"{index:09d}-{short}" if short else f"{index:09d}"
