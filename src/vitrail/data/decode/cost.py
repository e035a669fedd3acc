"""What decoding takes, counted before it begins: the most bytes that are in memory at once, up to upright RGB pixels.

Pillow has 4 bytes a pixel whatever the mode, once for what it decodes, once for RGB and once more for what is turned.
libwebp adds two canvases of 4 bytes and a copy, a progressive JPEG its coefficients. Measured by the resident memory.
"""

from typing import Final

from vitrail.core.errors import BadPicture

USUAL: Final = 12  # bytes a pixel
# Formats whose decoders keep more; one that is not known counts as much.
MORE: Final = {"TIFF": 16, "WEBP": 20, "AVIF": 24, "HEIC": 24}
LIGHT: Final = frozenset({"JPEG", "PNG", "GIF", "BMP", "PPM"})
HEAVIEST: Final = max(MORE.values())
SMALL: Final = 1 << 24  # pixels that any file may have; beyond them ...
DENSITY: Final = 2000  # ... no more than this many a byte: PNG packs greys up to 1032, JPEG about 340
# These pack one colour without end, and cost most; photographs have 10 to 50, AVIF and HEIC up to 200.
DENSE: Final = {"WEBP": 200, "AVIF": 400, "HEIC": 400}


def decoding_bytes(kind: str, size: tuple[int, int], length: int) -> int:
    """For a file of `length` bytes and (width, height) `size`."""
    each = USUAL if kind in LIGHT else MORE.get(kind, HEAVIEST)
    return each * size[0] * size[1] + 2 * length


def refuse_bomb(kind: str, size: tuple[int, int], length: int, max_pixels: int) -> None:
    """BadPicture for more pixels than allowed, or than a file of `length` bytes can honestly hold."""
    pixels = size[0] * size[1]
    if pixels > max_pixels:
        raise BadPicture(f"{size[0]} x {size[1]} pixels are more than the limit of {max_pixels:,}")
    if pixels > max(SMALL, DENSE.get(kind, DENSITY) * length):
        raise BadPicture(f"a decompression bomb: {size[0]} x {size[1]} pixels claimed by {length:,} bytes")
