"""Which image files are read, by the ends of their names, and what to do about the others."""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import Final

HEIC_EXTRA: Final = "pip install 'vitrail[heic]'"
READ: Final = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
)
HEIC: Final = (".heic", ".heif", ".hif")
RAW: Final = (
    *(".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".srf", ".sr2", ".dng", ".raf", ".orf", ".rw2", ".pef", ".srw"),
    *(".x3f", ".3fr", ".iiq", ".kdc", ".mrw"),
)
OTHER: Final = (
    *(".jxl", ".jp2", ".j2k", ".jpx", ".jxr", ".psd", ".psb", ".xcf", ".svg", ".svgz", ".eps", ".ai", ".ico", ".tga"),
    *(".exr", ".hdr", ".dds", ".dcm", ".fits", ".qoi", ".heics", ".avifs"),
)
CONVERT: Final = "convert them to JPEG or PNG"


@cache
def suffixes() -> tuple[str, ...]:
    """Those that are read here; HEIC where its library is installed."""
    return (*READ, *HEIC) if find_spec("pillow_heif") is not None else READ


def is_unsupported(name: str) -> bool:
    """Whether a file is an image by its name, of a format that is not read here."""
    lower = name.lower()
    return not lower.endswith(suffixes()) and lower.endswith((*HEIC, *RAW, *OTHER))


def remedy(names: Iterable[str]) -> str:
    """What to do about image files that are not read."""
    lower = [name.lower() for name in names]
    heic = any(name.endswith(HEIC) for name in lower)
    more = any(not name.endswith(HEIC) for name in lower)
    return "; ".join([*([f"HEIC: {HEIC_EXTRA}"] if heic else []), *([CONVERT] if more or not heic else [])])
